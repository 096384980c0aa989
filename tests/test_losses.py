"""MultiScaleMelLoss against formulas of its own, its gradients, state, compilation and messages; the training example."""

from __future__ import annotations

import copy
import math
import os
import pickle
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import noise, speech
from torch import Tensor, nn

from flashmel.losses import MultiScaleMelLoss
from flashmel.testing import assert_close

any_device = pytest.mark.parametrize("device", ("cpu", pytest.param("cuda", marks=pytest.mark.gpu)))
RATE = 24000
DAC = {"window_lengths": (32, 64, 128, 256, 512, 1024, 2048), "n_mels": (5, 10, 20, 40, 80, 160, 320)}
AUDIOCRAFT: dict[str, Any] = {
    "window_lengths": (64, 128, 256, 512, 1024),
    "n_mels": 64,
    "f_min": 64.0,
    "mag_weight": 1.0,
    "power": 2.0,
    "normalized": True,
    "norm": None,
    "mel_scale": "htk",
    "log_floor": "add",
    "log_distance": "l2",
    "reduction": "mean",
}
SMALL = {"window_lengths": (32, 64), "n_mels": 5}  # for what the number of scales does not change


def small(**kwargs: Any) -> MultiScaleMelLoss:
    return MultiScaleMelLoss(16000, **{**SMALL, **kwargs})


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return noise(2, 1, 4000), speech(2, 1, 4000)


# --- against other formulas -----------------------------------------------------------------------------------------------


def dac(estimate: Tensor, reference: Tensor, rate: int = RATE) -> Tensor:
    """MelSpectrogramLoss of descript-audiotools with DAC's settings: torch.stft, librosa's filters."""
    librosa, loss = pytest.importorskip("librosa"), torch.zeros((), dtype=estimate.dtype)
    for n_fft, n_mels in zip(*DAC.values(), strict=True):
        fb = torch.from_numpy(librosa.filters.mel(sr=rate, n_fft=n_fft, n_mels=n_mels)).to(estimate.dtype)
        window = torch.hann_window(n_fft, dtype=estimate.dtype)

        def log_mel(x: Tensor, fb: Tensor = fb, window: Tensor = window, n_fft: int = n_fft) -> Tensor:
            bins = torch.stft(x.reshape(-1, x.shape[-1]), n_fft, n_fft // 4, window=window, return_complex=True)
            return (fb @ bins.abs()).clamp(1e-5).log10()

        loss = loss + nn.functional.l1_loss(log_mel(estimate), log_mel(reference))
    return loss


def audiocraft(estimate: Tensor, reference: Tensor, alphas: list[float], rate: int = RATE) -> Tensor:
    """MultiScaleMelSpectrogramLoss of audiocraft, but for its framing: torchaudio's transform, terms over their weights."""
    torchaudio, loss = pytest.importorskip("torchaudio"), torch.zeros((), dtype=estimate.dtype)
    for n_fft, alpha in zip(AUDIOCRAFT["window_lengths"], alphas, strict=True):
        mel = torchaudio.transforms.MelSpectrogram(rate, n_fft, hop_length=n_fft // 4, f_min=64.0, n_mels=64, normalized=True)
        own, other = mel.to(estimate.dtype)(estimate), mel(reference)
        logs = (1e-5 + own).log10(), (1e-5 + other).log10()
        loss = loss + nn.functional.l1_loss(own, other) + alpha * nn.functional.mse_loss(*logs)
    return loss / sum(alpha + 1 for alpha in alphas)


ALPHAS = [math.sqrt(n_fft - 1) for n_fft in AUDIOCRAFT["window_lengths"]]
RECIPES = {
    "dac": ({}, dac),
    "audiocraft": (AUDIOCRAFT, lambda x, y: audiocraft(x, y, [1.0] * 5)),
    "audiocraft-alphas": ({**AUDIOCRAFT, "log_weight": ALPHAS}, lambda x, y: audiocraft(x, y, ALPHAS)),
}


@any_device
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str, device: str):
    """Value and gradient, against float64."""
    kwargs, formula = RECIPES[recipe]
    estimate, reference = noise(2, 1, 4000), speech(2, 1, 4000)
    leaf = estimate.double().requires_grad_()
    expected = formula(leaf, reference.double())
    expected.backward()
    x = estimate.to(device).requires_grad_()
    loss = MultiScaleMelLoss(RATE, **kwargs).to(device)(x, reference.to(device))
    loss.backward()
    assert loss.shape == () and loss.dtype == torch.float32
    assert_close(loss.cpu(), expected, rtol=1e-4, atol=0)
    assert_close(x.grad.cpu(), leaf.grad, rtol=1e-3, atol=1e-3 * leaf.grad.abs().max())


@pytest.mark.parametrize("rate", [16000, 22050, 44100])
def test_dac_at_other_rates(rate: int, pair: tuple[Tensor, Tensor]):
    assert_close(MultiScaleMelLoss(rate)(*pair), dac(*(x.double() for x in pair), rate=rate), rtol=1e-4, atol=0)


def test_defaults_are_dac(pair: tuple[Tensor, Tensor]):
    spelled = MultiScaleMelLoss(RATE, **DAC, f_min=[0.0] * 7, f_max=[None] * 7, power=1.0, eps=1e-5, log_weight=[1.0] * 7)
    assert torch.equal(MultiScaleMelLoss(RATE)(*pair), spelled(*pair))


# --- the terms ------------------------------------------------------------------------------------------------------------


def test_weights_and_reductions(pair: tuple[Tensor, Tensor]):
    def loss(**kwargs: Any) -> float:
        return small(**kwargs)(*pair).item()

    logs = [small(window_lengths=[n])(*pair).item() for n in (32, 64)]
    mags = [small(window_lengths=[n], log_weight=0, mag_weight=1)(*pair).item() for n in (32, 64)]
    assert loss() == pytest.approx(sum(logs))
    assert loss(log_weight=0, mag_weight=2) == pytest.approx(2 * sum(mags))
    weights = {"log_weight": (1, 3), "mag_weight": (0, 0.5)}
    assert loss(**weights) == pytest.approx(logs[0] + 3 * logs[1] + 0.5 * mags[1])
    assert loss(**weights, reduction="mean") == pytest.approx((logs[0] + 3 * logs[1] + 0.5 * mags[1]) / 4.5)
    assert loss(reduction="mean") == pytest.approx(sum(logs) / 2)
    assert loss(log_weight=7, reduction="mean") == pytest.approx(sum(logs) / 2)


@pytest.mark.parametrize("floor", ["clamp", "add"])
def test_log_power_is_a_power(floor: str, pair: tuple[Tensor, Tensor]):
    for distance, square in (("l1", 2), ("l2", 4)):
        one, two = (small(log_floor=floor, log_distance=distance, log_power=p)(*pair).item() for p in (1, 2))
        assert two == pytest.approx(square * one)
    own, other = (small().scales[0](x).clamp(min=1e-5).log() for x in pair)
    natural = small(window_lengths=[32], log_power=math.log(10))(*pair)
    torch.testing.assert_close(natural, (own - other).abs().mean())


def test_one_value_or_one_a_scale():
    loss = small(n_mels=[4, 7], f_min=(0, 100.0), f_max=[None, 4000.0], norm=None, mel_scale="htk", normalized="frame_length")
    assert [s.n_mels for s in loss.scales] == [4, 7]
    assert [(s.f_min, s.f_max) for s in loss.scales] == [(0, 8000.0), (100.0, 4000.0)]
    assert {(s.normalized, s.bank.norm, s.bank.mel_scale, s.hop_length / s.n_fft) for s in loss.scales} == {
        ("frame_length", None, "htk", 0.25)
    }
    assert [s.n_mels for s in MultiScaleMelLoss(16000, range(32, 65, 32), iter([4, 7])).scales] == [4, 7]


def test_shapes(pair: tuple[Tensor, Tensor]):
    loss, (x, y) = small(), pair
    expected = loss(x, y)
    for shape in ((2, 4000), (1, 2, 1, 4000)):
        torch.testing.assert_close(loss(x.reshape(shape), y.reshape(shape)), expected)
    torch.testing.assert_close((loss(x[0, 0], y[0, 0]) + loss(x[1, 0], y[1, 0])) / 2, expected)
    assert loss(x, x) == 0 and torch.allclose(loss(y, x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype, pair: tuple[Tensor, Tensor]):
    """Computed in float32 from the samples as they are."""
    loss = small(mag_weight=1.0)
    x, y = (v.to(dtype) for v in pair)
    leaf = x.clone().requires_grad_()
    value = loss(leaf, y)
    value.backward()
    assert value.dtype == torch.float32 and torch.equal(value, loss(x.float(), y.float()))
    assert leaf.grad.dtype == dtype and leaf.grad.isfinite().all() and leaf.grad.abs().sum() > 0
    pcm = noise(2, 1, 4000, dtype=torch.int16)
    assert torch.equal(loss(x, pcm), loss(x, pcm.float() / 32768))


@any_device
def test_autocast(device: str, pair: tuple[Tensor, Tensor]):
    for kwargs in ({}, AUDIOCRAFT):
        loss = MultiScaleMelLoss(RATE, **kwargs).to(device)
        x, y = (v.to(device) for v in pair)
        outside, leaves = loss(x, y), [x.clone().requires_grad_() for _ in range(2)]
        loss(leaves[0], y).backward()
        with torch.autocast(device, torch.bfloat16):
            assert torch.equal(loss(x, y), outside) and outside.dtype == torch.float32
            inside = loss(leaves[1], y)
        inside.backward()
        assert torch.equal(leaves[0].grad, leaves[1].grad)


# --- gradients ------------------------------------------------------------------------------------------------------------

TERMS: dict[str, dict[str, Any]] = {
    "log": {},
    "mag": {"log_weight": 0.0, "mag_weight": 1.0},
    "both": {"mag_weight": (0.5, 2.0), "log_power": 2.0, "reduction": "mean"},
    "add-l2": {"mag_weight": 1.0, "power": 2.0, "normalized": True, "log_floor": "add", "log_distance": "l2"},
}


@pytest.mark.parametrize("terms", TERMS)
def test_gradcheck(terms: str):
    loss = small(**TERMS[terms]).double()
    x, y = (noise(1, 70, seed=seed, dtype=torch.float64).requires_grad_() for seed in (0, 1))
    assert loss(x, y).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, (x, y))
    assert torch.autograd.gradgradcheck(loss, (x, y.detach()))


@any_device
@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("terms", TERMS)
def test_silence(terms: str, power: float, device: str):
    """A silent estimate or reference, and silence within sound: finite everywhere, 0 where the estimate is silent."""
    loss = small(**{**TERMS[terms], "power": power}).to(device)
    sound, silence = noise(1, 2000).to(device), torch.zeros(1, 2000, device=device)
    half = sound.clone()
    half[:, 1000:] = 0
    for estimate, reference in ((silence, sound), (sound, silence), (half, sound), (silence, silence), (1e-20 * sound, sound)):
        x = estimate.clone().requires_grad_()
        value = loss(x, reference)
        value.backward()
        assert value.isfinite() and x.grad.isfinite().all()
        assert (x.grad[:, 1100:] == 0).all() or estimate is not half
        assert (x.grad == 0).all() or estimate is not silence
        assert value > 0 or estimate is reference


def test_no_gradient_below_the_clamp(pair: tuple[Tensor, Tensor]):
    x = (1e-9 * pair[0]).requires_grad_()
    small()(x, pair[1]).backward()
    assert (x.grad == 0).all()


def test_gradients_reach_the_reference_only_if_asked(pair: tuple[Tensor, Tensor]):
    loss, (x, y) = small(**TERMS["add-l2"]), pair
    for requires in ((True, True), (True, False), (False, True)):
        leaves = [v.clone().requires_grad_(r) for v, r in zip(pair, requires, strict=True)]
        loss(*leaves).backward()
        assert [leaf.grad is not None for leaf in leaves] == list(requires)
    with torch.no_grad():
        assert not loss(x.clone().requires_grad_(), y).requires_grad


@pytest.mark.parametrize("terms", TERMS)
def test_of_a_reference_without_gradient_nothing_is_kept(terms: str, pair: tuple[Tensor, Tensor]):
    loss, (x, y) = small(**TERMS[terms]), pair
    outputs, saved = [], []
    for scale in loss.scales:
        scale.register_forward_hook(lambda module, inputs, mel: outputs.append((inputs[0] is y, mel)))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss(x, y)
        assert not saved
        loss(x.clone().requires_grad_(), y)
    references = [mel for is_reference, mel in outputs if is_reference]
    assert len(references) == 4 and saved and not any(mel.requires_grad for mel in references)
    derived = [f(mel) for mel in references for f in (Tensor.clone, loss._log, lambda mel: mel.clamp(min=1e-5), lambda m: m + 1e-5)]
    for kept in saved:
        assert not any(kept.shape == t.shape and torch.equal(kept, t) for t in (y, *derived))


# --- a module -------------------------------------------------------------------------------------------------------------


def test_checkpoints_stay_as_they_are():
    model = nn.ModuleDict({"generator": nn.Linear(3, 1), "loss": small()})
    assert set(model.state_dict()) == {"generator.weight", "generator.bias"}
    assert model.load_state_dict(model.state_dict(), strict=True) == ([], [])
    assert not list(model["loss"].parameters()) and len(list(model["loss"].buffers())) == 4


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), nn.Module.half, nn.Module.bfloat16])
def test_copies_and_conversions(clone, pair: tuple[Tensor, Tensor]):
    loss = small(**TERMS["both"])
    expected, text = loss(*pair), repr(loss)
    twin = clone(loss)
    assert torch.equal(twin(*pair), expected) and repr(twin) == text and not twin.state_dict()


def test_built_on_meta(pair: tuple[Tensor, Tensor]):
    with torch.device("meta"):
        loss = small()
    assert torch.equal(loss.to_empty(device="cpu")(*pair), small()(*pair))


def test_repr_names_the_terms():
    assert "log_weight=(1.0, 1.0), mag_weight=(0.0, 0.5), eps=1e-05, log_floor='clamp'" in repr(small(mag_weight=(0, 0.5)))


def test_vmap(pair: tuple[Tensor, Tensor]):
    loss = small()
    expected = torch.stack([loss(x, y) for x, y in zip(*pair, strict=True)])
    torch.testing.assert_close(torch.func.vmap(loss)(*pair), expected)


def test_compile():
    torch._dynamo.reset()
    loss = small(window_lengths=[32], mag_weight=0.5, reduction="mean")
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (1000, 1777):
        x, y = noise(2, length), noise(2, length, seed=1)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        values = [f(leaf, y) for f, leaf in zip((loss, compiled), leaves, strict=True)]
        for value in values:
            value.backward()
        torch.testing.assert_close(values[1], values[0])
        torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


def test_the_recipe_has_a_filter_for_every_row():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (8000, 16000, 22050, 24000, 32000, 44100):
            MultiScaleMelLoss(rate)


# --- messages -------------------------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    ({"window_lengths": 1024}, "window_lengths must be a sequence of lengths in samples, got 1024"),
    ({"window_lengths": "1024"}, "got '1024'"),
    ({"window_lengths": []}, "at least one length, got none"),
    ({"window_lengths": (32, 0)}, r"window_lengths\[1\] must be a positive integer, got 0"),
    ({"window_lengths": (32.0, 64)}, r"window_lengths\[0\] must be a positive integer, got 32.0"),
    ({"n_mels": (5, 10, 20)}, r"n_mels must be one value or 2, one for each of window_lengths; got 3: \(5, 10, 20\)"),
    ({"n_mels": 0}, "n_mels must be a positive integer, got 0"),
    ({"f_min": [0.0]}, "f_min must be one value or 2.*got 1"),
    ({"f_min": -5.0}, "f_min must not be negative, got -5.0"),
    ({"f_max": [None, 4000.0, None]}, "f_max must be one value or 2.*got 3"),
    ({"f_max": math.nan}, "f_max must be a finite frequency in Hz, got nan"),
    ({"log_weight": -1.0}, "log_weight must be finite and not negative, got -1.0"),
    ({"log_weight": (1.0, math.inf)}, r"log_weight must be finite and not negative, got \(1.0, inf\)"),
    ({"mag_weight": "1"}, "mag_weight must be finite and not negative, got '1'"),
    ({"mag_weight": None}, "mag_weight must be .*got None"),
    ({"mag_weight": torch.tensor(1.0)}, "mag_weight must be .*got tensor"),
    ({"mag_weight": [1.0] * 3}, "mag_weight must be one value or 2.*got 3"),
    ({"log_weight": 0}, "log_weight or mag_weight must be positive somewhere, got 0 and 0.0"),
    ({"power": 0}, "power must be .*got 0"),
    ({"normalized": "winow"}, "got 'winow'"),
    ({"norm": "area"}, "got 'area'"),
    ({"mel_scale": "mel"}, "got 'mel'"),
    ({"eps": 0.0}, "eps must be positive, got 0.0"),
    ({"log_power": math.nan}, "log_power must be positive, got nan"),
    ({"log_floor": "max"}, "log_floor must be one of 'clamp', 'add'; got 'max'"),
    ({"log_distance": 1}, "log_distance must be one of 'l1', 'l2'; got 1"),
    ({"reduction": "none"}, "reduction must be one of 'sum', 'mean'; got 'none'"),
    ({"sample_rate": 0}, "sample_rate must be positive, got 0"),
]


@pytest.mark.parametrize("kwargs,message", BAD_ARGUMENTS, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_bad_arguments(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        MultiScaleMelLoss(**{"sample_rate": 16000, **SMALL, **kwargs})


def test_fewer_windows_than_the_default_filters():
    with pytest.raises(ValueError, match="n_mels must be one value or 2, one for each of window_lengths; got 7"):
        MultiScaleMelLoss(16000, (512, 1024))


BAD_WAVEFORMS = [
    (torch.zeros(2, 4000), torch.zeros(2, 1, 4000), r"must have one shape, got \(2, 4000\) and \(2, 1, 4000\): cut the longer"),
    (torch.zeros(2, 4000), torch.zeros(2, 3999), r"got \(2, 4000\) and \(2, 3999\)"),
    (torch.zeros(1, 4000), torch.zeros(2, 4000), r"got \(1, 4000\) and \(2, 4000\)"),
    (torch.zeros(2, 1024), torch.zeros(2, 1024), "1024 samples is too short for n_fft=2048 .*at least 1025"),
    (torch.zeros(2, 0), torch.zeros(2, 0), "input is empty"),
    (torch.zeros(4000), torch.zeros(4000, dtype=torch.int32), "torch.int32"),
    (torch.zeros(4000), torch.zeros(4000, device="meta"), "waveform is on meta"),
]


@pytest.mark.parametrize("estimate,reference,message", BAD_WAVEFORMS, ids=[m[:30] for *_, m in BAD_WAVEFORMS])
def test_bad_waveforms(estimate: Tensor, reference: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        MultiScaleMelLoss(16000)(estimate, reference)


def test_waveforms_are_tensors():
    x = noise(4000)
    for name, arguments in (("estimate", (x.numpy(), x)), ("reference", (x, x.tolist()))):
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got (ndarray|list)"):
            small()(*arguments)


# --- scripts/train_example.py ---------------------------------------------------------------------------------------------

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_example.py"


def test_training_example(tmp_path: Path):
    soundfile = pytest.importorskip("soundfile")
    source, out = tmp_path / "source.wav", tmp_path / "new" / "learned.wav"
    soundfile.write(source, speech(9000, sample_rate=22050).numpy(), 22050)
    command = [sys.executable, str(SCRIPT), str(source), "--device", "cpu", "--steps", "10", "--every", "3", "--seconds", "0.3"]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in conftest.py
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=120, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(losses) == 5 and losses[-1] < 0.9 * losses[0]
    learned, rate = soundfile.read(out)
    assert rate == 22050 and learned.shape == (int(0.3 * rate) // 256 * 256,) and abs(learned).max() > 0


def test_training_example_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main = runpy.run_path(str(SCRIPT))["main"]
    assert main(["--device", "cpu", "--steps", "1", "--seconds", "0.1", "--lr", "10"]) == 1
    out, error = capsys.readouterr()
    assert out.startswith("a synthesised voice: 0.10 s") and "the loss did not fall" in error
    for arguments, message in (
        (["--seconds", "0.01"], "must be longer than 1024 samples, got 0"),
        ([str(tmp_path / "none.wav")], "none.wav: "),
    ):
        with pytest.raises(SystemExit, match=message):  # a text as the code: status 1
            main(["--device", "cpu", *arguments])
    for arguments, message in (
        (["--steps", "0"], "--steps must be positive, got 0"),
        (["--out", "learned.mp3"], "--out must end in .wav, got learned.mp3"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err
