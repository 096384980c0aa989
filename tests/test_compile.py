"""Every kernel variant compiles for every architecture, without a GPU, and keeps its plan's promises: no spills, and it fits."""

import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor

import pytest
from cases import CASES

from flashmel import MelSpectrogram
from flashmel.jit import compiler, toolchain
from flashmel.jit.source import INPUT_TYPES, OUTPUT_TYPES, Specialisation, config_header, kernel_sources
from flashmel.plan import UnsupportedError, architecture, make_plan
from flashmel.spec import StftSpec

try:
    toolchain.find()
    missing = None
except toolchain.ToolchainError as error:
    missing = str(error)
pytestmark = pytest.mark.skipif(missing is not None, reason=f"no compiler: {missing}")

WHISPER = StftSpec(400, 400, 160)
SIZES = (StftSpec(64, 64, 16), WHISPER, StftSpec(1024, 1024, 256), StftSpec(4096, 4096, 1024), StftSpec(16384, 16384, 4096))


def specialise(spec, compute, input_type="float32", output_type="float32", few_tiles=False):
    arch = architecture(*divmod(compute, 10))
    return Specialisation(spec, make_plan(spec, arch, few_tiles=few_tiles), arch, input_type, output_type)


def variants():
    """Id to specialisation; what gives the same ``config.h`` for the same architecture is one variant."""
    found = {}

    def add(name, *arguments):
        try:
            s = specialise(*arguments)
        except UnsupportedError:
            return
        found.setdefault((config_header(s), s.arch), (f"{name}-{s.arch.name}", s))

    for case in CASES:
        add(case.name, MelSpectrogram(**case.kwargs).spec, 90)
    for compute in (75, 80, 86, 89, 100, 120):
        for spec in SIZES:
            add(f"n_fft-{spec.n_fft}", spec, compute)
    for compute in (75, 90):
        for spec in SIZES:
            add(f"n_fft-{spec.n_fft}-few-tiles", spec, compute, "float32", "float32", True)
    for compute in (75, 90):  # sm_75 has no bfloat16 instructions
        for types in [*((t, "float32") for t in INPUT_TYPES), *(("float32", t) for t in OUTPUT_TYPES)]:
            add("-to-".join(types), WHISPER, compute, *types)
    return dict(found.values())


VARIANTS = variants()


def compile_variant(s):
    return compiler.compile_cubin({**kernel_sources(), "config.h": config_header(s)}, s.arch.name, ("--ptxas-options=-v",))


@pytest.fixture(scope="module")
def compiled(request):
    """(cubin, log) by variant. All that were selected compile ahead, in processes: two threads take as long as one (measured)."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # they are the processes
        yield lambda name: compile_variant(VARIANTS[name])
        return
    items = [item for item in request.session.items if item.module is request.module]
    wanted = [item.callspec.params["name"] for item in items if hasattr(item, "callspec")]
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn"))
    futures = {name: pool.submit(compile_variant, VARIANTS[name]) for name in wanted}
    yield lambda name: futures[name].result()
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, compiled):
    cubin, log = compiled(name)
    plan, arch = VARIANTS[name].plan, VARIANTS[name].arch
    assert cubin.startswith(b"\x7fELF") and b"mel_spectrogram" in cubin
    assert len(cubin) < 2**20, "cuFFTDx's tables of other precisions and architectures are in the cubin again"
    assert "warning" not in log, log
    assert re.search(r"\b0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", log), f"{plan}\n{log}"
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    warps = plan.threads // 32 * plan.min_blocks
    assert -(-registers // 8) * 8 * 32 * warps <= 65536  # handed out in units of 8 a thread
    assert plan.shared_bytes <= arch.shared_per_block
    reserved = 0 if arch.compute == 75 else 1024  # bytes a block, by the driver
    assert (plan.shared_bytes + reserved) * plan.min_blocks <= arch.shared_per_sm


def test_a_cubin_is_the_same_every_time(compiled):
    """Else a cache shared by machines would depend on who came first."""
    name = next(iter(VARIANTS))
    assert compile_variant(VARIANTS[name])[0] == compile_variant(VARIANTS[name])[0]
