"""The fused path on a GPU: every case against torchaudio and the float64 plain path, and the faults that must be impossible."""

import contextlib
import gc
import random
import threading
import time
import warnings

import pytest
import torch
from cases import CASES, INPUT_DTYPES, PAD_MODES, all_cases, noise, speech
from conftest import compile_together

from flashmel import MelSpectrogram, fused, ops, reference
from flashmel.jit import cache, compiler
from flashmel.plan import UnsupportedError, architecture, make_plan
from flashmel.spec import StftSpec
from flashmel.testing import assert_close, extra_memory, peak_error, poisoned_call

# Whoever falls back to plain torch unasked fails the test.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error:running in plain torch", "error:the fused kernel"),
    pytest.mark.usefixtures("compiled_ahead"),
]

GIB = 2**30


def make(**kwargs):
    return MelSpectrogram(**{"n_mels": 40, **kwargs}).cuda()


def plain(module, x):
    """The float64 plain path on the module's tables, on x's device."""
    window, fb = (t.detach().double().to(x.device) for t in (module.spectrogram.window, module.mel_scale.fb))
    return reference.features(x.detach(), window, fb, module.spec, None)


def check(module, x, limit=None):
    """The module's result on x, close to float64's in units of each frame's peak; returned."""
    y, limit = module(x), limit or (3e-6 if module.power >= 1 else 5e-5)  # seen: 4e-7; a root raises what lies far below
    assert y.is_cuda and y.dtype == torch.float32 and y.is_contiguous()
    assert peak_error(y, plain(module, x)) < limit
    return y


@pytest.fixture(autouse=True)
def every_warning_anew(monkeypatch):
    monkeypatch.setattr(ops, "_warned", set())


@pytest.fixture
def cold(monkeypatch):
    """A process that has not called anything yet, as far as flashmel knows."""
    monkeypatch.setattr(fused, "_plans", {})
    monkeypatch.setattr(fused, "_kernels", {})
    monkeypatch.setattr(fused, "_tables", {})
    monkeypatch.setattr(fused, "_calls", {})


# --- values --------------------------------------------------------------------------------------------------------------------


@all_cases
def test_against_float64(case):
    module = MelSpectrogram(**case.kwargs).cuda()
    check(module, speech(*case.shape).cuda())
    x = noise(*case.shape).cuda()
    y = check(module, x)
    assert_close(y, plain(module, x))  # every bin too: white noise has none far below the peak
    assert_close(y, MelSpectrogram(**case.kwargs)(x.cpu()))


@all_cases
def test_against_torchaudio(case):
    x, pad = noise(*case.shape).cuda(), case.kwargs.get("pad", 0)
    theirs = pytest.importorskip("torchaudio").transforms.MelSpectrogram(**case.kwargs).cuda()
    expected = theirs(x[..., -pad:pad] if pad < 0 else x)
    module = MelSpectrogram(**case.kwargs).cuda()
    y = module(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    exact = plain(module, x)  # an error of one rounding is no fault where theirs happens to be less
    assert peak_error(y, exact) <= max(2 * peak_error(expected, exact), 5e-7 if module.power >= 1 else 5e-5)


def test_random_sizes():
    """Other sizes in each run; a failure names what to put into the grid."""
    arch = architecture(*torch.cuda.get_device_capability())
    seed = int(time.time())
    rng = random.Random(seed)
    modules = []
    while len(modules) < 32:
        n_fft = int(2 ** rng.uniform(1, 14))
        kwargs = {"n_fft": n_fft, "hop_length": rng.randint(1, n_fft), "win_length": rng.randint(1, n_fft)}
        kwargs |= {"pad": rng.randint(0, 9), "pad_mode": rng.choice(PAD_MODES), "power": rng.choice([1.0, 2.0])}
        kwargs["n_mels"] = rng.randint(1, 9)
        with contextlib.suppress(UnsupportedError):
            make_plan(StftSpec(n_fft, n_fft, kwargs["hop_length"]), arch)
            modules.append((kwargs, MelSpectrogram(**kwargs).cuda()))
    compile_together(module for _, module in modules)
    for kwargs, module in modules:
        x = noise(2, 2 * module.n_fft + rng.randint(0, 3000), seed=seed).cuda()
        # On a CPU: cuFFT transforms two frames of odd length at once, and one that is all zeros is then no more quite that.
        error = peak_error(module(x).cpu(), plain(module, x.cpu()))
        assert error < 3e-6, f"seed {seed}: {kwargs} on {tuple(x.shape)}"


def test_the_grids_plans_are_those_of_this_device():
    arch = architecture(*torch.cuda.get_device_capability())
    for case in CASES:
        make_plan(MelSpectrogram(**case.kwargs).spec, arch)


@pytest.mark.parametrize("length", [*range(401, 420), *(n + d for n in (4960, 5120, 10440) for d in (-2, -1, 0, 1, 2))])
def test_tails(length):
    """Around the ends of frames and of tiles of 32 frames; a tile that is all padding at one end, or none of it."""
    module = make(hop_length=160)
    y = check(module, noise(2, length).cuda())
    assert y.shape[-1] == module.spec.frames(length)


@pytest.mark.parametrize("mode", PAD_MODES)
def test_shortest_waveforms(mode):
    for length in {"reflect": (201, 202, 399), "circular": (200, 201)}.get(mode, (1, 2, 7, 199)):
        check(make(pad_mode=mode), noise(3, length).cuda())


@pytest.mark.parametrize("frames", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("kwargs", [{"hop_length": 160}, {"n_fft": 512, "hop_length": 163}], ids=str)
def test_every_tile_size(kwargs, frames, monkeypatch, cold):
    module, x = make(**kwargs), noise(2, 9000).cuda()
    try:
        make_plan(module.spec, architecture(*torch.cuda.get_device_capability()), 4, frames)
    except ValueError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("FLASHMEL_FPB", str(frames))
    check(module, x)


@pytest.mark.parametrize("n_mels", [1, 3, 4, 5, 127, 200])
def test_dense_and_odd_filterbanks(n_mels):
    """Any matrix may stand in for the filters: dense, signed, with empty columns and gaps."""
    module, x = make(), noise(2, 4000).cuda()
    fb = noise(201, n_mels, seed=1)
    fb[:, n_mels // 2] = 0
    fb[7:190, 0] = 0
    module.mel_scale.fb = fb.cuda()
    y = module(x)
    assert_close(y, plain(module, x), atol=1e-5 * float(y.abs().max()))
    assert n_mels == 1 or not y[:, n_mels // 2].any()


# --- dtypes --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_fft", [400, 1024])
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
def test_input_dtypes(dtype, n_fft):
    module, x = make(n_fft=n_fft), noise(2, 6000, dtype=dtype).cuda()
    as_float = x.float() / 32768 if dtype == torch.int16 else x.float()
    assert torch.equal(check(module, x), module(as_float)), "the conversion is exact: not a bit may differ"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_output_dtypes(dtype):
    x = noise(2, 6000).cuda()
    y, expected = MelSpectrogram(n_mels=40, dtype=dtype).cuda()(x), make()(x)
    assert y.dtype == dtype
    assert_close(y, expected, atol=1e-6, rtol=6e-4 if dtype == torch.float16 else 4e-3)
    same = MelSpectrogram(n_mels=40, dtype=dtype).cuda()(x.to(dtype))
    assert_close(same, make()(x.to(dtype)), atol=1e-6, rtol=6e-4 if dtype == torch.float16 else 4e-3)


def test_float16_overflow_is_infinite_as_in_torch():
    x = torch.sin(torch.arange(16000, device="cuda") * (2 * torch.pi * 1000 / 16000))
    y = MelSpectrogram(n_fft=2048, n_mels=80, dtype=torch.float16).cuda()(x)
    expected = make(n_fft=2048, n_mels=80)(x).half()
    assert expected.isinf().any() and torch.equal(y.isinf(), expected.isinf()) and not y.isnan().any()


@pytest.mark.parametrize("convert", ["half", "bfloat16"])
def test_converted_modules_compute_in_float32(convert):
    x = noise(2, 4000).cuda()
    assert torch.equal(getattr(make(), convert)()(x), make()(x))
    with torch.autocast("cuda", torch.float16):
        assert torch.equal(make()(x), make()(x.clone()))


def test_float64_module_runs_plain():
    module, x = make().double(), noise(2, 4000, dtype=torch.float64).cuda()
    with pytest.warns(UserWarning, match="running in plain torch on cuda:0: the module is in float64"):
        y = module(x)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, plain(module, x), rtol=1e-12, atol=1e-12)
    module(x)  # and says so once


# --- strides and batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.float16])
def test_strides(dtype):
    module, base = make(), noise(6, 4100, dtype=dtype).cuda()
    views = {
        "transposed": noise(4100, 6, dtype=dtype).cuda().T,
        "every-second-row": base[::2],
        "every-second-sample": base[:, ::2],
        "expanded": base[:1].expand(5, -1),
        "expanded-1d": base[0].expand(3, 2, -1),
        "split": base.view(2, 3, 4100),
        "permuted": base.view(2, 3, 4100).transpose(0, 1),
        "channel": base.view(2, 3, 4100)[:, 1],
        "one-row": base[3:4],
        "one-sample-rows": base[:, :1].expand(-1, 4000),
        **{f"from-{start}": base[:, start:] for start in (1, 2, 3, 5)},
        **{f"odd-rows-from-{start}": noise(3, 4001, dtype=dtype).cuda()[:, start:] for start in (0, 1)},
    }
    for name, x in views.items():
        copy = x.clone(memory_format=torch.contiguous_format)
        y = module(x)
        assert y.is_contiguous() and torch.equal(y, module(copy)), name
        assert peak_error(y, plain(module, copy)) < 1e-5, name


def test_shapes():
    module = make()
    for shape in ((16000,), (1, 16000), (2, 3, 4, 1600), (0, 16000), (2, 0, 16000), (3, 2, 1, 801)):
        y = module(noise(*shape).cuda())
        assert y.shape == (*shape[:-1], 40, module.spec.frames(shape[-1])) and y.is_cuda
        assert y.dtype == torch.float32


@pytest.mark.parametrize("kwargs", [{"hop_length": 160}, {"n_fft": 2048, "power": 1.0}, {"n_fft": 64, "n_mels": 10}], ids=str)
def test_a_row_does_not_depend_on_its_batch(kwargs):
    module, x = make(**kwargs), noise(7, 5003).cuda()
    batch = module(x)
    for i in range(7):
        assert torch.equal(module(x[i]), batch[i]) and torch.equal(module(x[i : i + 2]), batch[i : i + 2])
    assert torch.equal(module(x.repeat(40, 1)), batch.repeat(40, 1, 1))
    assert all(torch.equal(module(x), batch) for _ in range(5)), "nor on the run"


@pytest.mark.parametrize("power", [0.5, 2.0])
@pytest.mark.parametrize("n_fft", [64, 400, 2048])
def test_frames_do_not_see_their_neighbours(n_fft, power):
    """Quiet stretches between ones 60 dB louder are as accurate as alone, and silence is exactly 0."""
    module = make(n_fft=n_fft, n_mels=10, power=power)
    x = noise(2, 40 * n_fft).cuda()
    gain = torch.tensor([1000.0, 1.0, 0.0, 1.0] * 10, device="cuda")  # stretches of n_fft samples, of two hops
    x = (x.view(2, 40, n_fft) * gain[:, None]).flatten(1)
    y = check(module, x)
    within = torch.arange(1, 79, 2)  # frames that lie in one stretch, (t - 1) / 2
    silent, unit = within[2::4], within[1::2]
    assert not y[..., silent].any() and y[..., unit].any(1).all()
    loud_free = (x.view(2, 40, n_fft) * (gain < 1000)[:, None]).flatten(1)
    assert torch.equal(y[..., unit], module(loud_free)[..., unit])


@pytest.mark.parametrize("kwargs", [{}, {"n_fft": 16384}, {"power": 0.5}, {"power": 1.0, "n_fft": 512}, {"center": False}], ids=str)
def test_silence(kwargs):
    module = make(**kwargs)
    assert not module(torch.zeros(2, 20000, device="cuda")).any()
    if module.power >= 1:  # beside the peak at 0 Hz bins are rounding errors, whose root is not small
        check(module, torch.ones(2, 20000, device="cuda"))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 3000, 5000, 8999])
def test_bad_samples_stay_in_their_frames(value, at):
    module, x = make(hop_length=160), noise(3, 9000).cuda()
    clean = module(x)
    x[1, at] = value
    y = module(x)
    assert torch.equal(y[[0, 2]], clean[[0, 2]])
    touched = []
    for t in range(y.shape[-1]):
        index, _ = module.spec.source_index(t * 160, 400, 9000)
        touched.append(bool((index == at).any()))
    touched = torch.tensor(touched, device="cuda")
    assert touched.any() and torch.equal(y[1][:, ~touched], clean[1][:, ~touched])
    assert not y[1][:, touched].isfinite().any()


@all_cases
def test_every_output_is_written(case):
    module, x = MelSpectrogram(**case.kwargs).cuda(), noise(*case.shape).cuda()
    module(x)  # its tables would take the poisoned block
    y, reached = poisoned_call(lambda: module(x))
    assert reached and y.isfinite().all()


def test_outputs_of_dead_filters_are_written():
    module, x = MelSpectrogram().cuda(), noise(2, 9000).cuda()
    module(x)  # its tables would take the poisoned block
    y, reached = poisoned_call(lambda: module(x))
    assert reached and not y[:, [0, 3, 6, 13]].any() and (y.sum((0, 2)) > 0).sum() == 124


# --- scale ---------------------------------------------------------------------------------------------------------------------


def test_more_rows_than_65535():
    module, x = make(n_fft=64, n_mels=10, pad_mode="constant"), noise(70000, 400).cuda()
    y = check(module, x)
    for rows in (slice(0, 3), slice(65530, 65541), slice(69997, 70000)):
        assert torch.equal(y[rows], module(x[rows]))


def test_more_than_2_31_samples_and_outputs():
    hop, n_mels, dtype = 100, 128, torch.float16
    n_samples = 2**31 + 123_456
    if torch.cuda.mem_get_info()[0] < 20 * GIB:
        pytest.skip("needs 20 GiB of free GPU memory")
    module = MelSpectrogram(n_fft=512, hop_length=hop, n_mels=n_mels, dtype=dtype).cuda()
    x = torch.zeros(n_samples, dtype=torch.int16, device="cuda")
    sound = noise(50_000, dtype=torch.int16).cuda()
    places = [0, 2**30 - 25_000, 2**31 - 25_000, n_samples - 50_000]
    for place in places:
        x[place : place + 50_000] = sound
    y = module(x)
    assert y.numel() > 2**31 and x.numel() > 2**31
    for place in places:
        first = -(-place // hop)  # of the frames that see this sound alone
        start = max(0, (first - 4) * hop)
        piece = x[start : start + 60_000]
        frames = slice(first + 4, min(first + 480, y.shape[-1]))
        there = slice(frames.start - start // hop, frames.stop - start // hop)
        assert torch.equal(y[:, frames], module(piece)[:, there])
        assert_close(y[:, frames], plain(module, piece)[:, there], atol=1e-4, rtol=6e-4)
    quiet = slice(1_000_000, 1_000_100)
    assert y[:, :100].any() and not y[:, quiet].any()
    del x, y
    torch.cuda.empty_cache()


def test_more_than_2_31_samples_in_rows():
    """Rows an odd stride apart, the last of them beyond 2**31 samples."""
    if torch.cuda.mem_get_info()[0] < 20 * GIB:
        pytest.skip("needs 20 GiB of free GPU memory")
    module, base = make(), torch.zeros(3, 2**30 + 7, dtype=torch.int16, device="cuda")
    base[:, -5000:] = noise(3, 5000, dtype=torch.int16).cuda()
    y = module(base[:, -5000:])
    assert torch.equal(y, module(base[:, -5000:].contiguous()))
    del base
    torch.cuda.empty_cache()


def test_memory_is_the_output_alone():
    module = make(hop_length=160)
    for x in (noise(8, 48000).cuda(), noise(8, 48000, dtype=torch.int16).cuda(), noise(8, 48001).cuda()[:, 1:]):
        assert extra_memory(lambda x=x: module(x)) == 0


def test_a_warm_call_does_not_wait_for_the_gpu():
    module, x = make(), noise(2, 8000).cuda()
    module(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(x)
        module(x[:, :7000])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_lengths_make_no_kernels():
    module = make()
    module(noise(2, 4000).cuda())
    before = len(fused._kernels), len(fused._tables)
    for length in range(401, 1400, 7):
        module(noise(2, length).cuda())
    assert (len(fused._kernels), len(fused._tables)) == before


# --- streams, graphs, threads --------------------------------------------------------------------------------------------------


def test_side_stream():
    """Work is queued where the caller's is: behind a slow producer on the same stream, without any synchronisation."""
    module, x = make(), noise(4, 48000).cuda()
    expected = module(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            late = torch.zeros_like(x)
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            y = module(late)
            late.zero_()
            assert torch.equal(y, expected)


def capture(call, x):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(x)
    return graph, out


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.float64])
def test_graph_capture_and_replay(dtype):
    module, x = make(), noise(2, 8000, dtype=dtype).cuda()
    module(x)
    graph, out = capture(module, x)
    for seed in range(3):
        x.copy_(noise(2, 8000, seed=seed, dtype=dtype))
        graph.replay()
        assert torch.equal(out, module(x))


def test_cold_capture_is_a_clear_error(cold):
    module, x = make(), noise(2, 8000).cuda()
    for what in ("a table", "a table"):  # first nothing is ready, then the kernel alone
        with pytest.raises(RuntimeError, match=f"being captured and {what} .*call the module's warmup"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            capture(module, x)
        torch.cuda.synchronize()
        y = check(module, x)  # the process is as good as before
        module = make()
    graph, out = capture(make_warm(module, x), x)
    graph.replay()
    assert torch.equal(out, y)


def make_warm(module, x):
    module(x)
    return module


def test_a_captured_graph_outlives_a_change_of_tables():
    """A graph holds addresses of tables: it goes on with the old ones or the new ones, never with what came to lie there."""
    module, x = make(), noise(2, 8000).cuda()
    old = module(x)
    graph, out = capture(module, x)
    module.spectrogram.window.mul_(2)
    new = module(x)
    # Zeros: with other bits in its filters the kernel could run for ever.
    junk = [torch.zeros(n, device="cuda") for n in (64, 200, 400, 600, 900, 1000, 1200, 2000) for _ in range(50)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, old) or torch.equal(out, new)
    del junk


def in_threads(n, function):
    """Run function(i) in n fresh threads at once; re-raise what they raise."""
    errors, barrier = [], threading.Barrier(n)

    def run(i):
        try:
            barrier.wait()
            function(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_eight_threads_call_first_at_once(cold, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path))
    compiled, compile_cubin, results = [], compiler.compile_cubin, {}
    monkeypatch.setattr(compiler, "compile_cubin", lambda *a: (compiled.append(a), compile_cubin(*a))[1])
    module, xs = make(hop_length=157), [noise(2, 8000, seed=i).cuda() for i in range(8)]
    in_threads(8, lambda i: results.update({i: module(xs[i])}))
    assert len(compiled) == 1
    for i, x in enumerate(xs):
        assert torch.equal(results[i], module(x)) and peak_error(results[i], plain(module, x)) < 1e-5


def test_a_warm_call_from_a_fresh_thread():
    """No CUDA context is current in it yet, and a cached block of memory brings none along."""
    module, x = make(), noise(2, 8000).cuda()
    expected, results = module(x), {}
    del expected
    in_threads(1, lambda i: results.update({i: module(x)}))
    assert torch.equal(results[0], module(x))


def test_threads_with_streams_of_their_own():
    module, xs = make(), [noise(2, 8000, seed=i).cuda() for i in range(8)]
    expected, wrong = [module(x) for x in xs], []
    torch.cuda.synchronize()

    def work(i):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(50):
                if not torch.equal(module(xs[i]), expected[i]):
                    wrong.append(i)

    in_threads(8, work)
    assert wrong == []


def test_several_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    modules = [make().to(f"cuda:{i}") for i in range(2)]
    x = noise(2, 8000)
    with torch.cuda.device(0):
        ys = [module(x.to(f"cuda:{i}")) for i, module in enumerate(modules)]  # the second launch is on a device that is not current
        assert torch.cuda.current_device() == 0
    assert [y.device.index for y in ys] == [0, 1] and torch.equal(ys[0].cpu(), ys[1].cpu())
    with pytest.raises(ValueError, match="waveform is on cuda:1, the module's window on cuda:0"):
        modules[0](x.to("cuda:1"))
    moved = modules[0].to("cuda:1")
    assert torch.equal(moved(x.to("cuda:1")), ys[1])


def test_a_waveform_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="waveform is on cpu, the module's window on cuda:0"):
        make()(noise(2, 8000))


# --- the buffers are the truth -------------------------------------------------------------------------------------------------


def test_changed_tables_are_used():
    module, x = make(), noise(2, 8000).cuda()
    check(module, x)
    module.spectrogram.window = torch.hamming_window(400, device="cuda")
    check(module, x)
    module.spectrogram.window = torch.hann_window(320, device="cuda")  # centred
    check(module, x)
    module.spectrogram.window.mul_(3)
    check(module, x)
    module.mel_scale.fb = module.mel_scale.fb.flip(1)  # the same values in other places
    check(module, x)
    module.mel_scale.fb[:, 3] = 0
    y = check(module, x)
    assert not y[:, 3].any()
    module.mel_scale.fb = torch.eye(201, device="cuda")[:, 5:8]
    assert check(module, x, limit=1e-4).shape[1] == 3  # three bins: all may be far below the frame's other ones
    other = make(window_fn=torch.blackman_window, norm="slaney")
    module = make()
    module(x)
    module.load_state_dict(other.state_dict())
    assert torch.equal(check(module, x), other(x))
    module.load_state_dict({k: 2 * v for k, v in other.state_dict().items()}, assign=True)
    check(module, x)
    with torch.no_grad():
        module.spectrogram.window[::2] = 0
    check(module, x)


def test_tables_that_are_views():
    module, x = make(), noise(2, 8000).cuda()
    both = torch.stack([module.spectrogram.window, torch.hamming_window(400, device="cuda")], 1)
    module.mel_scale.fb = module.mel_scale.fb.T.contiguous().T
    for column in (0, 1, 0):
        module.spectrogram.window = both[:, column]
        check(module, x)
    both.mul_(2)
    check(module, x)


def test_modules_do_not_mix():
    x = noise(2, 8000).cuda()
    tables = [{}, {"norm": "slaney"}, {"f_max": 4000.0}, {"window_fn": torch.hamming_window}, {"n_mels": 41}, {"normalized": True}]
    kernels = [{"power": 1.0}, {"hop_length": 160}, {"pad": 1}, {"pad_mode": "constant"}]
    modules = [make(**kwargs) for kwargs in tables + kernels]
    first = [module(x) for module in modules]
    assert all(torch.equal(module(x), y) for module, y in zip(modules, first, strict=True))
    for module in modules:
        check(module, x)


def test_modules_that_come_and_go():
    """Freed tables' addresses are given out again."""
    x = noise(2, 8000).cuda()
    for i in range(1, 40):
        module = make(window_fn=lambda n, i=i: i * torch.hann_window(n))
        check(module, x)
        del module
        if i % 10 == 0:
            gc.collect()
            torch.cuda.empty_cache()
    module = make()
    module(x)
    gc.collect()
    make()(x)  # what a new module's tables are made, those of dead ones go
    assert len(fused._tables) < 20


def test_inference_mode():
    x = noise(2, 8000).cuda()
    expected = make()(x)
    with torch.inference_mode():
        module = make()
        assert torch.equal(module(x), expected)
        module.spectrogram.window.mul_(2)
        assert torch.allclose(module(x), 4 * expected)
    assert torch.allclose(module(x), 4 * expected)
    outside = make()
    with torch.inference_mode():
        assert torch.equal(outside(x), expected)
        outside.spectrogram.window.mul_(2)
        assert torch.allclose(outside(x), 4 * expected)


# --- compilation ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode):
    torch._dynamo.reset()
    module = make()
    compiled = torch.compile(lambda x: (module(x) + 1e-5).log(), fullgraph=True, mode=mode)
    for seed in range(6):  # with CUDA graphs: warm-up, recording, replays
        x = noise(2, 8000, seed=seed).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        assert_close(compiled(x).clone(), (module(x) + 1e-5).log())


def test_compiled_for_many_lengths():
    torch._dynamo.reset()
    module, counter = make(), torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    compiled(noise(2, 1600).cuda())
    before = counter.frame_count
    for length in (1601, 401, 16000, 48000):
        x = noise(2, length).cuda()
        assert torch.equal(compiled(x), module(x))
    assert counter.frame_count == before


# --- what is not fused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs,reason",
    [
        ({"n_fft": 67}, "n_fft = 67: 67 is not a product of three numbers up to 64"),
        ({"n_fft": 2 * 8191}, "n_fft = 16382: 8191 is not a product"),
        ({"n_fft": 32768}, "n_fft from 2 to 16384, not 32768"),
    ],
)
def test_unsupported_sizes_run_plain_and_say_why_once(kwargs, reason):
    module, x = make(**kwargs), noise(2, 40000).cuda()
    with pytest.warns(UserWarning) as caught:
        y = module(x)
    (warning,) = [w for w in caught if "plain torch" in str(w.message)]
    assert str(warning.message).startswith("running in plain torch on cuda:0: ") and reason in str(warning.message)
    assert peak_error(y, plain(module, x)) < 1e-4
    module(noise(3, 50000).cuda())  # a second warning would be an error here


def test_a_compiler_that_fails_runs_plain(cold, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path))

    def fail(*_):
        raise compiler.CompileError("the log")

    monkeypatch.setattr(compiler, "compile_cubin", fail)
    module, x = make(), noise(2, 8000).cuda()
    with pytest.warns(UserWarning, match="running in plain torch on cuda:0: the log"):
        y = module(x)
    assert peak_error(y, plain(module, x)) < 1e-5


def test_a_cubin_that_the_driver_refuses_runs_plain(cold, monkeypatch):
    monkeypatch.setattr(cache, "load", lambda *_: b"no cubin\0")
    module, x = make(), noise(2, 8000).cuda()
    with pytest.warns(UserWarning, match="running in plain torch on cuda:0: cuModuleLoadData failed: CUDA_ERROR"):
        y = module(x)
    assert peak_error(y, plain(module, x)) < 1e-5


def test_errors_are_the_plain_paths():
    for x, message in ((torch.zeros(2, 100), "100 samples is too short"), (torch.zeros(2, 0), "input is empty")):
        with pytest.raises(ValueError, match=message):
            make()(x.cuda())


def test_an_error_elsewhere_in_the_batch_of_calls_leaves_the_module_usable():
    module, x = make(), noise(2, 8000).cuda()
    expected = module(x)
    for bad in (torch.zeros(2, 100, device="cuda"), torch.zeros(2, 8000, dtype=torch.int32, device="cuda")):
        with pytest.raises(ValueError):
            module(bad)
        assert torch.equal(module(x), expected)
