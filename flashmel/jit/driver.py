"""From a specialisation to a kernel on a device, and its launch through the CUDA driver API."""

from __future__ import annotations

import ctypes
from typing import Any

from .. import environment
from . import cache, compiler
from .source import Specialisation, config_header, kernel_sources


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's reason."""


class LaunchParams(ctypes.Structure):
    """The kernel's ``Params`` (kernel/kernel.cu), field for field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("waveform", "mel", "factors", "filters")),
        *((name, ctypes.c_int64) for name in ("n_samples", "row_stride", "frames")),
        *((name, ctypes.c_uint32) for name in ("tiles", "all_tiles", "magic", "shift", "step", "first_inner", "inner")),
        *((name, ctypes.c_int32) for name in ("aligned", "n_mels", "n_filters", "filter_entries")),
    ]


def cubin(s: Specialisation) -> bytes:
    """The cubin of a specialisation, from the disk cache or compiled and stored there.

    Raises:
        ToolchainError, CompileError: see compiler.py.
    """
    sources = {**kernel_sources(), "config.h": config_header(s)}
    key, folder = compiler.cache_key(sources, s.arch.name), environment.cache_dir()
    data = cache.load(folder, key) if folder else None
    if data is None:
        data, _ = compiler.compile_cubin(sources, s.arch.name)
        if folder:
            cache.store(folder, key, data)
    return data


class Kernel:
    """A kernel loaded on a device (its ordinal, as the driver and torch count)."""

    def __init__(self, s: Specialisation, device: int) -> None:
        """
        Raises:
            ToolchainError, CompileError: see compiler.py.
            DriverError: the driver does not take the cubin.
        """
        from cuda.bindings import driver

        self._driver = driver
        self._context = self._call("cuDevicePrimaryCtxRetain", device)  # torch's; it lives as long as the process
        self._make_current()
        self._plan = s.plan
        self._module = self._call("cuModuleLoadData", cubin(s))
        self._function = self._call("cuModuleGetFunction", self._module, b"mel_spectrogram")
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._function, attribute, s.arch.shared_per_block)
        self._filters_in_shared = s.filters_in_shared

    def launch(self, params: LaunchParams, blocks: int, threads: int, stream: int) -> None:
        """Launch ``blocks`` blocks of ``threads`` threads on a stream of the kernel's device.

        Raises:
            DriverError: the launch was refused.
        """
        self._make_current()
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        self._call(
            "cuLaunchKernel",
            self._function,
            blocks,
            1,
            1,
            threads,
            1,
            1,
            self._plan.shared_bytes + (16 * params.filter_entries if self._filters_in_shared else 0),
            stream,
            ctypes.addressof(arguments),
            0,
        )

    def _make_current(self) -> None:
        # A fresh thread has no context until it makes a CUDA call that needs one, and torch's cached memory may need none.
        if int(self._call("cuCtxGetCurrent")) != int(self._context):
            self._call("cuCtxSetCurrent", self._context)

    def _call(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) != 0:
            _, text = self._driver.cuGetErrorString(status)
            raise DriverError(f"{name} failed: {status.name} ({text.decode() if text else 'no description'})")
        return values[0] if values else None
