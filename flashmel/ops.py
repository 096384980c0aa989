"""The operators ``flashmel::mel_spectrogram`` and its ``_backward``: input checks, choice of path, fakes, autograd. The only file
that knows torch.library."""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

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

_spec = lru_cache(maxsize=256)(StftSpec)


def mel_spectrogram(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None = None) -> Tensor:
    """Mel spectrogram of a waveform, by the fused kernel where it can, else in plain torch.

    Args:
        waveform: (..., time), real; int16 is scaled by 1/32768.
        window: (n,) with n up to ``spec.n_fft``; its float64 makes the arithmetic float64.
        fb: (n_freqs, n_mels).
        spec: framing, normalisation and power.
        dtype: of the output; the arithmetic's if None.

    Returns:
        (..., n_mels, frames), contiguous. Nothing but the arguments is kept for its gradient, which is fused too for the waveform.
        For window and fb, for a gradient of the gradient, in forward mode and under torch.func it is plain torch's.

    Raises:
        TypeError: the waveform is not a tensor.
        ValueError: for a waveform that is empty, too short, of another dtype or on another device than the tables.
    """
    _check(waveform, window, fb, spec)
    tables_too = torch.is_grad_enabled() and (window.requires_grad or fb.requires_grad)
    if tables_too or reference.is_transformed(waveform, window, fb):
        return reference.mel_spectrogram(waveform, window, fb, spec, dtype)
    return torch.ops.flashmel.mel_spectrogram(
        waveform, window, fb, spec.n_fft, spec.hop_length, spec.pad, spec.power, spec.normalized, spec.center, spec.pad_mode, dtype
    )


def path(spec: StftSpec, device: torch.device) -> str:
    """Which path a module with this spec takes on a device, and why."""
    return fused.path(spec, device)


def _check(waveform: Tensor, window: Tensor, fb: Tensor, spec: StftSpec) -> None:
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
    return waveform, window, fb, _spec(n_fft, n_fft, hop_length, pad, power, normalized, center, pad_mode), dtype


def _plain(*operands: Any, **keywords: Any) -> Tensor:
    return reference.mel_spectrogram(*_arguments(*operands, **keywords))


def _cuda(*operands: Any, **keywords: Any) -> Tensor:
    arguments = _arguments(*operands, **keywords)
    try:
        return fused.mel_spectrogram(*arguments)
    except fused.UnavailableError as reason:
        _warn_once(f"running in plain torch on {arguments[0].device}: {reason}")
        return reference.mel_spectrogram(*arguments)


def _fake(*operands: Any, **keywords: Any) -> Tensor:
    waveform, window, fb, spec, dtype = _arguments(*operands, **keywords)
    frames = spec.frame_count(waveform.shape[-1])
    return waveform.new_empty((*waveform.shape[:-1], fb.shape[1], frames), dtype=dtype or reference.compute_dtype(window))


def _plain_backward(mel_gradient: Tensor, *operands: Any) -> Tensor:
    waveform, window, fb, spec, _ = _arguments(*operands)
    return reference.mel_spectrogram_backward(mel_gradient, waveform, window, fb, spec)


def _cuda_backward(mel_gradient: Tensor, *operands: Any) -> Tensor:
    waveform, window, fb, spec, _ = _arguments(*operands)
    try:
        return fused.mel_spectrogram_backward(mel_gradient, waveform, window, fb, spec)
    except fused.UnavailableError as reason:
        _warn_once(f"the gradient runs in plain torch on {waveform.device}: {reason}")
        return _plain_backward(mel_gradient, *operands)


def _fake_backward(mel_gradient: Tensor, waveform: Tensor, *_: Any) -> Tensor:
    return waveform.new_empty(waveform.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.parameters = inputs[3:10]


def _backward(ctx: Any, mel_gradient: Tensor) -> tuple[Tensor | None, ...]:
    tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[:3]
    gradients: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if torch.is_grad_enabled() or any(needed[1:]):  # a gradient of the gradient may follow
        spec = _spec(ctx.parameters[0], *ctx.parameters)
        found = iter(reference.vector_jacobian_product(mel_gradient, tensors, needed, spec))
        gradients[:3] = [next(found) if need else None for need in needed]
    elif needed[0]:
        gradients[0] = torch.ops.flashmel.mel_spectrogram_backward(mel_gradient, *tensors, *ctx.parameters)
    return tuple(gradients)


_library.impl("mel_spectrogram", _plain, "CompositeExplicitAutograd")
_library.impl("mel_spectrogram", _cuda, "CUDA")
torch.library.register_fake("flashmel::mel_spectrogram", _fake, lib=_library)
_library.impl("mel_spectrogram_backward", _plain_backward, "CompositeExplicitAutograd")
_library.impl("mel_spectrogram_backward", _cuda_backward, "CUDA")
torch.library.register_fake("flashmel::mel_spectrogram_backward", _fake_backward, lib=_library)
torch.library.register_autograd("flashmel::mel_spectrogram", _backward, setup_context=_setup_context, lib=_library)
