#!/usr/bin/env python3
"""Small launches of every kind of plan, to be run under compute-sanitizer:

    compute-sanitizer --tool memcheck python scripts/sanitize.py
    compute-sanitizer --tool racecheck python scripts/sanitize.py

Each result is compared with the plain path. Exit status: 0, or 1 if one differs.
"""

from __future__ import annotations

import sys
import warnings

import torch

from flashmel import MelSpectrogram
from flashmel.testing import assert_close

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
]


def main() -> int:
    failed = 0
    warnings.simplefilter("error", UserWarning)  # a fallback would be a run of nothing
    for kwargs, shape in CASES:
        waveform = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # filters of zero
            mel = MelSpectrogram(**kwargs)
        expected = mel(waveform)
        actual = mel.cuda()(waveform.cuda()).cpu()
        try:
            assert_close(actual, expected)
        except AssertionError as error:
            failed += 1
            print(f"{kwargs}: {error}")
    print(f"{len(CASES)} launches, {failed} wrong")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
