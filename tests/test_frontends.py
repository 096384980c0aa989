"""Front-ends against their executable references and float64, on synthetic speech in ragged batches; and what they promise."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import noise
from torch import Tensor

import flashmel
from flashmel import cli, frontends
from flashmel.frontends import FrontEnd, frontend
from flashmel.recipes import INT16

SCRIPT = Path(__file__).parents[1] / "scripts" / "parity.py"


def _load():
    spec = importlib.util.spec_from_file_location("parity_under_test", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.quiet()
    return module


with warnings.catch_warnings():
    parity = _load()

# (mean, largest) difference from the reference, then from float64: three and four times what benchmarks/parity-cpu.json has for
# this audio. Logarithms of what lies in silence, or of what pre-emphasis cancels, differ by far more than the mean.
GATES = {
    "whisper": (8e-7, 9e-5, 6e-7, 7e-5),
    "whisper-large-v3": (1e-6, 2e-4, 8e-7, 2e-4),
    "whisper over 30 s": (8e-7, 9e-5, 6e-7, 7e-5),
    "voxtral-realtime": (9e-7, 8e-5, 7e-7, 7e-5),
    "qwen2-audio": (1e-6, 2e-4, 8e-7, 2e-4),
    "qwen3-asr": (1e-6, 2e-4, 8e-7, 2e-4),
    "nemo": (3e-6, 2e-4, 3e-6, 3e-4),
    "nemo-128": (4e-6, 5e-4, 3e-6, 5e-4),
    "nemo-none": (8e-6, 8e-4, 7e-6, 2e-3),
    "parakeet": (3e-6, 2e-4, 3e-6, 3e-4),
    "parakeet-128": (4e-6, 5e-4, 3e-6, 5e-4),
    "kaldi-fbank": (2e-5, 2e-3, 8e-6, 3e-3),
    "kaldi-fbank by kaldi": (3e-5, 6e-3, 2e-5, 4e-3),
    "seamless-m4t": (6e-6, 6e-3, 5e-6, 6e-3),
    "w2v-bert": (6e-6, 6e-3, 5e-6, 6e-3),
    "speech-to-text": (7e-6, 3e-3, 5e-6, 6e-3),
    "ast": (3e-6, 8e-4, 2e-6, 7e-4),
    "audio-mae": (3e-6, 7e-4, 2e-6, 7e-4),
    "beats": (3e-6, 2e-3, 3e-6, 4e-3),
    "icefall": (3e-5, 5e-3, 2e-5, 5e-3),
    "wenet": (4e-5, 2e-2, 3e-5, 3e-2),
    "wespeaker": (2e-5, 6e-3, 1e-5, 7e-3),
    "campplus": (3e-5, 7e-3, 2e-5, 4e-3),
    "phi-4-multimodal": (9e-6, 1e-2, 1e-5, 8e-3),
    "gemma3n": (9e-6, 2e-2, 8e-6, 2e-2),
    "gemma4": (4e-6, 4e-4, 4e-6, 4e-4),
    "granite-speech": (8e-7, 1e-4, 6e-7, 7e-5),
    "lasr": (6e-6, 8e-4, 6e-6, 7e-4),
    "hifigan": (3e-6, 4e-4, 3e-6, 3e-4),
    "bigvgan-22k": (3e-6, 4e-4, 3e-6, 3e-4),
    "bigvgan-24k": (4e-6, 4e-4, 3e-6, 5e-4),
    "bigvgan-44k": (5e-6, 2e-3, 4e-6, 3e-3),
    "cosyvoice2": (3e-6, 3e-4, 2e-6, 2e-4),
    "matcha": (2e-6, 2e-4, 2e-6, 2e-4),
    "vocos": (4e-6, 4e-3, 3e-6, 1e-3),
    "f5-tts": (4e-6, 4e-3, 3e-6, 1e-3),
    "tacotron2": (3e-6, 3e-4, 3e-6, 2e-4),
    "univnet": (3e-6, 5e-4, 3e-6, 5e-4),
    "speecht5": (8e-7, 7e-5, 8e-7, 7e-5),
    "clap-fusion": (2e-5, 4e-3, 2e-5, 4e-3),
    "clap-unfused": (2e-5, 3e-3, 2e-5, 3e-3),
    "panns": (2e-5, 2e-3, 2e-5, 1e-3),
    "librosa": (5e-7, 2e-4, 4e-7, 2e-4),
    "librosa-db": (2e-5, 3e-3, 2e-5, 3e-3),
    "loss-hifigan": (3e-6, 4e-4, 3e-6, 3e-4),
    "loss-vocos": (4e-6, 4e-3, 3e-6, 1e-3),
    "loss-dac": (3e-6, 2e-3, 2e-6, 2e-3),
    "loss-encodec": (1e-6, 4e-5, 8e-7, 4e-5),
    "loss-auraloss": (5e-6, 2e-3, 4e-6, 2e-3),
}

all_names = pytest.mark.parametrize("name", frontends.names())


@pytest.fixture(scope="module")
def audio():
    made: dict[int, Tensor] = {}

    def at(sample_rate: int, seconds: float = 3.0) -> Tensor:
        if (sample_rate, seconds) not in made:
            made[sample_rate, seconds] = parity.speech_like(sample_rate, seconds)
        return made[sample_rate, seconds]

    return at


@pytest.mark.parametrize("case", parity.REFERENCES)
def test_parity(case: str, audio):
    name = parity.REFERENCES[case][0]
    record = parity.measure(case, audio(frontends.recipe(name).sample_rate))
    ref_mean, ref_max, f64_mean, f64_max = GATES[case]
    assert record["f64"]["mean"] <= f64_mean and record["f64"]["max"] <= f64_max, record["f64"]
    if "ref" not in record:
        pytest.skip(f"{record['reference']} is missing: {record['reason']}")
    assert record["ref"]["mean"] <= ref_mean and record["ref"]["max"] <= ref_max, record["ref"]


def test_the_table_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, audio):
    soundfile = pytest.importorskip("soundfile")
    soundfile.write(tmp_path / "a.wav", audio(16000).numpy(), 16000)
    out = tmp_path / "parity.json"
    command = ["parity", "--only", "kaldi-fbank", "hifigan", "--audio", str(tmp_path / "a.wav"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    assert parity.main() == 0
    record = json.loads(out.read_text())
    assert record["audio"] == "a.wav" and record["machine"]["torch"] == torch.__version__
    assert list(record["cases"]) == ["kaldi-fbank", "hifigan"] and record["cases"]["hifigan"]["f64"]["max"] < 1e-2
    assert "hifigan" in capsys.readouterr().out


def test_the_table_is_made_without_references_from_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, audio):
    monkeypatch.setattr(parity, "audio_at", lambda path, sample_rate: audio(sample_rate))
    outs = tmp_path / "there.json", tmp_path / "here.json"
    monkeypatch.setattr(sys, "argv", ["parity", "--only", "kaldi-fbank", "--save", str(tmp_path / "a.pt"), "--out", str(outs[0])])
    assert parity.main() == 0
    monkeypatch.setattr(parity, "audio_at", lambda *_: pytest.fail("made again"))
    monkeypatch.setitem(parity.REFERENCES, "kaldi-fbank", (*parity.REFERENCES["kaldi-fbank"][:3], lambda: pytest.fail("run again")))
    monkeypatch.setattr(sys, "argv", ["parity", "--only", "kaldi-fbank", "--load", str(tmp_path / "a.pt"), "--out", str(outs[1])])
    assert parity.main() == 0
    there, here = (json.loads(out.read_text())["cases"]["kaldi-fbank"] for out in outs)
    assert there == here and there["ref"]["max"] > 0


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch, audio):
    def missing():
        raise ImportError("no such package")

    monkeypatch.setitem(parity.REFERENCES, "hifigan", ("hifigan", {}, "librosa", missing))
    record = parity.measure("hifigan", audio(22050))
    assert record["reason"] == "no such package" and "ref" not in record


def test_every_front_end_has_a_reference():
    assert {name for name, *_ in parity.REFERENCES.values()} == set(frontends.names())


@pytest.mark.parametrize("n_mels", (80, 128))
def test_parakeet_in_a_ragged_batch(n_mels: int, audio):
    """The reference's own masks: the batch as a whole, lengths and the frames behind them too."""
    transformers = pytest.importorskip("transformers")
    rows = parity.rows_of(audio(16000))
    out = transformers.ParakeetFeatureExtractor(feature_size=n_mels)(
        [r.numpy() for r in rows], sampling_rate=16000, return_tensors="pt"
    )
    got, lengths = frontend("parakeet", n_mels=n_mels)(rows)
    torch.testing.assert_close(got, out["input_features"], rtol=0, atol=5e-4)
    assert lengths.tolist() == out["attention_mask"].sum(1).tolist()


def test_seamless_in_a_ragged_batch(audio):
    transformers = pytest.importorskip("transformers")
    rows = parity.rows_of(audio(16000))
    out = transformers.SeamlessM4TFeatureExtractor()([r.numpy() for r in rows], sampling_rate=16000, return_tensors="pt")
    got, lengths = frontend("seamless-m4t")(rows)
    torch.testing.assert_close(got, out["input_features"], rtol=0, atol=6e-3)
    assert lengths.tolist() == out["attention_mask"].sum(1).tolist()


def test_whisper_over_30_s_in_a_ragged_batch(audio):
    transformers = pytest.importorskip("transformers")
    rows = parity.rows_of(audio(16000))
    extractor = transformers.WhisperFeatureExtractor()
    out = extractor([r.numpy() for r in rows], sampling_rate=16000, return_tensors="pt", return_attention_mask=True)
    got, lengths = frontend("whisper", n_samples=480000)(rows)
    torch.testing.assert_close(got, out["input_features"], rtol=0, atol=1e-4)
    assert lengths.tolist() == out["attention_mask"].sum(1).tolist()


@all_names
def test_rows_do_not_depend_on_their_batch(name: str, audio):
    """Alone, in a batch, in a ragged batch, as a list: bit for bit; behind a row's frames nothing of what lies there."""
    module = frontend(name)
    x = audio(module.sample_rate, 1.5)
    n = len(x)
    batch = torch.stack((x, x.flip(0), 0.5 * x, torch.zeros(n)))
    ends = [n, n - 1234, n // 2, n]
    junk = batch.clone()
    for row, end in zip(junk, ends, strict=True):
        row[end:] = torch.nan
    lengths = torch.tensor(ends)
    plain = module(batch)
    ragged, frames = module(junk, lengths)
    listed, listed_frames = module([row[:end] for row, end in zip(batch, ends, strict=True)])
    assert torch.equal(listed, ragged) and torch.equal(frames, listed_frames)
    assert ragged.shape == plain.shape and ragged.isfinite().all()
    axis = -2 if module.spec.epilogue.time_major else -1
    for i, end in enumerate(ends):
        alone = module(batch[i, :end])
        assert torch.equal(plain[i], module(batch[i]))
        own = ragged[i].narrow(axis, 0, int(frames[i]))
        assert torch.equal(own, alone.narrow(axis, 0, int(frames[i])))
        assert int(frames[i]) == module.output_lengths(end) <= alone.shape[axis]
    assert (frames > 0).all()


@all_names
def test_gradients(name: str, audio):
    """Those of float64; finite, silence and the floor included; the same with lengths, and none behind them."""
    module, double = frontend(name), frontend(name).double()
    x = audio(module.sample_rate, 1.0)
    waveform = torch.stack((x, x, torch.zeros_like(x)))
    lengths = torch.tensor([len(x), len(x) // 2, len(x)])
    for given in (None, lengths):
        leaf = waveform.clone().requires_grad_()
        out = module(leaf) if given is None else module(leaf, given)[0]
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        (gradient,) = torch.autograd.grad((out * weight).masked_fill(out.isinf(), 0).sum(), leaf)
        assert gradient.isfinite().all() and (gradient[0] != 0).any()
        exact = waveform.double().requires_grad_()
        truth = double(exact) if given is None else double(exact, given)[0]
        (expected,) = torch.autograd.grad((truth * weight).masked_fill(truth.isinf(), 0).sum(), exact)
        assert (gradient - expected).norm() < 1e-3 * expected.norm()
        if given is not None:
            assert (gradient[1, len(x) // 2 :] == 0).all()
        with torch.no_grad():
            unrecorded = module(waveform) if given is None else module(waveform, given)[0]
        torch.testing.assert_close(out.detach(), unrecorded, rtol=2e-2, atol=2e-2)


@all_names
def test_int16_is_what_float_is(name: str, audio):
    module = frontend(name)
    x = (audio(module.sample_rate, 1.0) * 32767).round().short()
    assert torch.equal(module(x), module(x.float() / 32768))


@all_names
def test_module_behaviour(name: str, audio):
    module = frontend(name)
    assert not module.state_dict() and isinstance(module, FrontEnd) and module.spec is module.recipe.spec
    shown, recipe = repr(module), module.recipe
    assert all(part in shown for part in (name, str(module.sample_rate), module.layout, module.length_rule))
    assert f"source={recipe.source!r}" in shown and f"compared_with={recipe.compared_with!r}" in shown
    assert recipe.source and recipe.compared_with != "nothing" and (recipe.not_checked != "") == ("not_checked=" in shown)
    x = audio(module.sample_rate, 1.0)
    expected = module(x)
    assert module.n_features == expected.shape[-1 if module.spec.epilogue.time_major else -2]
    for converted in (copy.deepcopy(module).half(), copy.deepcopy(module).bfloat16()):
        assert converted.window.dtype == torch.float32 and torch.equal(converted(x), expected)
    stored = io.BytesIO()
    torch.save(module, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=False)(x), expected)
    with torch.device("meta"):
        module = frontend(name)
    module = module.to_empty(device="cpu")
    assert torch.equal(module(x), expected)
    half = frontend(name, dtype=torch.float16)(x)
    assert torch.equal(half, expected.half())


@all_names
def test_batch_shapes(name: str, audio):
    module = frontend(name)
    x = audio(module.sample_rate, 1.0)
    expected = module(x)
    assert torch.equal(module(x.expand(2, 3, -1)), expected.expand(2, 3, *expected.shape))
    got, frames = module(x.expand(2, 3, -1), torch.full((2, 3), len(x)))
    assert frames.shape == (2, 3) and got.shape == (2, 3, *expected.shape)
    got, frames = module(x, torch.tensor(len(x)))
    assert got.shape == expected.shape and frames.shape == ()


def test_nested_tensors(audio):
    module = frontend("nemo")
    rows = parity.rows_of(audio(16000))
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    for got, expected in zip(module(nested), module(rows), strict=True):
        assert torch.equal(got, expected)
    with pytest.raises(ValueError, match="has its own lengths"):
        module(nested, torch.tensor([1, 2, 3]))


@all_names
def test_warmup(name: str, monkeypatch: pytest.MonkeyPatch):
    """With and without lengths and gradient, of a waveform that leaves something after stacking."""
    module, calls, forward = frontend(name), [], FrontEnd.forward

    def watched(self, waveform, lengths=None):
        out = forward(self, waveform, lengths)
        features = out if lengths is None else out[0]
        calls.append((waveform.dtype, lengths is not None, features.requires_grad))
        assert features.numel()
        return out

    monkeypatch.setattr(FrontEnd, "forward", watched)
    module.warmup(torch.int16)
    module.warmup(torch.float16, gradient=True, lengths=True)
    half = [(torch.float16, lengths, recorded) for lengths in (False, True) for recorded in (False, True)]
    assert calls == [(torch.int16, False, False), *half]


def test_kaldi_options(audio):
    """Each option of Kaldi's, alone, against torchaudio."""
    kaldi = pytest.importorskip("torchaudio.compliance.kaldi")
    x = audio(16000)
    for ours, theirs in (
        ({"n_mels": 40, "f_min": 60.0, "f_max": 7000.0}, {"num_mel_bins": 40, "low_freq": 60.0, "high_freq": 7000.0}),
        ({"f_max": -400.0}, {"high_freq": -400.0}),
        ({"window": "hamming-symmetric"}, {"window_type": "hamming"}),
        ({"window": "hann-symmetric"}, {"window_type": "hanning"}),
        ({"window": "blackman-symmetric"}, {"window_type": "blackman"}),
        ({"window": "rectangular"}, {"window_type": "rectangular"}),
        ({"frame_length": 32.0, "frame_shift": 8.0}, {"frame_length": 32.0, "frame_shift": 8.0}),
        ({"snip_edges": False}, {"snip_edges": False}),
        ({"preemphasis": 0.0}, {"preemphasis_coefficient": 0.0}),
        ({"remove_dc": False}, {"remove_dc_offset": False}),
        ({"power": 1.0}, {"use_power": False}),
        ({"log": False}, {"use_log_fbank": False}),
        ({"sample_rate": 8000}, {"sample_frequency": 8000.0}),
    ):
        expected = kaldi.fbank(x[None] * INT16, **{"sample_frequency": 16000.0, **theirs})
        got = frontend("kaldi-fbank", scale=INT16, **ours)(x)
        assert got.shape == expected.shape, ours
        scale = expected.abs().max() if "log" in ours else 1.0
        torch.testing.assert_close(got / scale, expected / scale, rtol=0, atol=2e-2)
        assert (got - expected).abs().mean() / scale < 5e-5, ours


def test_options_of_others(audio):
    x = audio(16000)
    whisper = frontend("whisper")
    both = torch.stack((x, 0.001 * x))
    assert torch.equal(frontend("whisper", scope="batch")(both)[0], whisper(both)[0])
    assert (frontend("whisper", scope="batch")(both)[1] != whisper(both)[1]).any()
    padded = frontend("nemo", pad_to=16)(x)
    assert padded.shape[-1] % 16 == 0 and (padded[:, 300:] == 0).all()
    assert torch.equal(padded[:, :300], frontend("nemo")(x)[:, :300])
    realtime = frontend("voxtral-realtime", center=False)(x)
    assert realtime.shape == (128, (len(x) - 400) // 160)
    # A frame that begins at sample 0 is one that is centred at 320 behind 120 more samples.
    shifted = frontend("voxtral-realtime")(torch.nn.functional.pad(x, (120, 0)))
    torch.testing.assert_close(realtime[:, :200], shifted[:, 2:202], rtol=0, atol=1e-4)
    statistics = {"mean": (1.0,) * 128, "deviation": (2.0,) * 128}
    torch.testing.assert_close(frontend("gemma4", **statistics)(x), (frontend("gemma4")(x) - 1) / 2)
    same = frontend("vocos", padding="same")
    assert same(audio(24000)).shape[-1] == len(audio(24000)) // 256
    assert frontend("univnet", normalize=True)(audio(24000)).amin() >= -1.0001
    short, frames = frontend("qwen3-asr")([x[:3000], x[:9000]])
    assert frames.tolist() == [50, 56] and short.shape == (2, 128, 100)
    assert torch.equal(short[0, :, :50], frontend("qwen3-asr")(torch.nn.functional.pad(x[:3000], (0, 5000)))[:, :50])


def test_options_against_references(audio):
    """Those that Known.compared_with names, and the batches that have one maximum."""
    transformers, vocos = pytest.importorskip("transformers"), pytest.importorskip("vocos.feature_extractors")
    whisper, librosa = pytest.importorskip("whisper.audio"), pytest.importorskip("librosa")
    x, y, z = audio(16000), audio(24000), audio(22050)
    statistics = {"mean": torch.linspace(-5, 5, 128).tolist(), "deviation": torch.linspace(1, 3, 128).tolist()}
    own = {"per_bin_mean": statistics["mean"], "per_bin_stddev": statistics["deviation"]}
    gemma3n = transformers.Gemma3nAudioFeatureExtractor(**own)(x.numpy(), return_tensors="pt")
    gemma4 = transformers.Gemma4AudioFeatureExtractor(**own)([x.numpy()], return_tensors="pt")
    realtime = transformers.VoxtralRealtimeFeatureExtractor()(x.numpy(), center=False, sampling_rate=16000)
    univnet = transformers.UnivNetFeatureExtractor()
    both, louder = torch.stack((x, 0.001 * x)), torch.stack((z, 0.001 * z))
    decibels = librosa.power_to_db(librosa.feature.melspectrogram(y=louder.numpy()))
    for name, options, waveform, expected in (
        ("whisper", {"scope": "batch"}, both, whisper.log_mel_spectrogram(both)),
        ("librosa-db", {"scope": "batch"}, louder, decibels),
        ("voxtral-realtime", {"center": False}, x, realtime["input_features"][0]),
        ("gemma3n", statistics, x, gemma3n["input_features"][0]),
        ("gemma4", statistics, x, gemma4["input_features"][gemma4["input_features_mask"]]),
        ("vocos", {"padding": "same"}, y, vocos.MelSpectrogramFeatures(padding="same")(y[None])[0]),
        ("univnet", {"normalize": True}, y, univnet.normalize(univnet.mel_spectrogram(y.numpy()))),
    ):
        got, expected = frontend(name, **options)(waveform), torch.as_tensor(expected)
        assert got.shape == expected.shape, name
        difference = (got.double() - expected.double()).abs()
        mean, largest, *_ = GATES[name]
        assert difference.mean() <= mean and difference.max() <= largest, (name, difference.mean(), difference.max())


def test_lengths_too_short_for_a_frame():
    module = frontend("nemo")
    got, frames = module(torch.randn(3, 4000), torch.tensor([4000, 100, 0]))
    assert frames.tolist() == [25, 0, 0] and (got[1:] == 0).all()
    got, frames = frontend("kaldi-fbank")(torch.randn(2, 4000), torch.tensor([4000, 399]))
    assert frames.tolist() == [23, 0] and (got[1] == 0).all()


def test_what_is_refused():
    module = frontend("whisper")
    x = torch.randn(16000)
    assert torch.equal(module(x, sampling_rate=16000), module(x))
    with pytest.raises(ValueError, match="16000 Hz, got sampling_rate=22050"):
        module(x, sampling_rate=22050)
    with pytest.raises(ValueError, match="no front-end is called 'wisper'"):
        frontend("wisper")
    with pytest.raises(ValueError, match="has no option 'mels'; it has n_mels"):
        frontend("whisper", mels=80)
    with pytest.raises(ValueError, match="window must be one of"):
        frontend("kaldi-fbank", window="hann2")
    with pytest.raises(ValueError, match="dtype must be"):
        frontend("whisper", dtype=torch.int16)
    with pytest.raises(ValueError, match=r"must hold 1-D tensors, got 2 tensors of shapes \(2, 100\), \(80,\)"):
        module([torch.zeros(2, 100), torch.zeros(80)])
    with pytest.raises(ValueError, match="at least one, got an empty list"):
        module([])
    with pytest.raises(TypeError, match="must hold tensors, got ndarray: use torch.as_tensor"):
        module([x, x.numpy()])
    with pytest.raises(TypeError, match="must hold tensors, got float"):
        module(x.tolist())
    with pytest.raises(ValueError, match=r"jagged, of shape \(batch, time\); got one of 3 axes and layout torch.jagged"):
        module(torch.nested.nested_tensor([torch.zeros(2, 100), torch.zeros(2, 80)], layout=torch.jagged))
    with pytest.raises(ValueError, match=r"jagged, of shape \(batch, time\); got one of 2 axes and layout torch.strided"):
        module(torch.nested.nested_tensor([torch.zeros(100), torch.zeros(80)]))
    with pytest.raises(TypeError, match="must be a torch.Tensor"):
        module(x.numpy())
    with pytest.raises(ValueError, match="too short"):
        module(x[:150])
    with pytest.raises(ValueError, match="input is empty"):
        frontend("qwen3-asr")(x[:0])


@pytest.mark.parametrize(
    ("name", "option", "value", "message"),
    (
        ("whisper", "n_samples", -5, "n_samples must be a positive integer or None, got -5"),
        ("whisper", "n_samples", "x", "n_samples must be a positive integer or None, got 'x'"),
        ("whisper", "n_samples", 200, "n_samples must be at least 201, .* got 200"),
        ("whisper", "n_mels", True, "n_mels must be a positive integer, got True"),
        ("whisper", "scope", "all", "scope must be one of .* got 'all'"),
        ("nemo", "pad_to", 0, "pad_to must be a positive integer, got 0"),
        ("nemo", "time_major", 1, "time_major must be True or False, got 1"),
        ("ast", "n_frames", 0, "n_frames must be a positive integer or None, got 0"),
        ("ast", "deviation", 0, "deviation must not be 0, got 0"),
        ("hifigan", "deviation", 0.0, "deviation must not be 0, got 0.0"),
        ("hifigan", "hop_length", 2048, "hop_length must be at most n_fft = 1024, got 2048"),
        ("hifigan", "mean", float("nan"), "mean must be a finite number, got nan"),
        ("gemma3n", "mean", (1.0, 2.0), r"mean must hold n_mels = 128 finite numbers, got 2: \(1.0, 2.0\)"),
        ("gemma3n", "mean", 3.0, "mean must hold n_mels = 128 numbers, got 3.0"),
        ("gemma4", "deviation", ("1",) * 128, "deviation must hold n_mels = 128 finite numbers, got 128: "),
        ("gemma4", "deviation", (1.0,) * 127 + (0.0,), "deviation must not be 0, got 0 for mel 127"),
        ("librosa-db", "top_db", "a", "top_db must be a finite number or None, got 'a'"),
        ("librosa-db", "top_db", -1, "top_db must not be negative, got -1"),
        ("librosa", "scope", "all", "scope must be one of .* got 'all'"),  # though nothing would use it
        ("panns", "mel_scale", "mel", "mel_scale must be one of .* got 'mel'"),
        ("kaldi-fbank", "window", 3, "window must be a string, got 3"),
        ("kaldi-fbank", "f_max", None, "f_max must be a finite number, got None"),
        ("kaldi-fbank", "f_max", -9000.0, "f_max=-9000.0: f_min must be at most f_max"),
        ("kaldi-fbank", "frame_length", -1.0, "frame_length must be at least one sample long, got -1.0 ms at 16000 Hz"),
        ("kaldi-fbank", "frame_shift", 0.01, "frame_shift must be at least one sample long, got 0.01 ms at 16000 Hz"),
        ("icefall", "frame_shift", 30.0, "frame_shift must be at most frame_length = 25.0 ms .* got 30.0"),
        ("loss-dac", "window_length", 2, "window_length=2: hop_length must be a positive integer"),
    ),
)
def test_values_that_are_refused(name: str, option: str, value, message: str):
    """At construction, with the name of the front-end and of the option."""
    with pytest.raises(ValueError, match=f"^front-end {name!r}.*{message}"):
        frontend(name, **{option: value})


@all_names
def test_options_of_another_kind(name: str):
    """Every option of every front-end, by its annotation."""
    for option, default in frontends.options(name).items():
        for value in (b"x", object(), [default], float("nan")):
            with pytest.raises(ValueError, match=f"^front-end {name!r}.*{option} must"):
                frontends.recipe(name, **{option: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    (
        ({"sample_rate": 0}, "sample_rate must be a positive integer, got 0"),
        ({"stack": 0}, "stack must be a positive integer, got 0"),
        ({"sample_multiple": 1.5}, "sample_multiple must be a positive integer, got 1.5"),
        ({"min_samples": -1}, "min_samples must be a positive integer, got -1"),
        ({"n_samples": 0}, "n_samples must be a positive integer, got 0"),
        ({"mean": ()}, r"mean must hold n_mels = 80 finite numbers, got 0: \(\)"),
        ({"deviation": (0.0,) * 80}, "deviation must not be 0, got 0 for mel 0"),
        ({"stack": 2}, "stack=2 needs a time-major epilogue"),
        ({"bank": frontends.recipe("cosyvoice2").bank}, "bank must be one for the spec's n_fft = 1024, got n_fft = 1920"),
    ),
)
def test_recipes_that_are_refused(fields: dict, message: str):
    with pytest.raises(ValueError, match=message):
        replace(frontends.recipe("hifigan"), **fields)


def test_statistics_in_other_containers(audio):
    expected = frontends.recipe("gemma4", mean=(1.0,) * 128)
    for held in ([1] * 128, torch.ones(128), torch.ones(128).numpy()):
        assert frontends.recipe("gemma4", mean=held) == expected


def test_what_was_compared_is_listed(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["frontends", "icefall"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "compared with: torchaudio.compliance.kaldi.fbank" in lines
    assert any(line.startswith("not checked: its own code") for line in lines)
    assert cli.main(["frontends", "lasr"]) == 0
    assert "not checked" not in capsys.readouterr().out
    own = FrontEnd(replace(frontends.recipe("icefall"), source="", compared_with="nothing", not_checked=""))
    assert "compared_with='nothing'" in repr(own) and "source=" not in repr(own)


def test_names_and_options():
    assert flashmel.frontend is frontend and flashmel.frontends is frontends
    assert len(frontends.names()) >= 45 and frontends.names() == sorted(frontends.names())
    assert frontends.options("whisper-large-v3")["n_mels"] == 128
    with pytest.raises(ValueError, match="no front-end"):
        frontends.options("x")
    assert frontends.options("gemma3n") == {"mean": None, "deviation": None}
    for name in frontends.names():
        assert frontends.recipe(name) == frontends.recipe(name, **frontends.options(name)), name


@all_names
def test_empty_batches(name: str):
    module = frontend(name)
    assert module(torch.zeros(0, 16000)).shape[0] == 0
    features, frames = module(torch.zeros(2, 0, 16000), torch.zeros(2, 0, dtype=torch.int64))
    assert features.shape[:2] == frames.shape == (2, 0)


@pytest.mark.parametrize("name", ("nemo", "gemma3n", "granite-speech"))
def test_compiled_without_a_break(name: str, audio):
    module = frontend(name)
    torch._dynamo.reset()  # another module's code counts as a recompilation of this one
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.stack((audio(16000, 1.0), audio(16000, 1.0).flip(0)))
    lengths = torch.tensor([16000, 9000])
    torch.testing.assert_close(compiled(x), module(x), rtol=1e-4, atol=1e-4)
    got, frames = compiled(x, lengths)
    expected, counts = module(x, lengths)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(frames, counts)


def test_a_list_of_two_dtypes_is_refused():
    x = torch.zeros(4000)
    with pytest.raises(ValueError, match="tensors of one dtype, got torch.float32, torch.int16"):
        frontends.frontend("kaldi-fbank")([x, x.short()])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_with_holes_is_refused():
    holes = torch.nested.nested_tensor_from_jagged(torch.zeros(10000), torch.tensor([0, 4000, 10000]), torch.tensor([3000, 5000]))
    with pytest.raises(ValueError, match="one behind the other"):
        frontends.frontend("kaldi-fbank")(holes)


@pytest.mark.parametrize("name", ["whisper", "gemma3n", "granite-speech", "qwen3-asr", "seamless-m4t"])
def test_an_exported_front_end_takes_other_lengths(name):
    """Those too that need no filling up, or have frames left over, or another side of a least length."""
    module = frontends.frontend(name, **({"n_samples": 48000} if name == "whisper" else {}))
    sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    program = torch.export.export(module, (torch.zeros(2, 13001),), dynamic_shapes=sizes).module()
    for length in (7001, 12800, 12960, 48000):
        x = noise(2, length)
        torch.testing.assert_close(program(x), module(x), rtol=1e-4, atol=1e-3)


def test_filters_up_to_torchaudios_nyquist():
    torchaudio = pytest.importorskip("torchaudio")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = frontends.frontend("vocos", sample_rate=11025)
    expected = torchaudio.functional.melscale_fbanks(513, 0.0, 5512.0, 100, 11025)
    assert torch.equal(module.fb, expected)
