"""The mel scale and the triangular mel filters."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from .spec import MelBankSpec

_SLANEY_MEL_PER_HZ = 3.0 / 200.0  # linear up to 1 kHz, which is mel 15
_SLANEY_LOG_STEP = math.log(6.4) / 27.0  # then logarithmic: 27 mel per factor of 6.4


def hz_to_mel(hz: float, scale: str) -> float:
    """Frequency in Hz to mel, on the "htk" or the "slaney" scale."""
    if scale == "htk":
        return 2595.0 * math.log10(1.0 + hz / 700.0)
    return hz * _SLANEY_MEL_PER_HZ if hz < 1000.0 else 15.0 + math.log(hz / 1000.0) / _SLANEY_LOG_STEP


def mel_to_hz(mel: Tensor, scale: str) -> Tensor:
    """Mel to frequency in Hz, the inverse of :func:`hz_to_mel`, elementwise."""
    if scale == "htk":
        return 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    return torch.where(mel < 15.0, mel * (200.0 / 3.0), 1000.0 * torch.exp(_SLANEY_LOG_STEP * (mel - 15.0)))


def mel_filterbank(spec: MelBankSpec, dtype: torch.dtype = torch.float64, bins: Tensor | None = None) -> Tensor:
    """Triangular mel filters, (n_freqs, n_mels) on the CPU; column m is filter m.

    ``bins`` are the bins' frequencies in Hz, (n_freqs,); if None they run to ``sample_rate // 2``, torchaudio's rule, which is off
    for odd sample rates and odd ``n_fft``. In float32 the steps round as torchaudio's do and the values are bit for bit
    ``torchaudio.functional.melscale_fbanks``: its narrow filters are off by up to 1e-5, more than the tolerance of a drop-in
    leaves. ``f_min == f_max`` gives all-zero filters.
    """
    if spec.f_min == spec.f_max:
        return torch.zeros((spec.n_freqs, spec.n_mels), dtype=dtype, device="cpu")
    if bins is None:
        bins = torch.linspace(0, spec.sample_rate // 2, spec.n_freqs, dtype=dtype, device="cpu")
    low, high = hz_to_mel(spec.f_min, spec.mel_scale), hz_to_mel(spec.f_max, spec.mel_scale)
    corners = mel_to_hz(torch.linspace(low, high, spec.n_mels + 2, dtype=dtype, device="cpu"), spec.mel_scale)
    widths = corners.diff()
    rising = (bins[:, None] - corners[:-2]) / widths[:-1]
    falling = (corners[2:] - bins[:, None]) / widths[1:]
    bank = torch.minimum(rising, falling).clamp(min=0.0)
    if spec.norm == "slaney":  # unit area in Hz
        bank = bank * (2.0 / (corners[2:] - corners[:-2]))
    return bank


def exact_filterbank(spec: MelBankSpec) -> Tensor:
    """:func:`mel_filterbank` in float64, bin k at ``k * sample_rate / n_fft``."""
    bins = torch.arange(spec.n_freqs, dtype=torch.float64, device="cpu") * (spec.sample_rate / spec.n_fft)
    return mel_filterbank(spec, bins=bins)


def librosa_filterbank(spec: MelBankSpec) -> Tensor:
    """:func:`exact_filterbank` rounded where librosa rounds: triangles in float64, to float32, times the norm, to float32.

    These are the bits of ``librosa.filters.mel`` and of the tables that openai-whisper ships.
    """
    bank = exact_filterbank(replace(spec, norm=None)).float()
    if spec.norm != "slaney":
        return bank
    low, high = hz_to_mel(spec.f_min, spec.mel_scale), hz_to_mel(spec.f_max, spec.mel_scale)
    corners = mel_to_hz(torch.linspace(low, high, spec.n_mels + 2, dtype=torch.float64, device="cpu"), spec.mel_scale)
    return (bank.double() * (2.0 / (corners[2:] - corners[:-2]))).float()


def kaldi_filterbank(spec: MelBankSpec) -> Tensor:
    """Kaldi's mel filters, (n_freqs, n_mels) float64: triangles over the mel scale, not over Hz, of height 1.

    The scale is 1127 ln(1 + f / 700), which is "htk". The bin at the Nyquist frequency belongs to no filter.
    """
    bins = torch.linspace(0, spec.sample_rate / 2, spec.n_freqs, dtype=torch.float64, device="cpu")
    mels = 2595.0 * torch.log10(1.0 + bins / 700.0)
    low, high = hz_to_mel(spec.f_min, "htk"), hz_to_mel(spec.f_max, "htk")
    corners = torch.linspace(low, high, spec.n_mels + 2, dtype=torch.float64, device="cpu")
    widths = corners.diff()
    rising = (mels[:, None] - corners[:-2]) / widths[:-1]
    falling = (corners[2:] - mels[:, None]) / widths[1:]
    bank = torch.minimum(rising, falling).clamp(min=0.0)
    bank[-1] = 0.0  # in exact arithmetic it is
    return bank
