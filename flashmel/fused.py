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
from .plan import Architecture, LaunchPlan, UnsupportedError, architecture, launch_grid, make_plan
from .spec import StftSpec
from .tables import kernel_tables


class UnavailableError(RuntimeError):
    """The fused path cannot take this call; the message says why."""


class _Prepared(NamedTuple):
    plan: LaunchPlan
    kernel: Kernel


class _Tables(NamedTuple):
    versions: tuple[int, int]  # of window and fb when they were read
    owners: tuple[StorageWeakRef, StorageWeakRef]
    factors: Tensor
    filters: Tensor
    weights: Tensor


_lock = threading.RLock()  # one thread prepares; the others wait for what it makes
_prepared: dict[tuple, _Prepared | UnavailableError] = {}
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
        few_tiles = _has_few_tiles(spec, device, frames * n_rows)
        plan, kernel = _prepare(spec, device, _name(rows.dtype), _name(out.dtype), few_tiles)
        tables = _tables_of(window, fb, spec, plan)
        if torch.cuda.is_current_stream_capturing():
            _captured[id(tables)] = tables
        try:
            grid = launch_grid(plan, frames, n_rows)
        except UnsupportedError as error:
            raise UnavailableError(str(error)) from None
        params = LaunchParams(
            rows.data_ptr(),
            out.data_ptr(),
            tables.factors.data_ptr(),
            tables.filters.data_ptr(),
            tables.weights.data_ptr(),
            n_samples,
            rows.stride(0),
            frames,
            n_rows,
            n_mels,
        )
        kernel.launch(params, grid, torch._C._cuda_getCurrentRawStream(device))
    return out


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
        toolchain.find()
    except (UnsupportedError, toolchain.ToolchainError) as error:
        return str(error)
    return None


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
    return architecture(properties.major, properties.minor), properties.multi_processor_count


def _has_few_tiles(spec: StftSpec, device: int, frames: int) -> bool:
    """Whether the plan for large batches would not give every multiprocessor a tile."""
    try:
        arch, multiprocessors = _device(device)
        return frames < multiprocessors * make_plan(spec, arch).frames_per_block
    except UnsupportedError as error:
        raise UnavailableError(str(error)) from None


def _prepare(spec: StftSpec, device: int, input_type: str, output_type: str, few_tiles: bool) -> _Prepared:
    key = (spec, device, input_type, output_type, few_tiles)
    found = _prepared.get(key)
    if found is None:
        with _lock:
            found = _prepared.get(key)
            if found is None:
                _refuse_in_capture("the kernel")
                try:
                    arch, _ = _device(device)
                    plan = make_plan(spec, arch, environment.frames_per_block(), few_tiles)
                    found = _Prepared(plan, Kernel(Specialisation(spec, plan, arch, input_type, output_type), device))
                except (UnsupportedError, toolchain.ToolchainError, CompileError, DriverError) as error:
                    found = UnavailableError(str(error))
                _prepared[key] = found
    if isinstance(found, UnavailableError):
        raise UnavailableError(*found.args)
    return found


def _tables_of(window: Tensor, fb: Tensor, spec: StftSpec, plan: LaunchPlan) -> _Tables:
    """The kernel's tables for what window and fb hold now.

    An entry belongs to the two tensors' memory and is made again when autograd's version counters say that they changed.
    (Writing through ``.data`` does not count up; assigning a new tensor is seen.) A captured CUDA graph keeps the tables
    that it was captured with.
    """
    if window.is_inference() or fb.is_inference():  # no version counter: read them at each call
        return _build_tables((0, 0), window, fb, spec, plan)
    versions = (window._version, fb._version)
    key = (_place(window), _place(fb), spec, plan)
    found = _tables.get(key)
    if found is None or found.versions != versions:
        with _lock:
            found = _tables.get(key)
            if found is None or found.versions != versions:
                new = _build_tables(versions, window, fb, spec, plan)
                torch.cuda.synchronize()  # kernels of any stream may still read what is dropped next
                for stale in [k for k, t in _tables.items() if any(owner.expired() for owner in t.owners)]:
                    del _tables[stale]
                found = _tables[key] = new
    return found


def _place(t: Tensor) -> tuple:
    # While an entry's weak reference is alive, the storage's address is not given to another storage.
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device


def _build_tables(versions: tuple[int, int], window: Tensor, fb: Tensor, spec: StftSpec, plan: LaunchPlan) -> _Tables:
    _refuse_in_capture("a table of the module")
    window_values, fb_values = (t.detach().double().cpu().numpy() for t in (window, fb))
    host = kernel_tables(plan, spec.n_fft, spec.normalized, window_values, fb_values)
    owners = StorageWeakRef(window.untyped_storage()), StorageWeakRef(fb.untyped_storage())

    def upload() -> list[Tensor]:
        return [torch.from_numpy(array).to(window.device) for array in (host.factors, host.filters, host.weights)]

    # In a thread of its own: memory pools of CUDA graphs are bound to a thread and its stream, and these outlive any.
    with ThreadPoolExecutor(1) as thread:
        return _Tables(versions, owners, *thread.submit(upload).result())
