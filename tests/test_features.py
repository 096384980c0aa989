"""Prologue, framing, epilogue and lengths in plain torch, against their definition in NumPy float64 and against rows alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import noise, speech
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from flashmel import ops, reference
from flashmel.spec import Epilogue, StftSpec

N_MELS = 20


def spec_of(n_fft: int = 256, win_length: int | None = None, hop_length: int = 100, **fields: object) -> StftSpec:
    return StftSpec(n_fft, win_length or n_fft, hop_length, **fields)


PLAIN = spec_of()
KALDI = spec_of(
    win_length=200, margins=(0, 56), pad_mode="constant", scale=32768.0,
    remove_dc=True, preemphasis=0.97, preemphasis_scope="frame",
    epilogue=Epilogue("ln", 1.1920929e-7, time_major=True),
)  # fmt: skip
NEMO = spec_of(
    win_length=200, margins=(128, 128), pad_mode="constant", preemphasis=0.97,
    epilogue=Epilogue("ln", 2.0**-24, "add", masked_frames=1),
)  # fmt: skip
SPECS = {
    "plain": PLAIN,
    "plain-pad": replace(PLAIN, pad=33),
    "plain-crop": replace(PLAIN, pad=-33, power=1.0),
    "kaldi": KALDI,
    "kaldi-mirror": replace(KALDI, margins=(50, 106), pad_mode="symmetric"),
    "nemo": NEMO,
    "drop-last": spec_of(margins=(128, 28), epilogue=Epilogue("log10", 1e-10)),
    "vocoder": spec_of(margins=(78, 78), power=1.0, epsilon=1e-9, epilogue=Epilogue("ln", 1e-5)),
    "epsilon-max": spec_of(power=1.0, epsilon=1e-3, epsilon_mode="max", margins=(128, 0), pad_mode="replicate"),
    "causal": spec_of(margins=(156, 0), pad_mode="circular", power=0.5, preemphasis=0.5),
    "db-affine": spec_of(epilogue=Epilogue("db", 1e-10, log_floor=-40.0, gain=0.25, bias=1.0, pad_value=-3.0)),
    "no-log-affine": spec_of(center=False, epilogue=Epilogue(gain=-2.0, bias=0.5, time_major=True, masked_frames=2)),
    "no-floor": spec_of(normalized="window", epilogue=Epilogue("ln", log_floor=-9.0)),
}
all_specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def tables(spec: StftSpec, dtype: torch.dtype = torch.float32, seed: int = 3) -> tuple[Tensor, Tensor]:
    """A window, ending in zeros where operations see a frame's first samples, and filters with overlap."""
    window = torch.hann_window(spec.win_length, dtype=torch.float64) + 0.01
    if spec is KALDI or spec.remove_dc:
        window = torch.nn.functional.pad(window, (0, spec.n_fft - spec.win_length))
    centres = torch.linspace(2, spec.n_freqs - 3, N_MELS, dtype=torch.float64)
    fb = (1 - (torch.arange(spec.n_freqs, dtype=torch.float64)[:, None] - centres).abs() / 8).clamp(min=0)
    return window.to(dtype), fb.to(dtype)


def oracle(row: np.ndarray, window: np.ndarray, fb: np.ndarray, spec: StftSpec, affine: np.ndarray | None) -> np.ndarray:
    """One row, time-major, by the definition alone."""
    x = row * spec.scale
    if spec.preemphasis and spec.preemphasis_scope == "waveform":
        x = x - spec.preemphasis * np.concatenate(([0.0], x[:-1]))
    x = np.pad(x, spec.pad) if spec.pad >= 0 else x[-spec.pad : spec.pad]
    left, right = (spec.n_fft // 2 * spec.center,) * 2 if spec.margins is None else spec.margins
    mode = {"replicate": "edge", "circular": "wrap"}.get(spec.pad_mode, spec.pad_mode)
    x = np.pad(x, (left, max(right, 0)), mode=mode)[: len(x) + left + right]
    frames = sliding_window_view(x, spec.n_fft)[:: spec.hop_length].copy()
    if spec.remove_dc:
        frames -= frames[:, : spec.win_length].mean(1, keepdims=True)
    if spec.preemphasis and spec.preemphasis_scope == "frame":
        frames = frames - spec.preemphasis * np.concatenate((frames[:, :1], frames[:, :-1]), 1)
    if spec.normalized == "window":
        window = window / np.sqrt((window**2).sum())
    start = (spec.n_fft - len(window)) // 2
    energy = np.abs(np.fft.rfft(frames[:, start : start + len(window)] * window, spec.n_fft)) ** 2
    energy = energy + spec.epsilon if spec.epsilon_mode == "add" else np.maximum(energy, spec.epsilon)
    mel = energy ** (spec.power / 2) @ fb
    e = spec.epilogue
    if e.log is not None:
        mel = mel + e.floor if e.floor_mode == "add" else np.maximum(mel, e.floor)
        with np.errstate(divide="ignore"):
            mel = {"ln": np.log, "log10": np.log10, "db": lambda m: 10 * np.log10(m)}[e.log](mel)
        mel = np.maximum(mel, e.log_floor)
    mel = mel * e.gain + e.bias
    mel = mel if affine is None else mel * affine[0] + affine[1]
    mel[len(mel) - e.masked_frames :] = e.pad_value
    return mel


def expected(x: Tensor, window: Tensor, fb: Tensor, spec: StftSpec, affine: Tensor | None = None) -> Tensor:
    numbers = [None if t is None else t.double().numpy() for t in (window, fb, affine)]
    rows = [torch.from_numpy(oracle(row, *numbers[:2], spec, numbers[2])) for row in x.double().numpy()]
    stacked = torch.stack(rows)
    return stacked if spec.epilogue.time_major else stacked.mT


@all_specs
@pytest.mark.parametrize("with_affine", (False, True))
def test_is_its_definition(spec: StftSpec, with_affine: bool):
    x = speech(3, 5000)
    affine = torch.stack((torch.linspace(0.5, 2, N_MELS), torch.linspace(-1, 1, N_MELS))) if with_affine else None
    truth = expected(x, *tables(spec, torch.float64), spec, affine)
    window, fb = tables(spec, torch.float64)
    double = reference.features(x, window, fb, spec, None, None, affine)
    torch.testing.assert_close(double, truth, rtol=1e-9, atol=1e-9)
    single = reference.features(x, window.float(), fb.float(), spec, None, None, affine)
    assert single.shape == truth.shape and single.is_contiguous()
    torch.testing.assert_close(single.double(), truth, rtol=2e-3, atol=2e-3)
    recorded = reference.features(x.double().requires_grad_(), window, fb, spec, None, None, affine)
    torch.testing.assert_close(recorded.detach(), truth, rtol=1e-9, atol=1e-9)
    half = ops.features(x, window.float(), fb.float(), spec, torch.float16, None, affine)
    torch.testing.assert_close(half, single.half(), rtol=0, atol=0)


@all_specs
def test_lengths_are_rows_alone(spec: StftSpec):
    lengths = torch.tensor([5000, 3333, 257, 0, 4000, 1])
    x = speech(6, 5000)
    window, fb = tables(spec)
    junk = x.clone()
    for row, n in enumerate(lengths.tolist()):
        junk[row, n:] = torch.nan
    pad = spec.epilogue.pad_value

    def check(got: Tensor, **tolerance: float) -> None:
        got = got if spec.epilogue.time_major else got.mT
        for row, n in enumerate(lengths.tolist()):
            valid = int(spec.valid_frames(n))
            assert (got[row, valid:] == pad).all()
            if valid:
                alone = reference.features(x[row, :n], window, fb, spec, None)
                alone = alone if spec.epilogue.time_major else alone.mT
                torch.testing.assert_close(got[row, :valid], alone[:valid], **tolerance)

    got = ops.features(junk, window, fb, spec, lengths=lengths)
    assert got.shape == reference.features(x, window, fb, spec, None).shape
    check(got, rtol=0, atol=0)
    assert torch.equal(
        ops.features(junk.reshape(2, 3, -1), window, fb, spec, lengths=lengths.reshape(2, 3).int()).flatten(0, 1), got
    )
    wave = junk.clone().requires_grad_()  # the formulas for devices and gradients
    recorded = reference.features(wave, window, fb, spec, None, lengths)
    check(recorded.detach(), rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(recorded.sum(), wave)
    behind = torch.arange(5000) >= lengths[:, None]
    assert gradient.isfinite().all() and (gradient[behind] == 0).all() and (gradient[0] != 0).any()


@all_specs
def test_pieces_of_a_device(spec: StftSpec, monkeypatch: pytest.MonkeyPatch):
    """The way that lengths take on a GPU: several rows at a time, indices from tensors; here without one."""
    x, lengths = speech(3, 5000), torch.tensor([5000, 2000, 4096])
    window, fb = tables(spec)
    whole = reference.features(x, window, fb, spec, None)
    monkeypatch.setattr(reference, "_PIECE_CPU", 7 * spec.n_fft)
    torch.testing.assert_close(reference.features(x, window, fb, spec, None), whole, rtol=1e-4, atol=1e-4)
    ragged = reference.features(x, window, fb, spec, None, lengths)
    out = torch.empty((3, spec.frame_count(5000), N_MELS))
    reference._fill(out, x, lengths, reference._scaled_window(window, spec), fb, spec, None)
    for row, n in enumerate(lengths.tolist()):
        valid = int(spec.valid_frames(n))
        expected = ragged[row] if spec.epilogue.time_major else ragged[row].mT
        torch.testing.assert_close(out[row, :valid], expected[:valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pad_mode", ("reflect", "constant", "replicate", "circular", "symmetric"))
@pytest.mark.parametrize("n_samples", (129, 500))
def test_tensor_indices_are_the_specs(pad_mode: str, n_samples: int):
    spec = spec_of(margins=(128, 101), pad_mode=pad_mode)
    index, valid = spec.source_index(0, n_samples + 229, n_samples)
    got, inside = reference._source_index(spec, 0, n_samples + 229, torch.tensor([[n_samples]]), torch.device("cpu"))
    assert np.array_equal(inside[0].numpy(), valid)
    assert np.array_equal(got[0].numpy()[valid], index[valid])


def test_a_plain_spec_is_a_mel_spectrogram():
    x = noise(4, 20000)
    window, fb = tables(PLAIN)
    mel = reference.features(x, window, fb, PLAIN, None)
    assert torch.equal(reference.features(x, window, fb, PLAIN, None), mel)
    assert torch.equal(reference.features(x, window, fb, PLAIN, None, torch.full((4,), 20000)), mel)


@all_specs
def test_a_row_does_not_depend_on_its_batch(spec: StftSpec):
    x, lengths = speech(5, 9000), torch.tensor([9000, 8999, 300, 4500, 9000])
    window, fb = tables(spec)
    batch = reference.features(x, window, fb, spec, None)
    ragged = reference.features(x, window, fb, spec, None, lengths)
    for row in range(5):
        assert torch.equal(batch[row], reference.features(x[row], window, fb, spec, None))
        alone = reference.features(x[row : row + 1], window, fb, spec, None, lengths[row : row + 1])
        assert torch.equal(ragged[row], alone[0])


def test_int16_and_scale():
    x = noise(2, 3000, dtype=torch.int16)
    window, fb = tables(KALDI)
    got = reference.features(x, window, fb, KALDI, None)
    assert torch.equal(got, reference.features(x.float(), window, fb, replace(KALDI, scale=1.0), None))


GRADIENT_SPECS = ("kaldi", "kaldi-mirror", "nemo", "vocoder", "epsilon-max", "causal", "db-affine", "plain-crop")


@pytest.mark.parametrize("name", GRADIENT_SPECS)
@pytest.mark.parametrize("ragged", (False, True))
def test_gradients_twice(name: str, ragged: bool):
    small = SPECS[name]
    fields = {"n_fft": 16, "win_length": 12 if small.win_length < small.n_fft else 16, "hop_length": 6, "scale": 1.0}
    fields |= {"margins": None if small.margins is None else (5, 3), "pad": -2 if small.pad < 0 else small.pad}
    # The floors lie below every value: at one the second derivative is not what differences find.
    epilogue = replace(small.epilogue, floor=1e-9, log_floor=-1e9, masked_frames=min(1, small.epilogue.masked_frames))
    spec = replace(small, **fields, epilogue=epilogue)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 30, dtype=torch.float64, generator=generator).requires_grad_()
    window = torch.rand(12, dtype=torch.float64, generator=generator) + 0.5
    window = torch.nn.functional.pad(window, (0, 4)).requires_grad_()
    fb = torch.rand(spec.n_freqs, 3, dtype=torch.float64, generator=generator).requires_grad_()
    lengths = torch.tensor([30, 23]) if ragged else None

    def f(*tensors: Tensor) -> Tensor:
        return reference.features(*tensors, spec, None, lengths)

    assert torch.autograd.gradcheck(f, (x, window, fb), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (x, window, fb), fast_mode=True)


@all_specs
def test_gradients_of_silence_are_finite(spec: StftSpec):
    window, fb = (t.requires_grad_() for t in tables(spec))
    x = torch.zeros(2, 3000)
    x[1, 1000:] = noise(2000)
    x.requires_grad_()
    out = ops.features(x, window, fb, spec)
    found = torch.autograd.grad((out * noise(*out.shape, seed=1)).masked_fill(out.isinf(), 0).sum(), (x, window, fb))
    assert all(g.isfinite().all() for g in found)
    assert (found[0][0] == 0).all() and (found[0][1] != 0).any()


def test_bad_arguments():
    window, fb = tables(PLAIN)
    x = noise(2, 3000)
    for lengths, message in (
        (torch.tensor([3000.0, 1.0]), "int64 or int32"),
        ([3000, 1], "int64 or int32"),
        (torch.tensor([3000]), "without its last axis"),
        (torch.tensor([3001, 1]), "between 0 and the waveform's 3000"),
        (torch.tensor([3000, -1]), "got -1 to 3000"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.features(x, window, fb, PLAIN, lengths=lengths)
    with pytest.raises(ValueError, match=r"affine must have shape \(2, n_mels\)"):
        ops.features(x, window, fb, PLAIN, affine=torch.ones(N_MELS))
    with pytest.raises(ValueError, match="too short"):
        ops.features(x[:, :100], window, fb, PLAIN)
