"""From a specialisation to a kernel on a device, and its launch through the CUDA driver API."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from .. import environment
from . import bundle, compiler, toolchain
from . import cache as disk
from .machine import this_machine
from .source import AnySpecialisation, sources

_log = logging.getLogger("flashmel")


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's reason."""


class MissingKernelError(RuntimeError):
    """Compiling is forbidden, and a kernel is neither in a bundle nor in the cache; the message says what was looked at."""


class LaunchParams(ctypes.Structure):
    """``Params`` of kernel/forward.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("waveform", "mel", "factors", "filters")),
        *((name, ctypes.c_int64) for name in ("n_samples", "row_stride", "frames")),
        *((name, ctypes.c_uint32) for name in ("tiles", "all_tiles", "magic", "shift", "step", "first_inner", "inner")),
        *((name, ctypes.c_int32) for name in ("aligned", "n_mels", "n_filters", "filter_entries")),
        *((name, ctypes.c_void_p) for name in ("lengths", "affine", "summary")),
    ]


class BackwardParams(ctypes.Structure):
    """``Params`` of kernel/backward.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("waveform", "mel", "gradient", "edges", "factors", "filters")),
        *((name, ctypes.c_int64) for name in ("n_samples", "row_stride", "frames")),
        *((name, ctypes.c_int64) for name in ("mel_row_stride", "mel_stride", "mel_frame_stride")),
        *((name, ctypes.c_int64) for name in ("emitted", "first_inner", "inner", "edge_length")),
        *((name, ctypes.c_uint32) for name in ("segments", "all_segments", "magic", "shift", "stride")),
        *((name, ctypes.c_int32) for name in ("tiles", "aligned", "filter_entries", "fold")),
        ("rows", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("features", "lengths", "affine")),
    ]


class NormalizeParams(ctypes.Structure):
    """``Params`` of kernel/normalize.cu, field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("features", "out", "summary", "lengths")),
        *((name, ctypes.c_int64) for name in ("n_samples", "frames")),
        *((name, ctypes.c_uint32) for name in ("rows", "group")),
        *((name, ctypes.c_int32) for name in ("n_mels", "tiles", "warps", "frames_per_tile")),
    ]


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` of cuda.h, and behind it where the kernel's one argument is."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("blocks_x", "blocks_y", "blocks_z", "threads_x", "threads_y", "threads_z")),
        ("shared_bytes", ctypes.c_uint32),
        *((name, ctypes.c_void_p) for name in ("stream", "attributes")),
        ("n_attributes", ctypes.c_uint32),
        ("argument", ctypes.c_void_p),
    ]


@lru_cache(maxsize=1024)
def _launch_config(blocks_x: int, blocks_y: int, threads: int, shared_bytes: int) -> bytes:
    """A :class:`_LaunchConfig` without what changes from call to call."""
    return bytes(_LaunchConfig(blocks_x, blocks_y, 1, threads, 1, 1, shared_bytes))


def cubin(s: AnySpecialisation) -> bytes:
    """The cubin of a specialisation: from a bundle, from the disk cache, or compiled and stored there.

    Raises:
        ToolchainError, CompileError: see compiler.py.
        MissingKernelError: FLASHMEL_NO_JIT is set, and it would have to be compiled.
    """
    text, strict = sources(s), environment.no_jit()
    if (data := bundle.find(compiler.identity(text, s.arch.name))) is not None:
        _log.info("from a bundle, %d KiB: %s", len(data) // 1024, s)
        return data
    folder = environment.cache_dir()
    try:
        key = compiler.cache_key(text, s.arch.name)
    except toolchain.ToolchainError as error:
        if strict:
            raise _missing(s, f"the cache cannot be asked ({error})") from error
        raise
    if folder and (data := disk.load(folder, key)) is not None:
        _log.info("from %s, %d KiB: %s", folder, len(data) // 1024, s)
        return data
    if strict:
        raise _missing(s, f"it is not in the cache ({folder or 'there is none'})")
    start = time.perf_counter()
    data, _ = compiler.compile_cubin(text, s.arch.name)
    _log.info("compiled in %.2f s, %d KiB: %s", time.perf_counter() - start, len(data) // 1024, s)
    if folder:
        disk.store(folder, key, data)
    return data


def _missing(s: AnySpecialisation, cache: str) -> MissingKernelError:
    return MissingKernelError(
        f"FLASHMEL_NO_JIT is set, so nothing is compiled, and no bundle holds the kernel ({bundle.describe()}), and {cache}: "
        f"make it ahead with flashmel bundle build or flashmel warm, or unset FLASHMEL_NO_JIT. The kernel: {s}"
    )


@cache
def _launch_function() -> Callable[..., int]:
    """cuLaunchKernelEx, called directly: the bindings' own call takes several times as long, and cuLaunchKernel's eleven arguments
    1 µs more to convert than these four."""
    function = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuLaunchKernelEx
    function.argtypes = [ctypes.c_void_p] * 4
    function.restype = ctypes.c_int
    return function


class Kernel:
    """A kernel loaded on a device (its ordinal, as the driver and torch count)."""

    def __init__(self, s: AnySpecialisation, device: int) -> None:
        """
        Raises:
            ToolchainError, CompileError, MissingKernelError: see :func:`cubin`.
            DriverError: the driver does not take the cubin.
        """
        from cuda.bindings import driver

        self._driver = driver
        self._context = self._call("cuDevicePrimaryCtxRetain", device)  # torch's; it lives as long as the process
        self._make_current()
        self._shared_bytes, self._filters_in_shared = s.shared_bytes, s.filters_in_shared
        data = cubin(s)
        try:
            self._module = self._call("cuModuleLoadData", data)
        except DriverError as error:
            known = f"the driver takes kernels of CUDA {this_machine().cuda} and older"
            raise DriverError(f"{error}: {known}: {toolchain.INSTALL}") from None
        functions = [self._call("cuModuleGetFunction", self._module, name.encode()) for name in s.entry_points]
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", functions[0], attribute, s.arch.shared_per_block)
        self._functions = [int(function) for function in functions]

    def launch(self, params: LaunchParams | BackwardParams, blocks: int, threads: int, stream: int) -> None:
        """Launch ``blocks`` blocks of ``threads`` threads of the main kernel on a stream of the kernel's device.

        Raises:
            DriverError: the launch was refused.
        """
        shared_bytes = self._shared_bytes + (16 * params.filter_entries if self._filters_in_shared else 0)
        self._launch(self._functions[0], params, _launch_config(blocks, 1, threads, shared_bytes), stream)

    def launch_fold(self, params: BackwardParams, stream: int) -> None:
        """The same for the kernel that folds the padding's gradients."""
        blocks = -(-params.edge_length // 128), min(params.rows, 65535)
        self._launch(self._functions[1], params, _launch_config(*blocks, 128, 0), stream)

    def launch_normalize(self, params: NormalizeParams, blocks: int, threads: int, stream: int) -> None:
        """Launch the kernel of a :class:`NormalizeSpecialisation`, with so many blocks for each row."""
        config = _launch_config(blocks, min(params.rows, 65535), threads, self._shared_bytes)
        self._launch(self._functions[0], params, config, stream)

    def _launch(self, function: int, params: ctypes.Structure, config: bytes, stream: int) -> None:
        own = _LaunchConfig.from_buffer_copy(config)  # other threads launch too
        own.stream, own.argument = stream, ctypes.addressof(params)
        place = ctypes.addressof(own)
        arguments = place, function, place + _LaunchConfig.argument.offset, None
        launch = _launch_function()
        status = launch(*arguments)
        # A fresh thread has no context until it makes a CUDA call that needs one, and torch's cached memory may need none.
        if status != 0 and self._make_current():
            status = launch(*arguments)
        if status != 0:
            self._checked("cuLaunchKernelEx", self._driver.CUresult(status))

    def _make_current(self) -> bool:
        """Whether the kernel's context was not the thread's already."""
        if int(self._call("cuCtxGetCurrent")) == int(self._context):
            return False
        self._call("cuCtxSetCurrent", self._context)
        return True

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._checked(name, *getattr(self._driver, name)(*arguments))

    def _checked(self, name: str, status: Any, *values: Any) -> Any:
        if int(status) != 0:
            _, text = self._driver.cuGetErrorString(status)
            message = f"{name} failed: {status.name} ({text.decode() if text else 'no description'})"
            if status.name == "CUDA_ERROR_NOT_INITIALIZED":
                message += ". A process forked from one that used CUDA cannot use it: start it with the spawn method"
            raise DriverError(message)
        return values[0] if values else None
