"""The CUDA kernel's own source, compiled for the CPU (tests/emulator): its arithmetic without a GPU.

With ``EMULATOR_FLAGS="-g -fsanitize=thread" LD_PRELOAD=libtsan.so`` a missing barrier is reported as a data race.
"""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from flashmel import reference
from flashmel.jit.driver import LaunchParams
from flashmel.jit.source import Specialisation, config_header, kernel_sources
from flashmel.plan import architecture, launch_grid, make_plan
from flashmel.spec import StftSpec
from flashmel.tables import kernel_tables
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
    "odd-half": (StftSpec(882, 882, 220), 1, 4000, 90),
    "odd-rows": (StftSpec(450, 450, 90), 1, 3000, 90),
    "sm75": (StftSpec(400, 400, 160), 1, 4000, 75),
    "one-frame-tiles": (StftSpec(8192, 8192, 2048), 1, 9000, 75),
    "few-tiles": (StftSpec(400, 400, 160), 1, 2000, 90),
    "huge": (StftSpec(16384, 16384, 4096), 1, 17000, 90),
}


def build(s: Specialisation, folder: Path) -> ctypes.CDLL:
    for name, text in {**kernel_sources(), "config.h": config_header(s)}.items():
        (folder / name).write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-I", HERE / "emulator", "-I", folder]
    command += os.environ.get("EMULATOR_FLAGS", "").split()
    subprocess.run([*command, HERE / "emulator" / "emulator.cpp", "-o", folder / "kernel.so"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


@pytest.mark.parametrize("name", CASES)
def test_kernel_source_against_the_plain_path(name, tmp_path):
    spec, rows, n_samples, compute = CASES[name]
    arch = architecture(*divmod(compute, 10))
    plan = make_plan(spec, arch, few_tiles=name == "few-tiles")
    generator = torch.Generator().manual_seed(len(name))
    waveform = torch.randn(rows, n_samples + 3, generator=generator)[:, :n_samples]  # rows a stride apart
    window = torch.hann_window(spec.win_length)
    fb = torch.rand(spec.n_freqs, 7, generator=generator)
    fb[:, 0] = 0
    fb[: spec.n_freqs // 2, 1] = 0
    fb[spec.n_freqs // 2 :, 2] = 0

    tables = kernel_tables(plan, spec.n_fft, spec.normalized, window.numpy(), fb.numpy())
    frames = spec.frames(n_samples)
    mel = torch.full((rows, fb.shape[1], frames), torch.nan)
    params = LaunchParams(
        waveform.data_ptr(), mel.data_ptr(), *(a.ctypes.data for a in (tables.factors, tables.filters, tables.weights)),
        n_samples, waveform.stride(0), frames, rows, fb.shape[1],
    )
    assert all(a.ctypes.data % 16 == 0 for a in (tables.factors, tables.filters))
    library = build(Specialisation(spec, plan, arch, "float32", "float32"), tmp_path)
    library.run(ctypes.byref(params), *launch_grid(plan, frames, rows))

    expected = reference.mel_spectrogram(waveform.double(), window.double(), fb.double(), spec, None)
    assert_close(mel, expected.float())
    assert np.all(mel[:, 0].numpy() == 0)
