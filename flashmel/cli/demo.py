"""``flashmel demo``: synthesise a sound, time the transform, draw a picture."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import fused
from ..jit.cache import whole_file
from ..testing import cpu_time
from ..transform import MelSpectrogram
from .arguments import device_arguments
from .console import Failure, device_name, device_of, need, printable
from .picture import decibels, draw

RATE = 16_000
OPTIONS: dict[str, Any] = {"sample_rate": RATE, "n_fft": 400, "hop_length": 160, "n_mels": 80}
CLIPS, SECONDS = 8, 30


def add(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser(
        "demo",
        help="synthesise a sound, time the transform, draw a picture",
        description="Transform a synthesised sound: prints shape, device, path, time and the difference from torchaudio.",
        allow_abbrev=False,
        parents=[device_arguments()],
    )
    parser.add_argument("-o", "--output", default="flashmel-demo.png", metavar="PICTURE", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what was measured as it comes, and draw the sound."""
    path = Path(args.output)
    if path.suffix.lower() != ".png":
        raise Failure(f"-o {args.output}: the picture's extension must be .png")
    need("matplotlib")
    device = device_of(args.device)
    sound = torch.from_numpy(synthesise(RATE))
    # Different clips: the sound repeated, from as many beginnings.
    clips = [sound.roll(-RATE * n // 2).repeat(-(-SECONDS * RATE // len(sound)))[: SECONDS * RATE] for n in range(CLIPS)]
    transform = MelSpectrogram(**OPTIONS).to(device)
    with torch.inference_mode():
        _measure(transform, torch.stack(clips).to(device))
        picture = decibels(transform(sound.to(device)), 2.0).cpu().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        draw(file, picture, transform, "flashmel demo: a chirp, three vowels, clicks, silence", 80.0)
    _print("picture", printable(path))
    return 0


def synthesise(rate: int) -> np.ndarray:
    """Four seconds at a sample rate in Hz, (time,) float32: a rising chirp, three vowels on a gliding voice, clicks, silence."""

    def fade(x: np.ndarray) -> np.ndarray:
        ramp = np.minimum(1.0, np.arange(len(x)) / (0.02 * rate))
        return x * ramp * ramp[::-1]

    t = np.arange(rate) / rate
    ratio = 7000 / 100
    chirp = fade(0.4 * np.sin(2 * np.pi * 100 / np.log(ratio) * (ratio**t - 1)))

    t = np.arange(int(1.6 * rate)) / rate
    pitch = 120 + 50 * np.sin(np.pi * t / 1.6)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    formants = [np.interp(t, [0.3, 0.8, 1.3], hz) for hz in ([730, 270, 300], [1090, 2290, 870], [2440, 3010, 2240])]  # a, i, u
    vowels = np.zeros_like(t)
    for k in range(1, 70):
        gain = sum(weight / (1 + ((k * pitch - hz) / 90) ** 2) for weight, hz in zip((1.0, 0.5, 0.25), formants, strict=True))
        vowels += (gain + 0.003) * np.sin(k * phase) * (k * pitch < rate / 2)
    vowels = fade(vowels * 0.4 / np.abs(vowels).max())

    clicks = np.zeros(int(0.8 * rate))
    clicks[rate // 20 :: rate // 10] = 0.9
    silence = np.zeros(int(0.6 * rate))
    return np.concatenate([chirp, vowels, clicks, silence]).astype(np.float32)


def _measure(transform: MelSpectrogram, batch: torch.Tensor) -> None:
    """Print shape, device, path and times of a transform of a batch (clips, time), next to torchaudio's where that is installed."""
    device = batch.device
    begin = time.perf_counter()
    mel = transform(batch).cpu()
    first = time.perf_counter() - begin
    reason = _why_not_fused(transform, batch)
    _print("input", f"{CLIPS} x {SECONDS} s at {RATE} Hz: {tuple(batch.shape)}")
    _print("output", f"{tuple(mel.shape)}, {mel.dtype}".replace("torch.", ""))
    _print("device", device_name(device))
    _print("path", "fused" if reason is None else f"plain torch ({reason})")
    torchaudio, absent = _torchaudio()
    transforms: list[torch.nn.Module] = [transform] if torchaudio is None else [transform, torchaudio.to(device)]
    ours, *theirs = _milliseconds(transforms, batch)
    _print("first call", f"{1e3 * first:.1f} ms")
    _print("time", f"{ours:.3f} ms, {1e3 * CLIPS * SECONDS / ours:,.0f} times as fast as the sound plays")
    if torchaudio is None:
        _print("torchaudio", f"not compared: {absent}")
        return
    expected = torchaudio(batch).cpu()
    difference, largest = (mel - expected).abs().max().item(), expected.max().item()
    _print("torchaudio's time", f"{theirs[0]:.3f} ms, {theirs[0] / ours:.2f} times flashmel's")
    _print("largest difference", f"{difference:.2e} of values up to {largest:.2e}: {difference / largest:.1e}")


def _print(what: str, value: str) -> None:
    print(f"{what:18}  {value}")


def _why_not_fused(transform: MelSpectrogram, batch: torch.Tensor) -> str | None:
    """None if the transform runs fused."""
    reason = fused.unavailable_reason(batch.device)
    if reason is None:  # for the device; whether this configuration runs fused, only running it tells
        try:
            fused.features(batch, transform.spectrogram.window, transform.mel_scale.fb, transform.spec)
        except fused.UnavailableError as error:
            reason = str(error)
    return reason


def _torchaudio() -> tuple[torch.nn.Module | None, str]:
    """torchaudio's transform, or None and the reason."""
    try:
        from torchaudio.transforms import MelSpectrogram as Theirs
    except Exception as error:  # absent, or built for another torch (OSError, RuntimeError, ...)
        return None, str(error).splitlines()[0]
    return Theirs(**OPTIONS), ""


def _milliseconds(transforms: list[torch.nn.Module], batch: torch.Tensor) -> list[float]:
    """Median time of a call of each, until its result is there."""
    synchronize = getattr(torch, batch.device.type).synchronize

    def call(transform: torch.nn.Module) -> Callable[[], None]:
        def run() -> None:
            transform(batch)
            synchronize()

        return run

    # Many on a GPU, whose clocks rise during the first.
    return [time / 1e3 for time in cpu_time([call(t) for t in transforms], repeats=5 if batch.device.type == "cpu" else 50)]
