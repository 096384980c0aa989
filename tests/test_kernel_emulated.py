"""The CUDA kernel's own source, compiled for the CPU (tests/emulator): its arithmetic without a GPU.

With ``EMULATOR_FLAGS="-g -fsanitize=thread" LD_PRELOAD=libtsan.so`` a missing barrier is reported as a data race.
"""

import ctypes
import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flashmel import fused, reference
from flashmel.jit.driver import NormalizeParams
from flashmel.jit.source import NormalizeSpecialisation, Specialisation, kernel_sources, sources
from flashmel.normalize import normalize
from flashmel.plan import architecture, launch, launch_backward, make_backward_plan, make_plan
from flashmel.spec import Epilogue, Normalization, StftSpec
from flashmel.tables import bin_table, entries_per_bin, factor_table, kernel_tables
from flashmel.testing import assert_close

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ to compile the kernel for the CPU")

HERE = Path(__file__).parent
CASES = {
    "whisper": (StftSpec(400, 400, 160), 2, 6000, 90),
    "short": (StftSpec(400, 400, 160), 1, 201, 90),
    "pow2-small": (StftSpec(64, 60, 16, pad_mode="constant"), 3, 1000, 90),
    "two-factors": (StftSpec(1024, 1024, 256, power=1.0, normalized="window"), 1, 6000, 90),
    "three-factors": (StftSpec(2048, 1201, 512, power=0.5, pad_mode="replicate"), 1, 9000, 90),
    "odd-hop": (StftSpec(512, 400, 163, pad=7, pad_mode="circular"), 2, 5001, 90),
    "crop": (StftSpec(400, 400, 100, pad=-50, normalized="frame_length"), 2, 3000, 90),
    "no-center": (StftSpec(256, 256, 300, center=False, power=3.0), 1, 5000, 90),
    "gaps": (StftSpec(400, 400, 401), 2, 5000, 90),
    "odd-half": (StftSpec(882, 882, 220), 1, 4000, 90),
    "odd-rows": (StftSpec(450, 450, 90), 1, 3000, 90),
    "sm75": (StftSpec(400, 400, 160), 1, 4000, 75),
    "one-frame-tiles": (StftSpec(8192, 8192, 2048), 1, 9000, 75),
    "huge": (StftSpec(16384, 16384, 4096), 1, 17000, 90),
    "no-prefetch": (StftSpec(16384, 16384, 4096), 1, 17000, 75),
    "odd": (StftSpec(441, 441, 110), 2, 4000, 90),
    "odd-three-factors": (StftSpec(2205, 2205, 441), 1, 5000, 90),
    "tiny": (StftSpec(2, 2, 1), 1, 300, 90),
    "four": (StftSpec(4, 4, 2), 1, 300, 90),
    "tiny-odd": (StftSpec(3, 3, 2), 1, 300, 90),
    "prime": (StftSpec(61, 61, 16), 1, 2000, 90),
    "twice-a-prime": (StftSpec(118, 118, 30), 1, 2000, 90),
    "large-factors": (StftSpec(2 * 61 * 59, 2 * 61 * 59, 3000), 1, 9000, 90),
}


def compile_library(source: str, folder: Path, *flags: str) -> ctypes.CDLL:
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-I", HERE / "emulator", "-I", folder, *flags]
    command += os.environ.get("EMULATOR_FLAGS", "").split()
    subprocess.run([*command, HERE / "emulator" / source, "-o", folder / "kernel.so"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def build(s: Specialisation, folder: Path) -> ctypes.CDLL:
    for name, text in sources(s).items():
        if name != "device.cuh":  # the emulator has its own
            (folder / name).write_text(text)
    return compile_library("emulator.cpp", folder, f"-D{s.unit.removesuffix('.cu').upper()}")


def test_transforms_of_every_size(tmp_path):
    (tmp_path / "dft.cuh").write_text(kernel_sources()["dft.cuh"])
    library = compile_library("dft.cpp", tmp_path)
    rng = np.random.default_rng(0)
    for n in range(1, 65):
        x = (rng.standard_normal(n) + 1j * rng.standard_normal(n)).astype(np.complex64)
        y = x.copy()
        library.run(n, y.ctypes.data_as(ctypes.c_void_p))
        expected = np.fft.fft(x.astype(np.complex128))
        assert np.abs(y - expected).max() < 3e-7 * np.abs(expected).max(), n


def run(
    folder,
    spec,
    waveform,
    fb,
    compute=90,
    dtype=torch.float32,
    in_shared=True,
    window=None,
    lengths=None,
    affine=None,
    summary=None,
):
    """The emulated kernel's result, and the float64 plain path's. ``summary`` is a dictionary that has one's name and gets it."""
    arch = architecture(*divmod(compute, 10))
    plan = make_plan(spec, arch, waveform.element_size())
    plan = dataclasses.replace(plan, teams=min(plan.teams, 2))
    window = torch.hann_window(spec.win_length) if window is None else window
    scale = spec.scale / 32768 if waveform.dtype == torch.int16 else spec.scale
    host = kernel_tables(plan, spec.n_fft, spec.normalized, window.numpy(), fb.numpy(), scale)
    tables = fused._Tables(plan, (0, 0), (), torch.from_numpy(host.factors), torch.from_numpy(host.filters), host.n_filters)
    assert all(t.data_ptr() % 16 == 0 for t in (tables.factors, tables.filters))
    rows, n_samples = waveform.shape
    shape = (fb.shape[1], spec.output_frames(n_samples))
    mel = torch.full((rows, *(shape[::-1] if spec.epilogue.time_major else shape)), torch.nan, dtype=dtype)
    grid = launch(spec, plan, n_samples, rows, multiprocessors=2)
    params = fused.launch_params(spec, plan, grid, waveform, mel.shape, tables)
    params.waveform, params.mel = waveform.data_ptr(), mel.data_ptr()
    params.aligned = fused._Alignment.of(spec, plan, waveform).holds_at(waveform.data_ptr())
    params.lengths, params.affine = (None if t is None else t.data_ptr() for t in (lengths, affine))
    in_shared = in_shared and 16 * len(tables.filters) <= plan.spare_bytes
    types = (str(t).removeprefix("torch.") for t in (waveform.dtype, dtype))
    kind = next(iter(summary), "") if summary else ""
    kernel = Specialisation(spec, plan, arch, *types, in_shared, lengths is not None, affine is not None, kind)
    if kind:
        across = plan.threads // 32 if kind == "extremes" else fb.shape[1]
        summary[kind] = torch.full((rows, grid.tiles, across, 2), torch.nan)
        params.summary = summary[kind].data_ptr()
    build(kernel, folder).run(ctypes.byref(params), grid.blocks, grid.threads)
    exact = None if affine is None else affine.double()
    return mel, reference.features(waveform, window.double(), fb.double(), spec, None, lengths, exact)


def run_backward(folder, spec, waveform, fb, g, compute=90, in_shared=True, window=None, lengths=None, affine=None):
    """The emulated backward kernels' gradient, and the float64 plain path's. ``g`` is (rows, n_mels, frames)."""
    arch = architecture(*divmod(compute, 10))
    window, values = torch.hann_window(spec.win_length) if window is None else window, fb.double().numpy()
    plan = make_backward_plan(spec, arch, fb.shape[1], entries_per_bin(values), waveform.element_size())
    plan = dataclasses.replace(plan, teams=min(plan.teams, 2))
    factors = torch.from_numpy(factor_table(plan, spec.n_fft, spec.normalized, window.double().numpy(), spec.scale))
    filters = torch.from_numpy(bin_table(values, plan, spec.power))
    tables = fused._Tables(plan, (0, 0), (), factors, filters, fb.shape[1])
    rows, n_samples = waveform.shape
    grid = launch_backward(spec, plan, n_samples, rows, 2, lengths is not None)
    partial = spec.pad < 0 or spec.right_margin < 0 or lengths is not None  # some samples have no gradient
    gradient = torch.full((rows, n_samples), 0.0 if partial else torch.nan, dtype=waveform.dtype)
    edges = torch.full((rows, grid.edge_length), torch.nan)
    exact = None if affine is None else affine.double()
    x = waveform.double().requires_grad_()
    y = reference.features(x, window.double(), fb.double(), spec, None, lengths, exact)
    features = y.detach().float().contiguous()
    params = fused.backward_params(spec, plan, grid, waveform, g, gradient, edges, tables, features, lengths, affine)
    in_shared = in_shared and 16 * len(tables.filters) <= plan.spare_bytes
    types = (str(t).removeprefix("torch.") for t in (waveform.dtype, g.dtype))
    library = build(Specialisation(spec, plan, arch, *types, in_shared, lengths is not None, affine is not None), folder)
    library.run(ctypes.byref(params), grid.blocks, grid.threads)
    if edges.numel() and not grid.fold:
        library.fold(ctypes.byref(params), 2, 32)
    mel = y.mT if spec.epilogue.time_major else y
    return gradient, torch.autograd.grad(mel, x, g.double())[0]


KALDI = {"margins": (0, 112), "pad_mode": "constant", "scale": 32768.0, "preemphasis": 0.97, "preemphasis_scope": "frame"}
FRONT_ENDS = {
    "whisper": StftSpec(400, 400, 160, margins=(200, 40), epilogue=Epilogue("log10", 1e-10, gain=0.25, bias=1.0)),
    "nemo": StftSpec(
        512,
        400,
        160,
        margins=(256, 256),
        pad_mode="constant",
        preemphasis=0.97,
        epilogue=Epilogue("ln", 2**-24, "add", masked_frames=1),
    ),
    "kaldi": StftSpec(512, 400, 160, **KALDI, remove_dc=True, epilogue=Epilogue("ln", 2**-23, time_major=True)),
    "kaldi-mirrored": StftSpec(
        512, 400, 160, **(KALDI | {"margins": (120, 312), "pad_mode": "symmetric"}), remove_dc=True, epilogue=Epilogue("ln", 2**-23)
    ),
    "odd": StftSpec(441, 401, 110, **(KALDI | {"margins": (0, 0)}), remove_dc=True, power=1.0),
    "gemma": StftSpec(
        512, 320, 160, margins=(160, 0), pad_mode="constant", power=1.0, epilogue=Epilogue("ln", 1e-3, "add", time_major=True)
    ),
    "hifigan": StftSpec(1024, 1024, 256, margins=(384, 384), power=1.0, epsilon=1e-9, epilogue=Epilogue("ln", 1e-5)),
    "decibels": StftSpec(
        256, 256, 64, epsilon=1e-3, epsilon_mode="max", power=1.0, epilogue=Epilogue("db", 1e-10, log_floor=-20.0, pad_value=-7.0)
    ),
    "linear": StftSpec(400, 400, 160, epilogue=Epilogue(gain=2.0, bias=-1.0, time_major=True)),
    "ast": StftSpec(
        512, 400, 160, **KALDI, remove_dc=True, epilogue=Epilogue("ln", 2**-23, time_major=True, n_frames=70, pad_value=3.0)
    ),
    "ast-cut": StftSpec(512, 400, 160, margins=(0, 112), pad_mode="constant", epilogue=Epilogue("ln", 2**-23, n_frames=20)),
    "multiple": StftSpec(
        512, 400, 160, margins=(256, 256), epilogue=Epilogue("ln", 2**-24, "add", masked_frames=1, frame_multiple=16)
    ),
    "large-hop": StftSpec(256, 256, 300, margins=(100, -50), preemphasis=0.5, preemphasis_scope="frame", remove_dc=True),
}


AFFINE = torch.tensor([[0.5, 2.0, 1.0, 1.0, -1.0, 3.0, 1.0], [0.0, 1.0, 2.0, -3.0, 0.0, 0.0, 0.5]])


def front_end_window(spec):
    """Kaldi's frames lie at the start of n_fft samples."""
    if spec.margin == 0 or spec.remove_dc:
        return torch.nn.functional.pad(torch.hamming_window(spec.win_length, False), (0, spec.n_fft - spec.win_length))
    return torch.hann_window(spec.win_length)


def ragged_batch(spec, rows=4, n_samples=6003):
    """Noise that fades to silence, of a row each: whole, short by a little, ending early, too short for a frame."""
    waveform = 0.1 * torch.randn(rows, n_samples + 3, generator=torch.Generator().manual_seed(0))[:, :n_samples]
    waveform[0, 3000:] = 0
    return waveform, torch.tensor([n_samples, n_samples - 77, 2222, 3])[:rows]


@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_front_ends_against_the_plain_path(name, ragged, tmp_path):
    spec = FRONT_ENDS[name]
    waveform, lengths = ragged_batch(spec)
    fb = torch.rand(spec.n_freqs, 7, generator=torch.Generator().manual_seed(1))
    lengths, affine = (lengths, None) if ragged else (None, AFFINE)
    mel, expected = run(tmp_path, spec, waveform, fb, window=front_end_window(spec), lengths=lengths, affine=affine)
    torch.testing.assert_close(mel, expected.float(), rtol=1e-4, atol=1e-4 * max(1.0, expected.abs().max() / 30))


@pytest.mark.parametrize("name", ["whisper", "kaldi", "nemo"])
def test_extremes(name, tmp_path):
    spec = FRONT_ENDS[name]
    waveform, lengths = ragged_batch(spec)
    fb, summary = torch.rand(spec.n_freqs, 7, generator=torch.Generator().manual_seed(1)), {"extremes": None}
    mel, _ = run(tmp_path, spec, waveform, fb, window=front_end_window(spec), lengths=lengths, summary=summary)
    rows = mel if spec.epilogue.time_major else mel.mT
    frames = make_plan(spec, architecture(9, 0)).frames_per_tile
    for row, length, found in zip(rows, lengths.tolist(), summary["extremes"], strict=True):
        assert torch.equal(found.amax(1)[:, 0], extremes_of(row, spec.valid_frames(length), frames)[:, 0])
        assert torch.equal(found.amin(1)[:, 1], extremes_of(row, spec.valid_frames(length), frames)[:, 1])


@pytest.mark.parametrize("name", ["whisper", "kaldi", "nemo", "odd", "few-frames-tiles"])
def test_moments(name, tmp_path):
    few = StftSpec(4096, 4096, 512, epilogue=Epilogue("ln", 1e-5))
    spec, compute = (few, 75) if name == "few-frames-tiles" else (FRONT_ENDS[name], 90)
    waveform, lengths = ragged_batch(spec)
    fb, summary = torch.rand(spec.n_freqs, 7, generator=torch.Generator().manual_seed(1)), {"moments": None}
    fb[:, 2] = 0  # stands still at the floor of a logarithm
    window = front_end_window(spec)
    mel, _ = run(tmp_path, spec, waveform, fb, compute, window=window, lengths=lengths, summary=summary)
    rows = mel if spec.epilogue.time_major else mel.mT
    frames = make_plan(spec, architecture(*divmod(compute, 10))).frames_per_tile
    for row, length, found in zip(rows, lengths.tolist(), summary["moments"], strict=True):
        expected = moments_of(row, spec.valid_frames(length), frames)
        there = ~expected.isnan()
        assert_close(found[there], expected[there].float(), atol=1e-4, rtol=1e-5)
        assert (found[:, 2, 1][there[:, 2, 1]] == 0).all()


def moments_of(row, valid, frames):
    """Mean and squared distances from it of the first ``valid`` rows, in tiles of ``frames``, in float64; NaN for none."""
    parts = (row[t : max(t, min(t + frames, valid))].double() for t in range(0, len(row), frames))
    return torch.stack([torch.stack((part.mean(0), (part - part.mean(0)).square().sum(0) / (len(part) > 0)), -1) for part in parts])


def extremes_of(row, valid, frames):
    """Largest and smallest of the first ``valid`` rows, in tiles of ``frames``."""
    largest = torch.finfo(torch.float32).max
    parts = (row[t : max(t, min(t + frames, valid))].flatten() for t in range(0, len(row), frames))
    return torch.tensor([[float(part.max()), float(part.min())] if len(part) else [-largest, largest] for part in parts])


GROUPS = {"sample": 1, "channels": 2, "batch": 4}
RULES = {
    "maximum": Normalization("maximum", 8.0, gain=0.25, bias=1.0, pad_value=-5.0),
    "maximum-of-batch": Normalization("maximum", 8.0, "batch"),
    "maximum-of-channels": Normalization("maximum", 8.0, "channels"),
    "mean": Normalization("mean", bias=2.0),
    "variance": Normalization("variance", ddof=1, eps=1e-5, gain=3.0, pad_value=7.0),
    "variance-eps-inside": Normalization("variance", eps=1e-7, eps_mode="variance"),
}


@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("time_major", [False, True], ids=["by-mel", "by-time"])
@pytest.mark.parametrize("name", RULES)
def test_normalization(name, time_major, ragged, tmp_path):
    rule, spec = RULES[name], StftSpec(400, 400, 160, epilogue=Epilogue(time_major=time_major, masked_frames=1))
    generator = torch.Generator().manual_seed(0)
    n_samples, n_mels = 31000, 11
    frames = spec.frames(n_samples)
    x = 7 * torch.randn((4, frames, n_mels) if time_major else (4, n_mels, frames), generator=generator) - 3
    (x[1, :, 2] if time_major else x[1, 2])[:] = 5.0  # a feature that stands still
    lengths = torch.tensor([n_samples, 20000, 480, 100])
    valid = spec.valid_frames(lengths if ragged else n_samples)
    batch = (2, 2) if rule.scope == "channels" else (4,)
    batched = valid.reshape(batch) if ragged else valid
    expected = normalize(x.double().reshape(*batch, *x.shape[1:]), rule, batched, time_major=time_major).reshape(x.shape)
    ends = valid.tolist() if ragged else [valid] * 4
    in_place = rule.kind == "maximum" or time_major
    if rule.kind == "maximum":  # of what the other kernel has made
        x = x * rule.gain + rule.bias
        behind = torch.arange(frames) >= torch.tensor(ends)[:, None]
        x = torch.where(behind[:, :, None] if time_major else behind[:, None], rule.pad_value, x)
    summarize = extremes_of if rule.kind == "maximum" else moments_of
    summary = torch.stack([summarize(row if time_major else row.mT, end, 32) for row, end in zip(x, ends, strict=True)]).float()
    out = x if in_place else torch.full_like(x, torch.nan)
    pointers = (t.data_ptr() for t in (x, out, summary, lengths))
    params = NormalizeParams(*pointers, n_samples, frames, 4, GROUPS[rule.scope], n_mels, summary.shape[1], 1, 32)
    s = NormalizeSpecialisation(rule, spec, architecture(9, 0), "float32", "float32", ragged)
    library = build(s, tmp_path)
    library.run(ctypes.byref(params), 2 if rule.kind == "maximum" else 3 * -(-n_mels // s.together), s.threads)
    assert_close(out, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ragged", [False, True], ids=["whole", "ragged"])
@pytest.mark.parametrize("name", FRONT_ENDS)
def test_gradients_of_front_ends_against_the_plain_path(name, ragged, tmp_path):
    spec = FRONT_ENDS[name]
    waveform, lengths = ragged_batch(spec)
    generator = torch.Generator().manual_seed(1)
    fb = torch.rand(spec.n_freqs, 7, generator=generator) * (torch.rand(spec.n_freqs, 7, generator=generator).argsort(dim=1) < 2)
    g = torch.randn(len(waveform), 7, spec.output_frames(waveform.shape[-1]), generator=generator)
    lengths, affine = (lengths, None) if ragged else (None, AFFINE)
    gradient, expected = run_backward(
        tmp_path, spec, waveform, fb, g, window=front_end_window(spec), lengths=lengths, affine=affine
    )
    peak = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)  # of its row
    assert_close(gradient / peak, expected / peak, atol=1e-5, rtol=1e-4)


# What went wrong once: a spec, rows, samples.
MENDED = {
    # A row's last sample in what a tile carries, where the next position is padding.
    "last-sample-carried": (StftSpec(512, 512, 160, margins=(256, 256), pad_mode="constant", preemphasis=0.97), 8, 10240),
    # Samples left off on the right, folds on the left.
    "negative-margin": (StftSpec(44, 44, 11, margins=(41, -23), pad_mode="symmetric", power=1.0), 5, 60),
    "negative-margin-one-frame-more": (StftSpec(44, 22, 22, margins=(33, -41), pad_mode="symmetric", remove_dc=True), 3, 117),
    "gain-of-0": (StftSpec(64, 64, 16, epilogue=Epilogue("ln", 1e-5)), 2, 600),
    "floor-of-0-added": (StftSpec(64, 64, 16, epilogue=Epilogue("ln", 0.0, "add")), 2, 600),
    "floor-without-a-logarithm": (StftSpec(64, 64, 16, epilogue=Epilogue(log_floor=1e4)), 2, 600),
}


@pytest.mark.parametrize("name", MENDED)
def test_mended(name, tmp_path):
    spec, rows, n_samples = MENDED[name]
    generator = torch.Generator().manual_seed(1)
    waveform = torch.randn(rows, n_samples, generator=generator)
    affine = None
    if name == "gain-of-0":
        affine = torch.stack((torch.tensor([0.0, 1, 1, 2, 1, 1, 1]), torch.zeros(7)))
    if name == "floor-of-0-added":
        waveform[:, 200:400] = 0
    fb = torch.rand(spec.n_freqs, 7, generator=generator) * (torch.rand(spec.n_freqs, 7, generator=generator).argsort(dim=1) < 2)
    fb[:, 0] += fb.sum(1) == 0
    g = torch.randn(rows, 7, spec.output_frames(n_samples), generator=generator)
    window, folders = front_end_window(spec), [tmp_path / "forward", tmp_path / "backward"]
    for folder in folders:
        folder.mkdir()
    mel, expected = run(folders[0], spec, waveform, fb, window=window, affine=affine)
    torch.testing.assert_close(mel, expected.float(), rtol=1e-4, atol=1e-4)
    gradient, expected = run_backward(folders[1], spec, waveform, fb, g, window=window, affine=affine)
    peak = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert_close(gradient / peak, expected / peak, atol=1e-5, rtol=1e-4)


BACKWARD_CASES = {name: case for name, case in CASES.items() if name not in ("one-frame-tiles", "no-prefetch")}  # no room in 64 KiB
BACKWARD_CASES["few-frames-tiles"] = (StftSpec(4096, 4096, 512, pad_mode="replicate"), 1, 12000, 75)
BACKWARD_CASES["hop-1"] = (StftSpec(64, 64, 1), 2, 300, 90)
BACKWARD_CASES["short-circular"] = (StftSpec(64, 64, 16, pad_mode="circular"), 2, 32, 90)
BACKWARD_CASES["long-pad"] = (StftSpec(64, 64, 16, pad=100), 2, 50, 90)
BACKWARD_CASES["crop-margin"] = (StftSpec(64, 64, 16, pad=-20, pad_mode="constant"), 2, 500, 90)


@pytest.mark.parametrize("name", BACKWARD_CASES)
def test_backward_source_against_the_plain_path(name, tmp_path):
    spec, rows, n_samples, compute = BACKWARD_CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    waveform = torch.randn(rows, n_samples + 3, generator=generator)[:, :n_samples]  # rows a stride apart
    fb = torch.rand(spec.n_freqs, 7, generator=generator)
    if name != "odd-hop":  # else every bin lies in all filters
        fb *= torch.rand(spec.n_freqs, 7, generator=generator).argsort(dim=1) < 2
    g = torch.randn(rows, 7, spec.frames(n_samples), generator=generator)
    gradient, expected = run_backward(tmp_path, spec, waveform, fb, g, compute, in_shared=name != "odd-hop")
    peak = expected.abs().max()  # a power below 1 has the largest gradient where a bin is smallest
    assert_close(gradient / peak, expected / peak, atol=1e-6 if spec.power >= 1 else 1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_kernel_source_against_the_plain_path(name, tmp_path):
    spec, rows, n_samples, compute = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    waveform = torch.randn(rows, n_samples + 3, generator=generator)[:, :n_samples]  # rows a stride apart
    fb = torch.rand(spec.n_freqs, 7, generator=generator)
    fb[:, 0] = 0
    fb[: spec.n_freqs // 2, 1] = 0
    fb[spec.n_freqs // 2 :, 2] = 0
    mel, expected = run(tmp_path, spec, waveform, fb, compute, in_shared=name != "odd-hop")
    assert_close(mel, expected.float())
    assert np.all(mel[:, 0].numpy() == 0)


@pytest.mark.parametrize("rows_apart", [0, 1])
@pytest.mark.parametrize("hop", [160, 161])
@pytest.mark.parametrize("types", [(torch.int16, torch.float16), (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_types_and_alignments(types, hop, rows_apart, tmp_path):
    samples = 0.1 * torch.randn(2, 6000 + rows_apart, generator=torch.Generator().manual_seed(0))
    waveform = (32768 * samples).round().short() if types[0] == torch.int16 else samples.to(types[0])
    fb = torch.rand(201, 5, generator=torch.Generator().manual_seed(1))
    mel, expected = run(tmp_path, StftSpec(400, 400, hop), waveform[:, :6000], fb, dtype=types[1])
    torch.testing.assert_close(mel, expected.to(types[1]), rtol=1e-2, atol=1e-4)
