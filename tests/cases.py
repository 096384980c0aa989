"""The parameter grid of the tests, once: every path (plain torch, fused CUDA) runs through the same cases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

INPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int16)
OUTPUT_DTYPES = (None, torch.float32, torch.float16, torch.bfloat16)
PAD_MODES = ("reflect", "constant", "replicate", "circular")
POWERS = (0.5, 1.0, 2.0, 3.0)


@dataclass(frozen=True)
class Case:
    """One set of constructor arguments, common to flashmel and torchaudio, and the waveform to try it on."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, ...] = (2, 4000)


def _case(name: str, shape: tuple[int, ...] = (2, 4000), **kwargs: Any) -> Case:
    return Case(name, kwargs, shape)


def _size(n_fft: int, n_mels: int = 40, **kwargs: Any) -> Case:
    return _case(f"n_fft-{n_fft}", (2, max(4000, 2 * n_fft + 77)), n_fft=n_fft, n_mels=n_mels, **kwargs)


CASES = (
    _case("defaults", (16000,)),
    *(_size(2**k, n_mels=10 if k < 8 else 40) for k in range(6, 15)),
    *(_size(n, n_mels=max(1, n // 8)) for n in (2, 3, 4, 6, 17, 32, 61, 122)),
    *(_size(n) for n in (225, 441, 1023, 2205)),  # odd: the centre padding is one sample short of a frame
    *(_size(n) for n in (240, 320, 480, 640, 800, 882, 960, 1200, 1280, 1536, 1920, 2400)),
    *(_case(f"hop-{hop}", hop_length=hop, n_mels=40) for hop in (1, 77, 160, 400, 401, 1000)),
    *(_case(f"win-{win}", win_length=win, hop_length=160, n_mels=40) for win in (1, 25, 320, 399)),
    _case("win-odd-in-512", n_fft=512, win_length=401, hop_length=160, n_mels=80),
    _case("hamming", window_fn=torch.hamming_window, n_mels=40),
    _case("blackman", window_fn=torch.blackman_window, n_mels=40),
    _case("kaiser", window_fn=torch.kaiser_window, wkwargs={"beta": 8.0, "periodic": False}, n_mels=40),
    _case("rectangular", window_fn=torch.ones, n_mels=40),
    *(_case(f"power-{power}", power=power, n_mels=40) for power in POWERS),
    _case("power-1-n_fft-1024", n_fft=1024, power=1.0, n_mels=80),
    *(_case(f"normalized-{n}", normalized=n, win_length=300, n_mels=40) for n in (True, "window", "frame_length")),
    *(_case(f"pad-{pad}", pad=pad, n_mels=40) for pad in (1, 700, -1, -350)),
    *(_case(f"mode-{m}", pad_mode=m, n_mels=40) for m in PAD_MODES),
    *(_case(f"mode-{m}-pad", pad_mode=m, pad=33, n_fft=512, n_mels=40) for m in PAD_MODES),
    *(_case(f"mode-{m}-crop", pad_mode=m, pad=-33, n_fft=512, n_mels=40) for m in PAD_MODES),
    _case("short-constant", (3, 1), pad_mode="constant", n_mels=40),
    _case("short-replicate", (3, 1), pad_mode="replicate", n_mels=40),
    _case("short-circular", (3, 200), pad_mode="circular", n_mels=40),
    _case("short-reflect", (3, 201), n_mels=40),
    _case("no-center", center=False, hop_length=160, n_mels=40),
    _case("no-center-one-frame", (2, 400), center=False, n_mels=40),
    _case("no-center-pad", (2, 300), center=False, pad=60, n_mels=40),
    *(
        _case(f"{norm}-{scale}", norm=norm, mel_scale=scale, n_fft=1024, n_mels=80)
        for norm in (None, "slaney")
        for scale in ("htk", "slaney")
    ),
    *(_case(f"mels-{n}", n_mels=n, n_fft=512) for n in (1, 23, 128)),
    _case("mels-512", n_mels=512, n_fft=4096, shape=(2, 9000)),
    _case("band", f_min=125.0, f_max=3800.0, n_mels=40),
    _case("f_max-over-nyquist", f_max=12000.0, n_mels=40),
    _case("one-dimension", (1601,), n_mels=40),
    _case("four-dimensions", (2, 3, 4, 1600), n_mels=40),
    _case("whisper", (2, 48000), n_fft=400, hop_length=160, n_mels=80, norm="slaney", mel_scale="slaney"),
    _case("hifigan", (2, 44100), sample_rate=22050, n_fft=1024, hop_length=256, n_mels=80, f_max=8000.0, power=1.0),
)

all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """White noise of deviation 0.1, so that int16 has room for it; from float64, so that dtypes differ by rounding alone."""
    x = 0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * 32768).round().clamp(-32768, 32767).to(dtype) if dtype == torch.int16 else x.to(dtype)


def speech(*shape: int, seed: int = 0, sample_rate: int = 16000, dtype: torch.dtype = torch.float32) -> Tensor:
    """Voiced bursts with a falling spectrum over a floor 60 dB below: the dynamics of speech."""
    t = torch.arange(shape[-1], dtype=torch.float64) / sample_rate
    harmonics = sum(torch.sin(2 * torch.pi * 120 * k * t) / k for k in range(1, 30))
    bursts = torch.sin(2 * torch.pi * 3 * t).clamp(min=0)
    return (0.2 * harmonics * bursts + 1e-3 * noise(*shape, seed=seed, dtype=torch.float64)).to(dtype)
