"""The transform as a function of the waveform and the tables, in the manner of ``torchaudio.functional``."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .spec import normalization


def mel_spectrogram(
    waveform: Tensor,
    window: Tensor,
    fb: Tensor,
    n_fft: int,
    hop_length: int,
    pad: int = 0,
    power: float = 2.0,
    normalized: bool | str = False,
    center: bool = True,
    pad_mode: str = "reflect",
    dtype: torch.dtype | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Mel spectrogram of a waveform, as :class:`flashmel.MelSpectrogram` with these tables and parameters.

    Args:
        waveform: (..., time), floating point or int16 PCM (scaled by 1/32768).
        window: (win_length,) with win_length up to ``n_fft``; float64 here makes the arithmetic float64.
        fb: filterbank, (n_freqs, n_mels) with ``n_freqs = n_fft // 2 + 1``.
        n_fft: size of the Fourier transform, in samples.
        hop_length: distance of frames, in samples.
        pad, power, normalized, center, pad_mode: see :class:`flashmel.MelSpectrogram`.
        dtype: of the result, that of the arithmetic if None; ``out`` decides it where given.
        out: where to write the result: (..., n_mels, frames) of any strides and floating dtype. On a GPU a contiguous one is
            written by the kernel itself, from the second call with such arguments on; others are copied to.

    Returns:
        (..., n_mels, frames); ``out`` where given.

    Raises:
        TypeError: an argument that has to be a tensor is none.
        ValueError: as the class does; and for an ``out`` of another shape or device, or where a gradient would be recorded.

    Example:
        >>> import torch
        >>> from flashmel.functional import mel_spectrogram
        >>> mel_spectrogram(torch.randn(16000), torch.hann_window(400), torch.rand(201, 80), n_fft=400, hop_length=160).shape
        torch.Size([80, 101])
    """
    for name, tensor in (("window", window), ("fb", fb), ("out", waveform if out is None else out)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if out is not None:
        dtype = out.dtype
    elif dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"the result must have a floating dtype, got {dtype!r}")
    normalized = normalization(normalized)
    if torch.compiler.is_compiling():  # which follows neither the cache nor the making of a spec, but the text that it is made of
        text = (
            f'{{"n_fft": {n_fft}, "win_length": {n_fft}, "hop_length": {hop_length}, "pad": {pad}, "power": {power}, '
            f'"normalized": "{normalized}", "center": {"true" if center else "false"}, "pad_mode": "{pad_mode}"}}'
        )
        return ops.traced(waveform, window, fb, text, dtype, out=out)
    spec = ops.cached_spec(n_fft, n_fft, hop_length, pad, power, normalized, center, pad_mode)
    return ops.features(waveform, window, fb, spec, dtype, out=out)
