"""Decibels and cepstra: drop-ins for ``torchaudio.transforms.AmplitudeToDB`` and ``MFCC``."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from . import ops, reference
from .buffers import Tables, table
from .normalize import normalize
from .spec import NORMALIZATION_SCOPES, Epilogue, Normalization, is_finite, one_of, positive_int
from .transform import MelSpectrogram

AMIN = 1e-10  # the smallest value that decibels are taken of
TOP_DB = 80.0  # what MFCC keeps below the loudest value


class AmplitudeToDB(nn.Module):
    """Decibels of a spectrogram: ``torchaudio.transforms.AmplitudeToDB``, but each waveform has a floor of its own.

    Args:
        stype: "power" (10 log10), or "magnitude" or "amplitude" (20 log10).
        top_db: what lies so far below the loudest value is raised to that; None (default) raises nothing.
        scope: whose loudest value: "sample" (default) takes each waveform's own, so that none depends on its batch. "channels" is
            torchaudio's: one for the axis before (freq, time), which are channels in (batch, channel, freq, time), but the whole
            batch in (batch, freq, time). "batch" is librosa's: one for all.

    Shape: (..., freq, time), and so is the result.

    Raises:
        ValueError: naming the argument and the value received.

    Example:
        >>> import torch
        >>> from flashmel import AmplitudeToDB
        >>> AmplitudeToDB(top_db=80.0)(torch.tensor([[1.0, 0.0]]))
        tensor([[  0., -80.]])
    """

    def __init__(self, stype: str = "power", top_db: float | None = None, *, scope: str = "sample") -> None:
        super().__init__()
        one_of("stype", stype, ("power", "magnitude", "amplitude"))
        one_of("scope", scope, NORMALIZATION_SCOPES)
        self.stype, self.scope, self.top_db = stype, scope, top_db
        self.multiplier, self.amin, self.ref_value, self.db_multiplier = 10.0 if stype == "power" else 20.0, AMIN, 1.0, 0.0

    @property
    def top_db(self) -> float | None:
        return None if self.rule is None else self.rule.range

    @top_db.setter
    def top_db(self, value: float | None) -> None:
        if value is not None and (not is_finite(value) or value < 0):
            raise ValueError(f"top_db must be a number of decibels and not negative, or None; got {value!r}")
        self.rule = None if value is None else Normalization("maximum", float(value), self.scope)

    def forward(self, x: Tensor) -> Tensor:
        """Decibels of (..., freq, time)."""
        if not isinstance(x, Tensor):
            raise TypeError(f"the spectrogram must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() < 2:
            raise ValueError(f"the spectrogram must have shape (..., freq, time), got {tuple(x.shape)}")
        decibels = self.multiplier * x.clamp(min=self.amin).log10()
        return decibels if self.rule is None else normalize(decibels, self.rule)

    def extra_repr(self) -> str:
        return f"stype={self.stype!r}, top_db={self.top_db!r}, scope={self.scope!r}"


class MFCC(Tables):
    """Mel-frequency cepstral coefficients: a drop-in for ``torchaudio.transforms.MFCC``, one launch up to its cosine transform.

    Args:
        sample_rate: samples per second.
        n_mfcc: number of coefficients, at most the number of filters.
        dct_type: 2.
        norm: "ortho", or None for the cosine transform as it is.
        log_mels: whether to take ln(mel + 1e-6) instead of decibels with 80 below the loudest value.
        melkwargs: arguments of :class:`flashmel.MelSpectrogram`.
        scope: whose loudest value, see :class:`AmplitudeToDB`; torchaudio's is "channels".
        dtype: of the output, see :class:`flashmel.MelSpectrogram`.

    Shape:
        - Input: (..., time), see :class:`flashmel.MelSpectrogram`.
        - Output: (..., n_mfcc, frames).

    The buffers are ``dct_mat`` (n_mels, n_mfcc) and those of ``MelSpectrogram``, under torchaudio's names.

    Raises:
        ValueError: at construction for an argument out of range; at a call as :class:`flashmel.MelSpectrogram`.

    Example:
        >>> import torch
        >>> from flashmel import MFCC
        >>> MFCC(16000, 13, melkwargs={"n_fft": 512, "hop_length": 160, "n_mels": 40})(torch.randn(16000)).shape
        torch.Size([13, 101])
    """

    dct_mat: Tensor

    def __init__(
        self,
        sample_rate: int = 16000,
        n_mfcc: int = 40,
        dct_type: int = 2,
        norm: str | None = "ortho",
        log_mels: bool = False,
        melkwargs: dict[str, Any] | None = None,
        *,
        scope: str = "sample",
        dtype: torch.dtype | None = None,
    ) -> None:
        one_of("dct_type", dct_type, (2,))
        one_of("norm", norm, ("ortho", None))
        positive_int("n_mfcc", n_mfcc)
        with warnings.catch_warnings(record=True) as caught:
            mel = MelSpectrogram(sample_rate, **{"dtype": dtype, **(melkwargs or {})})
        for warning in caught:  # again, from the line that made this module
            warnings.warn(warning.message, stacklevel=2)
        if n_mfcc > mel.n_mels:
            raise ValueError(f"n_mfcc must be at most n_mels = {mel.n_mels}, got {n_mfcc}")
        fb, cosines = mel.mel_scale.fb, _cosines(n_mfcc, mel.n_mels, norm).to(mel.mel_scale.fb.dtype)
        super().__init__(dct_mat=cosines if fb.is_meta else cosines.to(fb.device))
        self.sample_rate, self.n_mfcc, self.dct_type, self.norm, self.log_mels = sample_rate, n_mfcc, dct_type, norm, log_mels
        self.top_db, self.dtype = TOP_DB, mel.dtype
        self.MelSpectrogram = mel
        self.amplitude_to_DB = AmplitudeToDB("power", TOP_DB, scope=scope)
        self.spec = replace(mel.spec, epilogue=Epilogue("ln", 1e-6, "add") if log_mels else Epilogue("db", AMIN))

    def forward(self, waveform: Tensor) -> Tensor:
        """Coefficients (..., n_mfcc, frames) of a waveform (..., time); see the class for dtypes and errors."""
        mel, cosines = self.MelSpectrogram, table(self, "dct_mat")
        operands = waveform, mel.spectrogram.window, mel.mel_scale.fb, self.spec
        floor = None if self.log_mels else self.amplitude_to_DB.rule
        features = ops.features(*operands) if floor is None else ops.normalized_features(*operands, floor)
        rows = features.reshape(-1, *features.shape[-2:])
        transposed = cosines.mT.to(features.dtype)
        with torch.autocast(waveform.device.type, enabled=False):
            if (
                rows.device.type != "cpu"
                or torch.compiler.is_compiling()
                or reference.is_differentiated(rows, cosines)
                or not len(rows)
            ):
                out = transposed @ rows
            else:  # as in reference.features: how a product rounds depends on its shape, and a row must not depend on its batch
                out = torch.stack([transposed @ row for row in rows])
        return out.reshape(*features.shape[:-2], *out.shape[-2:]).to(self.dtype or features.dtype)

    def warmup(self, dtype: torch.dtype = torch.float32, *, gradient: bool = False) -> None:
        """Make ready all that calls need, see :meth:`flashmel.MelSpectrogram.warmup`."""
        shortest = self.spec.n_fft + 2 * abs(self.spec.pad) + 1
        ops.rehearse(self, shortest, dtype, self.MelSpectrogram.spectrogram.window.device, gradient)

    def extra_repr(self) -> str:
        shown = {name: getattr(self, name) for name in ("sample_rate", "n_mfcc", "dct_type", "norm", "log_mels", "dtype")}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _cosines(n_mfcc: int, n_mels: int, norm: str | None) -> Tensor:
    """The cosine transform of type 2, (n_mels, n_mfcc) float64; "ortho" makes its columns of unit length."""
    n = torch.arange(n_mels, dtype=torch.float64, device="cpu")
    k = torch.arange(n_mfcc, dtype=torch.float64, device="cpu")
    cosines = torch.cos(math.pi / n_mels * (n[:, None] + 0.5) * k)
    if norm is None:
        return 2.0 * cosines
    scale = torch.full((n_mfcc,), math.sqrt(2.0 / n_mels), dtype=torch.float64, device="cpu")
    scale[0] = math.sqrt(1.0 / n_mels)
    return cosines * scale
