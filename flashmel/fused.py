"""The fused path's host side: a kernel and its tables for each configuration, made once, and the launch."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import environment
from .jit import toolchain
from .jit.compiler import CompileError
from .jit.driver import DriverError, Kernel, LaunchParams
from .jit.source import Specialisation
from .plan import Architecture, Launch, LaunchPlan, UnsupportedError, architecture, launch, make_plan
from .spec import StftSpec
from .tables import kernel_tables


class UnavailableError(RuntimeError):
    """The fused path cannot take this call; the message says why."""


class _Tables(NamedTuple):
    plan: LaunchPlan
    versions: tuple[int, int]  # of window and fb when they were read
    owners: tuple[StorageWeakRef, StorageWeakRef]
    factors: Tensor
    filters: Tensor
    n_filters: int


_lock = threading.RLock()  # one thread prepares; the others wait for what it makes
# Plans are hashed once a configuration, here; what follows from a plan is kept under its id, and keeps it.
_plans: dict[tuple, LaunchPlan | UnavailableError] = {}
_kernels: dict[tuple, tuple[LaunchPlan, Kernel | UnavailableError]] = {}
_tables: dict[tuple, _Tables] = {}
_captured: dict[int, _Tables] = {}  # what CUDA graphs read, by id: nobody says when a graph is gone


def mel_spectrogram(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None) -> Tensor:
    """One launch on the current stream of the waveform's device; arguments as in :func:`flashmel.ops.mel_spectrogram`.

    Raises:
        UnavailableError: this configuration or machine has no fused path.
        RuntimeError: a CUDA graph is being captured and the configuration was not run before.
    """
    if window.dtype == torch.float64:
        raise UnavailableError("the module is in float64, the fused kernel computes in float32")
    *batch, n_samples = waveform.shape
    frames, n_mels = spec.frames(n_samples), fb.shape[1]
    if waveform.dtype == torch.float64:
        waveform = waveform.float()
    n_rows = waveform.numel() // n_samples
    rows = waveform.reshape(n_rows, n_samples)
    if rows.stride(1) != 1 and n_samples > 1:
        rows = rows.contiguous()
    out = torch.empty((*batch, n_mels, frames), dtype=dtype or torch.float32, device=waveform.device)
    if out.numel() == 0:
        return out

    with torch.cuda.device(waveform.device):
        device = waveform.device.index
        plan = _plan(spec, device, rows.element_size())
        tables = _tables_of(window, fb, spec, plan, rows.dtype)
        kernel = _kernel(spec, plan, device, rows.dtype, out.dtype, 16 * len(tables.filters) <= plan.spare_bytes)
        if torch.cuda.is_current_stream_capturing():
            _captured[id(tables)] = tables
        try:
            grid = launch(spec, plan, n_samples, n_rows, _device(device)[1])
        except UnsupportedError as error:
            raise UnavailableError(str(error)) from None
        params = launch_params(spec, plan, grid, rows, out, tables)
        kernel.launch(params, grid.blocks, grid.threads, torch._C._cuda_getCurrentRawStream(device))
    return out


def launch_params(spec: StftSpec, plan: LaunchPlan, grid: Launch, rows: Tensor, out: Tensor, tables: _Tables) -> LaunchParams:
    """The kernel's arguments for ``rows`` (rows, time), their samples side by side, and ``out`` (..., n_mels, frames)."""
    n_rows, n_samples = rows.shape
    n_mels, frames = out.shape[-2:]
    chunk_bytes = plan.chunk * rows.element_size()
    first_address = rows.data_ptr() - (spec.margin + spec.pad) * rows.element_size()
    return LaunchParams(
        rows.data_ptr(),
        out.data_ptr(),
        tables.factors.data_ptr(),
        tables.filters.data_ptr(),
        n_samples,
        rows.stride(0),
        frames,
        grid.tiles,
        grid.all_tiles,
        grid.magic,
        grid.shift,
        grid.step,
        grid.first_inner,
        grid.inner,
        first_address % chunk_bytes == 0 and (n_rows == 1 or rows.stride(0) % plan.chunk == 0),
        n_mels,
        tables.n_filters,
        len(tables.filters),
    )


def unavailable_reason(device: torch.device | None = None) -> str | None:
    """Why nothing can run fused on a device (the current one if None); None if it can."""
    if torch.version.cuda is None:
        return "this build of torch has no CUDA"
    if not torch.cuda.is_available():
        return "torch finds no usable CUDA device or driver"
    if device is not None and device.type != "cuda":
        return f"{device} is not a CUDA device"
    try:
        architecture(*torch.cuda.get_device_capability(device))
        toolchain.nvrtc_version()
    except (UnsupportedError, toolchain.ToolchainError) as error:
        return str(error)
    return None


def path(spec: StftSpec, device: torch.device) -> str:
    """Which path float32 waveforms on a device take, and why: for people to read."""
    if device.type != "cuda":
        return f"plain torch on {device}"
    reason = unavailable_reason(device)
    if reason is None:
        try:
            return f"fused kernel: {_plan(spec, torch.cuda.current_device() if device.index is None else device.index, 4)}"
        except UnavailableError as error:
            reason = str(error)
    return f"plain torch on {device}: {reason}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _refuse_in_capture(what: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph is being captured and {what} is not ready: call the module once on such an input before the capture"
        )


@cache
def _device(ordinal: int) -> tuple[Architecture, int]:
    """Architecture and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(ordinal)
    try:
        return architecture(properties.major, properties.minor), properties.multi_processor_count
    except UnsupportedError as error:
        raise UnavailableError(str(error)) from None


def _plan(spec: StftSpec, device: int, sample_bytes: int) -> LaunchPlan:
    key = (spec, device, sample_bytes)
    found = _plans.get(key)
    if found is None:
        try:
            found = make_plan(spec, _device(device)[0], sample_bytes, environment.frames_per_tile())
        except UnsupportedError as error:
            found = UnavailableError(str(error))
        found = _plans.setdefault(key, found)
    if isinstance(found, UnavailableError):
        raise UnavailableError(*found.args)
    return found


def _kernel(
    spec: StftSpec, plan: LaunchPlan, device: int, samples: torch.dtype, output: torch.dtype, filters_in_shared: bool
) -> Kernel:
    key = (id(plan), device, samples, output, filters_in_shared)
    if key not in _kernels:
        with _lock:
            if key not in _kernels:
                _refuse_in_capture("the kernel")
                found: Kernel | UnavailableError
                try:
                    found = Kernel(
                        Specialisation(spec, plan, _device(device)[0], _name(samples), _name(output), filters_in_shared), device
                    )
                except (toolchain.ToolchainError, CompileError, DriverError) as error:
                    found = UnavailableError(str(error))
                _kernels[key] = plan, found
    _, kernel = _kernels[key]
    if isinstance(kernel, UnavailableError):
        raise UnavailableError(*kernel.args)
    return kernel


def _tables_of(window: Tensor, fb: Tensor, spec: StftSpec, plan: LaunchPlan, samples: torch.dtype) -> _Tables:
    """The kernel's tables for what window and fb hold now.

    An entry belongs to the two tensors' memory and is made again when autograd's version counters say that they changed.
    (Writing through ``.data`` does not count up; assigning a new tensor is seen.) A captured CUDA graph keeps the tables
    that it was captured with.
    """
    if window.is_inference() or fb.is_inference():  # no version counter: read them at each call
        return _build_tables((0, 0), window, fb, spec, plan, samples)
    versions = (window._version, fb._version)
    key = (_place(window), _place(fb), id(plan), samples)
    found = _tables.get(key)
    if found is None or found.versions != versions:
        with _lock:
            found = _tables.get(key)
            if found is None or found.versions != versions:
                new = _build_tables(versions, window, fb, spec, plan, samples)
                torch.cuda.synchronize()  # kernels of any stream may still read what is dropped next
                for stale in [k for k, t in _tables.items() if any(owner.expired() for owner in t.owners)]:
                    del _tables[stale]
                found = _tables[key] = new
    return found


def _place(t: Tensor) -> tuple:
    # While an entry's weak reference is alive, the storage's address is not given to another storage.
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device


def _build_tables(
    versions: tuple[int, int], window: Tensor, fb: Tensor, spec: StftSpec, plan: LaunchPlan, samples: torch.dtype
) -> _Tables:
    _refuse_in_capture("a table of the module")
    window_values, fb_values = (t.detach().double().cpu().numpy() for t in (window, fb))
    sample_scale = 1.0 / 32768.0 if samples == torch.int16 else 1.0
    host = kernel_tables(plan, spec.n_fft, spec.normalized, window_values, fb_values, sample_scale)
    owners = StorageWeakRef(window.untyped_storage()), StorageWeakRef(fb.untyped_storage())

    def upload() -> list[Tensor]:
        return [torch.from_numpy(array).to(window.device) for array in (host.factors, host.filters)]

    # In a thread of its own: memory pools of CUDA graphs are bound to a thread and its stream, and these outlive any.
    with ThreadPoolExecutor(1) as thread:
        factors, filters = thread.submit(upload).result()
        return _Tables(plan, versions, owners, factors, filters, host.n_filters)
