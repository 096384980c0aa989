"""The fused path's host side: a kernel and its tables for each configuration, made once, and the launch."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import environment
from .jit import bundle, toolchain
from .jit.compiler import CompileError
from .jit.driver import BackwardParams, DriverError, Kernel, LaunchParams, NormalizeParams
from .jit.source import AnySpecialisation, NormalizeSpecialisation, Specialisation
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
from .spec import Normalization, StftSpec
from .tables import bin_table, entries_per_bin, factor_table, kernel_tables, padded_window


class UnavailableError(RuntimeError):
    """The fused path cannot take this call; the message says why."""


@contextlib.contextmanager
def _what_is_unsupported_is_unavailable() -> Iterator[None]:
    try:
        yield
    except UnsupportedError as error:
        raise UnavailableError(str(error)) from None


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
_kernels: dict[tuple, tuple[object, Kernel | UnavailableError]] = {}
_tables: dict[tuple, _Tables] = {}
_captured: dict[int, _Tables] = {}  # what CUDA graphs read, by id: nobody says when a graph is gone
# By all that a call depends on: window and fb, their state, spec (which its id in the key keeps alive), and the prepared call.
_calls: dict[tuple, tuple[weakref.ref[Tensor], weakref.ref[Tensor], tuple, StftSpec, _Call]] = {}
_normalized_calls: dict[tuple, _NormalizedCall] = {}
_MAX_CALLS = 1024
_NORMALIZING_BLOCKS = 4  # of a multiprocessor


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
    """A call of :func:`features`, prepared up to the places of waveform and output."""

    tables: _Tables
    kernel: Kernel
    blocks: int
    threads: int
    tiles: int  # of a row
    params: bytes  # LaunchParams, without what changes from call to call
    shape: tuple[int, ...]  # of the output
    strides: tuple[int, ...]  # contiguous: torch.empty() takes a third longer than empty_strided()
    dtype: torch.dtype
    device: torch.device
    alignment: _Alignment

    def run(
        self,
        waveform: Tensor,
        lengths: Tensor | None = None,
        affine: Tensor | None = None,
        out: Tensor | None = None,
        summary: Tensor | None = None,
    ) -> Tensor:
        if out is None:
            out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        params = LaunchParams.from_buffer_copy(self.params)
        params.waveform = place = waveform.data_ptr()
        params.mel = out.data_ptr()
        params.aligned = self.alignment.holds_at(place)
        if lengths is not None:
            params.lengths = lengths.data_ptr()
        if affine is not None:
            affine = affine.to(torch.float32).contiguous()
            params.affine = affine.data_ptr()
        if summary is not None:
            params.summary = summary.data_ptr()
        _on_device(self.device.index, self._launch, params)
        return out

    def _launch(self, params: LaunchParams, stream: int) -> None:
        if torch._C._cuda_isCurrentStreamCapturing():
            _captured[id(self.tables)] = self.tables
        self.kernel.launch(params, self.blocks, self.threads, stream)


def _on_device(index: int, launch: Callable[[Any, int], None], params: Any) -> None:
    """Call ``launch(params, stream)`` with a device current, and its current stream."""
    if torch._C._cuda_getDevice() == index:
        launch(params, torch._C._cuda_getCurrentRawStream(index))
    else:
        with torch.cuda.device(index):
            launch(params, torch._C._cuda_getCurrentRawStream(index))


class _NormalizedCall(NamedTuple):
    """The second launch of a call of :func:`normalized_features`, prepared up to the places of its tensors."""

    first: tuple  # the key of the first launch
    rule: Normalization  # this and the specs live as long as the keys with their ids
    specs: tuple[StftSpec, StftSpec]
    kernel: Kernel
    blocks: int  # of a row
    threads: int
    params: bytes  # NormalizeParams
    summary: tuple[int, ...]  # shape of what the first launch leaves for it
    out: tuple[tuple[int, ...], torch.dtype] | None  # of the result; None where it is in place

    def run(self, call: _Call, waveform: Tensor, lengths: Tensor | None, affine: Tensor | None) -> Tensor:
        summary = torch.empty(self.summary, dtype=torch.float32, device=call.device)
        found = call.run(waveform, lengths, affine, None, summary)
        out = found if self.out is None else torch.empty(self.out[0], dtype=self.out[1], device=call.device)
        params = NormalizeParams.from_buffer_copy(self.params)
        params.features, params.out, params.summary = found.data_ptr(), out.data_ptr(), summary.data_ptr()
        if lengths is not None:
            params.lengths = lengths.data_ptr()
        _on_device(call.device.index, self._launch, params)
        return out

    def _launch(self, params: NormalizeParams, stream: int) -> None:
        self.kernel.launch_normalize(params, self.blocks, self.threads, stream)


def _state(window: Tensor, fb: Tensor) -> tuple[int, ...]:
    memory = window.untyped_storage()._cdata, window.data_ptr(), fb.untyped_storage()._cdata, fb.data_ptr()
    return *memory, window._version, fb._version


def _key(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None,
    lengths: Tensor | None,
    affine: Tensor | None,
    summary: str,
) -> tuple:
    layout = waveform.dtype, waveform.get_device(), waveform.shape, waveform.stride()
    own = None if affine is None else (affine.shape, affine.get_device())
    return id(window), id(fb), id(spec), dtype, lengths is None, own, summary, *layout


def _found(window: Tensor, fb: Tensor, key: tuple) -> _Call | None:
    """The call recorded under the key, if window and fb are unchanged since."""
    found = _calls.get(key)
    if found is None:
        return None
    its_window, its_fb, state, _, call = found
    if its_window() is not window or its_fb() is not fb or state != _state(window, fb):
        return None
    return call


def _remember(calls: dict[tuple, Any], key: tuple, call: Any) -> None:
    if len(calls) >= _MAX_CALLS:
        calls.clear()
    calls[key] = call


def recall(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | None:
    """:func:`features` of arguments like those of an earlier call, or None if there was none.

    ``out``, if given, is contiguous, of this dtype, and of the result's shape and device.
    """
    call = _found(window, fb, _key(waveform, window, fb, spec, dtype, lengths, affine, ""))
    return None if call is None else call.run(waveform, lengths, affine, out)


def features(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None = None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:
    """One launch on the current stream of the waveform's device; arguments as in :func:`flashmel.ops.features`.

    Raises:
        UnavailableError: this configuration or machine has no fused path.
        RuntimeError: a CUDA graph is being captured and the configuration was not run before.
    """
    if dtype == torch.float64:
        return features(waveform, window, fb, spec, torch.float32, lengths, affine).double()
    if waveform.numel() == 0 or fb.shape[1] == 0:
        return _nothing(waveform, fb, spec, dtype)
    rows, call = _prepared(waveform, window, fb, spec, dtype, lengths, affine)
    return call.run(rows, lengths, affine)


def recall_normalized(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    rule: Normalization,
    dtype: torch.dtype | None = None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor | None:
    """:func:`normalized_features` of arguments like those of an earlier call, or None if there was none."""
    found = _normalized_calls.get((id(rule), *_key(waveform, window, fb, spec, dtype, lengths, affine, "")))
    if found is None or (call := _found(window, fb, found.first)) is None:
        return None
    return found.run(call, waveform, lengths, affine)


def normalized_features(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    rule: Normalization,
    dtype: torch.dtype | None = None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:
    """:func:`features` normalised over time, in two launches.

    Raises:
        UnavailableError, RuntimeError: see :func:`features`.
    """
    by_maximum, late = rule.kind == "maximum", dtype or torch.float32
    if late == torch.float64 or not _normalizes(rule, affine is not None):
        raise UnavailableError("the fused normalisation is in float32, and its gain is positive")
    if waveform.numel() == 0 or fb.shape[1] == 0:
        return _nothing(waveform, fb, spec, dtype)
    first, early = _spec_before(spec, rule), _dtype_between(rule, late)
    operands = waveform, window, fb, first, early, lengths, affine, _summary_for(rule)
    rows, call = _prepared(*operands)
    shape = spec.output_shape(waveform.shape, fb.shape[1])
    n_mels, frames = shape[-2:][:: -1 if spec.epilogue.time_major else 1]
    warps, per_tile = call.tables.plan.threads // 32, call.tables.plan.frames_per_tile
    with torch.cuda.device(rows.device):
        device = rows.device.index
        arch, multiprocessors = _device(device)
        s = NormalizeSpecialisation(rule, spec, arch, _name(early), _name(late), lengths is not None)
        kernel = _kernel_of((s, device), None, lambda: Kernel(s, device))
    groups = 1 if by_maximum else -(-n_mels // s.together)
    blocks = groups * max(1, min(call.tiles, _NORMALIZING_BLOCKS * multiprocessors // (len(rows) * groups)))
    group = {"sample": 1, "channels": waveform.shape[-2] if waveform.dim() > 1 else 1, "batch": len(rows)}[rule.scope]
    params = NormalizeParams(
        n_samples=rows.shape[1],
        frames=frames,
        rows=len(rows),
        group=group,
        n_mels=n_mels,
        tiles=call.tiles,
        warps=warps,
        frames_per_tile=per_tile,
    )
    summary = len(rows), call.tiles, warps if by_maximum else n_mels, 2
    found = _NormalizedCall(
        _key(*operands),
        rule,
        (spec, first),
        kernel,
        blocks,
        s.threads,
        bytes(params),
        summary,
        None if late == early else (shape, late),
    )
    out = found.run(call, rows, lengths, affine)
    if rows.data_ptr() == waveform.data_ptr():
        _remember(_normalized_calls, (id(rule), *_key(waveform, window, fb, spec, dtype, lengths, affine, "")), found)
    return out


def _nothing(waveform: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None) -> Tensor:
    shape = spec.output_shape(waveform.shape, fb.shape[1])
    return torch.empty(shape, dtype=dtype or torch.float32, device=waveform.device)


def _normalizes(rule: Normalization, affine: bool) -> bool:
    """Whether there is a kernel for a rule: a floor has to commute with all that follows it in the first launch."""
    return rule.kind != "maximum" or (rule.gain > 0 and not affine)


def _summary_for(rule: Normalization) -> str:
    """What the first of two launches leaves for the second, beside the features."""
    return "extremes" if rule.kind == "maximum" else "moments"


def _dtype_between(rule: Normalization, output: torch.dtype) -> torch.dtype:
    """Of what the first of two launches makes."""
    return output if rule.kind == "maximum" else torch.float32


@lru_cache(maxsize=256)
def _spec_before(spec: StftSpec, rule: Normalization) -> StftSpec:
    """What the first of two launches makes. A floor commutes with gain, bias and rounding, which are therefore its business."""
    end = spec.epilogue
    if rule.kind != "maximum":
        return spec
    end = replace(end, gain=end.gain * rule.gain, bias=end.bias * rule.gain + rule.bias, pad_value=rule.pad_value)
    return replace(spec, epilogue=end)


def _prepared(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None,
    lengths: Tensor | None,
    affine: Tensor | None,
    summary: str = "",
) -> tuple[Tensor, _Call]:
    """The waveform as rows, and the call to make with them."""
    key = _key(waveform, window, fb, spec, dtype, lengths, affine, summary)
    if (call := _found(window, fb, key)) is not None:
        return waveform.reshape(-1, waveform.shape[-1]), call
    if window.dtype == torch.float64:
        raise UnavailableError("the module is in float64, the fused kernel computes in float32")
    rows = _rows(waveform)
    n_rows, n_samples = rows.shape
    shape, dtype = spec.output_shape(waveform.shape, fb.shape[1]), dtype or torch.float32
    with torch.cuda.device(waveform.device), _what_is_unsupported_is_unavailable():
        device = waveform.device.index
        plan = _plan(spec, device, rows.element_size())
        tables = _tables_of(window, fb, (id(plan), rows.dtype), lambda: _forward_tables(window, fb, spec, plan, rows.dtype))
        flags = _fits(plan, tables.filters), lengths is not None, affine is not None, summary
        kernel = _kernel(spec, plan, device, rows.dtype, dtype, *flags)
        grid = launch(spec, plan, n_samples, n_rows, _device(device)[1])
    params = bytes(launch_params(spec, plan, grid, rows, shape, tables))
    alignment = _Alignment.of(spec, plan, rows)
    output = torch.empty(shape, dtype=dtype, device="meta")
    call = _Call(
        tables, kernel, grid.blocks, grid.threads, grid.tiles, params, shape, output.stride(), dtype, waveform.device, alignment
    )
    if rows.data_ptr() == waveform.data_ptr() and not (window.is_inference() or fb.is_inference()):
        _remember(_calls, key, (weakref.ref(window), weakref.ref(fb), _state(window, fb), spec, call))
    return rows, call


def features_backward(
    gradient: Tensor,
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
    output: Tensor | None = None,
) -> Tensor:
    """The gradient of the waveform, in its shape and dtype; arguments as in :func:`flashmel.ops.features`.

    One launch on the current stream of the waveform's device; or two where the ends of short rows, of circular ones or of rows with
    lengths are shared out among teams: the second then folds back what was padded.

    Args:
        gradient: of the features.
        output: the features themselves, which a logarithm's derivative needs; computed again if they are not there in float32.

    Raises:
        UnavailableError, RuntimeError: see :func:`features`.
    """
    if window.dtype == torch.float64:
        raise UnavailableError("the module is in float64, the fused kernel computes in float32")
    rows = _rows(waveform)
    n_rows, n_samples = rows.shape
    if gradient.dtype == torch.float64:
        gradient = gradient.float()
    by_row = gradient.reshape(n_rows, *gradient.shape[-2:])
    by_row = by_row.mT if spec.epilogue.time_major else by_row
    # What is cropped or lies behind a row's length has no gradient.
    make = torch.zeros if spec.pad < 0 or spec.right_margin < 0 or lengths is not None else torch.empty
    found = make((n_rows, n_samples), dtype=rows.dtype, device=rows.device)
    if found.numel() == 0 or by_row.numel() == 0:
        return found.zero_().to(waveform.dtype).reshape(waveform.shape)
    if spec.epilogue.log is None:
        output = None
    elif output is None or output.dtype != torch.float32 or not output.is_contiguous():
        output = features(waveform, window, fb, spec, torch.float32, lengths, affine)
    affine = None if affine is None else affine.to(torch.float32).contiguous()

    with torch.cuda.device(waveform.device), _what_is_unsupported_is_unavailable():
        device = waveform.device.index
        tables = _tables_of(window, fb, (spec, device, rows.dtype), lambda: _backward_tables(window, fb, spec, device, rows))
        plan = tables.plan
        assert isinstance(plan, BackwardPlan)
        kernel = _kernel(
            spec, plan, device, rows.dtype, by_row.dtype, _fits(plan, tables.filters), lengths is not None, affine is not None
        )
        grid = launch_backward(spec, plan, n_samples, n_rows, _device(device)[1], lengths is not None)
        edges = torch.empty((n_rows, grid.edge_length), dtype=torch.float32, device=rows.device)
        params = backward_params(spec, plan, grid, rows, by_row, found, edges, tables, output, lengths, affine)
        stream = torch._C._cuda_getCurrentRawStream(device)
        kernel.launch(params, grid.blocks, grid.threads, stream)
        if edges.numel() and not grid.fold:
            kernel.launch_fold(params, stream)
    return found.to(waveform.dtype).reshape(waveform.shape)


def _rows(waveform: Tensor) -> Tensor:
    """(rows, time) in a dtype that the kernel reads, the samples of a row side by side."""
    n_samples = waveform.shape[-1]
    if waveform.dtype == torch.float64:
        waveform = waveform.float()
    rows = waveform.reshape(waveform.numel() // n_samples, n_samples)
    return rows.contiguous() if rows.stride(1) != 1 and n_samples > 1 else rows


def launch_params(
    spec: StftSpec,
    plan: LaunchPlan,
    grid: Launch,
    rows: Tensor,
    shape: tuple[int, ...],
    tables: _Tables,
) -> LaunchParams:
    """The kernel's arguments for ``rows`` (rows, time), their samples side by side, and features of a shape; but for the places
    of all that is not in the tables.
    """
    n_rows, n_samples = rows.shape
    n_mels, frames = shape[-2:][:: -1 if spec.epilogue.time_major else 1]
    return LaunchParams(
        factors=tables.factors.data_ptr(),
        filters=tables.filters.data_ptr(),
        n_samples=n_samples,
        row_stride=rows.stride(0),
        frames=frames,
        n_mels=n_mels,
        n_filters=tables.n_filters,
        filter_entries=len(tables.filters),
        **_told(grid),
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
    features: Tensor | None = None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> BackwardParams:
    """The backward kernels' arguments for ``rows`` (rows, time), their samples side by side, and the other tensors of the call:
    ``mel_rows`` (rows, n_mels, frames) with any strides, ``gradient`` (rows, time), ``edges`` (rows, ``grid.edge_length``);
    ``features``, what the forward pass made in float32, contiguous; ``lengths`` and ``affine`` as in :func:`launch_params`.
    """
    n_rows, n_samples = rows.shape
    mel_row_stride, mel_stride, mel_frame_stride = mel_rows.stride()
    return BackwardParams(
        waveform=rows.data_ptr(),
        mel=mel_rows.data_ptr(),
        gradient=gradient.data_ptr(),
        edges=edges.data_ptr(),
        factors=tables.factors.data_ptr(),
        filters=tables.filters.data_ptr(),
        n_samples=n_samples,
        row_stride=rows.stride(0),
        frames=mel_rows.shape[-1],
        mel_row_stride=mel_row_stride,
        mel_stride=mel_stride,
        mel_frame_stride=mel_frame_stride,
        aligned=_Alignment.of(spec, plan, rows).holds_at(rows.data_ptr()),
        filter_entries=len(tables.filters),
        rows=n_rows,
        features=None if features is None else features.data_ptr(),
        lengths=None if lengths is None else lengths.data_ptr(),
        affine=None if affine is None else affine.data_ptr(),
        **_told(grid),
    )


def _told(grid: Launch | BackwardLaunch) -> dict[str, int]:
    """What a kernel is told of its grid: all but its size, under the same names."""
    return {name: value for name, value in vars(grid).items() if name not in ("blocks", "threads")}


def specialisations(
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    arch: Architecture,
    samples: torch.dtype = torch.float32,
    output: torch.dtype = torch.float32,
    *,
    rule: Normalization | None = None,
    gradient: bool = False,
    ragged: bool = False,
    affine: bool = False,
) -> list[AnySpecialisation]:
    """The kernels that calls with these tables compile on an architecture. Needs no GPU.

    Args:
        samples: dtype of the waveforms.
        output: of the features.
        rule: of their normalisation over time: the kernels of both launches, and that of the one which plain torch follows where a
            gradient is recorded or a compiler watches.
        gradient: whether the waveform's is wanted too.
        ragged: whether rows have lengths.
        affine: whether filters have factors and summands.

    Raises:
        UnsupportedError: a kernel cannot be; the message says why.
    """
    window_values, fb_values = _values(spec, window, fb)

    def forward(spec: StftSpec, output: torch.dtype, summary: str = "") -> Specialisation:
        plan = make_plan(spec, arch, samples.itemsize, environment.frames_per_tile())
        filters = kernel_tables(plan, spec.n_fft, spec.normalized, window_values, fb_values).filters
        return Specialisation(spec, plan, arch, _name(samples), _name(output), _fits(plan, filters), ragged, affine, summary)

    found: list[AnySpecialisation] = []
    if rule is not None and _normalizes(rule, affine):
        between = _dtype_between(rule, output)
        found.append(forward(_spec_before(spec, rule), between, _summary_for(rule)))
        found.append(NormalizeSpecialisation(rule, spec, arch, _name(between), _name(output), ragged))
    late = output if rule is None else torch.float32  # plain torch normalises before it rounds
    found.append(forward(spec, late))
    if gradient:
        if spec.epilogue.log is not None:
            found.append(forward(spec, torch.float32))  # made again where they were rounded: a logarithm's derivative needs them
        plan = make_backward_plan(spec, arch, fb.shape[1], entries_per_bin(fb_values), samples.itemsize)
        fits = _fits(plan, bin_table(fb_values, plan, spec.power))
        found.append(Specialisation(spec, plan, arch, _name(samples), _name(late), fits, ragged, affine))
    return list(dict.fromkeys(found))


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
    """Architecture and number of multiprocessors.

    Raises:
        UnsupportedError: there are no kernels for such a device.
    """
    properties = torch.cuda.get_device_properties(ordinal)
    return architecture(properties.major, properties.minor), properties.multi_processor_count


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
    spec: StftSpec,
    plan: LaunchPlan,
    device: int,
    samples: torch.dtype,
    output: torch.dtype,
    *flags: Any,
) -> Kernel:
    """``flags`` are those of :class:`Specialisation`, in its order."""
    key = (id(plan), device, samples, output, *flags)

    def make() -> Kernel:
        s = Specialisation(spec, plan, _device(device)[0], _name(samples), _name(output), *flags)
        return Kernel(s, device)

    return _kernel_of(key, plan, make)


def _kernel_of(key: tuple, kept: object, make: Callable[[], Kernel]) -> Kernel:
    """The kernel of a key, made once. ``kept`` is what the key has the id of, if it has one."""
    if key not in _kernels:
        with _lock:
            if key not in _kernels:
                _refuse_in_capture("the kernel")
                found: Kernel | UnavailableError
                try:
                    found = make()
                except (toolchain.ToolchainError, CompileError, DriverError) as error:
                    if environment.no_jit():
                        raise
                    found = UnavailableError(str(error))
                _kernels[key] = kept, found
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
        tables = build()
        for tensor in (tables.factors, tables.filters):  # of the default stream's memory, and dropped after this call
            tensor.record_stream(torch.cuda.current_stream())
        return tables
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
    window_values, fb_values = _values(spec, window, fb)
    sample_scale = spec.scale / 32768.0 if samples == torch.int16 else spec.scale
    host = kernel_tables(plan, spec.n_fft, spec.normalized, window_values, fb_values, sample_scale)
    return _uploaded(plan, window, fb, host.factors, host.filters, host.n_filters)


def _backward_tables(window: Tensor, fb: Tensor, spec: StftSpec, device: int, rows: Tensor) -> _Tables:
    window_values, fb_values = _values(spec, window, fb)
    plan = make_backward_plan(spec, _device(device)[0], fb.shape[1], entries_per_bin(fb_values), rows.element_size())
    factors = factor_table(plan, spec.n_fft, spec.normalized, window_values, spec.scale)
    return _uploaded(plan, window, fb, factors, bin_table(fb_values, plan, spec.power), fb.shape[1])


def _values(spec: StftSpec, window: Tensor, fb: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """
    Raises:
        UnsupportedError: the kernel cannot take this window.
    """
    window_values, fb_values = (t.detach().double().cpu().numpy() for t in (window, fb))
    # A tile lacks the sample before its first.
    if spec.emphasises_waveform and (first := padded_window(window_values, spec.n_fft)[0]) != 0:
        raise UnsupportedError(
            f"the fused kernel pre-emphasises a waveform where the window, padded to n_fft, begins with 0, not with {first:g}"
        )
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
