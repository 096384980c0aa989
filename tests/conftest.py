from __future__ import annotations

import contextlib
import multiprocessing
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from cases import CASES

from flashmel import MelSpectrogram, environment, fused
from flashmel.jit import bundle, cache, compiler, driver, toolchain
from flashmel.jit.source import AnySpecialisation, Specialisation, config_header, sources
from flashmel.plan import Architecture, UnsupportedError, architecture

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


def kernels_of(
    modules: Iterable[MelSpectrogram], arch: Architecture
) -> Iterator[AnySpecialisation]:
    """What the modules make of float32 waveforms and gradients, in both directions."""
    for module in modules:
        with contextlib.suppress(UnsupportedError):
            yield from fused.specialisations(module.spectrogram.window, module.mel_scale.fb, module.spec, arch)
            yield from fused.specialisations(module.spectrogram.window, module.mel_scale.fb, module.spec, arch, gradient=True)


def compile_together(modules: Iterable[MelSpectrogram]) -> None:
    """The modules' kernels in the disk cache, by all cores: one after another they take minutes."""
    compile_kernels(kernels_of(modules, architecture(*torch.cuda.get_device_capability())))


def _duration(s: AnySpecialisation) -> int:
    """Orders kernels by how long they take to compile, the longest first."""
    return -max(s.plan.r1, s.plan.r2, s.plan.r3) if isinstance(s, Specialisation) else 0


def compile_kernels(kernels: Iterable[AnySpecialisation]) -> None:
    """The same of kernels of one architecture."""
    # Without what does not tell kernels apart; the longest first.
    wanted = {(s.unit, config_header(s)): s for s in kernels}
    longest = sorted(wanted.values(), key=_duration)
    folder = environment.cache_dir()
    missing = [s for s in longest if folder is None or cache.load(folder, compiler.cache_key(sources(s), s.arch.name)) is None]
    if missing:
        with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(driver.cubin, missing))


@pytest.fixture
def nvrtc_version() -> str:
    """The compiler's version; where there is none, the test is skipped."""
    try:
        return toolchain.nvrtc_version()
    except toolchain.ToolchainError as error:
        pytest.skip(f"no compiler: {error}")


@pytest.fixture
def own_bundles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing loaded, configured or cached by others."""
    monkeypatch.setattr(bundle, "_loaded", {})
    monkeypatch.setattr(bundle, "_failures", {})
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setattr(environment, "_configured_cache", None)
    monkeypatch.setattr(environment, "_configured_bundles", {})
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHMEL_NO_JIT", raising=False)


@pytest.fixture(scope="session")
def compiled_ahead() -> None:
    """The grid's kernels in the disk cache. Nothing without a GPU."""
    if not torch.cuda.is_available():
        return
    assert fused.unavailable_reason() is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filters of zero
        compile_together(MelSpectrogram(**case.kwargs) for case in CASES)
