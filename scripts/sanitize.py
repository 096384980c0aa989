#!/usr/bin/env python3
"""Small launches of every kind of plan, forward and backward, to be run under compute-sanitizer:

    compute-sanitizer --tool memcheck python scripts/sanitize.py
    compute-sanitizer --tool racecheck python scripts/sanitize.py
    compute-sanitizer --tool racecheck python scripts/sanitize.py parakeet   # these front-ends alone

Each spectrogram and each gradient is compared with the plain path's on a CPU. Exit status: 0, or 1 if one differs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from flashmel import MelSpectrogram, frontend  # noqa: E402
from flashmel.frontends import FrontEnd  # noqa: E402
from flashmel.plan import UnsupportedError, architecture, make_backward_plan  # noqa: E402
from flashmel.testing import assert_close  # noqa: E402

CASES: list[tuple[dict, tuple[int, int]]] = [
    ({"n_fft": 64, "hop_length": 16, "n_mels": 20}, (2, 999)),
    ({"n_fft": 400, "hop_length": 160}, (2, 6001)),
    ({"n_fft": 512, "hop_length": 163, "pad": 9, "pad_mode": "circular"}, (1, 5000)),
    ({"n_fft": 882, "hop_length": 441, "power": 1.0}, (1, 8000)),
    ({"n_fft": 441, "hop_length": 110}, (2, 5000)),
    ({"n_fft": 122, "hop_length": 31, "n_mels": 10}, (2, 3000)),
    ({"n_fft": 2, "hop_length": 1, "n_mels": 1}, (2, 300)),
    ({"n_fft": 1024, "hop_length": 256, "pad": -50, "pad_mode": "replicate"}, (2, 8000)),
    ({"n_fft": 2048, "hop_length": 512, "pad_mode": "constant"}, (1, 9000)),
    ({"n_fft": 256, "hop_length": 300, "center": False, "power": 0.5}, (3, 4000)),
    ({"n_fft": 16384, "hop_length": 4096}, (1, 20000)),
    # Of the gradient: ends that a kernel of its own folds, and those of many rows; tiles that are all overlap.
    ({"n_fft": 400, "hop_length": 160, "pad_mode": "circular"}, (3, 6001)),
    ({"n_fft": 128, "hop_length": 32, "n_mels": 20, "pad_mode": "replicate"}, (3, 5000)),
    ({"n_fft": 400, "hop_length": 160}, (3, 201)),
    ({"n_fft": 400, "hop_length": 160}, (300, 8000)),
    ({"n_fft": 64, "hop_length": 1, "n_mels": 20}, (2, 700)),
]

# Each with lengths, too.
FRONT_ENDS = ("whisper", "nemo", "parakeet", "wespeaker", "kaldi-fbank", "icefall", "gemma4", "hifigan", "loss-auraloss")


def has_gradient_kernel(mel: MelSpectrogram) -> bool:
    """A large size may have none on a small GPU."""
    try:
        make_backward_plan(mel.spec, architecture(*torch.cuda.get_device_capability()), mel.n_mels)
    except UnsupportedError as error:
        print(f"not launched: {error}")
        return False
    return True


def gradient(transform: Callable[[Tensor], Tensor], waveform: Tensor, mel_gradient: Tensor) -> Tensor:
    """Of the waveform, on the CPU, in units of its row's peak."""
    x = waveform.detach().requires_grad_()
    (found,) = torch.autograd.grad(transform(x), x, mel_gradient)
    return (found / found.abs().amax(-1, keepdim=True)).cpu()


def is_close(what: str, actual: Tensor, expected: Tensor, **tolerances: float) -> bool:
    try:
        assert_close(actual, expected, **tolerances)
    except AssertionError as error:
        print(f"{what}: {error}")
        return False
    return True


def main() -> int:
    warnings.simplefilter("error", UserWarning)  # a fallback would be a run of nothing
    results: list[bool] = []
    for kwargs, shape in CASES if len(sys.argv) == 1 else []:
        generator = torch.Generator().manual_seed(0)
        waveform = torch.randn(shape, generator=generator)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # filters of zero
            mel = MelSpectrogram(**kwargs)
        expected = mel(waveform)
        g = torch.randn(expected.shape, generator=generator)
        expected_gradient = gradient(mel, waveform, g)
        mel.cuda()
        results.append(is_close(f"{kwargs} on {shape}", mel(waveform.cuda()).cpu(), expected))
        if has_gradient_kernel(mel):
            # A power below 1 has its largest gradients where bins are smallest, and there a bin's own rounding counts.
            atol = 1e-5 if mel.power >= 1 else 1e-3
            actual = gradient(mel, waveform.cuda(), g.cuda())
            results.append(is_close(f"gradient of {kwargs} on {shape}", actual, expected_gradient, atol=atol))
    for name in sys.argv[1:] or FRONT_ENDS:
        module, generator = frontend(name), torch.Generator().manual_seed(0)
        waveform = 0.1 * torch.randn((2, 5000), generator=generator)
        for lengths in (None, torch.tensor([5000, 3210])):

            def features(x: Tensor, module: FrontEnd = module, lengths: Tensor | None = lengths) -> Tensor:
                return module(x) if lengths is None else module(x, lengths.to(x.device))[0]

            module.cpu()
            expected = features(waveform)
            g = torch.randn(expected.shape, generator=generator)
            expected_gradient = gradient(features, waveform, g)
            module.cuda()
            what = f"{name} with lengths {lengths}"
            results.append(is_close(what, features(waveform.cuda()).cpu(), expected, atol=1e-3))
            actual = gradient(features, waveform.cuda(), g.cuda())
            results.append(is_close(f"gradient of {what}", actual, expected_gradient, atol=1e-3))
    print(f"{len(results)} results, {results.count(False)} wrong")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
