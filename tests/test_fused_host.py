"""The fused path's host side without a GPU: what it asks of plan, tables and kernel, and how often. The launch is recorded."""

import contextlib

import pytest
import torch

from flashmel import MelSpectrogram, fused
from flashmel.jit.compiler import CompileError
from flashmel.plan import architecture, launch, make_plan

HOPPER, SMS = architecture(9, 0), 132


@pytest.fixture
def kernels(monkeypatch):
    """The kernels made, each with its specialisation and its launches; CPU tensors stand for CUDA ones."""
    made = []

    class Kernel:
        def __init__(self, specialisation, device):
            self.specialisation, self.launches = specialisation, []
            made.append(self)

        def launch(self, params, blocks, threads, stream):
            self.launches.append((params, blocks, threads))

    for name in ("_plans", "_kernels", "_tables", "_captured"):
        monkeypatch.setattr(fused, name, {})
    monkeypatch.setattr(fused, "Kernel", Kernel)
    monkeypatch.setattr(fused, "_device", lambda ordinal: (HOPPER, SMS))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return made


def call(module, x, dtype=None):
    return fused.mel_spectrogram(x, module.spectrogram.window, module.mel_scale.fb, module.spec, dtype)


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


def test_a_failed_compilation_is_not_tried_again(kernels, monkeypatch):
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


def test_nothing_is_made_in_a_capture(kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    module = MelSpectrogram(hop_length=160, n_mels=40)
    with pytest.raises(RuntimeError, match="being captured and a table of the module is not ready: call the module once"):
        call(module, torch.zeros(2, 4000))
    assert not kernels and not fused._tables
