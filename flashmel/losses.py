"""Training losses on mel spectrograms, for neural codecs and vocoders."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .spec import one_of, positive_int, positive_number
from .transform import MelSpectrogram

LOG_FLOORS = ("clamp", "add")
LOG_DISTANCES = ("l1", "l2")
REDUCTIONS = ("sum", "mean")


class MultiScaleMelLoss(nn.Module):
    """Distance of two waveforms' mel spectrograms at several resolutions: the reconstruction loss of codecs and vocoders.

    Each window length is a scale, with a mel spectrogram m of |X|**power: periodic Hann window, hops of a quarter of it, frames
    centred, ends reflected. A scale has two terms, each a mean over all of its elements:

    - log: the L1 or L2 distance of ``log_power * log10(max(m, eps))``, or of ``log_power * log10(m + eps)``;
    - mag: the L1 distance of m.

    The defaults are the loss of DAC and BigVGAN-v2 at any sample rate; the second example is that of AudioCraft (EnCodec), whose
    frames lie half a hop later.

    Args:
        sample_rate: samples per second.
        window_lengths: of the scales, in samples.
        n_mels: number of mel filters; this and the arguments marked * are one value for all scales, or one a scale.
        f_min: lowest frequency of the filters, in Hz *.
        f_max: highest frequency of the filters, in Hz; ``sample_rate // 2`` if None *.
        log_weight: weight of the log term; 0 leaves it out *.
        mag_weight: weight of the mag term; 0 leaves it out *.
        power: exponent of the magnitude: 1 for magnitude, 2 for power.
        normalized: as in :class:`MelSpectrogram`: False, True or "window", or "frame_length".
        norm: of the filters: "slaney" for unit area, or None.
        mel_scale: "slaney" or "htk".
        eps: floor of the mel values in the log term.
        log_floor: "clamp" (no gradient below ``eps``), or "add".
        log_power: factor of the logarithm (DAC's ``pow``): 2 makes it one of squares, ``math.log(10)`` a natural one.
        log_distance: "l1" or "l2" (mean square), of the log term.
        reduction: "sum" of the weighted terms, or "mean": the sum divided by that of all weights.

    Shape:
        - Input: estimate and reference, (..., time), of one shape; the dtypes of :class:`MelSpectrogram`.
        - Output: a scalar, float32 (float64 from a module converted by ``.double()``), also under autocast.

    Gradients are finite, and 0 where a waveform is silent. They reach both arguments; for a reference that requires none, nothing
    is kept for the backward pass. Windows and filters move with the module but are not in its ``state_dict``: a loss leaves
    checkpoints as they are, and its arguments alone say what it computes. Filters without a bin, which construction warns of, add 0
    to their scale's mean.

    Raises:
        TypeError: at a call for an argument that is not a tensor.
        ValueError: at construction for an argument out of range; at a call for shapes that differ, and for what
            :class:`MelSpectrogram` refuses: waveforms of at most half the longest window, among others.

    Example:
        >>> import torch
        >>> from flashmel.losses import MultiScaleMelLoss
        >>> loss = MultiScaleMelLoss(44100)
        >>> estimate = torch.randn(2, 1, 44100, requires_grad=True)
        >>> loss(estimate, torch.randn(2, 1, 44100)).backward()
        >>> audiocraft = MultiScaleMelLoss(
        ...     32000, (64, 128, 256, 512, 1024), 64, f_min=64.0, mag_weight=1.0, power=2.0, normalized=True, norm=None,
        ...     mel_scale="htk", log_floor="add", log_distance="l2", reduction="mean",
        ... )
    """

    def __init__(
        self,
        sample_rate: int,
        window_lengths: Iterable[int] = (32, 64, 128, 256, 512, 1024, 2048),
        n_mels: int | Iterable[int] = (5, 10, 20, 40, 80, 160, 320),
        f_min: float | Iterable[float] = 0.0,
        f_max: float | None | Iterable[float | None] = None,
        *,
        log_weight: float | Iterable[float] = 1.0,
        mag_weight: float | Iterable[float] = 0.0,
        power: float = 1.0,
        normalized: bool | str = False,
        norm: str | None = "slaney",
        mel_scale: str = "slaney",
        eps: float = 1e-5,
        log_floor: str = "clamp",
        log_power: float = 1.0,
        log_distance: str = "l1",
        reduction: str = "sum",
    ) -> None:
        super().__init__()
        if not _is_list(window_lengths):
            raise ValueError(f"window_lengths must be a sequence of lengths in samples, got {window_lengths!r}")
        windows = [positive_int(f"window_lengths[{i}]", length) for i, length in enumerate(window_lengths)]
        if not windows:
            raise ValueError("window_lengths must hold at least one length, got none")
        one_of("log_floor", log_floor, LOG_FLOORS)
        one_of("log_distance", log_distance, LOG_DISTANCES)
        one_of("reduction", reduction, REDUCTIONS)
        self.log_weight = _weights("log_weight", log_weight, len(windows))
        self.mag_weight = _weights("mag_weight", mag_weight, len(windows))
        if not any(self.log_weight + self.mag_weight):
            raise ValueError(f"log_weight or mag_weight must be positive somewhere, got {log_weight!r} and {mag_weight!r}")
        self.eps, self.log_floor = float(positive_number("eps", eps)), log_floor
        self.log_power, self.log_distance = float(positive_number("log_power", log_power)), log_distance
        self.reduction = reduction
        scales = []
        for window, filters, low, high in zip(
            windows,
            _per_scale("n_mels", n_mels, len(windows)),
            _per_scale("f_min", f_min, len(windows)),
            _per_scale("f_max", f_max, len(windows)),
            strict=True,
        ):
            mel = MelSpectrogram(
                sample_rate,
                n_fft=window,
                hop_length=max(1, window // 4),
                f_min=low,
                f_max=high,
                n_mels=filters,
                power=power,
                normalized=normalized,
                norm=norm,
                mel_scale=mel_scale,
            )
            # Not persistent: a checkpoint's filters would silently take the place of those that the arguments ask for.
            mel.spectrogram.register_buffer("window", mel.spectrogram.window, persistent=False)
            mel.mel_scale.register_buffer("fb", mel.mel_scale.fb, persistent=False)
            scales.append(mel)
        self.scales = nn.ModuleList(scales)

    def forward(self, estimate: Tensor, reference: Tensor) -> Tensor:
        """The loss, a scalar, of two waveforms (..., time) of one shape; see the class for dtypes and errors."""
        for name, waveform in (("estimate", estimate), ("reference", reference)):
            if not isinstance(waveform, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(waveform).__name__}")
        if estimate.shape != reference.shape:
            raise ValueError(
                f"estimate and reference must have one shape, got {tuple(estimate.shape)} and {tuple(reference.shape)}: "
                "cut the longer, or add the missing axis"
            )
        # Of L2 the logarithms' factor is a square; either way it need not be multiplied into the spectrograms.
        log_factor = self.log_power if self.log_distance == "l1" else self.log_power**2
        terms = []
        for scale, log_weight, mag_weight in zip(self.scales, self.log_weight, self.mag_weight, strict=True):
            # Two calls, not one of both: nothing is copied together, and a reference without gradients takes the fused kernel.
            own, other = scale(estimate), scale(reference)
            if log_weight:
                terms.append(log_weight * log_factor * _distance(self._log(own), self._log(other), self.log_distance))
            if mag_weight:
                terms.append(mag_weight * _distance(own, other, "l1"))
        loss = torch.stack(terms).sum()
        return loss / sum(self.log_weight + self.mag_weight) if self.reduction == "mean" else loss

    def _log(self, mel: Tensor) -> Tensor:
        return (mel + self.eps if self.log_floor == "add" else mel.clamp(min=self.eps)).log10()

    def extra_repr(self) -> str:
        names = ("log_weight", "mag_weight", "eps", "log_floor", "log_power", "log_distance", "reduction")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _distance(a: Tensor, b: Tensor, kind: str) -> Tensor:
    difference = a - b  # one tensor for the backward pass, where torch's mse_loss keeps two
    return (difference.abs() if kind == "l1" else difference.square()).mean()


def _is_list(value: object) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str) and getattr(value, "ndim", 1) > 0


def _per_scale(name: str, value: Any, count: int) -> tuple[Any, ...]:
    """``value`` for each of ``count`` scales: repeated, or already a sequence of that length."""
    values = tuple(value) if _is_list(value) else (value,) * count
    if len(values) != count:
        raise ValueError(f"{name} must be one value or {count}, one for each of window_lengths; got {len(values)}: {value!r}")
    return values


def _weights(name: str, value: Any, count: int) -> tuple[float, ...]:
    weights = _per_scale(name, value, count)
    if not all(isinstance(w, numbers.Real) and math.isfinite(w) and float(w) >= 0 for w in weights):
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
    return tuple(map(float, weights))
