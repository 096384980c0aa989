"""The fused path's host side: a kernel and its tables for each configuration, made once, and the launch."""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import environment
from .jit import toolchain
from .jit.compiler import CompileError
from .jit.driver import DriverError, Kernel, LaunchParams
from .jit.source import Specialisation
from .plan import LaunchPlan, UnsupportedError, architecture, launch_grid, make_plan
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
        plan, kernel = _prepare(spec, waveform.device.index, _name(rows.dtype), _name(out.dtype))
        tables = _tables_of(window, fb, spec, plan)
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
        kernel.launch(params, grid, torch._C._cuda_getCurrentRawStream(waveform.device.index))
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
            f"a CUDA graph is being captured and {what} is not ready: call the module once, with these dtypes, before the capture"
        )


def _prepare(spec: StftSpec, device: int, input_type: str, output_type: str) -> _Prepared:
    key = (spec, device, input_type, output_type)
    found = _prepared.get(key)
    if found is None:
        with _lock:
            found = _prepared.get(key)
            if found is None:
                _refuse_in_capture("the kernel")
                try:
                    arch = architecture(*torch.cuda.get_device_capability(device))
                    plan = make_plan(spec, arch, environment.frames_per_block())
                    found = _Prepared(plan, Kernel(Specialisation(spec, plan, arch, input_type, output_type)))
                except (UnsupportedError, toolchain.ToolchainError, CompileError, DriverError) as error:
                    found = UnavailableError(str(error))
                _prepared[key] = found
    if isinstance(found, UnavailableError):
        raise UnavailableError(*found.args)
    return found


def _tables_of(window: Tensor, fb: Tensor, spec: StftSpec, plan: LaunchPlan) -> _Tables:
    """The kernel's tables for what window and fb hold now.

    An entry belongs to the two tensors' memory and is read again when autograd's version counters say that they changed.
    (Writing through ``.data`` does not count up; assigning a new tensor is seen.)
    """
    if window.is_inference() or fb.is_inference():  # no version counter: read them at each call
        return _build_tables((0, 0), window, fb, spec, plan)
    versions = (window._version, fb._version)
    key = (_place(window), _place(fb), spec, plan)
    found = _tables.get(key)
    if found is None or found.versions != versions:
        with _lock:
            for stale in [k for k, t in _tables.items() if any(owner.expired() for owner in t.owners)]:
                del _tables[stale]
            found = _tables[key] = _build_tables(versions, window, fb, spec, plan)
    return found


def _place(t: Tensor) -> tuple:
    # While an entry's weak reference is alive, the storage's address is not given to another storage.
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device


def _build_tables(versions: tuple[int, int], window: Tensor, fb: Tensor, spec: StftSpec, plan: LaunchPlan) -> _Tables:
    _refuse_in_capture("a table of the module")
    window_values, fb_values = (t.detach().double().cpu().numpy() for t in (window, fb))
    host = kernel_tables(plan, spec.n_fft, spec.normalized, window_values, fb_values)
    owners = StorageWeakRef(window.untyped_storage()), StorageWeakRef(fb.untyped_storage())
    factors, filters, weights = (torch.from_numpy(array).to(window.device) for array in (host.factors, host.filters, host.weights))
    return _Tables(versions, owners, factors, filters, weights)
