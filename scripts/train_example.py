#!/usr/bin/env python3
"""Fit a small vocoder to one sound with MultiScaleMelLoss: a whole training loop, and a check that its loss falls.

    python scripts/train_example.py                                  # a synthesised voice
    python scripts/train_example.py speech.flac --out learned.wav    # a file, and what the vocoder makes of it
    python scripts/train_example.py --device cpu --steps 20 --seconds 0.5

The vocoder sees the sound's mel spectrogram (flashmel.MelSpectrogram) and has to give the sound back. It hears one sound only, and
has no discriminator to teach it phases: expect no more than an intelligible buzz.

Exit status: 0; 1 if the loss did not fall, or a file could not be read or written; 2 usage.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from flashmel import MelSpectrogram  # noqa: E402
from flashmel.losses import MultiScaleMelLoss  # noqa: E402

HOP = 256  # samples that the vocoder makes of a frame
SAMPLE_RATE = 24000  # of the synthesised voice; a file keeps its own


class Residual(nn.Module):
    """Three dilated convolutions, each added to what it sees: 79 values of context."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(channels, channels, 7, dilation=d, padding=3 * d) for d in (1, 3, 9))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(nn.functional.leaky_relu(x, 0.1))
        return x


class Vocoder(nn.Module):
    """Log-mel spectrogram (batch, n_mels, frames) to waveform (batch, HOP * frames): HiFi-GAN's plan, made small."""

    def __init__(self, n_mels: int, channels: int = 128) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv1d(n_mels, channels, 7, padding=3)]
        for stride in (8, 8, 4):  # HOP in all
            layers += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(channels, channels // 2, 2 * stride, stride, padding=stride // 2)]
            channels //= 2
            layers.append(Residual(channels))
        layers += [nn.LeakyReLU(0.1), nn.Conv1d(channels, 1, 7, padding=3), nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, log_mel: Tensor) -> Tensor:
        return self.layers(log_mel).squeeze(1)


def soundfile() -> Any:
    """The module that reads and writes audio, or the command that installs it."""
    try:
        import soundfile
    except (ImportError, OSError) as error:  # OSError: without its C library
        raise SystemExit(f'audio files need soundfile ({error}): pip install "flashmel[cli]"') from error
    return soundfile


def read_audio(path: Path, seconds: float) -> tuple[Tensor, int]:
    """The beginning of a file, its channels mixed, and its sample rate."""
    try:
        with soundfile().SoundFile(path) as file:
            samples = file.read(math.ceil(seconds * file.samplerate), dtype="float32", always_2d=True)
            return torch.from_numpy(samples).mean(1), file.samplerate
    except (OSError, RuntimeError) as error:  # soundfile's own errors are RuntimeErrors
        raise SystemExit(f"{path}: {error}") from error


def voice(seconds: float, sample_rate: int) -> Tensor:
    """Three syllables a second on a gliding pitch, with a breath of noise."""
    t = torch.arange(int(seconds * sample_rate)) / sample_rate
    phase = 2 * torch.pi * torch.cumsum(140 + 40 * torch.sin(2 * torch.pi * 0.7 * t), 0) / sample_rate
    tone = torch.stack([torch.sin(k * phase) / k for k in range(1, 40)]).sum(0)
    syllables = torch.sin(3 * torch.pi * t).square()
    return syllables * (0.3 * tone + 0.02 * torch.randn(len(t)))


def train(sound: Tensor, sample_rate: int, args: argparse.Namespace) -> tuple[Tensor, float, float]:
    """Fit a vocoder to a sound (1, time); returns its waveform, and the loss before and after."""
    mel = MelSpectrogram(sample_rate, n_fft=1024, hop_length=HOP, n_mels=80, power=1.0, norm="slaney", mel_scale="slaney")
    log_mel = mel.to(sound.device)(sound).clamp(min=1e-5).log()[..., : sound.shape[-1] // HOP]
    vocoder = Vocoder(n_mels=80).to(sound.device)
    criterion = MultiScaleMelLoss(sample_rate).to(sound.device)
    optimizer = torch.optim.AdamW(vocoder.parameters(), lr=args.lr, betas=(0.8, 0.99))

    def forward() -> Tensor:
        return criterion(vocoder(log_mel), sound)

    loss_of = torch.compile(forward, fullgraph=True) if args.compile else forward
    first, every = math.nan, args.every or max(1, args.steps // 10)
    for step in range(args.steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        if step == 0:
            first = loss.item()
        if step % every == 0:  # at the other steps nothing waits for the GPU
            print(f"step {step:5}  loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        learned = vocoder(log_mel)
        last = criterion(learned, sound).item()
    print(f"step {args.steps:5}  loss {last:.4f}")
    return learned, first, last


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("audio", nargs="?", type=Path, help="a file that libsndfile reads; default: a synthesised voice")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="auto: cuda if there is one (default)")
    parser.add_argument("--steps", type=int, default=500, metavar="N", help="updates of the vocoder (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="how much of the sound (default: %(default)g)")
    parser.add_argument("--lr", type=float, default=1e-3, metavar="RATE", help="AdamW's learning rate (default: %(default)g)")
    parser.add_argument("--every", type=int, metavar="N", help="steps from one printed loss to the next (default: a tenth of all)")
    parser.add_argument("--compile", action="store_true", help="torch.compile vocoder and loss; the first step takes a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the first weights and the voice's noise (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="WAV", help="write what the vocoder makes in the end")
    args = parser.parse_args(argv)
    for name in ("steps", "seconds", "lr", "every"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name} must be positive, got {value}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available; use --device cpu")
    if args.out and args.out.suffix.lower() != ".wav":
        parser.error(f"--out must end in .wav, got {args.out}")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    if args.out:
        soundfile()  # here, not after the training
    torch.manual_seed(args.seed)
    sound, rate = read_audio(args.audio, args.seconds) if args.audio else (voice(args.seconds, SAMPLE_RATE), SAMPLE_RATE)
    sound = sound[None, : len(sound) // HOP * HOP].to(device)
    if sound.shape[-1] <= 1024:  # half the longest window of the loss
        raise SystemExit(f"the sound must be longer than 1024 samples, got {sound.shape[-1]}: use more --seconds or a longer file")
    print(f"{args.audio or 'a synthesised voice'}: {sound.shape[-1] / rate:.2f} s at {rate} Hz, on {device}")

    begin = time.perf_counter()
    learned, first, last = train(sound, rate, args)
    seconds = time.perf_counter() - begin
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        soundfile().write(args.out, learned[0].cpu().numpy(), rate)
        print(f"written to {args.out}")
    print(f"loss {first:.4f} -> {last:.4f}, {last / first:.3f} times the first, after {args.steps} steps in {seconds:.1f} s")
    if not last < first:
        print("the loss did not fall: try a smaller --lr or more --steps", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
