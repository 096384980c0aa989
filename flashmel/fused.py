"""The fused path's host side: a kernel and its tables for each configuration, made once, and the launch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import environment
from .jit import bundle, toolchain
from .jit.compiler import CompileError
from .jit.driver import BackwardParams, DriverError, Kernel, LaunchParams
from .jit.source import Specialisation
from .plan import (
    Architecture,
    BackwardLaunch,
    BackwardPlan,
    Launch,
    LaunchPlan,
    UnsupportedError,
    architecture,
    launch,
    launch_backward,
    make_backward_plan,
    make_plan,
)
from .spec import StftSpec
from .tables import bin_table, entries_per_bin, factor_table, kernel_tables


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
# By all that a call depends on: window and fb, their state, spec (which its id in the key keeps alive), and the prepared call.
_calls: dict[tuple, tuple[weakref.ref[Tensor], weakref.ref[Tensor], tuple, StftSpec, _Call]] = {}
_MAX_CALLS = 1024


class _Alignment(NamedTuple):
    """Whether, in every row, the samples of frame 0 begin at a multiple of a chunk's size in memory."""

    first_sample: int  # of frame 0, in bytes from the waveform's first
    chunk_bytes: int
    rows: bool  # whether it holds for all rows if it does for the first

    @classmethod
    def of(cls, spec: StftSpec, plan: LaunchPlan, rows: Tensor) -> _Alignment:
        item = rows.element_size()
        return cls(-(spec.margin + spec.pad) * item, plan.chunk * item, len(rows) == 1 or rows.stride(0) % plan.chunk == 0)

    def holds_at(self, address: int) -> bool:
        return self.rows and (address + self.first_sample) % self.chunk_bytes == 0


class _Call(NamedTuple):
    """A call of :func:`mel_spectrogram`, prepared up to the places of waveform and output."""

    tables: _Tables
    kernel: Kernel
    blocks: int
    threads: int
    params: bytes  # LaunchParams
    shape: tuple[int, ...]  # of the output
    dtype: torch.dtype
    device: torch.device
    alignment: _Alignment

    def run(self, waveform: Tensor, out: Tensor | None = None) -> Tensor:
        if out is None:
            out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        params = LaunchParams.from_buffer_copy(self.params)
        params.waveform = place = waveform.data_ptr()
        params.mel = out.data_ptr()
        params.aligned = self.alignment.holds_at(place)
        index = self.device.index
        if torch._C._cuda_getDevice() == index:
            self._launch(params, index)
        else:
            with torch.cuda.device(index):
                self._launch(params, index)
        return out

    def _launch(self, params: LaunchParams, index: int) -> None:
        if torch._C._cuda_isCurrentStreamCapturing():
            _captured[id(self.tables)] = self.tables
        self.kernel.launch(params, self.blocks, self.threads, torch._C._cuda_getCurrentRawStream(index))


def _state(window: Tensor, fb: Tensor) -> tuple[int, int, int, int]:
    return window.untyped_storage()._cdata, window._version, fb.untyped_storage()._cdata, fb._version


def _key(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None) -> tuple:
    layout = waveform.dtype, waveform.get_device(), waveform.shape, waveform.stride()
    return id(window), id(fb), id(spec), dtype, *layout


def recall(
    waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None, out: Tensor | None = None
) -> Tensor | None:
    """:func:`mel_spectrogram` of arguments like those of an earlier call, or None if there was none.

    ``out``, if given, is contiguous, of this dtype, and of the result's shape and device.
    """
    found = _calls.get(_key(waveform, window, fb, spec, dtype))
    if found is None:
        return None
    its_window, its_fb, state, _, call = found
    if its_window() is not window or its_fb() is not fb or state != _state(window, fb):
        return None
    return call.run(waveform, out)


def mel_spectrogram(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None) -> Tensor:
    """One launch on the current stream of the waveform's device; arguments as in :func:`flashmel.ops.mel_spectrogram`.

    Raises:
        UnavailableError: this configuration or machine has no fused path.
        RuntimeError: a CUDA graph is being captured and the configuration was not run before.
    """
    if (recalled := recall(waveform, window, fb, spec, dtype)) is not None:
        return recalled
    if window.dtype == torch.float64:
        raise UnavailableError("the module is in float64, the fused kernel computes in float32")
    *batch, n_samples = waveform.shape
    frames, n_mels = spec.frames(n_samples), fb.shape[1]
    rows = _rows(waveform)
    n_rows = len(rows)
    out = torch.empty((*batch, n_mels, frames), dtype=dtype or torch.float32, device=waveform.device)
    if out.numel() == 0:
        return out

    with torch.cuda.device(waveform.device):
        device = waveform.device.index
        plan = _plan(spec, device, rows.element_size())
        tables = _tables_of(window, fb, (id(plan), rows.dtype), lambda: _forward_tables(window, fb, spec, plan, rows.dtype))
        kernel = _kernel(spec, plan, device, rows.dtype, out.dtype, _fits(plan, tables.filters))
        try:
            grid = launch(spec, plan, n_samples, n_rows, _device(device)[1])
        except UnsupportedError as error:
            raise UnavailableError(str(error)) from None
    params = bytes(launch_params(spec, plan, grid, rows, out, tables))
    shape, alignment = tuple(out.shape), _Alignment.of(spec, plan, rows)
    call = _Call(tables, kernel, grid.blocks, grid.threads, params, shape, out.dtype, out.device, alignment)
    call.run(rows, out)
    if rows.data_ptr() == waveform.data_ptr() and not (window.is_inference() or fb.is_inference()):
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        key = _key(waveform, window, fb, spec, dtype)
        _calls[key] = weakref.ref(window), weakref.ref(fb), _state(window, fb), spec, call
    return out


def mel_spectrogram_backward(mel_gradient: Tensor, waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec) -> Tensor:
    """The gradient of the waveform, in its shape and dtype; arguments as in :func:`flashmel.ops.mel_spectrogram_backward`.

    One launch on the current stream of the waveform's device; or two where the ends of short rows, or of circular ones, are
    shared out among teams: the second then folds back what ``center`` padded.

    Raises:
        UnavailableError, RuntimeError: see :func:`mel_spectrogram`.
    """
    if window.dtype == torch.float64:
        raise UnavailableError("the module is in float64, the fused kernel computes in float32")
    rows = _rows(waveform)
    n_rows, n_samples = rows.shape
    if mel_gradient.dtype == torch.float64:
        mel_gradient = mel_gradient.float()
    mel_rows = mel_gradient.reshape(n_rows, *mel_gradient.shape[-2:])
    make = torch.zeros if spec.pad < 0 else torch.empty  # what is cropped has no gradient
    gradient = make((n_rows, n_samples), dtype=rows.dtype, device=rows.device)
    if gradient.numel() == 0 or mel_rows.numel() == 0:
        return gradient.zero_().to(waveform.dtype).reshape(waveform.shape)

    with torch.cuda.device(waveform.device):
        device = waveform.device.index
        tables = _tables_of(window, fb, (spec, device, rows.dtype), lambda: _backward_tables(window, fb, spec, device, rows))
        plan = tables.plan
        assert isinstance(plan, BackwardPlan)
        kernel = _kernel(spec, plan, device, rows.dtype, mel_rows.dtype, _fits(plan, tables.filters))
        try:
            grid = launch_backward(spec, plan, n_samples, n_rows, _device(device)[1])
        except UnsupportedError as error:
            raise UnavailableError(str(error)) from None
        edges = torch.empty((n_rows, grid.edge_length), dtype=torch.float32, device=rows.device)
        params = backward_params(spec, plan, grid, rows, mel_rows, gradient, edges, tables)
        stream = torch._C._cuda_getCurrentRawStream(device)
        kernel.launch(params, grid.blocks, grid.threads, stream)
        if edges.numel() and not grid.fold:
            kernel.launch_fold(params, stream)
    return gradient.to(waveform.dtype).reshape(waveform.shape)


def _rows(waveform: Tensor) -> Tensor:
    """(rows, time) in a dtype that the kernel reads, the samples of a row side by side."""
    n_samples = waveform.shape[-1]
    if waveform.dtype == torch.float64:
        waveform = waveform.float()
    rows = waveform.reshape(waveform.numel() // n_samples, n_samples)
    return rows.contiguous() if rows.stride(1) != 1 and n_samples > 1 else rows


def launch_params(spec: StftSpec, plan: LaunchPlan, grid: Launch, rows: Tensor, out: Tensor, tables: _Tables) -> LaunchParams:
    """The kernel's arguments for ``rows`` (rows, time), their samples side by side, and ``out`` (..., n_mels, frames)."""
    n_rows, n_samples = rows.shape
    n_mels, frames = out.shape[-2:]
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
        _Alignment.of(spec, plan, rows).holds_at(rows.data_ptr()),
        n_mels,
        tables.n_filters,
        len(tables.filters),
    )


def backward_params(
    spec: StftSpec,
    plan: BackwardPlan,
    grid: BackwardLaunch,
    rows: Tensor,
    mel_rows: Tensor,
    gradient: Tensor,
    edges: Tensor,
    tables: _Tables,
) -> BackwardParams:
    """The backward kernels' arguments for ``rows`` (rows, time), their samples side by side, and the other tensors of the call:
    ``mel_rows`` (rows, n_mels, frames) with any strides, ``gradient`` (rows, time), ``edges`` (rows, ``grid.edge_length``).
    """
    n_rows, n_samples = rows.shape
    return BackwardParams(
        rows.data_ptr(),
        mel_rows.data_ptr(),
        gradient.data_ptr(),
        edges.data_ptr(),
        tables.factors.data_ptr(),
        tables.filters.data_ptr(),
        n_samples,
        rows.stride(0),
        mel_rows.shape[-1],
        *mel_rows.stride(),
        grid.emitted,
        grid.first_inner,
        grid.inner,
        grid.edge_length,
        grid.segments,
        grid.all_segments,
        grid.magic,
        grid.shift,
        grid.stride,
        grid.tiles,
        _Alignment.of(spec, plan, rows).holds_at(rows.data_ptr()),
        len(tables.filters),
        grid.fold,
        n_rows,
    )


def specialisations(
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    arch: Architecture,
    samples: torch.dtype = torch.float32,
    output: torch.dtype = torch.float32,
    gradient: bool = False,
) -> list[Specialisation]:
    """The kernels that calls with these tables compile on an architecture: the transform's, and its gradient's. Needs no GPU.

    Raises:
        UnsupportedError: a kernel cannot be; the message says why.
    """
    window_values, fb_values = _values(window, fb)
    plan = make_plan(spec, arch, samples.itemsize, environment.frames_per_tile())
    filters = kernel_tables(plan, spec.n_fft, spec.normalized, window_values, fb_values).filters
    names = _name(samples), _name(output)
    found = [Specialisation(spec, plan, arch, *names, _fits(plan, filters))]
    if gradient:
        back = make_backward_plan(spec, arch, fb.shape[1], entries_per_bin(fb_values), samples.itemsize)
        found.append(Specialisation(spec, back, arch, *names, _fits(back, bin_table(fb_values, back, spec.power))))
    return found


def _fits(plan: LaunchPlan, filters: Tensor | np.ndarray) -> bool:
    """Whether a table of filters has room in shared memory."""
    return 16 * len(filters) <= plan.spare_bytes


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
        if not (bundle.expected() or environment.no_jit()):  # without a kernel the latter raises, and nothing runs
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
        raise RuntimeError(f"a CUDA graph is being captured and {what} is not ready: call the module's warmup() before the capture")


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
                    if environment.no_jit():
                        raise
                    found = UnavailableError(str(error))
                _kernels[key] = plan, found
    _, kernel = _kernels[key]
    if isinstance(kernel, UnavailableError):
        raise UnavailableError(*kernel.args)
    return kernel


def _tables_of(window: Tensor, fb: Tensor, use: tuple, build: Callable[[], _Tables]) -> _Tables:
    """The kernel's tables for what window and fb hold now; ``use`` tells apart what different calls build of them.

    An entry belongs to the two tensors' memory and is made again when autograd's version counters say that they changed.
    (Writing through ``.data`` does not count up; assigning a new tensor is seen.) A captured CUDA graph keeps the tables
    that it was captured with.
    """
    if window.is_inference() or fb.is_inference():  # no version counter: read them at each call
        _refuse_in_capture("a table of the module")
        return build()
    versions = (window._version, fb._version)
    key = (_place(window), _place(fb), use)
    found = _tables.get(key)
    if found is None or found.versions != versions:
        with _lock:
            found = _tables.get(key)
            if found is None or found.versions != versions:
                _refuse_in_capture("a table of the module")
                new = build()
                torch.cuda.synchronize()  # kernels of any stream may still read what is dropped next
                _calls.clear()  # they keep tables alive
                for stale in [k for k, t in _tables.items() if any(owner.expired() for owner in t.owners)]:
                    del _tables[stale]
                found = _tables[key] = new
    if torch.cuda.is_current_stream_capturing():
        _captured[id(found)] = found
    return found


def _place(t: Tensor) -> tuple:
    # While an entry's weak reference is alive, the storage's address is not given to another storage.
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype, t.device


def _forward_tables(window: Tensor, fb: Tensor, spec: StftSpec, plan: LaunchPlan, samples: torch.dtype) -> _Tables:
    window_values, fb_values = _values(window, fb)
    sample_scale = 1.0 / 32768.0 if samples == torch.int16 else 1.0
    host = kernel_tables(plan, spec.n_fft, spec.normalized, window_values, fb_values, sample_scale)
    return _uploaded(plan, window, fb, host.factors, host.filters, host.n_filters)


def _backward_tables(window: Tensor, fb: Tensor, spec: StftSpec, device: int, rows: Tensor) -> _Tables:
    window_values, fb_values = _values(window, fb)
    try:
        plan = make_backward_plan(spec, _device(device)[0], fb.shape[1], entries_per_bin(fb_values), rows.element_size())
    except UnsupportedError as error:
        raise UnavailableError(str(error)) from None
    factors = factor_table(plan, spec.n_fft, spec.normalized, window_values)
    return _uploaded(plan, window, fb, factors, bin_table(fb_values, plan, spec.power), fb.shape[1])


def _values(window: Tensor, fb: Tensor) -> tuple[np.ndarray, np.ndarray]:
    window_values, fb_values = (t.detach().double().cpu().numpy() for t in (window, fb))
    return window_values, fb_values


def _uploaded(plan: LaunchPlan, window: Tensor, fb: Tensor, factors: np.ndarray, filters: np.ndarray, n_filters: int) -> _Tables:
    versions = (0, 0) if window.is_inference() or fb.is_inference() else (window._version, fb._version)
    owners = StorageWeakRef(window.untyped_storage()), StorageWeakRef(fb.untyped_storage())

    def upload() -> list[Tensor]:
        return [torch.from_numpy(array).to(window.device) for array in (factors, filters)]

    # In a thread of its own: memory pools of CUDA graphs are bound to a thread and its stream, and these outlive any.
    with ThreadPoolExecutor(1) as thread:
        on_device = thread.submit(upload).result()
    return _Tables(plan, versions, owners, on_device[0], on_device[1], n_filters)
