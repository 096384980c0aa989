"""Pictures of mel spectrograms, by matplotlib, and the decibels that they show."""

from __future__ import annotations

from typing import BinaryIO

import numpy as np
import torch

from ..cepstrum import AMIN
from ..filterbank import hz_to_mel
from ..spec import MelBankSpec
from ..transform import MelSpectrogram
from .console import need


def decibels(mel: torch.Tensor, power: float) -> torch.Tensor:
    """Decibels, in its shape, of a mel spectrogram with any exponent, with a floor below the smallest value."""
    return (20.0 / power) * mel.clamp(min=AMIN).log10()


def draw(file: BinaryIO, db: np.ndarray, transform: MelSpectrogram, title: str, db_range: float) -> None:
    """Write a PNG file of decibels: seconds, Hz on a mel axis, a colour bar.

    Args:
        db: (n_mels, frames), or (channels, n_mels, frames), which are drawn one below the other.
        transform: what made them.
        db_range: decibels from the loudest value to the darkest colour.
    """
    spec, bank = transform.spec, transform.bank
    db = db.reshape(-1, *db.shape[-2:])
    channels, n_mels, frames = db.shape
    low, high = hz_to_mel(bank.f_min, bank.mel_scale), hz_to_mel(bank.f_max, bank.mel_scale)
    half_row = 0.5 * (high - low) / (n_mels + 1)  # row m is centred at low + (m + 1) rows
    # Frame t begins at sample t * hop_length - margin - pad and is drawn around its middle.
    middle = spec.n_fft // 2 - spec.margin - spec.pad
    left, right = ((middle + (t - 0.5) * spec.hop_length) / bank.sample_rate for t in (0, frames))
    # A picture has some 1500 columns: the loudest of the frames that share one is drawn, so that clicks stay visible
    # and an hour of audio needs no more memory than a minute.
    step = -(-frames // 3000)
    db = np.maximum.reduceat(db, np.arange(0, frames, step), axis=-1)
    right = left + (right - left) * db.shape[-1] * step / frames
    floor = 20.0 / spec.power * float(np.log10(AMIN))
    top = float(np.max(db, initial=floor, where=np.isfinite(db)))  # a file may hold NaN

    fig = need("matplotlib.figure").Figure(figsize=(11, 1.2 + 3.4 * channels), dpi=150, layout="constrained")
    axes = fig.subplots(channels, 1, sharex=True, squeeze=False)[:, 0]
    for channel, ax in enumerate(axes):
        image = ax.imshow(
            db[channel],
            origin="lower",
            aspect="auto",
            extent=(left, right, low + half_row, high - half_row),
            cmap="magma",
            vmin=top - db_range,
            vmax=top,
        )
        ticks = _hz_ticks(bank)
        ax.set_yticks([hz_to_mel(hz, bank.mel_scale) for hz in ticks], [f"{hz:g}" for hz in ticks])
        ax.set_ylim(low, high)
        ax.set_facecolor("black")  # the half row at either end, where no filter has its middle
        ax.set_ylabel("frequency (Hz)" if channels == 1 else f"channel {channel + 1}: frequency (Hz)")
    axes[0].set_title(title, loc="left", fontweight="bold", parse_math=False)  # a file name may hold a $
    settings = f"{bank.sample_rate:g} Hz, n_fft {spec.n_fft}, window {spec.win_length}, hop {spec.hop_length}, {n_mels} mels"
    axes[0].set_title(settings, loc="right", fontsize="small", color="0.4")
    axes[-1].set_xlabel("time (s)")
    quantity = {1.0: "mel magnitude", 2.0: "mel power"}.get(spec.power, f"mel of |X|^{spec.power:g}")
    fig.colorbar(image, ax=list(axes), pad=0.015, extend="min", label=f"{quantity} (dB re 1)")
    fig.savefig(file, format="png")


def _hz_ticks(bank: MelBankSpec) -> list[float]:
    """Octaves, which lie nearly evenly on a mel axis; round numbers where the range holds too few."""
    octaves = [0.0] + [125.0 * 2**k for k in range(12)]
    ticks = [hz for hz in octaves if bank.f_min <= hz <= bank.f_max]
    if len(ticks) < 3:
        ticks = need("matplotlib.ticker").MaxNLocator(6).tick_values(bank.f_min, bank.f_max)
    return [hz for hz in ticks if bank.f_min <= hz <= bank.f_max]
