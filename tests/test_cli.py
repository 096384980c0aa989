"""The command line: every subcommand through ``main([...])``, on files synthesised here."""

from __future__ import annotations

import importlib
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashmel import MelSpectrogram, __version__, cli, frontends, fused
from flashmel.jit import bundle, compiler, driver, toolchain
from flashmel.plan import ARCHITECTURES, architecture

soundfile = pytest.importorskip("soundfile")
pytest.importorskip("matplotlib")
pytest.importorskip("scipy")

RATE = 16_000


@pytest.fixture
def sound() -> np.ndarray:
    """Half a second of two different channels, (time, 2)."""
    t = np.arange(RATE // 2) / RATE
    noise = np.random.default_rng(0).normal(size=t.size)
    return np.stack([0.5 * np.sin(2 * np.pi * 440 * t), 0.1 * noise], axis=1).astype(np.float32)


@pytest.fixture
def wav(tmp_path: Path, sound: np.ndarray) -> Path:
    path = tmp_path / "sound.wav"
    soundfile.write(path, sound, RATE, subtype="FLOAT")
    return path


def mel(*args: object) -> int:
    return cli.main(["mel", "--device", "cpu", *map(str, args)])


def rows(printed: str) -> dict[str, str]:
    """What stands right of each label."""
    return dict(re.split(r"  +", line, maxsplit=1) for line in printed.splitlines())


def gpus() -> dict[str, torch.device | None]:
    """Those of this machine, by what doctor adds to a label; None if there are none."""
    found = [torch.device("cuda", n) for n in range(torch.cuda.device_count())]
    return {f", {gpu}": gpu for gpu in found} or {"": None}


def module(rate: int = RATE, **options: Any) -> MelSpectrogram:
    """The module with what the command takes where nothing is said, at 16 kHz."""
    return MelSpectrogram(rate, **{"n_fft": 512, "win_length": 400, "hop_length": 160, "n_mels": 80, **options})


def transformed(x: np.ndarray, **options: Any) -> np.ndarray:
    return module(**options)(torch.from_numpy(np.ascontiguousarray(x))).numpy()


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "mp3"])
def test_reads(tmp_path: Path, sound: np.ndarray, suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    if suffix.upper() not in soundfile.available_formats():
        pytest.skip(f"this libsndfile has no {suffix}")
    source, out = tmp_path / f"a.{suffix}", tmp_path / "a.npy"
    soundfile.write(source, sound, RATE)
    assert mel(source, "-o", out) == 0
    decoded, _ = soundfile.read(source, dtype="float32")
    expected = transformed(decoded.mean(axis=1))  # an mp3 read in blocks differs in its last bits
    np.testing.assert_allclose(np.load(out), expected, rtol=1e-5, atol=1e-6 * expected.max())
    printed = capsys.readouterr()
    assert f"{np.load(out).shape}, {np.load(out).shape[1]} frames, {len(decoded) / RATE:.3f} s" in printed.out
    assert printed.err == ""


def test_keeps_channels(tmp_path: Path, wav: Path, sound: np.ndarray) -> None:
    assert mel(wav, "-o", tmp_path / "a.npy", "--channels", "keep") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), transformed(sound.T))


def test_blocks_join(tmp_path: Path) -> None:
    """A file longer than one block of reading."""
    x = np.random.default_rng(1).uniform(-0.5, 0.5, (1 << 20) + 1000).astype(np.float32)
    soundfile.write(tmp_path / "long.wav", x, RATE, subtype="FLOAT")
    assert mel(tmp_path / "long.wav", "-o", tmp_path / "a.npy") == 0
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), transformed(x))


def test_resamples(tmp_path: Path) -> None:
    tone = [np.sin(2 * np.pi * 1000 * np.arange(rate) / rate).astype(np.float32) for rate in (44_100, RATE)]
    soundfile.write(tmp_path / "a.wav", tone[0], 44_100, subtype="FLOAT")
    assert mel(tmp_path / "a.wav", "-o", tmp_path / "a.npy", "--resample", RATE) == 0
    got, expected = np.load(tmp_path / "a.npy"), transformed(tone[1])
    assert got.shape == expected.shape
    row = expected.sum(axis=1).argmax()
    np.testing.assert_allclose(got[row, 5:-5], expected[row, 5:-5], rtol=1e-2)


def test_defaults_follow_the_rate(tmp_path: Path, sound: np.ndarray) -> None:
    soundfile.write(tmp_path / "a.wav", sound[:, 0], 44_100, subtype="FLOAT")
    assert mel(tmp_path / "a.wav", "-o", tmp_path / "a.npy") == 0
    expected = module(44_100, n_fft=2048, win_length=1102, hop_length=441)(torch.from_numpy(sound[:, 0].copy()))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected.numpy())


def test_transform_arguments(tmp_path: Path, wav: Path, sound: np.ndarray) -> None:
    options = "--n-fft 512 --win-length 320 --hop-length 100 --f-min 50 --f-max 7000 --pad 30 --n-mels 40 --window hamming"
    more = "--power 1 --normalized window --no-center --pad-mode constant --norm slaney --mel-scale slaney"
    assert mel(wav, "-o", tmp_path / "a.npy", *options.split(), *more.split()) == 0
    expected = transformed(
        sound.mean(axis=1),
        win_length=320,
        hop_length=100,
        f_min=50.0,
        f_max=7000.0,
        pad=30,
        n_mels=40,
        window_fn=torch.hamming_window,
        power=1.0,
        normalized=True,
        center=False,
        pad_mode="constant",
        norm="slaney",
        mel_scale="slaney",
    )
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("suffix", ["npy", "pt", "safetensors"])
def test_formats(tmp_path: Path, wav: Path, sound: np.ndarray, suffix: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / f"a.{suffix}"
    if (suffix, dtype) == ("npy", "bfloat16"):
        assert mel(wav, "-o", out, "--dtype", dtype) == 2
        assert "bfloat16" in capsys.readouterr().err
        return
    if suffix == "safetensors":
        pytest.importorskip("safetensors")
    assert mel(wav, "-o", out, "--dtype", dtype) == 0
    if suffix == "npy":
        got = torch.from_numpy(np.load(out))
    elif suffix == "pt":
        got = torch.load(out, weights_only=True)
    else:
        got = importlib.import_module("safetensors.torch").load_file(out)["mel"]
    expected = module(dtype=getattr(torch, dtype))(torch.from_numpy(sound.mean(axis=1)))
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("power", [1.0, 2.0, 3.0])
def test_decibels(tmp_path: Path, wav: Path, sound: np.ndarray, power: float) -> None:
    assert mel(wav, "-o", tmp_path / "a.npy", "--db", "--power", power) == 0
    expected = 20 / power * np.log10(np.maximum(transformed(sound.mean(axis=1), power=power), 1e-10))
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("channels", ["mix", "keep"])
def test_picture(tmp_path: Path, sound: np.ndarray, channels: str) -> None:
    from matplotlib.image import imread

    source, out = tmp_path / "$a_b^.wav", tmp_path / "a.png"
    soundfile.write(source, sound, RATE)
    assert mel(source, "-o", out, "--channels", channels, "--f-min", 900, "--f-max", 1200, "--n-mels", 8) == 0
    height, width, _ = imread(out).shape
    assert 1200 <= width <= 2400 and 500 <= height <= 1600
    assert np.ptp(imread(out)[..., :3]) > 0.9


@pytest.mark.parametrize("samples", [np.zeros(1000), np.full(1000, np.nan)], ids=["silence", "nan"])
def test_picture_of_nothing(tmp_path: Path, samples: np.ndarray) -> None:
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    assert mel(tmp_path / "a.wav", "-o", tmp_path / "a.png") == 0


def test_a_bad_file_does_not_stop_the_others(tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.wav").write_text("this is no audio")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    soundfile.write(tmp_path / "short.wav", np.zeros(10), RATE)
    soundfile.write(tmp_path / "good.flac", np.zeros(RATE), RATE)
    names = ["text.wav", "absent.wav", "empty.wav", "short.wav", "sound.wav", "good.flac"]
    out = tmp_path / "deep" / "mels"
    assert mel(*(tmp_path / name for name in names), "-o", out) == 1
    assert sorted(path.name for path in out.iterdir()) == ["good.npy", "sound.npy"]
    printed = capsys.readouterr()
    assert printed.out.count("frames") == 2
    for name, reason in zip(names, ("Format not recognised", "no such file", "no samples", "too short"), strict=False):
        assert any(name in line and reason in line for line in printed.err.splitlines()), (name, printed.err)
    assert "4 of 6 files failed" in printed.err


def test_one_input_into_a_folder(tmp_path: Path, wav: Path) -> None:
    assert mel(wav, "-o", tmp_path / "mels", "--format", "pt") == 0
    assert (tmp_path / "mels" / "sound.pt").is_file()


def test_overwrites_only_when_told(tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.npy"
    out.write_text("precious")
    assert mel(wav, "-o", out) == 1
    assert out.read_text() == "precious" and "--overwrite" in capsys.readouterr().err
    assert mel(wav, "-o", out, "--overwrite") == 0
    assert np.load(out).ndim == 2


def test_usage_errors(tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    twin, disguised = tmp_path / "other" / "sound.flac", tmp_path / "in.npy"
    for path in (twin, disguised):
        path.write_bytes(wav.read_bytes())
    file, npy = tmp_path / "file", tmp_path / "a.npy"
    file.touch()
    wrong: list[tuple[list[object], str]] = [
        ([], "required"),
        ([wav], "-o"),
        ([wav, twin, "-o", tmp_path / "mels"], "would both be written"),
        ([wav, twin, "-o", npy], "need a folder"),
        ([wav, "-o", file], "not a folder"),
        ([wav, "-o", tmp_path / "a.xyz"], "extension"),
        ([wav, "-o", npy, "--format", "pt"], "contradicts"),
        ([disguised, "-o", disguised, "--overwrite"], "is an input"),
        ([wav, "-o", npy, "--n-fft", 0], "positive integer"),
        ([wav, "-o", npy, "--n-fft", 256, "--win-length", 400], "win_length"),
        ([wav, "-o", npy, "--f-min", 500, "--f-max", 400], "f_max"),
        ([wav, "-o", npy, "--power", 0], "positive number"),
        ([wav, "-o", npy, "--window", "square"], "square"),
        ([wav, "-o", npy, "--device", "gpu"], "--device gpu"),
        ([wav, "-o", npy, "--device", "cuda:99"], "--device cuda:99"),
        ([wav, "-o", npy, "--device", "meta"], "--device meta"),
    ]
    for args, message in wrong:
        assert mel(*args) == 2, args
        assert message in capsys.readouterr().err
    assert not npy.exists() and not (tmp_path / "mels").exists()
    assert cli.main([]) == cli.main(["sing"]) == 2


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt, 130), (OSError("disk full"), 1)])
def test_no_half_file(
    tmp_path: Path, wav: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | BaseException, status: int
) -> None:
    def save(file: object, array: object) -> None:
        file.write(b"half")  # type: ignore[attr-defined]
        raise error

    monkeypatch.setattr(np, "save", save)
    assert mel(wav, "-o", tmp_path / "mels" / "a.npy") == status
    assert list((tmp_path / "mels").iterdir()) == []


def test_a_missing_extra_is_named(
    tmp_path: Path, wav: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)  # import then raises ImportError
    assert mel(wav, wav.with_name("b.wav"), "-o", tmp_path / "mels") == 1
    err = capsys.readouterr().err
    assert 'pip install "flashmel[cli]"' in err and len(err.splitlines()) == 1


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(tmp_path: Path, wav: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mel(wav, "-o", tmp_path / "a.npy", "--n-fft", 256, "--n-mels", 128) == 0
    err = capsys.readouterr().err
    assert err.startswith("flashmel: warning: ") and len(err.splitlines()) == 1


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["demo"]) == 0
    shown = rows(capsys.readouterr().out)
    reason = fused.unavailable_reason(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert shown["path"] == ("fused" if reason is None else f"plain torch ({reason})")
    assert shown["output"] == "(8, 80, 3001), float32" and shown["picture"] == "flashmel-demo.png"
    time = re.fullmatch(r"(\d+\.\d{3}) ms, [\d,]+ times as fast as the sound plays", shown["time"])
    assert time and float(time[1]) > 0
    if "torchaudio" in shown:
        assert shown["torchaudio"].startswith("not compared: ")
    else:
        difference = re.fullmatch(r"\S+ of values up to \S+: (\S+)", shown["largest difference"])
        assert difference and float(difference[1]) < 1e-5
    assert (tmp_path / "flashmel-demo.png").stat().st_size > 10_000
    assert cli.main(["demo", "-o", "picture.bmp"]) == 2


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["flashmel"] == __version__ and shown["torch"] == torch.__version__
    for label, gpu in gpus().items():
        reason = fused.unavailable_reason(gpu)
        assert shown[f"fused path{label}"] == ("available" if reason is None else f"not available: {reason}")


def test_doctor_says_why_the_fused_path_is_not_available(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for reason, expected in ((None, "available"), ("no compiler", "not available: no compiler")):
        monkeypatch.setattr(fused, "unavailable_reason", lambda _, reason=reason: reason)
        assert cli.main(["doctor"]) == 0
        shown = rows(capsys.readouterr().out)
        assert [shown[f"fused path{label}"] for label in gpus()] == [expected] * len(gpus())


def test_doctor_says_which_path_a_gradient_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """A frame of 16384 points fits into sm_86's shared memory, but not with what the gradient keeps."""
    assert cli.main(["doctor", "--n-fft", "16384", "--arch", "sm_86"]) == 0
    shown = rows(capsys.readouterr().out)
    assert shown["n_fft 16384, sm_86"].startswith("fused kernel: 32 x 32 x 8 points, 1 frame a tile, ")
    assert "plain torch: the gradient at n_fft = 16384 with 80 filters fits in no block of sm_86: " in shown["its gradient, sm_86"]
    frames = {}
    for n_mels in ("80", "128"):
        assert cli.main(["doctor", "--n-fft", "8192", "--n-mels", n_mels, "--arch", "sm_90"]) == 0
        gradient = rows(capsys.readouterr().out)["its gradient, sm_90"]
        frames[n_mels] = re.fullmatch(r"fused kernel: 32 x 16 x 8 points, (.*) a tile, .* of shared memory", gradient)[1]
    assert frames == {"80": "4 frames", "128": "2 frames"}


def test_doctor_says_which_path_a_gradient_takes_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    monkeypatch.setattr(fused, "path", lambda spec, device: f"{spec.n_fft} on {device}")
    for n_fft, reason, expected in (
        ("400", None, "fused kernel: 20 x 10 points, "),
        ("16384", None, "plain torch: the gradient at n_fft = 16384"),
        ("400", "no compiler", "plain torch on cuda:0: no compiler"),
    ):
        monkeypatch.setattr(fused, "unavailable_reason", lambda _, reason=reason: reason)
        assert cli.main(["doctor", "--n-fft", n_fft]) == 0
        shown = rows(capsys.readouterr().out)
        assert shown["GPU"] == "cuda:0 (some GPU, sm_86)" and shown[f"n_fft {n_fft}, cuda:0"] == f"{n_fft} on cuda:0"
        assert shown["its gradient, cuda:0"].startswith(expected)


def test_doctor_tells_of_every_gpu_or_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--n-fft", "400"]) == 0
    shown = rows(capsys.readouterr().out)
    found = torch.cuda.device_count()
    places = [f"cuda:{n}" for n in range(found)] or [arch.name for arch in ARCHITECTURES]
    for place in places:
        assert re.match("fused kernel: |plain torch", shown[f"n_fft 400, {place}"])
        assert re.match("fused kernel: |plain torch", shown[f"its gradient, {place}"])
    assert sum("gradient" in label for label in shown) == len(places)


def test_doctor_says_which_path_a_size_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--n-fft", "400", "--hop-length", "160", "--arch", "sm_90"]) == 0
    assert "n_fft 400, sm_90 fused kernel: 20 x 10 points, 32 frames a tile" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["doctor", "--n-fft", "134", "--arch", "sm_80"]) == 0
    assert "plain torch: n_fft = 134: 67 is not a product of three numbers up to 64" in capsys.readouterr().out
    assert cli.main(["doctor", "--n-fft", "2", "--arch", "sm_80"]) == 0
    assert "fused kernel: 1 point, 32 frames a tile, " in capsys.readouterr().out
    assert cli.main(["doctor", "--n-fft", "0"]) == 2
    assert "n_fft must be a positive integer, got 0" in capsys.readouterr().err
    assert cli.main(["doctor", "--n-fft", "400", "--arch", "sm_91"]) == 2
    assert "got sm_91" in capsys.readouterr().err


def test_help_describes_the_transform(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["mel", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--mel-scale" in out and "--overwrite" in out and "Exit status" in out


def test_module_entry_point() -> None:
    done = subprocess.run([sys.executable, "-m", "flashmel", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"flashmel {__version__}"


# --- flashmel warm, flashmel cache -----------------------------------------------------------------------------------------------


def test_warm_and_cache(
    nvrtc_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    arguments = ["warm", "--n-fft", "64", "--hop-length", "16", "--n-mels", "10", "--arch", "sm_80,sm_90", "--gradient"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr()
    for arch in ("sm_80", "sm_90"):
        for kernel in ("forward", "backward"):
            assert f"KiB: {kernel} kernel for {arch}, float32 in, float32 out, n_fft 64, hop_length 16" in printed.out
    assert len(list((tmp_path / "cache").iterdir())) == 4
    monkeypatch.setattr(compiler, "compile_cubin", lambda *_: pytest.fail("compiled again"))
    assert cli.main(arguments) == 0
    assert cli.main(["cache", "info"]) == 0
    assert f"{tmp_path / 'cache'}: 4 kernels, 0." in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0
    assert f"{tmp_path / 'cache'}: removed 4 kernels, 0." in capsys.readouterr().out
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--n-fft", "67", "--arch", "sm_90"], "sm_90: n_fft = 67: 67 is not a product of three numbers"),
        (["--arch", "sm_12"], "must be one of sm_75, "),
        ([], "the following arguments are required: --arch"),
        (["--arch", "sm_90", "--gradient", "--input-dtype", "int16"], "gradient: waveforms of int16 have none"),
        (["--arch", "sm_90", "--n-fft", "16", "--win-length", "17"], "win_length"),
        (["--arch", "sm_90", "--frontend", "nemo", "whisp"], "--frontend whisp: no front-end is called 'whisp'"),
        (["--arch", "sm_90", "--frontend", "nemo", "hifigan", "--option", "pad_to=8"], "--frontend hifigan: front-end 'hifigan'"),
        (["--arch", "sm_90", "--frontend", "nemo", "--n-fft", "16"], "--n-fft does not go with --frontend"),
        (["--arch", "sm_90", "--frontend", "nemo", "--sample-rate", "16000"], "--sample-rate does not go with --frontend"),
        (["--arch", "sm_90", "--config", "a.json", "--n-fft", "16"], "--n-fft does not go with --config, whose file says"),
        (["--arch", "sm_90", "--config", "a.json", "--sample-rate", "16000"], "--sample-rate does not go with --config"),
        (["--arch", "sm_90", "--frontend", "nemo", "--config", "a.json"], "--config does not go with --frontend"),
        (["--arch", "sm_90", "--option", "n_mels=3"], "name one with --frontend"),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_warm_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["warm", *arguments]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_warm_for_a_sample_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Window and hop follow it, as for a file of that rate."""
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "cubin", lambda s: b"")
    for option, sizes in (((), "n_fft 512, hop_length 160"), (("--sample-rate", "8000"), "n_fft 256, hop_length 80")):
        assert cli.main(["warm", "--arch", "sm_90", *option]) == 0
        assert f"forward kernel for sm_90, float32 in, float32 out, {sizes}, power 2: " in capsys.readouterr().out
    assert cli.main(["warm", "--arch", "sm_90", "--resample", "8000"]) == 2  # there are no files
    for command in (["warm"], ["bundle", "build"]):
        capsys.readouterr()
        assert cli.main([*command, "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "--sample-rate HZ of the waveforms to come, in Hz (default: 16000)" in shown and "files" not in shown
        assert "which is specific to --n-mels" in shown


@pytest.mark.parametrize("by_file", [False, True])
def test_warm_of_front_ends(
    nvrtc_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], by_file: bool
) -> None:
    """Every kernel of theirs, each once, and no other."""
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(driver, "cubin", lambda s: str(s).encode())
    names, options = ["whisper-large-v3", "kaldi-fbank"], {"n_mels": 40}
    command = ["--frontend", *names, "--option", "n_mels=40", "--dtype", "float16", "--gradient"]
    if by_file:
        config = tmp_path / "mels.json"
        config.write_text(json.dumps([{"frontend": name, "dtype": "float16", "gradient": True, **options} for name in names]))
        command = ["--config", str(config)]
    assert cli.main(["warm", *command, "--arch", "sm_75,sm_90"]) == 0
    lines = capsys.readouterr().out.splitlines()[:-1]
    modules = [frontends.frontend(name, dtype=torch.float16, **options) for name in names]
    archs = [architecture(7, 5), architecture(9, 0)]
    wanted = {str(s) for m in modules for arch in archs for s in frontends.specialisations(m, arch, gradient=True)}
    assert len(lines) == len(wanted) and {line.partition(": ")[2] for line in lines} == wanted
    for part in (
        "normalize kernel for sm_75, float16 in, float16 out, with lengths, the second of two launches: a floor below the maximum",
        "power 2, with lengths, the first of two launches: ",
    ):
        assert any(part in line for line in lines), lines


def test_a_bundle_of_a_front_end(
    nvrtc_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Has what its calls ask for, where nothing may be compiled."""
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    assert cli.main(["bundle", "build", "--frontend", "parakeet", "--arch", "sm_90", "-o", str(tmp_path / "bundle")]) == 0
    assert f"{tmp_path / 'bundle'}: 6 kernels" in capsys.readouterr().out
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    monkeypatch.setattr(bundle, "_loaded", {})
    bundle.load_bundle(tmp_path / "bundle", archs=["sm_90"])
    for s in frontends.specialisations(frontends.frontend("parakeet"), architecture(9, 0)):
        assert driver.cubin(s).startswith(b"\x7fELF")


def test_front_ends_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["frontends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [re.split(r"  +", line) for line in lines]
    assert cells[0] == ["name", "sample rate", "shape", "frames of L samples"]
    assert [name for name, *_ in cells[1:]] == frontends.names()
    assert ["whisper-large-v3", "16000 Hz", "(..., 128, frames)", "L // 160"] in cells
    assert len({line.index(shape) for line, (_, _, shape, _) in zip(lines, cells, strict=True)}) == 1, "columns begin together"
    assert cli.main(["frontends", "ast"]) == 0
    shown = capsys.readouterr().out
    assert "source: transformers.ASTFeatureExtractor" in shown and "n_frames=1024" in shown and "(..., frames, 128)" in shown
    assert cli.main(["frontends", "asd"]) == 2
    assert "no front-end is called 'asd'" in capsys.readouterr().err


def test_rules_of_lengths_are_true() -> None:
    """What is printed gives the frames of a row, and says whether more follow."""
    for name in frontends.names():
        module = frontends.frontend(name)
        n_samples = module.sample_rate + 3 * module.hop_length
        rule, _, padding = module.length_rule.partition(", padded ")
        frames = eval(rule, {"ceil": math.ceil, "L": n_samples})
        assert frames == module.output_lengths(n_samples), (name, rule)
        features = module(torch.zeros(n_samples))
        held = features.shape[-2 if module.spec.epilogue.time_major else -1]
        assert (held > frames) == bool(padding), (name, padding)
    for name, options, padding in (
        ("qwen2-audio", {}, "to 3000"),
        ("qwen3-asr", {}, "to a multiple of 100"),
        ("nemo", {"pad_to": 16}, "by 1 and to a multiple of 16"),
        ("seamless-m4t", {}, "to a multiple of 2 before the last division"),
        ("ast", {}, "to 1024"),
    ):
        assert frontends.frontend(name, **options).length_rule.partition(", padded ")[2] == padding


def test_mel_of_a_front_end(tmp_path: Path, wav: Path, sound: np.ndarray, capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.from_numpy(sound.mean(1))
    out = tmp_path / "out"
    assert mel(wav, "-o", out / "w.npy", "--frontend", "whisper-large-v3") == 0
    assert "(128, 50), 50 frames" in capsys.readouterr().out
    np.testing.assert_array_equal(np.load(out / "w.npy"), frontends.frontend("whisper-large-v3")(x).numpy())
    command = (
        wav,
        "-o",
        out / "a.npy",
        "--frontend",
        "ast",
        "--option",
        "n_frames=None",
        "--option",
        "mean=-6.5",
        "--dtype",
        "float16",
    )
    assert mel(*command) == 0
    expected = frontends.frontend("ast", n_frames=None, mean=-6.5, dtype=torch.float16)(x).numpy()
    np.testing.assert_array_equal(np.load(out / "a.npy"), expected)
    assert f"{expected.shape}, {len(expected)} frames" in capsys.readouterr().out
    assert mel(wav, "-o", out / "h.npy", "--frontend", "hifigan", "--channels", "keep") == 0  # resampled
    assert np.load(out / "h.npy").shape == (2, 80, 11025 // 256)
    pytest.importorskip("safetensors")
    assert mel(wav, "-o", out / "k.safetensors", "--frontend", "kaldi-fbank", "--option", "window=hamming-symmetric") == 0


@pytest.mark.parametrize(
    "options, message",
    (
        (("--frontend", "whisp"), "no front-end is called 'whisp'"),
        (("--frontend", "whisper", "--option", "mels=3"), "has no option 'mels'"),
        (("--frontend", "whisper", "--n-mels", 3), "--n-mels does not go with --frontend"),
        (("--frontend", "whisper-large-v3", "--n-mels", 80), "--n-mels does not go with --frontend"),  # the plain one's default
        (("--frontend", "whisper", "--mel-scale", "htk"), "--mel-scale does not go with --frontend"),
        (("--frontend", "whisper", "--no-center"), "--no-center does not go with --frontend"),
        (("--frontend", "whisper", "--db"), "--db does not go with --frontend"),
        (("--frontend", "whisper", "--format", "png"), "--format png does not go with --frontend"),
        (("--frontend", "whisper", "--resample", 8000), "takes audio at 16000 Hz"),
        (("--option", "n_mels=3"), "name one with --frontend"),
        (("--frontend", "kaldi-fbank", "--option", "window=boxcar"), "window must be one of"),
        (("--frontend", "whisper", "--option", "n_mels"), "must be NAME=VALUE"),
    ),
)
def test_front_ends_refuse(tmp_path: Path, wav: Path, options: tuple, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mel(wav, "-o", tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("without_tqdm", [False, True])
def test_a_bundle_of_several_configurations(
    nvrtc_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], without_tqdm: bool
) -> None:
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    if without_tqdm:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    config = tmp_path / "mels.json"
    entries: list[dict[str, object]] = [
        {"n_fft": 64, "hop_length": 16, "n_mels": 10, "gradient": True},
        {"n_fft": 64, "hop_length": 16, "n_mels": 20},  # the same kernel
        {"n_fft": 32, "hop_length": 8, "n_mels": 4, "input_dtype": "int16", "dtype": "float16"},
    ]
    config.write_text(json.dumps(entries))
    assert cli.main(["bundle", "build", "--config", str(config), "--arch", "sm_90", "-o", str(tmp_path / "bundle")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and f"{tmp_path / 'bundle'}: 3 kernels, manifest sha256 " in lines[-1]
    for part, count in (("forward kernel for sm_90", 2), ("backward kernel for sm_90", 1), ("int16 in, float16 out", 1)):
        assert sum(part in line for line in lines) == count
    assert cli.main(["bundle", "list", str(tmp_path / "bundle"), "--arch", "sm_80,sm_75"]) == 0
    assert capsys.readouterr().out.count("rejected, not for sm_80, sm_75: ") == 3
    assert cli.main(["bundle", "list", str(tmp_path / "bundle"), "--arch", "sm_80,sm_90"]) == 0
    assert capsys.readouterr().out.count("accepted: ") == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "Expecting value"),
        ("{}", "expected a list of objects"),
        ("[]", "expected a list of objects"),
        ('[{"n_fft": 64}, {"n_fft": -1}]', "configuration 2: n_fft must be a positive integer, got -1"),
        ('[{"sound": 64}]', "configuration 1: "),
        ('[{"dtype": "int8"}]', "configuration 1: dtype must be"),
        ('[{"input_dtype": "int8"}]', "configuration 1: input_dtype must be one of"),
        ('[{"frontend": "whisp"}]', "configuration 1: no front-end is called 'whisp'"),
        ('[{"frontend": "whisper", "hop_length": 3}]', "configuration 1: front-end 'whisper' has no option 'hop_length'"),
        ('[{"frontend": ["whisper"]}]', "configuration 1: "),
        ('[{"frontend": "whisper", "dtype": "int8"}]', "configuration 1: dtype must be"),
        ('[{"input_dtype": "int16", "gradient": true}]', "configuration 1: gradient: waveforms of int16 have none"),
    ],
)
def test_wrong_configurations(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    config = tmp_path / "mels.json"
    config.write_text(text)
    assert cli.main(["warm", "--config", str(config), "--arch", "sm_90"]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["warm", "--config", str(tmp_path / "absent"), "--arch", "sm_90"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_warm_compiles_nothing_where_that_is_forbidden(
    nvrtc_version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    assert cli.main(["warm", "--n-fft", "64", "--arch", "sm_90"]) == 1
    assert "FLASHMEL_NO_JIT is set" in capsys.readouterr().err


def test_downloads_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "bundles" / ("a" * 64)
    folder.mkdir(parents=True)
    (folder / f"{'b' * 64}.cubin").write_bytes(bytes(2**20))
    assert cli.main(["cache", "info"]) == 0
    assert f"{folder}: 1 downloaded kernels, 1.0 MiB" in capsys.readouterr().out
    assert cli.main(["cache", "clear"]) == 0 and not folder.exists()


def test_doctor_compares_the_versions_of_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.0")
    for cuda, expected in (("12.8", 1), ("13.0", 0), (None, 0)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert cli.main(["doctor"]) == 0
        assert capsys.readouterr().out.count("torch is for CUDA 12, NVRTC for 13.0") == expected
