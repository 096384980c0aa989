#!/usr/bin/env python3
"""Measure how long the first calls take on this machine and how large what they need is, and write it as JSON.

    python scripts/cold_start.py                # -> benchmarks/cold-start-<machine>.json
    python scripts/cold_start.py --quick        # few repetitions and a small bundle

Every figure is the median of new processes, each with its own cache. `compile`: the cache is empty; `second` is another
configuration in the same process. `cached`: an earlier process compiled it. `bundle`: from a bundle that `flashmel bundle build`
made without a GPU, with compiling forbidden and an empty cache. Each process tells apart the import of torch, that of flashmel, the
construction of the module, and `cubin`, until the kernel's bytes are in hand (with `bundle`, the bundle's verification included);
on a GPU, torch's own CUDA start (context, an operation, its result on the host), the module's way to the GPU, and the first and
second call until the result is there. The kernels of all ways must be equal to the byte, and on a GPU the results and gradients.
Exit status: 0, or 1 if they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Figures = dict[str, Any]
FIRST: Figures = {"n_fft": 400, "hop_length": 160, "n_mels": 80, "gradient": True}
SECOND: Figures = {"n_fft": 1024, "hop_length": 256, "n_mels": 80, "gradient": True}
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TARGET_MS = 60  # of a cached first call, on top of torch's CUDA start


def fifty() -> list[Figures]:
    """Configurations of 50 kernels: ten sizes with five hops and powers each."""
    sizes = (256, 320, 400, 480, 512, 640, 800, 1024, 2048, 4096)
    kinds = ((4, 2.0), (4, 1.0), (2, 2.0), (2, 1.0), (8, 2.0))
    return [{"n_fft": n, "hop_length": n // part, "power": power, "n_mels": 40} for n in sizes for part, power in kinds]


# ------------------------------------------------------------------------------------------------------------ in a new process


class Stopwatch:
    """Milliseconds of each step since the step before."""

    def __init__(self) -> None:
        self.figures: Figures = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.figures[f"{name}_ms"] = round(1e3 * (now - self._last), 3)
        self._last = time.perf_counter()


def digest(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def child_without_gpu(bundle: str | None) -> Figures:
    """From the imports to the bytes of the first kernel, and of another."""
    watch = Stopwatch()
    import torch  # noqa: F401

    watch.lap("import_torch")
    import flashmel
    from flashmel import fused
    from flashmel.jit import driver
    from flashmel.plan import architecture

    watch.lap("import_flashmel")
    arch, digests = architecture(9, 0), []
    for number, config in enumerate((FIRST, SECOND)):
        prefix = "second_" if number else ""
        mel = flashmel.MelSpectrogram(n_fft=config["n_fft"], hop_length=config["hop_length"], n_mels=config["n_mels"])
        kernel, backward = fused.specialisations(mel.spectrogram.window, mel.mel_scale.fb, mel.spec, arch, gradient=True)
        watch.lap(prefix + "construct")
        if bundle and not number:
            flashmel.load_bundle(bundle)
        data = driver.cubin(kernel)
        watch.lap(prefix + "cubin")
        back = driver.cubin(backward)
        watch.lap(prefix + "backward_cubin")
        digests += [digest(data), digest(back)]
    return watch.figures | {"digests": digests}


def child_on_gpu(bundle: str | None) -> Figures:
    """From torch's CUDA start to the result of the first call, of the second, and of the first gradient."""
    watch = Stopwatch()
    import torch

    watch.lap("import_torch")
    x = torch.randn(4, 80_000, generator=torch.Generator().manual_seed(0)).cuda()
    (x + x).sum().item()
    watch.lap("torch_cuda_start")
    import flashmel

    watch.lap("import_flashmel")
    if bundle:
        flashmel.load_bundle(bundle)
        watch.lap("load_bundle")
    digests = []
    for number, config in enumerate((FIRST, SECOND)):
        prefix = "second_" if number else ""
        mel = flashmel.MelSpectrogram(n_fft=config["n_fft"], hop_length=config["hop_length"], n_mels=config["n_mels"])
        watch.lap(prefix + "construct")
        mel.cuda()
        torch.cuda.synchronize()
        watch.lap(prefix + "to_gpu")
        for call in ("first_call", "call_again"):
            result = mel(x)
            torch.cuda.synchronize()
            watch.lap(prefix + call)
        inputs = x.clone().requires_grad_()
        mel_gradient = mel(inputs)
        torch.cuda.synchronize()
        watch.lap(prefix + "recorded_call")
        (gradient,) = torch.autograd.grad(mel_gradient.sum(), inputs)
        torch.cuda.synchronize()
        watch.lap(prefix + "first_gradient")
        digests += [digest(t.detach().cpu().numpy().tobytes()) for t in (result, gradient)]
    return watch.figures | {"digests": digests}


# ------------------------------------------------------------------------------------------------------------------ the parent


def in_new_process(gpu: bool, cache: Path, bundle: Path | None = None) -> Figures:
    """What a child measured."""
    command = [sys.executable, __file__, "--child", "gpu" if gpu else "cpu", *(["--bundle", str(bundle)] if bundle else [])]
    variables = {
        "FLASHMEL_CACHE_DIR": str(cache),
        "FLASHMEL_NO_JIT": "1" if bundle else "0",
        "PYTHONWARNINGS": "error::UserWarning",
    }
    done = subprocess.run(command, env={**environment(), **variables}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def environment() -> dict[str, str]:
    """This process's, in which children find the same flashmel."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def build(configurations: list[Figures], archs: Sequence[str], folder: Path) -> Figures:
    """Build a bundle by the command, in a process that sees no GPU, into ``folder / "bundle"``; its time and sizes."""
    folder.mkdir()
    (folder / "configurations.json").write_text(json.dumps(configurations))
    command = [sys.executable, "-m", "flashmel", "bundle", "build", "--config", str(folder / "configurations.json")]
    command += ["--arch", ",".join(archs), "-o", str(folder / "bundle")]
    variables = {"FLASHMEL_CACHE_DIR": str(folder / "cache"), "FLASHMEL_NO_JIT": "0", "CUDA_VISIBLE_DEVICES": ""}
    start = time.perf_counter()
    done = subprocess.run(command, env={**environment(), **variables}, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    manifest = json.loads((folder / "bundle" / "manifest.json").read_text())
    packed = shutil.make_archive(str(folder / "packed"), "zip", folder / "bundle")
    sizes: dict[str, list[int]] = {}
    for kernel in manifest["kernels"]:
        sizes.setdefault(kernel["arch"], []).append(kernel["size"])
    return {
        "configurations": len(configurations),
        "kernels": len(manifest["kernels"]),
        "seconds": round(seconds, 2),
        "bytes": sum(path.stat().st_size for path in (folder / "bundle").iterdir()),
        "zip_bytes": Path(packed).stat().st_size,
        "cubin_bytes": {arch: {"min": min(s), "median": int(statistics.median(s)), "max": max(s)} for arch, s in sizes.items()},
    }


def summary(runs: list[Figures]) -> Figures:
    """Least, median and largest of each figure, and the digests, which every process must have found."""
    names = [name for name in runs[0] if name.endswith("_ms")]
    found = {
        what: {name: of(run[name] for run in runs) for name in names}
        for what, of in (("least", min), ("median", statistics.median), ("largest", max))
    }
    return found | {"runs": len(runs), "digests": sorted({tuple(run["digests"]) for run in runs})}


def measure(gpu: bool, arch: str, repetitions: int, folder: Path) -> Figures:
    """The three ways to a first call."""
    folder.mkdir()
    built = build([FIRST, SECOND], [arch], folder / "small")
    caches = [folder / f"cache-{number}" for number in range(repetitions)]
    ways = {
        "compile": [in_new_process(gpu, cache) for cache in caches],
        "cached": [in_new_process(gpu, cache) for cache in caches],
        "bundle": [in_new_process(gpu, folder / "none", folder / "small" / "bundle") for _ in caches],
    }
    if (folder / "none").exists():
        raise RuntimeError("a process with a bundle wrote to the cache")
    figures: Figures = {way: summary(runs) for way, runs in ways.items()}
    found = {tuple(digests) for way in figures.values() for digests in way.pop("digests")}
    return {"arch": arch, "ways": figures, "all_equal": len(found) == 1, "small_bundle": built}


def show(figures: Figures) -> None:
    for way, found in figures["ways"].items():
        medians = ", ".join(f"{name.removesuffix('_ms')} {value:.1f}" for name, value in found["median"].items())
        print(f"{way}, medians of {found['runs']} in ms: {medians}", flush=True)
    print(f"equal bytes by all ways: {figures['all_equal']}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two repetitions, and a bundle of two configurations for two GPUs")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: benchmarks/cold-start-<machine>.json")
    parser.add_argument("--child", choices=("cpu", "gpu"), help=argparse.SUPPRESS)
    parser.add_argument("--bundle", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        for message in ("(the gradient )?run(s|ning) in plain torch", ".* is not used$", "the compiled kernel could not be stored"):
            warnings.filterwarnings("error", message)  # what is measured must be what was meant
        print(json.dumps((child_on_gpu if args.child == "gpu" else child_without_gpu)(args.bundle)))
        return 0

    import bench  # beside this file: describes the machine
    import torch

    from flashmel.jit import toolchain

    gpu = torch.cuda.is_available()
    record = bench.describe_run("cuda" if gpu else "cpu", args.quick)
    record["load_average"] = os.getloadavg()[0]  # of who else is there
    record["versions"]["nvrtc"] = toolchain.nvrtc_version()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        record["without_gpu"] = measure(False, "sm_90", 2 if args.quick else 7, folder / "a")
        show(record["without_gpu"])
        if gpu:
            major, minor = torch.cuda.get_device_capability()
            record["gpu"] = measure(True, f"sm_{major}{minor}", 2 if args.quick else 7, folder / "b")
            show(record["gpu"])
            first = record["gpu"]["ways"]["cached"]["median"]["first_call_ms"]
            print(f"cached first call: {first:.1f} ms, target {TARGET_MS}: {'met' if first <= TARGET_MS else 'MISSED'}")
        configurations, archs = (fifty()[:2], ARCHS[:2]) if args.quick else (fifty(), ARCHS)
        record["large_bundle"] = build(configurations, archs, folder / "large")
    large = record["large_bundle"]
    print(
        f"{large['configurations']} configurations for {len(archs)} GPUs: {large['kernels']} kernels in {large['seconds']:.0f} s, ",
        end="",
    )
    print(f"{large['bytes'] / 2**20:.1f} MiB, zipped {large['zip_bytes'] / 2**20:.1f} MiB")
    out = args.out or bench.default_out(record["machine"])
    bench.write_json(args.out or out.with_name(f"cold-start-{out.name}"), record)
    return int(not all(record[part]["all_equal"] for part in ("without_gpu", "gpu") if part in record))


if __name__ == "__main__":
    sys.exit(main())
