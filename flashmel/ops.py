"""The operators ``flashmel::mel_spectrogram`` and its ``_backward``: input checks, choice of path, fakes, autograd. The only file
that knows torch.library."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import fused, reference
from .spec import StftSpec

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16)

_library = torch.library.Library("flashmel", "DEF")
_TRANSFORM = (
    "Tensor waveform, Tensor window, Tensor fb, int n_fft, int hop_length, int pad, float power, str normalized, bool center, "
    "str pad_mode"
)
_library.define(f"mel_spectrogram({_TRANSFORM}, ScalarType? dtype=None) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.define(f"mel_spectrogram_backward(Tensor mel_gradient, {_TRANSFORM}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

cached_spec = lru_cache(maxsize=256)(StftSpec)  # also: the same object for the same parameters, by which calls are recalled


def mel_spectrogram(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Mel spectrogram of a waveform, by the fused kernel where it can, else in plain torch.

    Args:
        waveform: (..., time), real; int16 is scaled by 1/32768.
        window: (n,) with n up to ``spec.n_fft``; its float64 makes the arithmetic float64.
        fb: (n_freqs, n_mels).
        spec: framing, normalisation and power.
        dtype: of the output; the arithmetic's if None.
        out: where to write the result, of this dtype and any strides.

    Returns:
        (..., n_mels, frames), contiguous; or ``out``. Nothing but the arguments is kept for its gradient, which is fused too for
        the waveform. For window and fb, for a gradient of the gradient, in forward mode and under torch.func it is plain torch's.

    Raises:
        TypeError: the waveform is not a tensor.
        ValueError: for a waveform that is empty, too short, of another dtype or on another device than the tables; for an ``out``
            that does not fit, or that a gradient would have to go through.
    """
    if out is not None:
        return _write(out, waveform, window, fb, spec)
    direct, recorded = _is_direct(waveform), torch.is_grad_enabled()
    tables_too = recorded and (window.requires_grad or fb.requires_grad)
    if direct and not tables_too:
        if recorded and waveform.requires_grad:
            return _Recorded.apply(waveform, window, fb, spec, dtype)
        if (recalled := fused.recall(waveform, window, fb, spec, dtype)) is not None:
            return recalled
    check(waveform, window, fb, spec)
    if tables_too or reference.is_transformed(waveform, window, fb):
        return reference.mel_spectrogram(waveform, window, fb, spec, dtype)
    if direct:
        return _run(waveform, window, fb, spec, dtype)
    return torch.ops.flashmel.mel_spectrogram(waveform, window, fb, *_parameters(spec), dtype)


def features(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    spec: StftSpec,
    dtype: torch.dtype | None = None,
    lengths: Tensor | None = None,
    affine: Tensor | None = None,
) -> Tensor:
    """Features of a waveform: all that the spec and its epilogue say.

    Args:
        waveform, window, fb, spec, dtype: see :func:`mel_spectrogram`.
        lengths: samples of each row, an integer tensor of the waveform's shape without its last axis; each row is what it would be
            alone, cut off there, and its frames behind hold the epilogue's ``pad_value``.
        affine: (2, n_mels), gain and bias per mel, after the epilogue's own.

    Returns:
        (..., n_mels, frames), or (..., frames, n_mels) if the epilogue is time-major, contiguous; differentiable (twice too) in
        waveform, window and fb.

    Raises:
        TypeError: the waveform is not a tensor.
        ValueError: as :func:`mel_spectrogram`; for lengths of another shape, not integers, or out of range where they are on a CPU
            (on a GPU they are clamped, for a look at them would wait for it); for an affine of another shape.
    """
    check(waveform, window, fb, spec)
    if lengths is not None:
        lengths = checked_lengths(lengths, waveform)
    if affine is not None and affine.shape != (2, fb.shape[1]):
        raise ValueError(f"affine must have shape (2, n_mels) with n_mels = {fb.shape[1]}, got {tuple(affine.shape)}")
    return reference.features(waveform, window, fb, spec, dtype, lengths, affine)


def checked_lengths(lengths: Tensor, waveform: Tensor) -> Tensor:
    """Lengths on the waveform's device."""
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"lengths must be an int64 or int32 tensor, got {getattr(lengths, 'dtype', type(lengths).__name__)}")
    if lengths.shape != waveform.shape[:-1]:
        raise ValueError(
            f"lengths must have the waveform's shape without its last axis, "
            f"{tuple(waveform.shape[:-1])}, got {tuple(lengths.shape)}"
        )
    if lengths.device.type == "cpu" and type(lengths) is Tensor and not torch.compiler.is_compiling() and lengths.numel():
        low, high = (int(end) for end in lengths.aminmax())
        if low < 0 or high > waveform.shape[-1]:
            raise ValueError(f"lengths must lie between 0 and the waveform's {waveform.shape[-1]} samples, got {low} to {high}")
    return lengths.to(waveform.device, non_blocking=True)


def _run(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None) -> Tensor:
    if waveform.is_cuda:
        try:
            return fused.mel_spectrogram(waveform, window, fb, spec, dtype)
        except fused.UnavailableError as reason:
            _warn_once(f"running in plain torch on {waveform.device}: {reason}")
    return reference.mel_spectrogram(waveform, window, fb, spec, dtype)


def _write(out: Tensor, waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec) -> Tensor:
    check(waveform, window, fb, spec)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (out, waveform, window, fb)):
        raise ValueError("out= records no gradient: call it under torch.no_grad(), or without out=")
    shape = (*waveform.shape[:-1], fb.shape[1], spec.frame_count(waveform.shape[-1]))
    if out.shape != shape or out.device != waveform.device or not out.is_floating_point():
        raise ValueError(
            f"out must be a floating-point tensor of shape {shape} on {waveform.device}, "
            f"got {out.dtype} of shape {tuple(out.shape)} on {out.device}"
        )
    direct = _is_direct(waveform) and type(out) is Tensor and out.is_contiguous() and not out.is_neg()
    if not direct or fused.recall(waveform, window, fb, spec, out.dtype, out) is None:
        out.copy_(mel_spectrogram(waveform, window, fb, spec, out.dtype))
    return out


def _parameters(spec: StftSpec) -> tuple[Any, ...]:
    """A spec as the operators take it: see ``_arguments``."""
    return spec.n_fft, spec.hop_length, spec.pad, spec.power, spec.normalized, spec.center, spec.pad_mode


def _is_direct(waveform: Tensor) -> bool:
    """Whether nobody but autograd watches this call: no compiler, tracer, mode or subclass.

    It may then do without the dispatcher, which takes longer than all the rest of a call.
    """
    return (
        not torch.compiler.is_compiling()
        and type(waveform) in (Tensor, torch.nn.Parameter)
        and not (waveform.is_meta or waveform.is_neg())  # the dispatcher's business
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


class _Recorded(torch.autograd.Function):
    """The operator's gradient without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None) -> Tensor:
        ctx.save_for_backward(waveform, window, fb)
        ctx.spec = spec
        out = fused.recall(waveform, window, fb, spec, dtype)
        return mel_spectrogram(waveform, window, fb, spec, dtype) if out is None else out

    @staticmethod
    def backward(ctx: Any, mel_gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, mel_gradient)


def path(spec: StftSpec, device: torch.device) -> str:
    """Which path a module with this spec takes on a device, and why."""
    return fused.path(spec, device)


def check(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec) -> None:
    """Raise what :func:`mel_spectrogram` raises for arguments that it cannot take."""
    if not isinstance(waveform, Tensor):
        raise TypeError(f"waveform must be a torch.Tensor, got {type(waveform).__name__}: convert an array with torch.from_numpy")
    if waveform.dtype not in INPUT_DTYPES:
        remedy = "pass its real part" if waveform.is_complex() else "convert it to float32, or to int16 for 16-bit PCM"
        raise ValueError(f"waveform must be float32, float16, bfloat16, float64 or int16, got {waveform.dtype}: {remedy}")
    if waveform.dim() == 0:
        raise ValueError("waveform must have a time axis, got a scalar")
    if waveform.device != window.device or waveform.device != fb.device:
        raise ValueError(
            f"waveform is on {waveform.device}, the module's window on {window.device} and filterbank on {fb.device}: "
            f"move the module with .to({str(waveform.device)!r}) or the waveform to the module's device"
        )
    if window.dim() != 1 or not 1 <= window.shape[0] <= spec.n_fft:
        raise ValueError(f"window must have one axis of 1 to n_fft = {spec.n_fft} values, got shape {tuple(window.shape)}")
    if fb.dim() != 2 or fb.shape[0] != spec.n_freqs:
        raise ValueError(f"filterbank must have shape (n_freqs, n_mels) with n_freqs = {spec.n_freqs}, got {tuple(fb.shape)}")
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
    n_fft: int,
    hop_length: int,
    pad: int,
    power: float,
    normalized: str,
    center: bool,
    pad_mode: str,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, StftSpec, torch.dtype | None]:
    """The operator's arguments as those of the two paths. The window's own length counts, and may be symbolic here."""
    return waveform, window, fb, cached_spec(n_fft, n_fft, hop_length, pad, power, normalized, center, pad_mode), dtype


def _forward(*operands: Any, **keywords: Any) -> Tensor:
    return _run(*_arguments(*operands, **keywords))


def _fake(*operands: Any, **keywords: Any) -> Tensor:
    waveform, window, fb, spec, dtype = _arguments(*operands, **keywords)
    frames = spec.frame_count(waveform.shape[-1])
    return waveform.new_empty((*waveform.shape[:-1], fb.shape[1], frames), dtype=dtype or reference.compute_dtype(window))


def _run_backward(mel_gradient: Tensor, *operands: Any) -> Tensor:
    waveform, window, fb, spec, _ = _arguments(*operands)
    if waveform.is_cuda:
        try:
            return fused.mel_spectrogram_backward(mel_gradient, waveform, window, fb, spec)
        except fused.UnavailableError as reason:
            _warn_once(f"the gradient runs in plain torch on {waveform.device}: {reason}")
    return reference.mel_spectrogram_backward(mel_gradient, waveform, window, fb, spec)


def _fake_backward(mel_gradient: Tensor, waveform: Tensor, *_: Any) -> Tensor:
    return waveform.new_empty(waveform.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.spec, _ = _arguments(*inputs)
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, mel_gradient: Tensor) -> tuple[Tensor | None, ...]:
    tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
    gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if torch.is_grad_enabled() or any(needed[1:]):  # a gradient of the gradient may follow
        found = iter(reference.vector_jacobian_product(mel_gradient, tensors, needed, ctx.spec))
        gradients[:3] = [next(found) if need else None for need in needed]
    elif needed[0]:
        gradients[0] = torch.ops.flashmel.mel_spectrogram_backward(mel_gradient, *tensors, *_parameters(ctx.spec))
    return tuple(gradients)


_library.impl("mel_spectrogram", _forward, "CompositeExplicitAutograd")
torch.library.register_fake("flashmel::mel_spectrogram", _fake, lib=_library)
_library.impl("mel_spectrogram_backward", _run_backward, "CompositeExplicitAutograd")
torch.library.register_fake("flashmel::mel_spectrogram_backward", _fake_backward, lib=_library)
torch.library.register_autograd("flashmel::mel_spectrogram", _backward, setup_context=_setup_context, lib=_library)
