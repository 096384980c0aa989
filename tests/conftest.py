from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from cases import CASES

from flashmel import MelSpectrogram, fused
from flashmel.jit import driver
from flashmel.jit.source import Specialisation, config_header
from flashmel.plan import Architecture, UnsupportedError, architecture, make_backward_plan, make_plan
from flashmel.tables import bin_table, entries_per_bin, kernel_tables

torch.set_num_threads(1)  # the signals are short: on a busy machine, threads wait for one another far longer than they work


def pytest_configure(config: pytest.Config) -> None:
    # Many cases have more filters than bins on purpose; test_tables and test_module look at the warnings themselves.
    config.addinivalue_line("filterwarnings", "ignore:.*mel filters are zero everywhere")
    config.addinivalue_line("filterwarnings", "ignore:At least one mel filterbank has all zero values")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch.cuda.is_available() is False"))


def grid_kernels(arch: Architecture) -> Iterator[Specialisation]:
    """What the grid's cases make of float32 waveforms and gradients, in both directions: see fused.py."""
    for case in CASES:
        module = MelSpectrogram(**case.kwargs)
        spec, (window, fb) = module.spec, (t.double().numpy() for t in (module.spectrogram.window, module.mel_scale.fb))
        with contextlib.suppress(UnsupportedError):
            plan = make_plan(spec, arch)
            filters = kernel_tables(plan, spec.n_fft, spec.normalized, window, fb).filters
            yield Specialisation(spec, plan, arch, "float32", "float32", 16 * len(filters) <= plan.spare_bytes)
            backward = make_backward_plan(spec, arch, module.n_mels, entries_per_bin(fb))
            filters = bin_table(fb, backward, spec.power)
            yield Specialisation(spec, backward, arch, "float32", "float32", 16 * len(filters) <= backward.spare_bytes)


@pytest.fixture(scope="session")
def compiled_ahead() -> None:
    """The grid's kernels in the disk cache, by all cores: one after another they take minutes. Nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    assert fused.unavailable_reason() is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filters of zero
        # Without what does not tell kernels apart; the longest first.
        wanted = {(s.unit, config_header(s)): s for s in grid_kernels(architecture(*torch.cuda.get_device_capability()))}
    longest = sorted(wanted.values(), key=lambda s: -max(s.plan.r1, s.plan.r2, s.plan.r3))
    if os.cpu_count() > 2:
        with ProcessPoolExecutor(min(16, os.cpu_count()), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(driver.cubin, longest))
