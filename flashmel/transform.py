"""The public nn.Module: torchaudio's arguments, attributes and buffers in front of :func:`flashmel.ops.features`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import ops, reference
from .buffers import Tables, refuse_scripting, table
from .filterbank import mel_filterbank
from .spec import MelBankSpec, StftSpec, normalization, positive_int, positive_number


class _OfSpec:
    """Parameters of ``spec`` under torchaudio's names. Read-only: setting one raises instead of being ignored."""

    spec: StftSpec
    n_fft = property(lambda self: self.spec.n_fft)
    win_length = property(lambda self: self.spec.win_length)
    hop_length = property(lambda self: self.spec.hop_length)
    pad = property(lambda self: self.spec.pad)
    power = property(lambda self: self.spec.power)


class _OfBank:
    """The same of ``bank``."""

    bank: MelBankSpec
    sample_rate = property(lambda self: self.bank.sample_rate)
    f_min = property(lambda self: self.bank.f_min)
    f_max = property(lambda self: self.bank.f_max)
    n_mels = property(lambda self: self.bank.n_mels)


class _Spectrogram(_OfSpec, Tables):
    """The window and the framing, under the names of ``torchaudio.transforms.Spectrogram``."""

    window: Tensor

    def __init__(self, spec: StftSpec, normalized: bool | str, onesided: bool | None, window: Tensor) -> None:
        super().__init__(window=window)
        self.spec, self.normalized, self.onesided = spec, normalized, onesided

    center = property(lambda self: self.spec.center)
    pad_mode = property(lambda self: self.spec.pad_mode)

    def forward(self, waveform: Tensor) -> Tensor:
        """(..., time) to (..., n_freqs, frames), in plain torch."""
        return reference.spectrogram(waveform, self.window, self.spec)


class _MelScale(_OfBank, Tables):
    """The filterbank, under the names of ``torchaudio.transforms.MelScale``."""

    fb: Tensor

    def __init__(self, spec: MelBankSpec, fb: Tensor) -> None:
        super().__init__(fb=fb)
        self.bank = spec

    norm = property(lambda self: self.bank.norm)
    mel_scale = property(lambda self: self.bank.mel_scale)
    n_stft = property(lambda self: self.bank.n_freqs)

    def forward(self, specgram: Tensor) -> Tensor:
        """(..., n_freqs, frames) to (..., n_mels, frames), in plain torch."""
        return (specgram.mT @ self.fb).mT


class MelSpectrogram(_OfSpec, _OfBank, nn.Module):
    """Mel spectrogram: a drop-in for ``torchaudio.transforms.MelSpectrogram``, one CUDA kernel launch on a GPU.

    Args:
        sample_rate: samples per second.
        n_fft: size of the Fourier transform, in samples.
        win_length: length of the window, in samples; ``n_fft`` if None.
        hop_length: distance of frames, in samples; ``win_length // 2`` if None.
        f_min: lowest frequency of the filters, in Hz.
        f_max: highest frequency of the filters, in Hz; ``sample_rate // 2`` if None (0.0 means 0 Hz).
        pad: zeros added on each side of the waveform; negative crops (where torchaudio ignores it).
        n_mels: number of mel filters.
        window_fn: called as ``window_fn(win_length, **wkwargs)``; returns a 1-D real tensor or array.
        power: exponent of the magnitude, positive: 1 for magnitude, 2 for power.
        normalized: False, True or "window" (divide by the root of the window's energy), or "frame_length"
            (divide by the root of n_fft).
        wkwargs: keyword arguments of ``window_fn``.
        center: whether frame t is centred at sample ``t * hop_length``.
        pad_mode: what ``center`` pads with: "reflect", "constant", "replicate" or "circular".
        onesided: accepted for compatibility; a mel spectrogram is always one-sided.
        norm: None, or "slaney" for filters of unit area.
        mel_scale: "htk" or "slaney".
        dtype: of the output: float32, float16 or bfloat16; None (default) gives float32, and float64 from a module
            converted by ``.double()``. Arithmetic is float32 (float64 in a ``.double()`` module) whatever the output.

    Shape:
        - Input: (..., time): float32, float16, bfloat16, float64, or int16 PCM, which is scaled by 1/32768.
        - Output: (..., n_mels, frames) with ``frames = 1 + time // hop_length`` when ``center`` (and n_fft is even),
          else ``1 + (time - n_fft) // hop_length``.

    The buffers ``spectrogram.window`` (win_length,) and ``mel_scale.fb`` (n_freqs, n_mels) are what is computed with:
    replace or load them and the next call uses them.

    Raises:
        ValueError: at construction for a parameter out of range; at a call for a waveform that is empty, too short, of a
            dtype not listed, or on another device than the module.

    Example:
        >>> import torch
        >>> from flashmel import MelSpectrogram
        >>> mel = MelSpectrogram(16000, n_fft=512, hop_length=160, n_mels=80)
        >>> mel(torch.randn(2, 16000)).shape
        torch.Size([2, 80, 101])
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        n_fft: int = 400,
        win_length: int | None = None,
        hop_length: int | None = None,
        f_min: float = 0.0,
        f_max: float | None = None,
        pad: int = 0,
        n_mels: int = 128,
        window_fn: Callable[..., Any] = torch.hann_window,
        power: float = 2.0,
        normalized: bool | str = False,
        wkwargs: dict[str, Any] | None = None,
        center: bool = True,
        pad_mode: str = "reflect",
        onesided: bool | None = None,
        norm: str | None = None,
        mel_scale: str = "htk",
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        ops.check_output_dtype(dtype)
        if onesided is False:
            warnings.warn("onesided=False changes nothing: a mel spectrogram is always one-sided", stacklevel=2)
        win_length = positive_int("n_fft", n_fft) if win_length is None else win_length
        hop_length = positive_int("win_length", win_length) // 2 if hop_length is None else hop_length
        f_max = float(positive_number("sample_rate", sample_rate) // 2) if f_max is None else f_max
        self.spec = StftSpec(
            n_fft=n_fft,
            win_length=win_length,
            hop_length=hop_length,
            pad=pad,
            power=power,
            normalized=normalization(normalized),
            center=center,
            pad_mode=pad_mode,
        )
        self.bank = MelBankSpec(sample_rate, n_fft, n_mels, f_min, f_max, norm, mel_scale)
        # Tables follow the default dtype where it is a compute dtype, as torchaudio's do.
        compute = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        bank = mel_filterbank(self.bank, compute)
        _warn_dead_filters(self.bank, bank)
        window = _make_window(window_fn, win_length, wkwargs, compute)
        self.dtype = dtype
        self.spectrogram = _Spectrogram(self.spec, normalized, onesided, window)
        self.mel_scale = _MelScale(self.bank, bank.to(window.device))

    __prepare_scriptable__ = refuse_scripting

    normalized = property(lambda self: self.spectrogram.normalized)

    def forward(self, waveform: Tensor) -> Tensor:
        """Mel spectrogram (..., n_mels, frames) of a waveform (..., time); see the class for dtypes and errors."""
        modules = self._modules
        window, fb = table(modules["spectrogram"], "window"), table(modules["mel_scale"], "fb")
        return ops.features(waveform, window, fb, self.spec, self.dtype)

    def warmup(self, dtype: torch.dtype = torch.float32, *, gradient: bool = False) -> None:
        """Make ready all that calls on the module's device need: kernels compiled or read from the cache, and loaded; tables made.

        The first call does the same. Do it here where a first call must not take half a second, or must not happen: before the
        capture of a CUDA graph, or before the first request.

        Args:
            dtype: of the waveforms to come.
            gradient: whether their gradient will be wanted.

        Example:
            >>> from flashmel import MelSpectrogram
            >>> MelSpectrogram(n_fft=512, n_mels=40).warmup()
        """
        shortest = self.spec.n_fft + 2 * abs(self.spec.pad) + 1
        ops.rehearse(self, shortest, dtype, self.spectrogram.window.device, gradient)

    def to_torch(self) -> nn.Module:
        """The same transform in standard operators and real arithmetic alone, for ``torch.onnx.export`` and the like.

        Returns:
            A module with the shapes, dtypes and errors of this one and, but for rounding, its values; differentiable in the
            waveform. It is a snapshot: load, replace or convert (``.double()``) the tables before. Its Fourier transform is a
            matrix of 4 * n_fft * (n_fft + 2) bytes (0.6 MB at 400, 67 MB at 4096), which on a CPU takes 4
            times as long as this module at 400 and 15 times at 4096.

        This module itself passes ``torch.export`` and AOTInductor as the one operator ``flashmel::mel_spectrogram``: Python must
        have imported flashmel where the result is loaded. ``torch.onnx.export`` finds "No ONNX function" for that name.

        Example, with a batch of 2 because a size of 1 would be taken for fixed::

            sizes = {"waveform": {0: "batch", 1: "time"}}
            torch.onnx.export(mel.to_torch(), (torch.zeros(2, 16000),), "mel.onnx", dynamic_shapes=sizes, dynamo=True)
        """
        from .export import TorchMelSpectrogram

        return TorchMelSpectrogram(self.spectrogram.window, self.mel_scale.fb, self.spec, self.dtype).eval()

    def extra_repr(self) -> str:
        spec, bank = self.spec, self.bank
        shown = {
            "sample_rate": bank.sample_rate,
            "n_fft": spec.n_fft,
            "win_length": spec.win_length,
            "hop_length": spec.hop_length,
            "f_min": bank.f_min,
            "f_max": bank.f_max,
            "pad": spec.pad,
            "n_mels": bank.n_mels,
            "power": spec.power,
            "normalized": self.normalized,
            "center": spec.center,
            "pad_mode": spec.pad_mode,
            "norm": bank.norm,
            "mel_scale": bank.mel_scale,
            "dtype": self.dtype,
            "path": ops.path(spec, self.spectrogram.window.device),
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def _make_window(window_fn: Callable[..., Any], win_length: int, wkwargs: dict[str, Any] | None, dtype: torch.dtype) -> Tensor:
    default = torch.get_default_dtype()
    with torch.device("cpu"):  # no CUDA context at construction; a device in wkwargs is followed
        torch.set_default_dtype(dtype)  # a half-precision default would round the window
        try:
            window = torch.as_tensor(window_fn(win_length, **(wkwargs or {})))
        finally:
            torch.set_default_dtype(default)
    if window.shape != (win_length,) or window.is_complex():
        raise ValueError(
            f"window_fn must return {win_length} real values in one dimension, got shape {tuple(window.shape)}, {window.dtype}"
        )
    return window.detach().to(dtype)


def _warn_dead_filters(spec: MelBankSpec, bank: Tensor) -> None:
    dead = (~bank.any(dim=0)).nonzero().flatten().tolist()
    if not dead:
        return
    nyquist = spec.sample_rate // 2
    if spec.f_min == spec.f_max:
        why = f"f_min and f_max are both {spec.f_min} Hz"
    elif spec.f_max > nyquist:
        why = f"f_max = {spec.f_max} Hz lies above the Nyquist frequency of {nyquist} Hz"
    else:
        why = f"{spec.n_mels} filters are too many for {spec.n_freqs} frequency bins; use fewer filters or a larger n_fft"
    listed = ", ".join(map(str, dead[:8])) + (", …" if len(dead) > 8 else "")
    warnings.warn(f"{len(dead)} of {spec.n_mels} mel filters are zero everywhere (filters {listed}): {why}", stacklevel=3)
