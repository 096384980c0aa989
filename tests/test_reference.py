"""The plain-torch path against torchaudio, against a NumPy float64 oracle, and the promises it makes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from cases import CASES, INPUT_DTYPES, OUTPUT_DTYPES, PAD_MODES, POWERS, Case, all_cases, noise, speech
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor

from flashmel import MelSpectrogram, reference
from flashmel.spec import StftSpec


def plain(module: MelSpectrogram, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return reference.features(x, module.spectrogram.window, module.mel_scale.fb, module.spec, dtype)


def oracle(module: MelSpectrogram, x: Tensor) -> np.ndarray:
    """The definition in NumPy float64, sharing no code with the package: pad, frame, window, transform, filter."""
    spec = module.spec
    wave = x.double().numpy() / (32768 if x.dtype == torch.int16 else 1)
    axes = [(0, 0)] * (wave.ndim - 1)
    wave = np.pad(wave, [*axes, (spec.pad, spec.pad)]) if spec.pad >= 0 else wave[..., -spec.pad : spec.pad]
    if spec.center:
        half = spec.n_fft // 2
        mode = {"replicate": "edge", "circular": "wrap"}.get(spec.pad_mode, spec.pad_mode)
        wave = np.pad(wave, [*axes, (half, half)], mode=mode)
    window = module.spectrogram.window.double().numpy()
    left = (spec.n_fft - len(window)) // 2
    frames = sliding_window_view(wave, spec.n_fft, axis=-1)[..., :: spec.hop_length, left : left + len(window)] * window
    magnitude = np.abs(np.fft.rfft(frames, spec.n_fft))  # a shift by `left` changes the phase alone
    magnitude /= {"none": 1, "window": np.sqrt((window**2).sum()), "frame_length": np.sqrt(spec.n_fft)}[spec.normalized]
    return np.swapaxes(magnitude**spec.power @ module.mel_scale.fb.double().numpy(), -1, -2)


def peak_error(got: Tensor, expected: np.ndarray) -> float:
    """Largest error relative to the frame's own peak: float32 has no relative accuracy far below it."""
    peak = np.abs(expected).max(axis=-2, keepdims=True)
    return float((np.abs(got.double().numpy() - expected) / np.where(peak == 0, 1, peak)).max())


@all_cases
def test_matches_torchaudio(case: Case):
    torchaudio = pytest.importorskip("torchaudio")
    x = noise(*case.shape)
    pad = case.kwargs.get("pad", 0)
    cropped = x[..., -pad:pad] if pad < 0 else x
    expected = torchaudio.transforms.MelSpectrogram(**case.kwargs)(cropped)  # torchaudio ignores a negative pad; here it crops
    module = MelSpectrogram(**case.kwargs)
    torch.testing.assert_close(plain(module, x), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(plain(module, x, torch.float16).float(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(plain(module, x, torch.bfloat16).float(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(plain(module, x.clone().requires_grad_()).detach(), expected, atol=1e-4, rtol=1e-4)


@all_cases
@pytest.mark.parametrize("signal", [noise, speech], ids=["noise", "speech"])
def test_matches_oracle(case: Case, signal):
    module, x = MelSpectrogram(**case.kwargs), signal(*case.shape)
    expected = oracle(module, x)
    # A root magnifies the error of a bin far below its frame's peak.
    assert peak_error(plain(module, x), expected) < (3e-5 if module.power < 1 else 3e-6)
    module.double()
    expected = oracle(module, x)
    assert peak_error(plain(module, x.double()), expected) < 1e-13
    assert peak_error(plain(module, x.double().requires_grad_()).detach(), expected) < 1e-13


@all_cases
def test_pieces_are_seamless(case: Case, monkeypatch):
    module, x = MelSpectrogram(**case.kwargs).double(), noise(*case.shape)
    whole = plain(module, x)
    for size in (1, 2**12):  # one frame, a few
        monkeypatch.setattr(reference, "_PIECE_CPU", size)
        torch.testing.assert_close(plain(module, x), whole, rtol=1e-12, atol=1e-15 * float(whole.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2**13, 2**22])  # one frame, several rows, all
@all_cases
def test_pieces_on_a_gpu(case: Case, size: int, monkeypatch):
    module, x = MelSpectrogram(**case.kwargs).double(), noise(*case.shape)
    expected = plain(module, x)
    monkeypatch.setattr(reference, "_PIECE_DEVICE", max(size, 16 * module.n_fft) if size > 1 else 1)
    if size > 1 or expected.shape[-1] < 100:
        torch.testing.assert_close(plain(module.cuda(), x.cuda()).cpu(), expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("out", OUTPUT_DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, out: torch.dtype | None):
    module, x = MelSpectrogram(n_mels=40), noise(2, 4000, dtype=dtype)
    got = plain(module, x, out)
    assert got.dtype == (out or torch.float32)
    as_float = x.float() / (32768 if dtype == torch.int16 else 1)
    assert torch.equal(got, plain(module, as_float).to(got.dtype))  # bit for bit: half and PCM samples are exact in float32
    assert plain(module.double(), x).dtype == torch.float64


def test_int16_extremes():
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    module = MelSpectrogram(n_mels=40, pad=7)
    assert torch.equal(plain(module, x), plain(module, x.float() / 32768))


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("mode", PAD_MODES)
@pytest.mark.parametrize("pad", [3, -3])
def test_gradients(power: float, mode: str, pad: int):
    spec = StftSpec(8, 5, 3, pad=pad, power=power, normalized="window", pad_mode=mode)
    x = noise(12, dtype=torch.float64).requires_grad_()
    window = torch.hann_window(5, periodic=False, dtype=torch.float64).add(0.1).requires_grad_()
    fb = torch.rand(spec.n_freqs, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def f(x: Tensor, window: Tensor, fb: Tensor) -> Tensor:
        return reference.features(x, window, fb, spec, None)

    assert torch.autograd.gradcheck(f, (x, window, fb), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(f, (x, window, fb))


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_no_gradient_at_silence(power: float, dtype: torch.dtype):
    module = MelSpectrogram(n_mels=40, power=power).to(dtype)
    x = noise(2, 8000, dtype=dtype)
    x[0], x[1, :4000] = 0, 0
    x.requires_grad_()
    y = plain(module, x)
    assert (y[0] == 0).all() and (y[1, :, :10] == 0).all()
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert grad.isfinite().all() and (grad[0] == 0).all() and (grad[1, :3500] == 0).all() and (grad[1, 4500:] != 0).any()
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    assert second.isfinite().all() and (second[0] == 0).all()


def test_gradient_is_deterministic_and_of_the_inputs_dtype():
    module = MelSpectrogram(n_mels=40)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        x = noise(4, 16000, dtype=dtype).requires_grad_()
        one, two = (torch.autograd.grad(plain(module, x).log1p().sum(), x)[0] for _ in range(2))
        assert one.dtype == dtype and torch.equal(one, two)


def test_function_transforms():
    module, x = MelSpectrogram(n_mels=40), noise(3, 2, 4000)
    expected = plain(module, x)
    torch.testing.assert_close(torch.func.vmap(lambda row: plain(module, row))(x), expected)
    loss = lambda x: plain(module, x).square().sum()  # noqa: E731
    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(loss)(x), torch.autograd.grad(loss(leaf), leaf)[0])
    _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.grad(loss)(x).sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_fft,n_mels", [(400, 128), (512, 80), (1024, 23)])
@pytest.mark.parametrize("length", [1601, 48000, 200001])
def test_batch_independence(n_fft: int, n_mels: int, length: int):
    module, x = MelSpectrogram(n_fft=n_fft, hop_length=160, n_mels=n_mels), noise(7, length)
    together = plain(module, x)
    for row in range(7):
        assert torch.equal(plain(module, x[row]), together[row])
    assert torch.equal(plain(module, x.T.contiguous().T), together)


def test_frame_independence():
    module = MelSpectrogram(n_fft=512, hop_length=128, n_mels=80)
    loud, quiet = noise(8192), noise(8192, seed=1) * 1e-3
    both = torch.cat((loud, quiet, torch.zeros(8192)))
    assert peak_error(plain(module, both), oracle(module, both)) < 3e-6
    assert (plain(module, both)[:, -32:] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", PAD_MODES)
@pytest.mark.parametrize("at", [0, 3, 2000, 3999])
def test_nan_stays_where_it_is(bad: float, mode: str, at: int):
    spec = StftSpec(400, 400, 160, pad=3, pad_mode=mode)
    fb = torch.ones(201, 2)
    clean = noise(2, 4000)
    x = clean.clone()
    x[1, at] = bad
    expected, got = (reference.features(w, torch.hamming_window(400), fb, spec, None) for w in (clean, x))
    touched = np.zeros(got.shape[-1], dtype=bool)
    for frame in range(len(touched)):
        index, valid = spec.source_index(frame * 160, 400, 4000)
        touched[frame] = at in index[valid]
    assert 0 < touched.sum() <= 6
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1][:, ~touched], expected[1][:, ~touched])
    assert not got[1][:, touched].isfinite().any()


@pytest.mark.parametrize(
    "normalized,peak", [(False, 9300.96), (True, 62.006), ("window", 62.006), ("frame_length", 23.2524)], ids=str
)
def test_pinned_sine(normalized: bool | str, peak: float):
    x = torch.sin(2 * torch.pi * 1000 * torch.arange(16000, dtype=torch.float64) / 16000).float()
    assert float(plain(MelSpectrogram(n_mels=20, normalized=normalized), x).max()) == pytest.approx(peak, rel=1e-4)


def test_pinned_values():
    dc = plain(MelSpectrogram(n_fft=512, n_mels=80), torch.ones(16000))
    assert float(dc[0, 40]) == pytest.approx(9828.7, rel=1e-4) and float(dc[1, 40]) == pytest.approx(6555.3, rel=1e-4)
    assert (plain(MelSpectrogram(n_mels=40), torch.zeros(2, 16000)) == 0).all()
    default = plain(MelSpectrogram(), noise(16000))
    assert default.shape == (128, 81)
    assert (default == 0).all(1).nonzero().flatten().tolist() == [0, 3, 6, 13]


@pytest.mark.parametrize(
    "length,kwargs,frames",
    [
        *((n, {"hop_length": 160}, f) for n, f in ((16000, 101), (15999, 100), (480000, 3001), (799, 5), (800, 6), (801, 6))),
        (16000, {"hop_length": 160, "center": False}, 98),
        (16000, {"hop_length": 160, "center": False, "n_fft": 512}, 97),
        (400, {"center": False}, 1),
    ],
)
def test_frame_counts(length: int, kwargs: dict, frames: int):
    assert plain(MelSpectrogram(n_mels=23, **kwargs), noise(length)).shape == (23, frames)


# Frames of n_fft 400 by length and mode; None: refused.
SHORT = {200: (None, 2, 2, 2), 201: (2, 2, 2, 2), 1: (None, 1, 1, None), 199: (None, 1, 1, None), 0: (None,) * 4}


@pytest.mark.parametrize("length", SHORT)
@pytest.mark.parametrize("mode", PAD_MODES)
def test_short_input(length: int, mode: str):
    module = MelSpectrogram(n_mels=23, pad_mode=mode)
    frames = SHORT[length][PAD_MODES.index(mode)]
    for x in (noise(2, length), noise(2, length).requires_grad_()):
        if frames is None:
            with pytest.raises(ValueError, match="empty" if length == 0 else rf"{length} samples.*n_fft=400.*{mode}"):
                plain(module, x)
        else:
            assert plain(module, x).shape == (2, 23, frames)


@pytest.mark.parametrize("shape", [(0, 16000), (2, 0, 16000)])
def test_zero_batch(shape: tuple[int, ...]):
    for grad in (False, True):
        assert plain(MelSpectrogram(), torch.empty(shape, requires_grad=grad)).shape == (*shape[:-1], 128, 81)
    with pytest.raises(ValueError, match="too short"):
        plain(MelSpectrogram(), torch.empty(0, 100))


def test_autocast_changes_nothing():
    module, x = MelSpectrogram(n_mels=40), noise(2, 4000)
    expected = plain(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(plain(module, x), expected)
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(plain(module, leaf).detach(), expected, rtol=1e-5, atol=1e-6)


def test_bank_of_any_width():
    spec = StftSpec(400, 400, 160)
    fb = torch.rand(201, 5)
    got = reference.features(noise(3, 4000), torch.hann_window(400), fb, spec, None)
    bins = reference.spectrogram(noise(3, 4000), torch.hann_window(400), spec)
    assert got.shape == (3, 5, 26) and bins.shape == (3, 201, 26)
    torch.testing.assert_close(got, (bins.mT @ fb).mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.name in ("defaults", "win-25", "pad-700", "no-center")], ids=lambda c: c.name
)
def test_spectrogram_matches_torchaudio(case: Case):
    torchaudio = pytest.importorskip("torchaudio")
    kwargs, x = {k: v for k, v in case.kwargs.items() if k != "n_mels"}, noise(*case.shape)
    expected = torchaudio.transforms.Spectrogram(**{"n_fft": 400, **kwargs})(x)
    torch.testing.assert_close(MelSpectrogram(**case.kwargs).spectrogram(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux alone")
def test_memory_is_the_output_and_a_few_mib():
    code = """
import resource, torch
from flashmel import MelSpectrogram, reference
torch.set_num_threads(1)
module = MelSpectrogram(n_mels=8)
call = lambda x: reference.features(x, module.spectrogram.window, module.mel_scale.fb, module.spec, None)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
call(torch.zeros(1, 400000, dtype=torch.int16))
x = torch.zeros(4, 12_000_000, dtype=torch.int16)  # 92 MiB; 183 MiB in float32
before = peak()
y = call(x)
print(peak() - before - y.nbytes / 2**20)
"""
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 20
