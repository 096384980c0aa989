"""The fused path's host side without a GPU: what it asks of plan, tables and kernel, and how often. The launch is recorded."""

import contextlib

import pytest
import torch

from flashmel import MelSpectrogram, environment, frontends, fused
from flashmel.jit import driver, toolchain
from flashmel.jit.compiler import CompileError
from flashmel.jit.toolchain import ToolchainError
from flashmel.plan import architecture, launch, launch_backward, make_backward_plan, make_plan
from flashmel.spec import Normalization

HOPPER, SMS = architecture(9, 0), 132


@pytest.fixture
def kernels(monkeypatch):
    """The kernels made, each with its specialisation and its launches; CPU tensors stand for CUDA ones."""
    made = []

    class Kernel:
        def __init__(self, specialisation, device):
            self.specialisation, self.launches, self.folds = specialisation, [], []
            made.append(self)

        def launch(self, params, blocks, threads, stream):
            self.launches.append((params, blocks, threads))

        def launch_normalize(self, params, blocks, threads, stream):
            self.launches.append((params, blocks))

        def launch_fold(self, params, stream):
            assert self.launches[-1][0] is params, "the other kernel has to be there first"
            self.folds.append(params)

    for name in ("_plans", "_kernels", "_tables", "_captured", "_calls", "_normalized_calls"):
        monkeypatch.setattr(fused, name, {})
    monkeypatch.setattr(fused, "Kernel", Kernel)
    monkeypatch.setattr(fused, "_device", lambda ordinal: (HOPPER, SMS))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name, value in (("getCurrentRawStream", 0), ("getDevice", None), ("isCurrentStreamCapturing", False)):
        monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *_, value=value: value, raising=False)
    return made


def call(module, x, dtype=None):
    return fused.features(x, module.spectrogram.window, module.mel_scale.fb, module.spec, dtype)


def call_backward(module, x, g=None, dtype=torch.float32):
    if g is None:
        g = torch.ones(*x.shape[:-1], module.n_mels, module.spec.frames(x.shape[-1]), dtype=dtype)
    return fused.features_backward(g, x, module.spectrogram.window, module.mel_scale.fb, module.spec)


def test_a_configuration_is_planned_and_compiled_once(kernels, monkeypatch):
    module = MelSpectrogram(hop_length=160, n_mels=40)
    call(module, torch.zeros(2, 4000))
    monkeypatch.setattr(fused, "make_plan", lambda *_: pytest.fail("planned again"))
    monkeypatch.setattr(fused, "_uploaded", lambda *_: pytest.fail("tables made again"))
    for length in (4000, 5000, 16000):
        call(module, torch.zeros(3, length))
    (kernel,) = kernels
    assert len(kernel.launches) == 4 and kernel.specialisation.filters_in_shared
    assert len(fused._plans) == len(fused._kernels) == len(fused._tables) == 1


def test_each_type_has_its_kernel(kernels):
    module = MelSpectrogram(hop_length=160, n_mels=40)
    for dtype in (torch.float32, torch.float64, torch.int16, torch.float16):
        call(module, torch.zeros(2, 4000, dtype=dtype))
    call(module, torch.zeros(2, 4000), torch.bfloat16)
    types = [(kernel.specialisation.input_type, kernel.specialisation.output_type) for kernel in kernels]
    assert types == [("float32", "float32"), ("int16", "float32"), ("float16", "float32"), ("float32", "bfloat16")]
    assert [len(kernel.launches) for kernel in kernels] == [2, 1, 1, 1]


def test_modules_of_one_kernel_have_their_own_tables(kernels):
    x = torch.zeros(2, 4000)
    modules = [MelSpectrogram(hop_length=160, n_mels=40, **kwargs) for kwargs in ({}, {"normalized": True}, {"f_min": 50.0})]
    for module in modules * 2:
        call(module, x)
    assert len({params.filters for kernel in kernels for params, *_ in kernel.launches}) == 3


def test_changed_tables_are_read_again(kernels):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000)
    call(module, x)
    module.spectrogram.window.mul_(2)
    call(module, x)
    (kernel,) = kernels
    first, second = (params.factors for params, *_ in kernel.launches)
    assert first != second


def test_a_large_filterbank_stays_in_global_memory(kernels):
    module = MelSpectrogram(hop_length=160, n_mels=40)
    module.mel_scale.fb = torch.ones(201, 500)
    call(module, torch.zeros(2, 4000))
    assert not kernels[0].specialisation.filters_in_shared


@pytest.mark.parametrize("offset,stride,aligned", [(0, 4000, True), (1, 4000, False), (2, 4002, True), (0, 4001, False)])
def test_alignment(kernels, offset, stride, aligned):
    """At hop 160 float32 samples are copied two at a time: so must every row begin."""
    module = MelSpectrogram(hop_length=160, n_mels=40)
    storage = torch.zeros(3 * stride + offset)
    call(module, storage[offset:].as_strided((2, 3000), (stride, 1), offset))
    params, *_ = kernels[0].launches[0]
    assert kernels[0].specialisation.plan.chunk == 2 and params.row_stride == stride and bool(params.aligned) == aligned


def test_parameters_are_the_launchs(kernels):
    module = MelSpectrogram(hop_length=160, n_mels=41)
    out = call(module, torch.zeros(7, 30000))
    params, blocks, threads = kernels[0].launches[0]
    plan = make_plan(module.spec, HOPPER)
    grid = launch(module.spec, plan, 30000, 7, SMS)
    assert (blocks, threads) == (grid.blocks, grid.threads) and out.shape == (7, 41, 188)
    for name in ("tiles", "all_tiles", "magic", "shift", "step", "first_inner", "inner"):
        assert getattr(params, name) == getattr(grid, name)
    assert (params.n_samples, params.frames, params.n_mels, params.n_filters) == (30000, 188, 41, 44)


def test_what_cannot_run_fused_says_so_at_every_call(kernels):
    for _ in range(2):
        with pytest.raises(fused.UnavailableError, match="67 is not a product of three numbers"):
            call(MelSpectrogram(n_fft=67, n_mels=4), torch.zeros(2, 4000))
    assert not kernels


@pytest.mark.parametrize("call", [call, call_backward], ids=["transform", "gradient"])
def test_a_failed_compilation_is_not_tried_again(kernels, monkeypatch, call):
    attempts = []

    def fail(*_):
        attempts.append(1)
        raise CompileError("the log")

    monkeypatch.setattr(fused, "Kernel", fail)
    module = MelSpectrogram(hop_length=160, n_mels=40)
    for _ in range(3):
        with pytest.raises(fused.UnavailableError, match="the log"):
            call(module, torch.zeros(2, 4000))
    assert len(attempts) == 1


@pytest.mark.parametrize("call", [call, call_backward], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", [driver.MissingKernelError, driver.DriverError, ToolchainError])
def test_where_compiling_is_forbidden_a_missing_kernel_is_an_error(kernels, monkeypatch, call, kind):
    """Not the plain path; and the next call looks again, for a bundle may have been loaded."""
    module, x, made = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000), fused.Kernel

    def refuse(specialisation, device):
        raise kind("not there")

    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    monkeypatch.setattr(fused, "Kernel", refuse)
    with pytest.raises(kind, match="not there"):
        call(module, x)
    monkeypatch.setattr(fused, "Kernel", made)
    call(module, x)
    with pytest.raises(fused.UnavailableError):  # what no kernel covers has the plain path still
        call(MelSpectrogram(n_fft=134), x)


def test_a_missing_compiler_is_a_reason_only_where_one_is_needed(monkeypatch):
    def no_compiler():
        raise ToolchainError("none here")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(toolchain, "nvrtc_version", no_compiler)
    monkeypatch.delenv("FLASHMEL_NO_JIT", raising=False)
    assert fused.unavailable_reason(torch.device("cuda")) == "none here"
    monkeypatch.setattr(environment, "_configured_bundles", {"kernels": None})
    assert fused.unavailable_reason(torch.device("cuda")) is None
    monkeypatch.setattr(environment, "_configured_bundles", {})
    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    assert fused.unavailable_reason(torch.device("cuda")) is None


def test_nothing_is_made_in_a_capture(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    module = MelSpectrogram(hop_length=160, n_mels=40)
    with pytest.raises(RuntimeError, match="being captured and a table of the module is not ready: call the module's warmup"):
        call(module, torch.zeros(2, 4000))
    assert not kernels and not fused._tables


# --- the gradient --------------------------------------------------------------------------------------------------------------


def test_a_gradient_is_planned_and_compiled_once(kernels, monkeypatch):
    module = MelSpectrogram(hop_length=160, n_mels=40)
    call(module, torch.zeros(2, 4000))
    call_backward(module, torch.zeros(2, 4000))
    monkeypatch.setattr(fused, "make_backward_plan", lambda *_: pytest.fail("planned again"))
    monkeypatch.setattr(fused, "_uploaded", lambda *_: pytest.fail("tables made again"))
    for length in (4000, 5000, 16000):
        call_backward(module, torch.zeros(3, length))
        call(module, torch.zeros(3, length))  # beside a forward pass, whose kernel and tables are others
    forward, backward = kernels
    assert (forward.specialisation.unit, backward.specialisation.unit) == ("forward.cu", "backward.cu")
    assert len(backward.launches) == 4 and not backward.folds and backward.specialisation.filters_in_shared
    assert len(fused._kernels) == len(fused._tables) == 2


def test_gradients_parameters_are_the_launchs(kernels):
    module, x = MelSpectrogram(hop_length=160, n_mels=41), torch.zeros(7, 30000)
    g = torch.ones(7, 41, 188)
    gradient = call_backward(module, x, g)
    params, blocks, threads = kernels[0].launches[0]
    plan = make_backward_plan(module.spec, HOPPER, 41)
    grid = launch_backward(module.spec, plan, 30000, 7, SMS)
    assert kernels[0].specialisation.plan == plan and (blocks, threads) == (grid.blocks, grid.threads)
    names = "segments all_segments magic shift stride tiles emitted first_inner inner edge_length fold"
    for name in names.split():
        assert getattr(params, name) == getattr(grid, name), name
    assert (params.n_samples, params.row_stride, params.frames, params.rows) == (30000, 30000, 188, 7)
    assert (params.waveform, params.mel, params.gradient) == (x.data_ptr(), g.data_ptr(), gradient.data_ptr())
    assert params.filter_entries == module.spec.n_freqs * plan.entries_per_bin


def test_each_type_has_its_gradients_kernel(kernels):
    module = MelSpectrogram(hop_length=160, n_mels=40)
    waveforms = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for dtype in waveforms:
        x = torch.zeros(2, 3, 4000, dtype=dtype)
        gradient = call_backward(module, x)
        assert gradient.dtype == dtype and gradient.shape == x.shape and gradient.is_contiguous()
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert call_backward(module, torch.zeros(2, 4000), dtype=dtype).dtype == torch.float32
    types = [(kernel.specialisation.input_type, kernel.specialisation.output_type) for kernel in kernels]
    inputs = [(t, "float32") for t in ("float32", "float16", "bfloat16")]
    assert types == [*inputs, ("float32", "float16"), ("float32", "bfloat16")]
    assert [len(kernel.launches) for kernel in kernels] == [3, 1, 1, 1, 1]
    sizes = [{"float32": 4}.get(t, 2) for t, _ in types]
    assert [kernel.specialisation.plan for kernel in kernels] == [make_backward_plan(module.spec, HOPPER, 40, 1, n) for n in sizes]


def test_changed_tables_are_read_again_for_the_gradient(kernels):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000)
    window, fb = module.spectrogram.window, module.mel_scale.fb
    seen = []
    for change in (None, None, window, None, fb, None):
        if change is not None:
            change.mul_(2)
        call_backward(module, x)
        (tables,) = fused._tables.values()  # old ones go
        seen.append(tables)
    (kernel,) = kernels
    assert seen[0] is seen[1] and seen[2] is seen[3] and seen[4] is seen[5]
    first, second, third = seen[::2]
    assert not torch.equal(first.factors, second.factors) and torch.equal(second.factors, third.factors)
    assert torch.equal(first.filters, second.filters) and not torch.equal(second.filters, third.filters)
    last, *_ = kernel.launches[-1]
    assert (last.factors, last.filters) == (third.factors.data_ptr(), third.filters.data_ptr())


def test_a_bank_of_more_filters_a_bin_has_another_plan(kernels):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000)
    call_backward(module, x)
    module.mel_scale.fb.fill_(0.5)
    call_backward(module, x)
    assert [kernel.specialisation.plan.entries_per_bin for kernel in kernels] == [1, 20]
    params, *_ = kernels[1].launches[0]
    assert params.filter_entries == 20 * 201
    module.mel_scale.fb = torch.ones(201, 500)
    call_backward(module, x)
    assert kernels[2].specialisation.plan.n_mels == 500 and not kernels[2].specialisation.filters_in_shared


def test_mel_gradients_are_read_where_they_lie(kernels):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 3, 4000)
    base = torch.ones(2, 3, 40, 26)
    views = {
        "contiguous": base,
        "frames-first": torch.ones(2, 3, 26, 40).mT,
        "every-second-frame": torch.ones(2, 3, 40, 52)[..., ::2],
        "channels-of-more": torch.ones(2, 3, 80, 26)[:, :, 40:],
        "expanded": torch.ones(()).expand(2, 3, 40, 26),  # of sum().backward()
        "expanded-filters": torch.ones(2, 3, 1, 26).expand(2, 3, 40, 26),
        "expanded-rows": torch.ones(40, 26).expand(2, 3, 40, 26),
    }
    for name, g in views.items():
        call_backward(module, x, g)
        params, *_ = kernels[0].launches[-1]
        rows = g.view(6, 40, 26)
        assert params.mel == g.data_ptr(), name
        assert (params.mel_row_stride, params.mel_stride, params.mel_frame_stride) == rows.stride(), name
    assert len(kernels) == 1


def test_waveforms_are_read_where_they_lie(kernels):
    module, storage = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(3, 5000)
    views = ((storage[:, 8:4008], 5000, True), (storage[:, 1:4001], 5000, False), (storage[:1].expand(3, -1), 0, True))
    for x, stride, aligned in views:
        gradient = call_backward(module, x)
        params, *_ = kernels[0].launches[-1]
        assert params.waveform == x.data_ptr() and params.row_stride == stride and bool(params.aligned) == aligned
        assert gradient.shape == x.shape and gradient.is_contiguous()


@pytest.mark.parametrize("shape", [(0, 4000), (2, 0, 4000)])
def test_no_rows_have_no_gradient(kernels, shape):
    gradient = call_backward(MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(shape, dtype=torch.float16))
    assert gradient.shape == shape and gradient.dtype == torch.float16 and not kernels


def test_no_filters_have_a_gradient_of_zero(kernels):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000)
    module.mel_scale.fb = torch.zeros(201, 0)
    gradient = call_backward(module, x, torch.zeros(2, 0, 26))
    assert gradient.shape == x.shape and not gradient.any() and not kernels


@pytest.mark.parametrize("pad", [-50, 0, 50])
def test_what_is_cropped_has_a_gradient_of_zero(kernels, monkeypatch, pad):
    """The kernel does not write there. Everywhere else it does: no time goes into zeros that are overwritten."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(7))
    gradient = call_backward(MelSpectrogram(hop_length=160, n_mels=40, pad=pad), torch.zeros(2, 4000))
    assert (gradient == (0 if pad < 0 else 7)).all()


@pytest.mark.parametrize(
    "kwargs,shape,folded_by",
    [
        ({}, (32, 16000), "teams"),
        ({"pad": 30}, (32, 16000), "teams"),
        ({}, (2, 201), "kernel"),  # its two ends overlap
        ({}, (1, 480_000), "kernel"),  # in more segments than its ends fit into one of
        ({"n_fft": 16384}, (2, 50_000), "kernel"),  # long ends
        ({"pad_mode": "circular"}, (32, 16000), "kernel"),
        ({"pad_mode": "replicate"}, (32, 16000), "kernel"),
        ({"pad_mode": "constant"}, (32, 16000), "nobody"),
        ({"center": False}, (32, 16000), "nobody"),
        ({"pad_mode": "circular", "n_fft": 2, "n_mels": 1, "hop_length": 1}, (2, 100), "kernel"),
    ],
    ids=str,
)
def test_who_folds_the_ends(kernels, kwargs, shape, folded_by):
    module = MelSpectrogram(**{"hop_length": 160, "n_mels": 40, **kwargs})
    call_backward(module, torch.zeros(shape))
    (kernel,) = kernels
    (params, *_), side = kernel.launches[0], 2 * module.spec.margin + 1
    assert len(kernel.launches) == 1 and len(kernel.folds) == (folded_by == "kernel")
    assert bool(params.fold) == (folded_by == "teams")
    padded = shape[1] + 2 * (module.spec.pad + module.spec.margin)
    assert params.edge_length == (0 if folded_by == "nobody" else min(2 * side, padded)) and params.rows == shape[0]


def test_what_has_no_gradients_kernel_says_so_at_every_call(kernels):
    for n_fft, reason in ((67, "67 is not a product of three numbers"), (14553, "the gradient at n_fft = 14553 with 4 filters")):
        for _ in range(2):
            with pytest.raises(fused.UnavailableError, match=reason):
                call_backward(MelSpectrogram(n_fft=n_fft, n_mels=4), torch.zeros(2, 40000))
    module = MelSpectrogram(n_mels=4).double()
    with pytest.raises(fused.UnavailableError, match="the module is in float64"):
        call_backward(module, torch.zeros(2, 4000, dtype=torch.float64))
    assert not kernels


def test_nothing_is_made_for_the_gradient_in_a_capture(kernels, monkeypatch):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000)
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    call(module, x)  # the other direction's tables are no help
    (forward,), capturing = kernels, True
    with pytest.raises(RuntimeError, match="being captured and a table of the module is not ready: call the module's warmup"):
        call_backward(module, x)
    assert kernels == [forward] and len(fused._tables) == 1 and not fused._captured
    capturing = False
    call_backward(module, x)
    capturing = True
    call_backward(module, x)
    assert len(kernels[1].launches) == 2
    (kept,) = fused._captured.values()  # as long as the graph may run
    assert kept.plan is kernels[1].specialisation.plan


# --- calls that are recalled ---------------------------------------------------------------------------------------------------


def test_a_call_like_another_is_a_launch_and_no_more(kernels, monkeypatch):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000)
    first = call(module, x)
    for name in ("_plan", "_tables_of", "_kernel", "launch", "launch_params"):
        monkeypatch.setattr(fused, name, lambda *_, name=name: pytest.fail(f"{name} again"))
    second = module(torch.zeros(2, 4000))  # also through the module
    (kernel,) = kernels
    (before, *grid), (after, *grid_again) = kernel.launches
    assert grid == grid_again and second.shape == first.shape and second.dtype == first.dtype
    pointers = {"waveform", "mel"}
    assert {name: getattr(after, name) for name, _ in after._fields_ if name not in pointers} == {
        name: getattr(before, name) for name, _ in before._fields_ if name not in pointers
    }
    assert after.mel == second.data_ptr() and after.mel != before.mel


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.spectrogram.window.mul_(2),
        lambda module: module.mel_scale.fb.mul_(2),
        lambda module: setattr(module.spectrogram, "window", module.spectrogram.window.clone()),
        lambda module: setattr(module.mel_scale.fb, "data", module.mel_scale.fb.clone()),
        lambda module: module.load_state_dict(MelSpectrogram(hop_length=160, n_mels=40).state_dict()),
    ],
    ids=["window in place", "filters in place", "a new window", "new data", "a checkpoint"],
)
def test_what_changes_is_not_recalled(kernels, change):
    module, x = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(2, 4000)
    call(module, x)
    assert fused.recall(x, module.spectrogram.window, module.mel_scale.fb, module.spec, None) is not None
    change(module)
    assert fused.recall(x, module.spectrogram.window, module.mel_scale.fb, module.spec, None) is None
    call(module, x)
    assert fused.recall(x, module.spectrogram.window, module.mel_scale.fb, module.spec, None) is not None


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 4001),
        torch.zeros(4000),
        torch.zeros(3, 4000),
        torch.zeros(2, 4000).half(),
        torch.zeros(4000, 2).T,
        torch.zeros(2, 8000)[:, ::2],
    ],
    ids=lambda x: f"{tuple(x.shape)}-{x.stride()}-{x.dtype}",
)
def test_another_layout_is_another_call(kernels, other):
    module = MelSpectrogram(hop_length=160, n_mels=40)
    call(module, torch.zeros(2, 4000))
    assert fused.recall(other, module.spectrogram.window, module.mel_scale.fb, module.spec, None) is None
    assert fused.recall(torch.zeros(2, 4000), module.spectrogram.window, module.mel_scale.fb, module.spec, torch.float16) is None


def test_where_the_waveform_begins_decides_how_it_is_copied(kernels):
    module, storage = MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(4003)
    for offset in (0, 1, 2):
        call(module, storage[offset : offset + 4000])
    assert [bool(params.aligned) for params, *_ in kernels[0].launches] == [True, False, True]
    assert len(fused._calls) == 1


def test_calls_are_forgotten_in_the_end(kernels, monkeypatch):
    monkeypatch.setattr(fused, "_MAX_CALLS", 10)
    module = MelSpectrogram(hop_length=160, n_mels=40)
    for length in range(4000, 4100):
        call(module, torch.zeros(1, length))
    assert len(fused._calls) <= 10
    del module
    call(MelSpectrogram(hop_length=160, n_mels=40), torch.zeros(1, 4000))
    assert len(fused._calls) == 1, "calls of a module that is gone keep its tables"


# --- ahead of the first call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "kwargs", [{}, {"n_fft": 2048, "hop_length": 512, "power": 1.0, "pad": 3}, {"n_fft": 441, "pad_mode": "circular"}], ids=str
)
def test_what_is_compiled_ahead_is_what_calls_ask_for(kernels, kwargs, dtype):
    module = MelSpectrogram(**{"hop_length": 160, "n_mels": 40, **kwargs})
    ahead = fused.specialisations(module.spectrogram.window, module.mel_scale.fb, module.spec, HOPPER, dtype, gradient=True)
    x = torch.zeros(1, 9000, dtype=dtype)
    call(module, x)
    call_backward(module, x)
    assert [kernel.specialisation for kernel in kernels] == ahead


def test_a_dense_filterbank_ahead(kernels):
    module = MelSpectrogram(hop_length=160, n_mels=40)
    module.mel_scale.fb = torch.ones(201, 500)
    ahead = fused.specialisations(module.spectrogram.window, module.mel_scale.fb, module.spec, HOPPER, gradient=True)
    call(module, torch.zeros(1, 9000))
    call_backward(module, torch.zeros(1, 9000))
    assert [kernel.specialisation for kernel in kernels] == ahead and not ahead[0].filters_in_shared


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("name", ["whisper-large-v3", "nemo", "parakeet", "kaldi-fbank", "matcha", "qwen2-audio"])
def test_a_front_ends_kernels_ahead(kernels, name, dtype):
    """All that ops asks for: features, or normalised ones; recorded or compiled; and the gradient of those that were rounded."""
    module = frontends.frontend(name, dtype=dtype)
    rule, affine, x = module.recipe.normalization, module._buffers.get("affine"), torch.zeros(1, 9000)
    for lengths in (None, torch.tensor([8000]))[: 2 - (module.recipe.n_samples is not None)]:
        operands = x, module.window, module.fb, module.spec
        if rule is not None:
            fused.normalized_features(*operands, rule, dtype, lengths, affine)
        late = dtype if rule is None else None
        out = fused.features(*operands, late, lengths, affine)
        fused.features_backward(torch.ones_like(out), *operands, lengths, affine, out)
    ahead = frontends.specialisations(module, HOPPER, gradient=True)
    assert len(ahead) == len(set(ahead)) == len(kernels)
    assert {kernel.specialisation for kernel in kernels} == set(ahead)


def test_a_floor_without_a_kernel_ahead():
    """Of features with factors of their own: in plain torch after one launch."""
    module, rule = MelSpectrogram(hop_length=160, n_mels=40), Normalization("maximum", 8.0)
    tables = module.spectrogram.window, module.mel_scale.fb
    (kernel,) = fused.specialisations(*tables, module.spec, HOPPER, output=torch.float16, rule=rule, affine=True)
    assert kernel.output_type == "float32" and kernel.affine and not kernel.summary
