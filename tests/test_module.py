"""MelSpectrogram as an nn.Module and as a drop-in: signature, state, dtypes, devices, errors, strides."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from cases import INPUT_DTYPES, OUTPUT_DTYPES, PAD_MODES, Case, all_cases, noise
from torch import Tensor, nn

from flashmel import MelSpectrogram

KEYS = ("spectrogram.window", "mel_scale.fb")


def make(**kwargs: Any) -> MelSpectrogram:
    return MelSpectrogram(**{"n_mels": 40, **kwargs})


def torchaudios(**kwargs: Any) -> nn.Module:
    return pytest.importorskip("torchaudio").transforms.MelSpectrogram(**{"n_mels": 40, **kwargs})


@pytest.fixture
def x() -> Tensor:
    return noise(2, 4000)


# --- a drop-in for torchaudio ---------------------------------------------------------------------------------------------


def test_signature_is_torchaudios():
    theirs = inspect.signature(pytest.importorskip("torchaudio").transforms.MelSpectrogram.__init__).parameters
    ours = inspect.signature(MelSpectrogram.__init__).parameters
    positional = [p for p in ours.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in positional] == [(p.name, p.default) for p in theirs.values()]
    assert [p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY] == ["dtype"]


def test_attributes_are_torchaudios():
    kwargs = {
        "f_max": 7000.0,
        "pad": 3,
        "normalized": True,
        "norm": "slaney",
        "mel_scale": "slaney",
        "center": False,
        "onesided": True,
    }
    ours, theirs = make(**kwargs), torchaudios(**kwargs)
    for path in ("", "spectrogram", "mel_scale"):
        mine, reference = ours.get_submodule(path), theirs.get_submodule(path)
        for name, value in vars(reference).items():
            if not name.startswith("_"):
                assert getattr(mine, name) == value, (path, name)


@all_cases
def test_state_dict_both_ways(case: Case):
    ours, theirs = MelSpectrogram(**case.kwargs), torchaudios(**{"n_mels": 128, **case.kwargs})
    assert tuple(ours.state_dict()) == tuple(theirs.state_dict()) == KEYS
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for key in KEYS:
        assert torch.equal(ours.state_dict()[key], theirs.state_dict()[key])


@all_cases
def test_forward_is_torchaudios(case: Case):
    x, pad = noise(*case.shape), case.kwargs.get("pad", 0)
    expected = torchaudios(**{"n_mels": 128, **case.kwargs})(x[..., -pad:pad] if pad < 0 else x)
    y = MelSpectrogram(**case.kwargs)(x)
    assert y.is_contiguous()
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_submodules_compose(x: Tensor):
    module = make()
    torch.testing.assert_close(module.mel_scale(module.spectrogram(x)), module(x), rtol=1e-5, atol=1e-6)


# --- state ----------------------------------------------------------------------------------------------------------------


def test_checkpoint_without_keys_loads_strictly(x: Tensor):
    model = nn.Sequential(make(), nn.Linear(21, 1))
    expected = model[0](x)
    old = {k: v for k, v in model.state_dict().items() if k.startswith("1.")}
    assert model.load_state_dict(old, strict=True) == ([], [])
    assert torch.equal(model[0](x), expected)
    with pytest.raises(RuntimeError, match="Unexpected"):
        model.load_state_dict({**old, "0.spectrogram.other": torch.ones(1)})
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**old, "0.mel_scale.fb": torch.ones(201, 41)})


def _saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m)), _saved])
def test_copies(clone, x: Tensor):
    module = make(power=1.0, window_fn=torch.hamming_window, dtype=torch.bfloat16)
    module.mel_scale.fb.mul_(2)
    twin = clone(module)
    assert torch.equal(twin(x), module(x)) and repr(twin) == repr(module) and twin.spec == module.spec


def test_buffers_are_the_truth(x: Tensor):
    module, expected = make(), make(window_fn=torch.hamming_window)(x)
    module.spectrogram.window = torch.hamming_window(400)
    torch.testing.assert_close(module(x), expected)
    module.spectrogram.window.zero_()
    assert (module(x) == 0).all()
    module.load_state_dict(make(window_fn=torch.hamming_window).state_dict())
    assert torch.equal(module(x), expected)
    module.mel_scale.fb = 2 * module.mel_scale.fb[:, :7]
    torch.testing.assert_close(module(x), 2 * expected[:, :7])
    module.spectrogram.window = torch.hamming_window(300)  # of another length: centred in n_fft
    torch.testing.assert_close(module(x), 2 * make(window_fn=torch.hamming_window, win_length=300, hop_length=200)(x)[:, :7])


def test_learnable_tables(x: Tensor):
    module = make()
    window, fb = nn.Parameter(module.spectrogram.window.clone()), nn.Parameter(module.mel_scale.fb.clone())
    del module.spectrogram.window, module.mel_scale.fb
    module.spectrogram.window, module.mel_scale.fb = window, fb
    module(x).sum().backward()
    assert window.grad.abs().sum() > 0 and fb.grad.abs().sum() > 0


def test_instances_share_nothing(x: Tensor):
    one, two = make(), make(f_max=4000.0)
    assert not torch.equal(one(x), two(x))
    assert torch.equal(one(x), make()(x)) and torch.equal(two(x), make(f_max=4000.0)(x))


# --- dtypes and devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [nn.Module.half, nn.Module.bfloat16, lambda m: m.to(torch.float16), lambda m: nn.Sequential(m).half()[0], nn.Module.float],
)
def test_tables_stay_float32(convert, x: Tensor):
    module = convert(make())
    assert {b.dtype for b in module.buffers()} == {torch.float32}
    assert torch.equal(module(x), make()(x))


def test_double(x: Tensor):
    module = make().double()
    y = module(x)
    assert y.dtype == torch.float64 and {b.dtype for b in module.buffers()} == {torch.float64}
    torch.testing.assert_close(y.float(), make()(x), rtol=1e-4, atol=1e-5)
    assert module.float()(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("out", OUTPUT_DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype, out: torch.dtype | None):
    x = noise(2, 4000, dtype=dtype)
    y = make(dtype=out)(x)
    assert y.dtype == (out or torch.float32)
    assert torch.equal(y, make(dtype=out)(x.float() / (32768 if dtype == torch.int16 else 1)))


@pytest.mark.parametrize("default", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_default_dtype(default: torch.dtype, x: Tensor):
    try:
        torch.set_default_dtype(default)
        module = make()
        y = module(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert y.dtype == (torch.float64 if default == torch.float64 else torch.float32)
    torch.testing.assert_close(y.float(), make()(x), rtol=1e-4, atol=1e-5)


def test_to_meta_and_back(x: Tensor):
    module = make().to("meta")
    assert module(x.to("meta")).shape == (2, 40, 21)
    module.to_empty(device="cpu").load_state_dict(make().state_dict())
    assert torch.equal(module(x), make()(x))


@pytest.mark.parametrize(
    "change", [lambda m: m, copy.deepcopy, nn.Module.half, nn.Module.double], ids=["", "copy", "half", "double"]
)
def test_built_on_meta(change, x: Tensor):
    """to_empty gives the tables their values, not garbage: a checkpoint need not hold them."""
    with torch.device("meta"):
        module = make(window_fn=torch.hamming_window)
    assert {b.device.type for b in module.buffers()} == {"meta"}
    module = change(module).to_empty(device="cpu")
    assert torch.equal(module(x), change(make(window_fn=torch.hamming_window))(x))


def test_built_on_meta_and_assigned(x: Tensor):
    with torch.device("meta"):
        module = make()
    module.load_state_dict(make(window_fn=torch.hamming_window).state_dict(), assign=True)
    expected = make(window_fn=torch.hamming_window)(x)
    assert torch.equal(module(x), expected)
    assert torch.equal(module.to("cpu")(x), expected)


def test_default_device():
    with torch.device("cpu"):
        assert make().spectrogram.window.device.type == "cpu"
    assert make(wkwargs={"device": "cpu"}).mel_scale.fb.device.type == "cpu"


def test_no_cuda_at_import_construction_or_call():
    code = """
import torch
def refuse(*args, **kwargs): raise AssertionError("CUDA was initialised")
torch.cuda._lazy_init = torch._C._cuda_init = refuse
import copy, sys
loaded = {name for name in sys.modules if name.startswith("cuda.")}  # torch itself may load some
import flashmel
module = copy.deepcopy(flashmel.MelSpectrogram(n_mels=40)).half()
repr(module), module(torch.zeros(2, 4000)), module.state_dict()
assert not torch.cuda.is_initialized()
assert loaded == {name for name in sys.modules if name.startswith("cuda.")}
assert "torchaudio" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_copies_that_data_parallel_makes_are_kept_until_the_buffer_changes():
    module = MelSpectrogram(n_mels=40).spectrogram

    def copied() -> torch.Tensor:
        replica = module._replicate_for_data_parallel()
        replica.window = module.window.clone()  # as torch.nn.parallel.replicate sets it
        return replica.window

    first = copied()
    assert first is not module.window and copied() is first
    module.window.mul_(2)
    assert torch.equal(copied(), module.window) and copied() is copied()
    module.window = torch.ones(400)
    assert torch.equal(copied(), torch.ones(400))
    module.window.data = torch.zeros(400)
    assert torch.equal(copied(), torch.zeros(400))


@pytest.mark.skipif(sys.platform != "linux", reason="fork")
def test_in_forked_workers():
    code = """
import torch
from torch.utils.data import DataLoader
import flashmel
module = flashmel.MelSpectrogram(n_mels=40)
data = [torch.full((4000,), float(i)) for i in range(8)]
expected = torch.stack([module(x) for x in data])
loader = DataLoader(data, 4, num_workers=2, multiprocessing_context="fork", collate_fn=lambda b: module(torch.stack(b)))
torch.testing.assert_close(torch.cat(list(loader)), expected)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- calls ----------------------------------------------------------------------------------------------------------------


def test_default_shapes(x: Tensor):
    assert MelSpectrogram()(noise(16000)).shape == (128, 81)
    assert MelSpectrogram().hop_length == 200 and make(win_length=320).hop_length == 160
    assert make()(noise(2, 3, 4, 1600)).shape == (2, 3, 4, 40, 9)
    assert make(center=False)(noise(400)).shape == (40, 1)
    for shape in ((0, 16000), (2, 0, 16000)):
        assert MelSpectrogram()(torch.empty(shape)).shape == (*shape[:-1], 128, 81)


@pytest.mark.parametrize("grad", [False, True])
def test_strides(grad: bool):
    base = noise(3, 2, 8000)
    views = {
        "transposed": base.transpose(0, 1),
        "sliced": base[:, :, 17:6001],
        "every other sample": base[..., ::2],
        "reversed rows": base[[2, 0, 1]],
        "expanded": base[:1].expand(5, 2, 8000),
        "expanded in time": base[:, :, :1].expand(3, 2, 8000),
        "channels last": base.mT.contiguous().mT,
        "padded rows": torch.empty(3, 2, 8192)[..., :8000].copy_(base),
    }
    module = make()
    for name, view in views.items():
        y = module(view.detach().requires_grad_(grad)).detach()
        torch.testing.assert_close(y, module(view.contiguous()), rtol=1e-5, atol=1e-6, msg=name)
        assert y.is_contiguous(), name


def test_input_is_left_alone():
    for dtype in INPUT_DTYPES:
        x = noise(2, 4000, dtype=dtype)
        before = x.clone()
        for mode in PAD_MODES:
            make(pad=5, pad_mode=mode)(x)
        assert torch.equal(x, before)


def test_inference_mode(x: Tensor):
    module = make()
    with torch.inference_mode():
        assert torch.equal(module(x), make()(x))


def test_gradient_through_the_module(x: Tensor):
    module, theirs = make(), torchaudios()
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    module(leaf).square().mean().backward()
    theirs(other).square().mean().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert not module(leaf).requires_grad


def test_function_transforms(x: Tensor):
    module = make()
    torch.testing.assert_close(torch.func.vmap(module)(x), module(x))
    loss = lambda x: module(x).sum()  # noqa: E731
    _, tangent = torch.func.jvp(loss, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(tangent, torch.func.grad(loss)(x).sum(), rtol=1e-3, atol=1e-3)


def test_autocast(x: Tensor):
    module = make()
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(x), expected)
        assert module(x.clone().requires_grad_()).dtype == torch.float32


def test_one_graph_for_many_lengths(x: Tensor):
    module = make()
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in (4000, 4001, 9999):
            x = noise(2, length)
            torch.testing.assert_close(compiled(x), module(x))
    leaf = noise(2, 4000).requires_grad_()
    (grad,) = torch.autograd.grad(torch.compile(module, fullgraph=True, backend="aot_eager")(leaf).sum(), leaf)
    torch.testing.assert_close(grad, torch.autograd.grad(module(leaf).sum(), leaf)[0])


# --- errors, warnings, repr -----------------------------------------------------------------------------------------------

BAD_ARGUMENTS = [
    ({"center": "no"}, "center must be True or False, got 'no'"),
    ({"win_length": 500}, "win_length must be at most n_fft = 400, got 500"),
    ({"hop_length": 0}, "hop_length must be a positive integer, got 0"),
    ({"hop_length": -3}, "got -3"),
    ({"hop_length": 1.5}, "got 1.5"),
    ({"n_mels": 0}, "n_mels must be a positive integer, got 0"),
    ({"n_fft": 0}, "n_fft must be a positive integer, got 0"),
    ({"n_fft": 400.0}, "got 400.0"),
    ({"f_min": 9000.0}, "f_min=9000.0 and f_max=8000.0"),
    ({"f_min": -1.0}, "f_min must not be negative, got -1.0"),
    ({"f_max": float("nan")}, "f_max must be a finite frequency in Hz, got nan"),
    ({"f_max": "8k"}, "got '8k'"),
    ({"power": None}, "power must be .*got None"),
    ({"power": 0}, "got 0"),
    ({"power": "2"}, "got '2'"),
    ({"power": float("inf")}, "got inf"),
    ({"pad": 1.5}, "pad must be an integer number of samples, got 1.5"),
    ({"pad_mode": "reflct"}, "'circular'; got 'reflct'"),
    ({"norm": "area"}, "got 'area'"),
    ({"mel_scale": "mel"}, "got 'mel'"),
    ({"normalized": "winow"}, "got 'winow'"),
    ({"sample_rate": 0}, "sample_rate must be positive, got 0"),
    ({"dtype": torch.int16}, "got torch.int16"),
    ({"window_fn": lambda n: torch.ones(n + 1)}, r"400 real values in one dimension, got shape \(401,\)"),
    ({"window_fn": lambda n: torch.ones(n, dtype=torch.complex64)}, "torch.complex64"),
]


@pytest.mark.parametrize("kwargs,message", BAD_ARGUMENTS, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_bad_arguments(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make(**kwargs)


BAD_WAVEFORMS = [
    (torch.zeros(2, 0), "input is empty"),
    (torch.zeros(2, 100), "100 samples.*n_fft=400.*reflect.*at least 201.*pad_mode='constant'"),
    (torch.zeros(16000, 2), "2 samples.*looks like channels"),
    (torch.zeros(4000, dtype=torch.int32), "torch.int32"),
    (torch.zeros(4000, dtype=torch.uint8), "torch.uint8"),
    (torch.zeros(4000, dtype=torch.bool), "torch.bool"),
    (torch.zeros(4000, dtype=torch.complex64), "torch.complex64.*real part"),
    (torch.tensor(1.0), "time axis"),
    (torch.zeros(4000, device="meta"), "waveform is on meta.* on cpu"),
]


@pytest.mark.parametrize("waveform,message", BAD_WAVEFORMS, ids=[m[:20] for _, m in BAD_WAVEFORMS])
def test_bad_waveforms(waveform: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        make()(waveform)


def test_a_waveform_is_a_tensor():
    for wave in (noise(4000).numpy(), [0.0] * 4000):
        with pytest.raises(TypeError, match="waveform must be a torch.Tensor, got .*(ndarray|list)"):
            make()(wave)


@pytest.mark.parametrize("name,table", [("spectrogram.window", torch.ones(401)), ("mel_scale.fb", torch.ones(200, 40))])
def test_bad_tables(name: str, table: Tensor, x: Tensor):
    module = make()
    parent, leaf = name.split(".")
    setattr(getattr(module, parent), leaf, table)
    with pytest.raises(ValueError, match=str(len(table))):
        module(x)


def test_parameters_are_read_only():
    for module, name in ((make(), "n_fft"), (make().spectrogram, "power"), (make().mel_scale, "f_max")):
        with pytest.raises(AttributeError, match=name):
            setattr(module, name, 512)
        assert getattr(module, name) is not None


def test_scripting_is_refused_and_tracing_works(x: Tensor):
    module = make()
    with pytest.raises(RuntimeError, match="torch.jit.script cannot compile MelSpectrogram: call torch.jit.trace"):
        torch.jit.script(module)
    assert torch.equal(torch.jit.trace(module, x)(x[..., :-7]), module(x[..., :-7]))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "waveform,message",
    [
        (lambda: torch.nested.nested_tensor([torch.ones(900), torch.ones(700)]), "must not be nested: pad its rows"),
        (lambda: torch.nested.nested_tensor([torch.ones(900), torch.ones(700)], layout=torch.jagged), "must not be nested"),
        (lambda: torch.ones(900).to_sparse(), "must be dense, got torch.sparse_coo"),
    ],
)
def test_layouts_that_are_refused(waveform, message: str):
    with pytest.raises(ValueError, match=message):
        make()(waveform())


def test_quiet_after_construction(x: Tensor):
    with pytest.warns(UserWarning, match="4 of 128 mel filters are zero everywhere"):
        module = MelSpectrogram(onesided=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(onesided=True)
        for wave in (x, x.short(), x.clone().requires_grad_()):
            module(wave)
        copy.deepcopy(module).half()
    with pytest.warns(UserWarning, match="onesided=False"):
        assert torch.equal(make(onesided=False)(x), make()(x))


def test_repr():
    text = repr(make(sample_rate=22050, power=1.0, norm="slaney", f_max=8000.0))
    for part in ("sample_rate=22050", "n_fft=400", "hop_length=200", "f_max=8000.0", "n_mels=40", "power=1.0", "norm='slaney'"):
        assert part in text


def test_built_and_moved_in_inference_mode():
    """Its buffers are ordinary tensors, whose changes are counted."""
    with torch.inference_mode():
        module = make().to(torch.float64).to("cpu")
    assert not any(buffer.is_inference() for buffer in module.buffers())
    assert module.spectrogram.window.dtype == torch.float64


@pytest.mark.parametrize("kwargs", [{}, {"pad": -30}, {"pad_mode": "circular"}, {"center": False}, {"n_fft": 17}], ids=str)
def test_warmup(kwargs: dict[str, Any], x: Tensor):
    module = MelSpectrogram(**{"n_mels": 10, **kwargs})
    module.warmup()
    module.warmup(torch.int16)
    module.warmup(torch.float16, gradient=True)
    assert module(x).isfinite().all()
