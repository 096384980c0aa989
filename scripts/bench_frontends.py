#!/usr/bin/env python3
"""GPU time of the front-ends, next to the plain mel spectrogram of the same transform, and with the gradient of each.

Each is run on 32 waveforms of 10 s by replay of a CUDA graph, forward alone and forward with backward; and in two cases that are
asked for by name: Whisper's features of 32 x 30 s, Parakeet's of one clip of 300 s, this one also from call to result.

    python scripts/bench_frontends.py [--only NAME ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from flashmel import frontends, fused, ops, testing  # noqa: E402
from flashmel.frontends import FrontEnd, frontend  # noqa: E402
from flashmel.jit import driver  # noqa: E402
from flashmel.jit.source import config_header  # noqa: E402
from flashmel.plan import architecture  # noqa: E402
from flashmel.spec import StftSpec  # noqa: E402
from flashmel.version import __version__  # noqa: E402

NAMED = {
    "whisper-large-v3, 32 x 30 s": ("whisper-large-v3", 32, 480000),
    "parakeet-128, 1 x 300 s": ("parakeet-128", 1, 4800000),
}


def plain(module: FrontEnd, x: Tensor) -> Tensor:
    """The mel spectrogram of the module's window, filterbank, hop and power."""
    spec = module.spec
    return ops.features(x, module.window, module.fb, _plain_spec(spec.n_fft, spec.hop_length, spec.power))


_specs: dict[tuple[int, int, float], StftSpec] = {}


def _plain_spec(n_fft: int, hop_length: int, power: float) -> StftSpec:
    return _specs.setdefault((n_fft, hop_length, power), StftSpec(n_fft, n_fft, hop_length, power=power))


def step(transform: Any, x: Tensor, weight: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    return torch.autograd.grad(transform(leaf), leaf, weight)[0]


def compile_ahead(names: list[str]) -> None:
    """All kernels that are measured, by all cores: NVRTC runs without Python's lock."""
    arch, wanted = architecture(*torch.cuda.get_device_capability()), {}
    for module in map(frontend, names):
        spec = module.spec
        both = (spec, module.recipe.normalization), (_plain_spec(spec.n_fft, spec.hop_length, spec.power), None)
        for some, rule in both:
            affine = rule is None and some is spec and "affine" in module._buffers
            for s in fused.specialisations(module.window, module.fb, some, arch, rule=rule, gradient=True, affine=affine):
                wanted[s.unit, config_header(s)] = s
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(driver.cubin, wanted.values()))


def measure(name: str, batch: int, n_samples: int) -> dict[str, Any]:
    """Microseconds: `gpu_us`, `plain_gpu_us`, with the gradient `step_us`, `plain_step_us`; of one row also `call_to_result_us`."""
    module = frontend(name).cuda()
    inputs = [0.1 * torch.randn(batch, n_samples, device="cuda") for _ in range(4)]
    entry: dict[str, Any] = {"name": name, "batch": batch, "samples": n_samples, "n_features": module.n_features}
    both: dict[str, Callable[[Tensor], Tensor]] = {"": module, "plain_": partial(plain, module)}
    calls: dict[str, list[Any]] = {}
    for prefix, transform in both.items():
        with torch.no_grad():
            weight = torch.randn_like(transform(inputs[0]))
        calls[f"{prefix}gpu_us"] = [partial(transform, x) for x in inputs]
        calls[f"{prefix}step_us"] = [partial(step, transform, x, weight) for x in inputs]
    runs: dict[str, list[float]] = {}
    for _ in range(2):  # taking turns
        for what, some in calls.items():
            with torch.set_grad_enabled("step" in what):
                runs.setdefault(what, []).append(testing.gpu_time(some, calls=4, replays=10))
    entry |= {what: statistics.mean(times) for what, times in runs.items()}
    if batch == 1:
        with torch.no_grad():
            times = []
            for i in range(60):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                module(inputs[i % 4])
                torch.cuda.synchronize()
                times.append(1e6 * (time.perf_counter() - begin))
        entry["call_to_result_us"] = statistics.median(times[10:])
    return entry


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", metavar="NAME", help="of the front-ends")
    parser.add_argument("--out", type=Path, metavar="FILE", help="instead of benchmarks/frontends-DEVICE.json")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("needs a GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 1
    warnings.simplefilter("error", UserWarning)  # the plain path is not what is timed
    gpu = torch.cuda.get_device_name()
    record: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda, "flashmel": __version__}
    cases: dict[str, tuple[str, int, int]] = {
        name: (name, 32, 10 * frontends.recipe(name).sample_rate) for name in args.only or frontends.names()
    }
    cases |= {} if args.only else NAMED
    record["cases"] = []
    compile_ahead([name for name, *_ in cases.values()])
    print(f"{gpu}; us{'':34}forward    plain  ratio     step    plain  ratio")
    for label, case in cases.items():
        entry = {"label": label} | measure(*case)
        record["cases"].append(entry)
        gpu_us, plain_us, step_us, plain_step_us = (entry[key] for key in ("gpu_us", "plain_gpu_us", "step_us", "plain_step_us"))
        late = f"  call to result {entry['call_to_result_us']:.0f}" if "call_to_result_us" in entry else ""
        print(
            f"{label:40} {gpu_us:9.1f} {plain_us:8.1f} {gpu_us / plain_us:6.2f} "
            f"{step_us:8.1f} {plain_step_us:8.1f} {step_us / plain_step_us:6.2f}{late}"
        )
    out = args.out or ROOT / "benchmarks" / f"frontends-{gpu.lower().replace(' ', '-')}.json"
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
