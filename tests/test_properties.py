"""Random shapes and parameters: the frame formula, the padding rule and the values."""

from __future__ import annotations

import numpy as np
import torch
from cases import PAD_MODES, noise
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_reference import oracle, peak_error, plain

from flashmel import MelSpectrogram
from flashmel.spec import StftSpec

pad_modes = st.sampled_from(PAD_MODES)
quick = settings(max_examples=300, deadline=None, derandomize=True)


@st.composite
def specs(draw: st.DrawFn) -> StftSpec:
    n_fft = draw(st.integers(1, 80))
    return StftSpec(
        n_fft=n_fft,
        win_length=draw(st.integers(1, n_fft)),
        hop_length=draw(st.integers(1, 100)),
        pad=draw(st.integers(-30, 60)),
        power=draw(st.sampled_from((0.5, 1.0, 2.0, 3.0))),
        normalized=draw(st.sampled_from(("none", "window", "frame_length"))),
        center=draw(st.booleans()),
        pad_mode=draw(pad_modes),
    )


def reference_padding(spec: StftSpec, x: torch.Tensor) -> torch.Tensor:
    """torch's own padding; it raises where torch.stft would."""
    x = torch.nn.functional.pad(x, (spec.pad, spec.pad))
    return torch.nn.functional.pad(x[None], (spec.margin, spec.margin), mode=spec.pad_mode)[0] if spec.center else x


@quick
@given(specs(), st.integers(1, 200))
def test_frames_and_padding_agree_with_torch(spec: StftSpec, length: int):
    x = torch.arange(1.0, length + 1)
    try:
        if length + 2 * spec.pad < 1:
            raise RuntimeError("the crop leaves nothing")
        padded = reference_padding(spec, x)
        bins = torch.stft(padded, spec.n_fft, spec.hop_length, window=torch.ones(spec.n_fft), center=False, return_complex=True)
    except (RuntimeError, ValueError):
        try:
            spec.check_length(length)
        except ValueError:
            return
        raise
    assert spec.frames(length) == bins.shape[-1]
    index, valid = spec.source_index(0, len(padded), length)
    assert torch.equal(torch.where(torch.from_numpy(valid), x[index], 0), padded)


@quick
@given(specs(), st.integers(1, 200), st.data())
def test_source_index_of_a_part(spec: StftSpec, length: int, data: st.DataObject):
    try:
        spec.check_length(length)
    except ValueError:
        assume(False)
    total = length + 2 * (spec.pad + spec.margin)
    first = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(0, total - first))
    whole, part = spec.source_index(0, total, length), spec.source_index(first, count, length)
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_array_equal(a[first : first + count], b)
    assert (part[0] >= 0).all() and (part[0] < length).all()


@quick
@given(specs(), st.integers(1, 400), st.lists(st.integers(0, 3), max_size=3), st.integers(1, 12), st.integers(0, 99))
def test_values(spec: StftSpec, length: int, batch: list[int], n_mels: int, seed: int):
    try:
        spec.check_length(length)
    except ValueError:
        assume(False)
    module = MelSpectrogram(
        n_fft=spec.n_fft,
        win_length=spec.win_length,
        hop_length=spec.hop_length,
        pad=spec.pad,
        n_mels=n_mels,
        window_fn=torch.hamming_window,
        power=spec.power,
        normalized=False if spec.normalized == "none" else spec.normalized,
        center=spec.center,
        pad_mode=spec.pad_mode,
    ).double()
    x = noise(*batch, length, seed=seed, dtype=torch.float64)
    for wave in (x, x.clone().requires_grad_()):
        got = plain(module, wave)
        assert got.shape == (*batch, n_mels, spec.frames(length)) and got.is_contiguous()
        if got.numel():
            assert peak_error(got.detach(), oracle(module, x)) < (1e-6 if spec.power < 1 else 1e-12)
