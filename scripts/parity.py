#!/usr/bin/env python3
"""Compare every front-end with its executable reference and with float64, on a CPU or a GPU, and write the figures as JSON.

    python scripts/parity.py                         # synthetic speech -> benchmarks/parity-cpu.json
    python scripts/parity.py --audio jfk.flac        # a recording, at each front-end's rate -> benchmarks/parity-cpu-jfk.json
    python scripts/parity.py --device cuda           # -> benchmarks/parity-cuda.json

Three rows of different lengths go through a front-end as one batch; each is compared with what the reference makes of it alone.
`ref` is the mean and the largest absolute difference from the reference over the frames that the front-end calls valid, `f64` the
same from the front-end in float64 (`.double()`, on the CPU). A reference whose package is missing is left out, with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import math
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from flashmel import frontends  # noqa: E402
from flashmel.frontends import FrontEnd, frontend  # noqa: E402


def speech_like(sample_rate: int, seconds: float = 3.0, seed: int = 0) -> Tensor:
    """Vowels by formants, a chirp, clicks, noise and digital silence, (time,) in [-1, 1]."""
    n = round(sample_rate * seconds)
    t = np.arange(n) / sample_rate
    generator = np.random.default_rng(seed)
    pitch = 120 * (1 + 0.1 * np.sin(2 * np.pi * 2 * t))
    phase = 2 * np.pi * np.cumsum(pitch) / sample_rate
    vowel = np.zeros(n)
    for k in range(1, 40):  # harmonics under formants that move
        f = k * pitch
        gain = sum(
            np.exp(-(((f - c * (1 + 0.2 * np.sin(2 * np.pi * 1.5 * t + i))) / 200) ** 2)) for i, c in enumerate((600, 1400, 2600))
        )
        vowel += np.where(f < 0.45 * sample_rate, gain / k**0.5, 0) * np.sin(k * phase)
    x = 0.3 * vowel * np.clip(np.sin(2 * np.pi * 2.5 * t), 0, 1)
    x += 0.05 * np.sin(2 * np.pi * (200 * t + 0.5 * (0.4 * sample_rate - 200) / seconds * t**2)) * (t > 0.6 * seconds)
    x += 0.2 * generator.standard_normal(n) * np.exp(-(((t - 0.45 * seconds) / 0.05) ** 2))
    x += 1e-3 * generator.standard_normal(n)
    x[:: max(1, n // 5)] += 0.5
    x[int(0.8 * n) : int(0.87 * n)] = 0
    return torch.from_numpy(np.clip(x, -1, 1).astype(np.float32))


# ------------------------------------------------------------------------------------------- references: a row to its features

Row = np.ndarray
Reference = Callable[[Row], "np.ndarray | Tensor"]


def _transformers(name: str, call: Callable[[Any, Row], Any], **config: Any) -> Callable[[], Reference]:
    def make() -> Reference:
        try:
            extractor = getattr(importlib.import_module("transformers"), name)(**config)
        except AttributeError as error:  # an older version
            raise ImportError(str(error)) from error
        return lambda row: call(extractor, row)

    return make


def _field(field: str, **keywords: Any) -> Callable[[Any, Row], Any]:
    return lambda extractor, row: extractor(row, return_tensors="np", sampling_rate=extractor.sampling_rate, **keywords)[field][0]


def _whisper(n_mels: int) -> Callable[[], Reference]:
    def make() -> Reference:
        audio = importlib.import_module("whisper.audio")
        return lambda row: audio.log_mel_spectrogram(torch.from_numpy(row), n_mels)

    return make


def _gemma4(extractor: Any, row: Row) -> np.ndarray:
    """The frames that its mask calls valid; others come from zeros that fill up the row."""
    out = extractor([row], return_tensors="np")
    return out["input_features"][0][out["input_features_mask"][0]]


def _granite() -> Reference:
    extractor = importlib.import_module("transformers").GraniteSpeechFeatureExtractor()
    return lambda row: extractor(torch.from_numpy(row))["input_features"][0]


def _parakeet(time_major: bool = True) -> Callable[[Any, Row], Any]:
    def call(extractor: Any, row: Row) -> Any:
        out = extractor(row, sampling_rate=16000, return_tensors="pt")["input_features"][0]
        return out if time_major else out.mT

    return call


def _nemo_none() -> Reference:
    """Before NeMo's normalisation, by its formula."""
    librosa = importlib.import_module("librosa")
    bank = torch.from_numpy(librosa.filters.mel(sr=16000, n_fft=512, n_mels=80))

    def call(row: Row) -> Tensor:
        x = torch.from_numpy(row)
        x = torch.cat((x[:1], x[1:] - 0.97 * x[:-1]))
        window = torch.hann_window(400, periodic=False)
        power = torch.stft(x, 512, 160, 400, window, pad_mode="constant", return_complex=True).abs().square()
        mel = (bank @ power + 2.0**-24).log()
        mel[:, len(row) // 160 :] = 0
        return mel

    return call


def _kaldi(
    scale: float = 1.0, mean: float = 0.0, deviation: float = 1.0, cmn: bool = False, **keywords: Any
) -> Callable[[], Reference]:
    def make() -> Reference:
        kaldi = importlib.import_module("torchaudio.compliance.kaldi")

        def call(row: Row) -> Tensor:
            features = kaldi.fbank(torch.from_numpy(row)[None] * scale, sample_frequency=16000, **keywords)
            features = features - features.mean(0) if cmn else features
            return (features - mean) / deviation

        return call

    return make


def _audio_mae() -> Reference:
    plain = _kaldi(window_type="hanning", htk_compat=True, num_mel_bins=128)()

    def call(row: Row) -> Tensor:
        features = torch.as_tensor(plain(row - row.mean()))
        features = torch.nn.functional.pad(features, (0, 0, 0, 1024 - len(features)))[:1024]
        return (features + 4.2677393) / (2 * 4.5689974)

    return call


def _native_kaldi() -> Reference:
    knf = importlib.import_module("kaldi_native_fbank")
    options = knf.FbankOptions()
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = 80

    def call(row: Row) -> np.ndarray:
        fbank = knf.OnlineFbank(options)
        fbank.accept_waveform(16000, row.tolist())
        fbank.input_finished()
        return np.stack([fbank.get_frame(i) for i in range(fbank.num_frames_ready)])

    return call


def _vocoder(
    sample_rate: int,
    n_mels: int = 80,
    n_fft: int = 1024,
    hop: int = 256,
    f_max: float | None = 8000.0,
    mean: float = 0.0,
    deviation: float = 1.0,
) -> Callable[[], Reference]:
    """The formula that hifi-gan, BigVGAN, Matcha and CosyVoice have in common."""

    def make() -> Reference:
        librosa = importlib.import_module("librosa")
        bank = torch.from_numpy(librosa.filters.mel(sr=sample_rate, n_fft=n_fft, n_mels=n_mels, fmin=0, fmax=f_max))

        def call(row: Row) -> Tensor:
            side = int((n_fft - hop) / 2)
            x = torch.nn.functional.pad(torch.from_numpy(row)[None], (side, side), mode="reflect")
            bins = torch.stft(x, n_fft, hop, n_fft, torch.hann_window(n_fft), center=False, return_complex=True)
            magnitude = torch.sqrt(torch.view_as_real(bins).pow(2).sum(-1) + 1e-9)
            return ((torch.log(torch.clamp(bank @ magnitude, min=1e-5)) - mean) / deviation)[0]

        return call

    return make


def _centred(
    n_fft: int, hop: int, bank: Callable[[], Tensor], finish: Callable[[Tensor, Tensor], Tensor], **keywords: Any
) -> Callable[[], Reference]:
    """A centred torch.stft, a filterbank (n_mels, n_freqs), and a formula of it and |X|**2."""

    def make() -> Reference:
        filters = bank()
        window = torch.hann_window(n_fft)
        return lambda row: finish(
            filters, torch.stft(torch.from_numpy(row), n_fft, hop, n_fft, window, return_complex=True, **keywords).abs().square()
        )

    return make


def _librosa_bank(*arguments: Any) -> Callable[[], Tensor]:
    def make() -> Tensor:
        sr, n_fft, n_mels, low, high = arguments
        return torch.from_numpy(
            importlib.import_module("librosa").filters.mel(sr=sr, n_fft=n_fft, n_mels=n_mels, fmin=low, fmax=high)
        )

    return make


def _torchaudio_bank(sample_rate: int, n_fft: int, n_mels: int, low: float, high: float) -> Callable[[], Tensor]:
    functional = "torchaudio.functional"
    return lambda: importlib.import_module(functional).melscale_fbanks(n_fft // 2 + 1, low, high, n_mels, sample_rate).T


def _vocos(floor: float) -> Callable[[], Reference]:
    def make() -> Reference:
        extractors = importlib.import_module("vocos.feature_extractors")
        module = extractors.MelSpectrogramFeatures()
        if floor == 1e-7:
            return lambda row: module(torch.from_numpy(row)[None])[0]
        return lambda row: module.mel_spec(torch.from_numpy(row)).clamp(min=floor).log()

    return make


def _clap(truncation: str, table: str) -> Callable[[], Reference]:
    def make() -> Reference:
        extractor = importlib.import_module("transformers").ClapFeatureExtractor(truncation=truncation, frequency_min=50)
        return lambda row: extractor._np_extract_fbank_features(row, getattr(extractor, table))

    return make


def _panns() -> Reference:
    stft = importlib.import_module("torchlibrosa.stft")
    spectrogram = stft.Spectrogram(n_fft=1024, hop_length=320, freeze_parameters=True)
    mel = stft.LogmelFilterBank(sr=32000, n_fft=1024, n_mels=64, fmin=50, fmax=14000, top_db=None, freeze_parameters=True)
    return lambda row: mel(spectrogram(torch.from_numpy(row)[None]))[0, 0]


def _librosa(decibels: bool) -> Callable[[], Reference]:
    def make() -> Reference:
        librosa = importlib.import_module("librosa")

        def call(row: Row) -> np.ndarray:
            mel = librosa.feature.melspectrogram(y=row)
            return librosa.power_to_db(mel) if decibels else mel

        return call

    return make


def _encodec() -> Reference:
    bank = _torchaudio_bank(24000, 1024, 64, 64.0, 12000.0)()
    window = torch.hann_window(1024)

    def call(row: Row) -> Tensor:
        x = torch.nn.functional.pad(torch.from_numpy(row)[None], (384, 384), mode="reflect")[0]
        power = torch.stft(x, 1024, 256, 1024, window, center=False, return_complex=True).abs().square()
        return (bank @ power / window.square().sum() + 1e-5).log10()

    return call


def _auraloss() -> Reference:
    loss = importlib.import_module("auraloss.freq").MelSTFTLoss(44100)
    return lambda row: (loss.fb @ loss.stft(torch.from_numpy(row)[None])[0])[0].log()


# (name, options) of a front-end, the reference's package, and how to make the reference.
REFERENCES: dict[str, tuple[str, dict[str, Any], str, Callable[[], Reference]]] = {
    "whisper": ("whisper", {}, "openai-whisper", _whisper(80)),
    "whisper-large-v3": ("whisper-large-v3", {}, "openai-whisper", _whisper(128)),
    "whisper over 30 s": (
        "whisper", {"n_samples": 480000}, "transformers", _transformers("WhisperFeatureExtractor", _field("input_features")),
    ),
    "voxtral-realtime": (
        "voxtral-realtime", {}, "transformers", _transformers("VoxtralRealtimeFeatureExtractor", _field("input_features")),
    ),
    "qwen2-audio": (
        "qwen2-audio", {}, "transformers", _transformers("WhisperFeatureExtractor", _field("input_features"), feature_size=128),
    ),
    "qwen3-asr": (
        "qwen3-asr", {}, "transformers", _transformers("Qwen3ASRFeatureExtractor", _field("input_features", padding=True)),
    ),
    "nemo": ("nemo", {}, "transformers", _transformers("ParakeetFeatureExtractor", _parakeet(False))),
    "nemo-128": ("nemo-128", {}, "transformers", _transformers("ParakeetFeatureExtractor", _parakeet(False), feature_size=128)),
    "nemo-none": ("nemo-none", {}, "librosa", _nemo_none),
    "parakeet": ("parakeet", {}, "transformers", _transformers("ParakeetFeatureExtractor", _parakeet())),
    "parakeet-128": ("parakeet-128", {}, "transformers", _transformers("ParakeetFeatureExtractor", _parakeet(), feature_size=128)),
    "kaldi-fbank": ("kaldi-fbank", {}, "torchaudio", _kaldi()),
    "kaldi-fbank by kaldi": ("kaldi-fbank", {"n_mels": 80}, "kaldi-native-fbank", _native_kaldi),
    "seamless-m4t": ("seamless-m4t", {}, "transformers", _transformers("SeamlessM4TFeatureExtractor", _field("input_features"))),
    "w2v-bert": (
        "w2v-bert", {}, "transformers", _transformers("SeamlessM4TFeatureExtractor", _field("input_features"), padding_value=1.0),
    ),
    "speech-to-text": (
        "speech-to-text", {}, "transformers", _transformers("Speech2TextFeatureExtractor", _field("input_features")),
    ),
    "ast": ("ast", {}, "transformers", _transformers("ASTFeatureExtractor", _field("input_values"))),
    "audio-mae": ("audio-mae", {}, "torchaudio", _audio_mae),
    "beats": ("beats", {}, "torchaudio", _kaldi(32768.0, 15.41663, 2 * 6.55582, num_mel_bins=128)),
    "icefall": ("icefall", {}, "torchaudio", _kaldi(num_mel_bins=80, high_freq=-400.0, snip_edges=False)),
    "wenet": ("wenet", {}, "torchaudio", _kaldi(32768.0, num_mel_bins=80)),
    "wespeaker": ("wespeaker", {}, "torchaudio", _kaldi(32768.0, cmn=True, num_mel_bins=80, window_type="hamming")),
    "campplus": ("campplus", {}, "torchaudio", _kaldi(cmn=True, num_mel_bins=80)),
    "phi-4-multimodal": (
        "phi-4-multimodal", {}, "transformers", _transformers("Phi4MultimodalFeatureExtractor", _field("audio_input_features")),
    ),
    "gemma3n": ("gemma3n", {}, "transformers", _transformers("Gemma3nAudioFeatureExtractor", _field("input_features"))),
    "gemma4": ("gemma4", {}, "transformers", _transformers("Gemma4AudioFeatureExtractor", _gemma4)),
    "granite-speech": ("granite-speech", {}, "transformers", _granite),
    "lasr": ("lasr", {}, "transformers", _transformers("LasrFeatureExtractor", _field("input_features"))),
    "hifigan": ("hifigan", {}, "librosa", _vocoder(22050)),
    "bigvgan-22k": ("bigvgan-22k", {}, "librosa", _vocoder(22050)),
    "bigvgan-24k": ("bigvgan-24k", {}, "librosa", _vocoder(24000, 100, f_max=12000.0)),
    "bigvgan-44k": ("bigvgan-44k", {}, "librosa", _vocoder(44100, 128, f_max=None)),
    "cosyvoice2": ("cosyvoice2", {}, "librosa", _vocoder(24000, 80, 1920, 480)),
    "matcha": ("matcha", {}, "librosa", _vocoder(22050, mean=-5.536622, deviation=2.116101)),
    "vocos": ("vocos", {}, "vocos", _vocos(1e-7)),
    "f5-tts": ("f5-tts", {}, "vocos", _vocos(1e-5)),
    "tacotron2": (
        "tacotron2", {}, "librosa",
        _centred(1024, 256, _librosa_bank(22050, 1024, 80, 0, 8000), lambda fb, power: (fb @ power.sqrt()).clamp(min=1e-5).log()),
    ),
    "univnet": ("univnet", {}, "transformers", _transformers("UnivNetFeatureExtractor", lambda e, row: e.mel_spectrogram(row))),
    "speecht5": (
        "speecht5", {}, "transformers", _transformers("SpeechT5FeatureExtractor", lambda e, row: e._extract_mel_features(row)),
    ),
    "clap-fusion": ("clap-fusion", {}, "transformers", _clap("fusion", "mel_filters")),
    "clap-unfused": ("clap-unfused", {}, "transformers", _clap("rand_trunc", "mel_filters_slaney")),
    "panns": ("panns", {}, "torchlibrosa", _panns),
    "librosa": ("librosa", {}, "librosa", _librosa(False)),
    "librosa-db": ("librosa-db", {}, "librosa", _librosa(True)),
    "loss-hifigan": ("loss-hifigan", {}, "librosa", _vocoder(22050, f_max=None)),
    "loss-vocos": ("loss-vocos", {}, "vocos", _vocos(1e-7)),
    "loss-dac": (
        "loss-dac", {}, "librosa",
        _centred(2048, 512, _librosa_bank(44100, 2048, 320, 0, None), lambda b, power: (b @ power.sqrt()).clamp(min=1e-5).log10()),
    ),
    "loss-encodec": ("loss-encodec", {}, "torchaudio", _encodec),
    "loss-auraloss": ("loss-auraloss", {}, "auraloss", _auraloss),
}  # fmt: skip


def rows_of(audio: Tensor) -> list[Tensor]:
    """Three rows: all of it, an odd part of it and a short one."""
    return [audio, audio[len(audio) // 7 : len(audio) // 7 + int(0.61 * len(audio)) | 1], audio[: len(audio) // 3]]


def _frames(features: Tensor, module: FrontEnd) -> Tensor:
    return features if module.spec.epilogue.time_major else features.mT


def measure(case: str, audio: Tensor, device: str = "cpu", stored: dict[str, list[Tensor]] | None = None) -> dict[str, Any]:
    """The figures of one case: `ref` and `f64`, each mean and largest error over all valid frames; `reason` where no `ref`.

    What the references make of the rows is kept in ``stored``, by case, and taken from there where it is.

    Raises:
        AssertionError: the reference's features of a row have another shape than the front-end's.
    """
    name, options, package, make = REFERENCES[case]
    module = frontend(name, **options).to(device)
    double = frontend(name, **options).double()
    rows = rows_of(audio)
    features, lengths = module([row.to(device) for row in rows])
    features = _frames(features.cpu(), module)
    exact, _ = double(rows)
    exact = _frames(exact, module)
    valid = [own[:n] for own, n in zip(features, lengths.tolist(), strict=True)]
    record: dict[str, Any] = {"front-end": name, "options": options, "reference": package}
    record["f64"] = _errors(valid, [own[: len(v)] for own, v in zip(exact, valid, strict=True)])
    stored = {} if stored is None else stored
    if case not in stored:
        try:
            reference = make()
        except ImportError as error:
            return record | {"reason": str(error)}
        stored[case] = [torch.as_tensor(reference(row.numpy())).clone() for row in rows]
    expected = []
    for row, v, found in zip(rows, valid, stored[case], strict=True):
        alone = module(row.to(device))
        assert found.shape == alone.shape, f"{case}: the reference's shape is {tuple(found.shape)}, ours {tuple(alone.shape)}"
        expected.append(_frames(found, module)[: len(v)])
    return record | {"ref": _errors(valid, expected)}


def _errors(got: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    pairs = zip(got, expected, strict=True)
    difference = torch.cat([(a.double() - b.double()).abs().flatten() for a, b in pairs])
    return {"mean": float(difference.mean()), "max": float(difference.max())}


def audio_at(path: str | None, sample_rate: int) -> Tensor:
    """The recording at this rate, or synthetic speech."""
    if path is None:
        return speech_like(sample_rate)
    import soundfile
    from scipy.signal import resample_poly

    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    common = math.gcd(rate, sample_rate)
    mono = resample_poly(samples.mean(1), sample_rate // common, rate // common).astype(np.float32)
    return torch.from_numpy(mono)


def _machine(device: str) -> dict[str, Any]:
    cpu = platform.processor()
    with contextlib.suppress(OSError, StopIteration):
        cpu = next(line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    found: dict[str, Any] = {"cpu": cpu, "torch": torch.__version__, "python": platform.python_version()}
    if device != "cpu":
        found["gpu"] = torch.cuda.get_device_name(device)
    for package in ("transformers", "torchaudio", "librosa"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--audio", help="a recording instead of synthetic speech")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", help="cases instead of all")
    parser.add_argument("--out", type=Path, help="instead of benchmarks/parity-DEVICE[-AUDIO].json; - writes none")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the audio at all rates, and what the references made of it")
    parser.add_argument("--load", type=Path, metavar="FILE", help="take both from there, on a machine without the references")
    args = parser.parse_args()
    quiet()
    stored = torch.load(args.load) if args.load else {"audio": {}, "references": {}}
    records = {}
    print(f"{'front-end':22} {'reference':20} {'ref mean':>9} {'ref max':>9} {'f64 mean':>9} {'f64 max':>9}")
    for case in args.only or REFERENCES:
        sample_rate = frontends.recipe(REFERENCES[case][0]).sample_rate
        if sample_rate not in stored["audio"]:
            stored["audio"][sample_rate] = audio_at(args.audio, sample_rate)
        record = records[case] = measure(case, stored["audio"][sample_rate], args.device, stored["references"])
        ref = record.get("ref", {"mean": math.nan, "max": math.nan})
        figures = (*ref.values(), *record["f64"].values())
        print(f"{case:22} {record['reference']:20} " + " ".join(f"{value:9.1e}" for value in figures), record.get("reason", ""))
    if args.save:
        torch.save(stored, args.save)
    named = "" if args.audio is None else f"-{Path(args.audio).stem}"
    out = args.out or ROOT / "benchmarks" / f"parity-{args.device.split(':')[0]}{named}.json"
    if str(out) != "-":
        audio = "synthetic" if args.audio is None else Path(args.audio).name
        out.write_text(json.dumps({"machine": _machine(args.device), "audio": audio, "cases": records}, indent=1) + "\n")
    return 0


def quiet() -> None:
    """Without the references' advice."""
    import logging

    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


if __name__ == "__main__":
    sys.exit(main())
