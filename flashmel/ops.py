"""The operators ``flashmel::mel_spectrogram`` and its ``_backward``: input checks, choice of path, fakes, autograd. The only file
that knows torch.library."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import fused, reference
from .normalize import normalize
from .spec import Normalization, StftSpec, spec_of

OUTPUT_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)
INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16)

_library = torch.library.Library("flashmel", "DEF")
# A spec is its text; a dtype is its name, for AOTInductor of torch 2.11 and before takes one torch.dtype for another.
_OPERANDS = "Tensor waveform, Tensor window, Tensor fb, str spec, Tensor? lengths=None, Tensor? affine=None"
_library.define(f'mel_spectrogram({_OPERANDS}, str dtype="") -> Tensor', tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    f"mel_spectrogram_backward(Tensor gradient, {_OPERANDS}, Tensor? features=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)

# Also: the same object for the same parameters, by which calls are recalled.
cached_spec = lru_cache(maxsize=256, typed=True)(StftSpec)


def features(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None = None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A mel spectrogram, or the features that the spec makes of it: by the fused kernel where it can, else in plain torch.

    Args:
        waveform: (..., time), real; int16 is scaled by 1/32768.
        window: (n,) with n up to ``spec.n_fft``; its float64 makes the arithmetic float64.
        fb: (n_freqs, n_mels).
        spec: framing, prologue, normalisation, power, epilogue.
        dtype: of the output; the arithmetic's if None.
        lengths: samples of each row, an integer tensor of the waveform's shape without its last axis; each row is what it would be
            alone, cut off there, and its frames behind hold the epilogue's ``pad_value``.
        affine: (2, n_mels), gain and bias per mel, after the epilogue's own.
        out: where to write the result, of any strides and floating dtype; instead of ``dtype``.

    Returns:
        (..., n_mels, frames), or (..., frames, n_mels) if the epilogue is time-major, contiguous; or ``out``. Nothing but the
        arguments (and, where there is a log, the result) is kept for its gradient, which is fused too for the waveform. For
        tables, for a gradient of the gradient, in forward mode and under torch.func it is plain torch's.

    Raises:
        TypeError: the waveform is not a tensor.
        ValueError: for a waveform that is empty, too short, of another dtype or on another device than the tables; for an ``out``
            that does not fit, or that a gradient would have to go through; for lengths of another shape, not integers, or out of
            range where they are on a CPU (on a GPU they are clamped, for a look at them would wait for it); for an affine of
            another shape.
    """
    if out is not None:
        return _write(out, waveform, window, fb, spec, lengths, affine)
    direct, recorded = _is_direct(waveform), torch.is_grad_enabled()
    tables_too = recorded and (window.requires_grad or fb.requires_grad or (affine is not None and affine.requires_grad))
    if lengths is not None:
        lengths = checked_lengths(lengths, waveform)
    if direct and not tables_too:
        if recorded and waveform.requires_grad:
            return _Recorded.apply(waveform, window, fb, spec, lengths, affine, dtype)
        if (recalled := fused.recall(waveform, window, fb, spec, dtype, lengths, affine)) is not None:
            return recalled
    check(waveform, window, fb, spec, affine)
    if tables_too or reference.is_transformed(waveform, window, fb):
        return reference.features(waveform, window, fb, spec, dtype, lengths, affine)
    if direct:
        return _run(waveform, window, fb, spec, dtype, lengths, affine)
    return traced(waveform, window, fb, spec.text, dtype, lengths, affine)


def traced(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: str,
    dtype: torch.dtype | None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """:func:`features` as the operator, for compilers and others that watch; ``spec`` is the spec's text."""
    name = "" if dtype is None else str(dtype).removeprefix("torch.")
    found = torch.ops.flashmel.mel_spectrogram(waveform, window, fb, spec, lengths, affine, name)
    if out is None:
        return found
    _check_out(out, found.shape, waveform)
    return out.copy_(found)


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
    """:func:`features`, normalised over each row's valid frames by ``rule`` before they are cast to ``dtype``.

    On a GPU that is a second launch; but where a gradient is recorded or a compiler watches, it is plain torch's.

    Raises:
        TypeError, ValueError: see :func:`features`.
    """
    direct = _is_direct(waveform) and waveform.is_cuda
    if direct and torch.is_grad_enabled():
        direct = not any(t is not None and t.requires_grad for t in (waveform, window, fb, affine))
    if direct:
        own = None if lengths is None else checked_lengths(lengths, waveform)
        if (recalled := fused.recall_normalized(waveform, window, fb, spec, rule, dtype, own, affine)) is not None:
            return recalled
        check(waveform, window, fb, spec, affine)
        with contextlib.suppress(fused.UnavailableError):  # what follows says why
            return fused.normalized_features(waveform, window, fb, spec, rule, dtype, own, affine)
    found = features(waveform, window, fb, spec, None, lengths, affine)
    valid = spec.valid_frames(waveform.shape[-1] if lengths is None else lengths.to(found.device))
    found = normalize(found, rule, valid, time_major=spec.epilogue.time_major)
    return found if dtype is None else found.to(dtype)


def rehearse(call: Callable[[Tensor], Tensor], n_samples: int, dtype: torch.dtype, device: torch.device, gradient: bool) -> None:
    """Call with silence, and call recording its gradient if so asked, so that no later call has anything to make ready."""
    if gradient and not dtype.is_floating_point:
        raise ValueError(f"waveforms of {dtype} have no gradient: warm up without gradient=True, or for a floating dtype")
    waveform = torch.zeros((1, n_samples), dtype=dtype, device=device, requires_grad=gradient)
    with torch.no_grad():
        call(waveform)
    if gradient:
        with torch.enable_grad():
            torch.autograd.grad(call(waveform).sum(), waveform)


def check_output_dtype(dtype: torch.dtype | None) -> None:
    """Raise ValueError for a dtype that modules do not give; None is that of the arithmetic."""
    if dtype not in OUTPUT_DTYPES:
        raise ValueError(f"dtype must be torch.float32, torch.float16 or torch.bfloat16 (or None), got {dtype!r}")


def checked_lengths(lengths: Tensor, waveform: Tensor) -> Tensor:
    """Lengths on the waveform's device."""
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"lengths must be an int64 or int32 tensor, got {getattr(lengths, 'dtype', type(lengths).__name__)}")
    if lengths.shape != waveform.shape[:-1]:
        raise ValueError(
            f"lengths must have the waveform's shape without its last axis, "
            f"{tuple(waveform.shape[:-1])}, got {tuple(lengths.shape)}"
        )
    watched = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if lengths.device.type == "cpu" and type(lengths) is Tensor and not watched and lengths.numel():
        low, high = (int(end) for end in lengths.aminmax())
        if low < 0 or high > waveform.shape[-1]:
            raise ValueError(f"lengths must lie between 0 and the waveform's {waveform.shape[-1]} samples, got {low} to {high}")
    return lengths.to(waveform.device, torch.int64, non_blocking=True).contiguous()


def _run(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:
    if waveform.is_cuda:
        try:
            return fused.features(waveform, window, fb, spec, dtype, lengths, affine)
        except fused.UnavailableError as reason:
            _warn_once(f"running in plain torch on {waveform.device}: {reason}")
    return reference.features(waveform, window, fb, spec, dtype, lengths, affine)


def _write(
    out: Tensor, waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, lengths: Tensor | None, affine: Tensor | None
) -> Tensor:
    check(waveform, window, fb, spec, affine)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (out, waveform, window, fb, affine)):
        raise ValueError("out= records no gradient: call it under torch.no_grad(), or without out=")
    _check_out(out, spec.output_shape(waveform.shape, fb.shape[1]), waveform)
    if lengths is not None:
        lengths = checked_lengths(lengths, waveform)
    direct = _is_direct(waveform) and type(out) is Tensor and out.is_contiguous() and not out.is_neg()
    if not direct or fused.recall(waveform, window, fb, spec, out.dtype, lengths, affine, out) is None:
        out.copy_(features(waveform, window, fb, spec, out.dtype, lengths, affine))
    return out


def _check_out(out: Tensor, shape: tuple[int, ...], waveform: Tensor) -> None:
    if out.shape != shape or out.device != waveform.device or not out.is_floating_point():
        raise ValueError(
            f"out must be a floating-point tensor of shape {tuple(shape)} on {waveform.device}, "
            f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )


def _is_direct(waveform: Tensor) -> bool:
    """Whether nobody but autograd watches this call: no compiler, tracer, mode or subclass.

    It may then do without the dispatcher, which takes longer than all the rest of a call.
    """
    return (
        not torch.compiler.is_compiling()
        and type(waveform) in (Tensor, torch.nn.Parameter)
        and not (waveform.is_meta or waveform.is_neg() or waveform.is_nested or waveform.layout is not torch.strided)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


class _Recorded(torch.autograd.Function):
    """The operator's gradient without the dispatcher."""

    @staticmethod
    def forward(
        ctx: Any,
        waveform: Tensor,
        window: Tensor,
        fb: Tensor,
        spec: StftSpec,
        lengths: Tensor | None,
        affine: Tensor | None,
        dtype: torch.dtype | None,
    ) -> Tensor:
        operands = waveform, window, fb, spec, dtype, lengths, affine
        found = fused.recall(*operands)
        found = features(*operands) if found is None else found
        _keep(ctx, operands, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, gradient)


def path(spec: StftSpec, device: torch.device) -> str:
    """Which path a module with this spec takes on a device, and why."""
    return fused.path(spec, device)


def check(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, affine: Tensor | None = None) -> None:
    """Raise what :func:`features` raises for arguments that it cannot take, but for lengths."""
    if not isinstance(waveform, Tensor):
        raise TypeError(f"waveform must be a torch.Tensor, got {type(waveform).__name__}: convert an array with torch.from_numpy")
    if waveform.dtype not in INPUT_DTYPES:
        remedy = "pass its real part" if waveform.is_complex() else "convert it to float32, or to int16 for 16-bit PCM"
        raise ValueError(f"waveform must be float32, float16, bfloat16, float64 or int16, got {waveform.dtype}: {remedy}")
    if waveform.is_nested:
        raise ValueError("waveform must not be nested: pad its rows, or give it to a flashmel.frontend, which knows lengths")
    if waveform.layout is not torch.strided:
        raise ValueError(f"waveform must be dense, got {waveform.layout}: call its to_dense()")
    if waveform.dim() == 0:
        raise ValueError("waveform must have a time axis, got a scalar")
    if waveform.device != window.device or waveform.device != fb.device:
        raise ValueError(
            f"waveform is on {waveform.device}, the module's window on {window.device} and filterbank on {fb.device}: "
            f"move the module with .to({str(waveform.device)!r}) or the waveform to the module's device"
        )
    if window.is_complex() or fb.is_complex():
        raise ValueError(f"window and filterbank must be real, got {window.dtype} and {fb.dtype}")
    if window.dim() != 1 or not 1 <= window.shape[0] <= spec.n_fft:
        raise ValueError(f"window must have one axis of 1 to n_fft = {spec.n_fft} values, got shape {tuple(window.shape)}")
    if fb.dim() != 2 or fb.shape[0] != spec.n_freqs:
        raise ValueError(f"filterbank must have shape (n_freqs, n_mels) with n_freqs = {spec.n_freqs}, got {tuple(fb.shape)}")
    if affine is not None and (affine.shape != (2, fb.shape[1]) or affine.device != fb.device):
        raise ValueError(
            f"affine must have shape (2, n_mels) with n_mels = {fb.shape[1]}, on {fb.device}; "
            f"got {tuple(affine.shape)} on {affine.device}"
        )
    spec.check_length(waveform.shape[-1])


_warned: set[str] = set()


def _warn_once(message: str) -> None:
    if not torch.compiler.is_compiling() and message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)


def _arguments(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: str,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
    dtype: str = "",
) -> tuple[Tensor, Tensor, Tensor, StftSpec, torch.dtype | None, Tensor | None, Tensor | None]:
    """The operator's arguments as those of the two paths."""
    return waveform, window, fb, spec_of(spec), getattr(torch, dtype) if dtype else None, lengths, affine


def _forward(*operands: Any, **keywords: Any) -> Tensor:
    return _run(*_arguments(*operands, **keywords))


def _fake(*operands: Any, **keywords: Any) -> Tensor:
    waveform, window, fb, spec, dtype, _, _ = _arguments(*operands, **keywords)
    return waveform.new_empty(spec.output_shape(waveform.shape, fb.shape[1]), dtype=dtype or reference.compute_dtype(window))


def _run_backward(
    gradient: Tensor,
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: str,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
    features: Tensor | None = None,
) -> Tensor:
    operands = waveform, window, fb, spec_of(spec), lengths, affine
    if waveform.is_cuda:
        try:
            return fused.features_backward(gradient, *operands, features)
        except fused.UnavailableError as reason:
            _warn_once(f"the gradient runs in plain torch on {waveform.device}: {reason}")
    return reference.features_backward(gradient, *operands)


def _fake_backward(gradient: Tensor, waveform: Tensor, *_: Any, **__: Any) -> Tensor:
    return waveform.new_empty(waveform.shape)


def _keep(ctx: Any, operands: tuple[Any, ...], output: Tensor) -> None:
    waveform, window, fb, ctx.spec, _, lengths, affine = operands
    ctx.save_for_backward(waveform, window, fb, lengths, affine, None if ctx.spec.epilogue.log is None else output)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _keep(ctx, _arguments(*inputs), output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    waveform, window, fb, lengths, affine, output = ctx.saved_tensors
    needed = ctx.needs_input_grad
    gradients: list[Tensor | None] = [None] * len(needed)
    places = [place for place in _TENSORS if place < len(needed) and needed[place]]
    if torch.is_grad_enabled() or any(place > 0 for place in places):  # a gradient of the gradient may follow
        found = reference.vector_jacobian_product(
            gradient, (waveform, window, fb, affine), [p in places for p in _TENSORS], ctx.spec, lengths
        )
        for place, value in zip(places, found, strict=True):
            gradients[place] = value
    elif places:
        operands = waveform, window, fb, ctx.spec.text, lengths, affine, output
        gradients[0] = torch.ops.flashmel.mel_spectrogram_backward(gradient, *operands)
    return tuple(gradients)


_TENSORS = (0, 1, 2, 5)  # among the operator's arguments, those with gradients: waveform, window, fb, affine

_library.impl("mel_spectrogram", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("flashmel::mel_spectrogram", _fake, lib=_library)
_library.impl("mel_spectrogram_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashmel::mel_spectrogram_backward", _fake_backward, lib=_library)
torch.library.register_autograd("flashmel::mel_spectrogram", _backward, setup_context=_setup_context, lib=_library)
