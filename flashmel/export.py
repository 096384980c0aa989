"""The transform as an nn.Module of standard real operators, for whatever knows neither complex numbers nor flashmel's operator."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from . import ops, reference
from .spec import StftSpec
from .tables import padded_window, window_scale


class TorchMelSpectrogram(nn.Module):
    """What :meth:`flashmel.MelSpectrogram.to_torch` returns: see there.

    The Fourier transform is a matrix product. A convolution would do the framing too, in a smaller graph, but on a GPU torch
    computes convolutions in TF32 unless told otherwise, and three digits are too few. ``Tensor.unfold`` would frame faster, but
    torch.export compares its strides and then refuses some lengths.

    The tables are no part of the state_dict: a checkpoint of this module could not be loaded into the transform, and they follow
    from the two buffers that the transform's own checkpoints hold. They keep their dtype when a model around them is converted.
    """

    table: Tensor  # (n_fft, 2 * n_freqs): cosines and sines, times the window
    fb: Tensor

    def __init__(self, window: Tensor, fb: Tensor, spec: StftSpec, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.spec = spec
        compute = reference.compute_dtype(window)
        self.dtype = dtype or compute
        values = window.detach().cpu().double().numpy()
        scaled = padded_window(values, spec.n_fft) * window_scale(values, spec.n_fft, spec.normalized)
        sample = np.arange(spec.n_fft)
        turn = np.outer(sample, sample[: spec.n_freqs]) % spec.n_fft  # whole turns are dropped while they are integers
        angle = 2 * np.pi / spec.n_fft * sample
        halves = [torch.from_numpy(wave(angle)[turn] * scaled[:, None]).to(compute) for wave in (np.cos, np.sin)]
        self.register_buffer("table", torch.cat(halves, 1).to(window.device), persistent=False)
        self.register_buffer("fb", fb.detach().to(compute, copy=True), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TorchMelSpectrogram:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None:
                self._buffers[name] = old.to(new.device)
        return self

    def forward(self, waveform: Tensor) -> Tensor:
        """Mel spectrogram (..., n_mels, frames) of a waveform (..., time)."""
        ops.check(waveform, self.table[:, 0], self.fb, self.spec)  # the cosines of bin 0 are the window
        *batch, n_samples = waveform.shape
        spec, device = self.spec, waveform.device
        # Left only where it is on: in an exported graph the context would be an operator.
        autocast = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
        with torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext():
            rows = reference.samples(waveform.reshape(math.prod(batch), 1, n_samples), self.fb.dtype)
            first = spec.hop_length * torch.arange(spec.frame_count(n_samples), device=device)
            frames = reference.padded_rows(rows, spec)[:, 0, first[:, None] + torch.arange(spec.n_fft, device=device)]
            real, imaginary = (frames @ self.table).split(spec.n_freqs, -1)
            powers = reference.raised(real.square() + imaginary.square(), spec.power)
            mel = (powers @ self.fb).transpose(1, 2).contiguous().to(self.dtype)
        return mel.reshape(*batch, *mel.shape[1:])
