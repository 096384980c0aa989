"""Every kernel variant compiles for every architecture, without a GPU, and keeps its promises: it fits, and spills no array."""

import multiprocessing
import os
import re
import time
from concurrent.futures import ProcessPoolExecutor

import pytest
from cases import CASES

from flashmel import MelSpectrogram
from flashmel.jit import compiler, toolchain
from flashmel.jit.source import INPUT_TYPES, OUTPUT_TYPES, Specialisation, config_header, sources
from flashmel.plan import ARCHITECTURES, architecture, make_plan
from flashmel.spec import StftSpec

try:
    toolchain.nvrtc_version()
    missing = None
except toolchain.ToolchainError as error:
    missing = str(error)
pytestmark = pytest.mark.skipif(missing is not None, reason=f"no compiler: {missing}")

TURING, HOPPER = architecture(7, 5), architecture(9, 0)
WHISPER = StftSpec(400, 400, 160)
SIZES = (StftSpec(64, 64, 16), WHISPER, StftSpec(1024, 1024, 256), StftSpec(4096, 4096, 1024), StftSpec(16384, 16384, 4096))
MORE_SIZES = (  # tiny, prime, odd; windows of 10 to 40 ms
    *(StftSpec(n_fft, n_fft, n_fft // 2) for n_fft in (2, 3, 61, 441, 2205)),
    *(StftSpec(n_fft, n_fft, n_fft // 4) for n_fft in (480, 640, 800, 960, 1920)),
)
LIKE_ANOTHER = (87, 103, 110, 121)  # compute capabilities; of these one size is enough


def specialise(spec, arch, input_type="float32", output_type="float32", filters_in_shared=True):
    plan = make_plan(spec, arch, 4 if input_type == "float32" else 2)
    return Specialisation(spec, plan, arch, input_type, output_type, filters_in_shared)


def variants():
    """Id to specialisation; what gives the same ``config.h`` for the same architecture is one variant."""
    found = {}

    def add(name, *arguments):
        s = specialise(*arguments)
        found.setdefault((config_header(s), s.arch), (f"{name}-{s.arch.name}", s))

    for case in CASES:
        add(case.name, MelSpectrogram(**case.kwargs).spec, HOPPER)
    for arch in ARCHITECTURES:
        sizes = (WHISPER,) if arch.compute in LIKE_ANOTHER else SIZES + MORE_SIZES * (arch == HOPPER)
        for spec in sizes:
            add(f"n_fft-{spec.n_fft}-hop-{spec.hop_length}", spec, arch)
    for arch in (TURING, HOPPER):  # Turing has no bfloat16 instructions, nor asynchronous copies
        for types in [*((t, "float32") for t in INPUT_TYPES), *(("float32", t) for t in OUTPUT_TYPES)]:
            add("-to-".join(types), WHISPER, arch, *types)
        add("filters-in-global", WHISPER, arch, "float32", "float32", False)
    for pad in (2**31 - 1, 1 - 2**31):  # no sum of these is an int
        add(f"pad-{pad}", StftSpec(400, 400, 160, pad), HOPPER)
    add("hop-largest", StftSpec(400, 400, 2**31 - 1), HOPPER)
    return dict(found.values())


VARIANTS = variants()


def compile_variant(s):
    return compiler.compile_cubin(sources(s), s.arch.name, ("--ptxas-options=-v",))


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
    assert len(cubin) < 150 * 1024, f"{len(cubin)} bytes: a loop of some stage is unrolled too far"
    assert "warning" not in log, log
    # At 64 registers of 64 ptxas parks a value or two, as it seems by chance; what a thread holds is 40 numbers.
    assert int(re.search(r"(\d+) bytes spill stores", log)[1]) <= 8, f"{plan}\n{log}"
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    # Registers are handed out in units of 8 a thread, and every fourth warp shares a quarter of a multiprocessor's.
    assert -(-registers // 8) * 8 * 32 * -(-plan.teams * plan.threads // 128) <= 65536 // 4
    assert plan.shared_bytes <= arch.shared_per_block


def test_a_cubin_is_the_same_every_time():
    """Else a cache shared by machines would depend on who came first."""
    s = specialise(WHISPER, HOPPER)
    assert compile_variant(s)[0] == compile_variant(s)[0]


def test_a_first_call_does_not_wait_long():
    """It takes half a second here. Processor time: how busy the machine is does not count."""
    start = time.process_time()
    compile_variant(specialise(WHISPER, HOPPER))
    assert time.process_time() - start <= 2.5
