"""The operator as torch sees it: schema, fake, tracing, compilation, gradients' path, and every message of its input checks."""

import re

import pytest
import torch
from cases import INPUT_DTYPES, noise
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flashmel import MelSpectrogram, frontend, ops, reference
from flashmel.testing import assert_close

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
any_device = pytest.mark.parametrize("device", DEVICES)
CONFIGS = {
    "whisper": {"hop_length": 160},
    "magnitude": {"n_fft": 512, "power": 1.0, "normalized": True, "win_length": 401},
    "no-center": {"center": False, "pad": 3, "normalized": "frame_length"},
    "constant": {"n_fft": 128, "n_mels": 10, "pad_mode": "constant", "pad": -5},
}


def make(**kwargs):
    return MelSpectrogram(**{"n_mels": 40, **kwargs})


def arguments(module, x, dtype=None):
    """Of the operator itself, as the module gives them."""
    name = "" if dtype is None else str(dtype).removeprefix("torch.")
    return x, module.spectrogram.window, module.mel_scale.fb, module.spec.text, None, None, name


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


# --- calls that nobody watches ---------------------------------------------------------------------------------------------------


def test_an_eager_call_takes_the_modules_own_spec(monkeypatch):
    """By its identity calls are recalled: a copy, such as the operator makes of its arguments, would never be found again."""
    seen = []
    module, x = make(), noise(2, 1200)
    monkeypatch.setattr(ops, "_run", lambda waveform, window, fb, spec, *_: seen.append((window, fb, spec)) or torch.empty(0))
    module(x)
    module(x.clone().requires_grad_())
    assert len(seen) == 2 and all(
        window is module.spectrogram.window and fb is module.mel_scale.fb and spec is module.spec for window, fb, spec in seen
    )


def test_who_watches_gets_the_operator():
    module, x = make(), noise(2, 1200)

    class Watcher(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen: list[str] = []
    with Watcher():
        module(x)
    assert "flashmel.mel_spectrogram.default" in seen


# --- the operator --------------------------------------------------------------------------------------------------------------


@any_device
@pytest.mark.parametrize("shape", [(1200,), (2, 1200), (2, 3, 900), (0, 1200)], ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_opcheck(config, shape, device):
    module = make(**CONFIGS[config]).to(device)
    torch.library.opcheck(torch.ops.flashmel.mel_spectrogram, arguments(module, noise(*shape).to(device)))


@any_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("input_dtype", INPUT_DTYPES)
def test_opcheck_dtypes(input_dtype, dtype, device):
    x = noise(2, 1200, dtype=input_dtype).to(device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flashmel.mel_spectrogram, arguments(make().to(device), x, dtype), test_utils=checks)


@any_device
def test_opcheck_float64_module_and_strides(device):
    module = make().double().to(device)
    base = noise(1200, 4).to(device)
    for x in (base.T, base.T[::2], base.T[:, 3:].expand(4, -1), base[:, 0]):
        torch.library.opcheck(torch.ops.flashmel.mel_spectrogram, arguments(module, x))


@pytest.mark.parametrize("shape", [(1200,), (0, 1200), (2, 0, 1200), (2, 3, 1201), (1, 201)], ids=str)
@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("double", [False, True])
def test_fake_has_the_real_metadata(shape, dtype, double):
    module = MelSpectrogram(n_mels=40, dtype=dtype)
    real = (module.double() if double else module)(torch.zeros(shape))
    with FakeTensorMode() as mode:
        tables = (mode.from_tensor(t) for t in (module.spectrogram.window, module.mel_scale.fb))
        fake = ops.features(torch.empty(shape), *tables, module.spec, dtype)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def test_meta_device():
    assert make().to("meta")(torch.empty(2, 1200, device="meta")).shape == (2, 40, 7)


def test_symbolic_trace_holds_one_operator():
    module, x = make(), noise(2, 1200)
    graph = make_fx(module, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function" and "flashmel" in str(node.target)]
    assert called == [torch.ops.flashmel.mel_spectrogram.default]
    for shape in ((2, 1200), (5, 3001)):
        assert torch.equal(graph(noise(*shape)), module(noise(*shape)))


# --- torch.compile and torch.export --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", CONFIGS)
def test_compile_fullgraph(config):
    module, x = make(**CONFIGS[config]), noise(2, 1200)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))


@pytest.mark.parametrize("how", ["dynamic", "mark"])
def test_one_graph_for_many_lengths(how):
    module, counter, after_first = make(), CompileCounterWithBackend("aot_eager"), 0
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True if how == "dynamic" else None)
    for length in (1600, 401, 1601, 4800, 799, 801, 16000):
        x = noise(2, length)
        if how == "mark":
            torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), module(x))
        after_first = after_first or counter.frame_count  # 2 where torch restarts its first analysis
    assert counter.frame_count == after_first


def test_lengths_alone_lead_to_one_dynamic_graph():
    """Without any hint torch compiles the first length, then once for all others."""
    module, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter)
    for length in range(1600, 1620):
        compiled(noise(2, length))
    assert counter.frame_count <= 2


def test_one_graph_for_many_batches():
    module, counter = make(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=counter, dynamic=True)
    compiled(noise(2, 1600))
    after_first = counter.frame_count
    for batch in (2, 3, 17):
        assert torch.equal(compiled(noise(batch, 1600)), module(noise(batch, 1600)))
    assert counter.frame_count == after_first


def test_compiled_modules_do_not_mix():
    """Two configurations through one compiled function."""
    modules, x = [make(), make(n_fft=512), make(power=1.0)], noise(2, 1600)
    compiled = torch.compile(lambda module, x: module(x), fullgraph=True, backend="aot_eager")
    for module in modules * 2:
        assert torch.equal(compiled(module, x), module(x))


def test_a_replaced_table_reaches_the_compiled_module():
    module, x = make(), noise(2, 1600)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    before = compiled(x)
    module.mel_scale.fb.mul_(2)
    assert torch.equal(compiled(x), 2 * before)


def test_compiled_error():
    with pytest.raises(Exception, match="waveform of 100 samples is too short for n_fft=400"):
        torch.compile(make(), fullgraph=True, backend="aot_eager")(noise(2, 100))


def test_compiled_in_a_larger_graph():
    module = make()

    def log_mel(x):
        return (module(x * 2) + 1e-5).log().mean(-1)

    torch.testing.assert_close(torch.compile(log_mel, fullgraph=True, backend="aot_eager")(noise(2, 1600)), log_mel(noise(2, 1600)))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    module = make().eval()
    batch, time = torch.export.Dim("batch"), torch.export.Dim("time", min=401, max=10**8)
    program = torch.export.export(module, (noise(2, 1600),), dynamic_shapes={"waveform": {0: batch, 1: time}}, strict=strict)
    assert "torch.ops.flashmel.mel_spectrogram" in program.graph_module.code
    for shape in ((2, 1600), (3, 4001), (1, 500)):
        assert torch.equal(program.module()(noise(*shape)), module(noise(*shape)))
    assert {"spectrogram.window", "mel_scale.fb"} <= set(program.state_dict)


# --- gradients' path -----------------------------------------------------------------------------------------------------------


def gradient_by_hand(module, x, weight):
    """The float64 plain path's."""
    x = x.detach().double().requires_grad_()
    window, fb = module.spectrogram.window.double(), module.mel_scale.fb.double()
    (reference.features(x, window, fb, module.spec, None) * weight).sum().backward()
    return x.grad


@pytest.mark.parametrize("config", CONFIGS)
def test_gradient(config):
    module, x = make(**CONFIGS[config]), noise(2, 1200).requires_grad_()
    y = module(x)
    weight = noise(*y.shape, seed=1)
    (y * weight).sum().backward()
    expected = gradient_by_hand(module, x, weight)
    assert_close(x.grad, expected, atol=1e-5 * expected.abs().max(), rtol=1e-4)
    assert torch.equal(y, module(x)) and y.requires_grad
    with torch.no_grad():
        assert not module(x).requires_grad
    with torch.inference_mode():
        assert module(x).is_inference()


def test_gradient_through_compile():
    module, x = make(), noise(2, 1200).requires_grad_()
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    weight = noise(*y.shape, seed=1)
    (y * weight).sum().backward()
    expected = gradient_by_hand(module, x, weight)
    assert_close(x.grad, expected, atol=1e-5 * expected.abs().max(), rtol=1e-4)


def test_gradients_of_the_tables():
    module, x = make(), noise(1200)
    window, fb = (t.clone().requires_grad_() for t in (module.spectrogram.window, module.mel_scale.fb))
    ops.features(x, window, fb, module.spec).sum().backward()
    assert window.grad.abs().sum() > 0 and fb.grad.abs().sum() > 0


def test_functional_transforms_are_the_plain_paths():
    """A tangent or a batch dimension is never dropped in silence."""
    module, x, t = make(), noise(2, 1200), noise(2, 1200, seed=1)

    def plain(x):
        return reference.features(x, module.spectrogram.window, module.mel_scale.fb, module.spec, None)

    for actual, expected in zip(torch.func.jvp(module, (x,), (t,)), torch.func.jvp(plain, (x,), (t,)), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.func.vmap(module)(x), module(x))
    torch.testing.assert_close(torch.func.grad(lambda x: module(x).sum())(x), torch.func.grad(lambda x: plain(x).sum())(x))


def test_forward_mode_dual_numbers():
    module, x, t = make(), noise(2, 1200), noise(2, 1200, seed=1)
    with torch.autograd.forward_ad.dual_level():
        y = module(torch.autograd.forward_ad.make_dual(x, t))
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, torch.func.jvp(module, (x,), (t,))[1])


# --- input checks --------------------------------------------------------------------------------------------------------------


def fails(match, x=None, window=None, fb=None, **kwargs):
    module = make(**kwargs)
    tables = module.spectrogram.window if window is None else window, module.mel_scale.fb if fb is None else fb
    for compute in (lambda x: ops.features(x, *tables, module.spec), *([module] if window is fb is None else [])):
        with pytest.raises(ValueError, match=match):
            compute(noise(2, 1200) if x is None else x)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8, torch.int8, torch.bool])
def test_dtypes_refused(dtype):
    fails(f"float64 or int16, got {dtype}: convert it to float32, or to int16 for 16-bit PCM", torch.zeros(2, 1200, dtype=dtype))


def test_complex_refused():
    fails("got torch.complex64: pass its real part", torch.zeros(2, 1200, dtype=torch.complex64))


def test_scalar_refused():
    fails("must have a time axis, got a scalar", torch.tensor(1.0))


def test_devices_refused():
    fails(re.escape("waveform is on meta, the module's window on cpu and filterbank on cpu: move the module with .to('meta')"),
          torch.empty(2, 1200, device="meta"))  # fmt: skip
    fails("window on cpu and filterbank on meta", fb=torch.empty(201, 40, device="meta"))


@pytest.mark.parametrize("shape", [(0,), (401,), (1, 400), ()], ids=str)
def test_windows_refused(shape):
    fails(re.escape(f"one axis of 1 to n_fft = 400 values, got shape {shape}"), window=torch.ones(shape))


@pytest.mark.parametrize("shape", [(200, 40), (40, 201), (201,), (1, 201, 40)], ids=str)
def test_filterbanks_refused(shape):
    fails(re.escape(f"with n_freqs = 201, got {shape}"), fb=torch.ones(shape))


@pytest.mark.parametrize(
    "n_samples,kwargs,parts",
    [
        (0, {}, ["input is empty"]),
        (200, {}, ["waveform of 200 samples is too short for n_fft=400", "'reflect'", "at least 201", "pad_mode='constant'"]),
        (199, {"pad_mode": "circular"}, ["199 samples", "'circular'", "at least 200"]),
        (399, {"center": False}, ["399 samples", "center=False", "at least 400", "use center=True"]),
        (2, {}, ["2 samples", "a last axis of 2 looks like channels"]),
        (1000, {"pad": -450}, ["1000 samples (100 after pad=-450)", "at least 201"]),
        (10, {"pad": -5, "pad_mode": "constant"}, ["10 samples (0 after pad=-5)", "at least 1"]),
    ],
)
def test_lengths_refused(n_samples, kwargs, parts):
    for part in parts:
        fails(re.escape(part), torch.zeros(2, n_samples), **kwargs)


def test_an_empty_batch_of_too_short_waveforms_is_refused_too():
    fails("waveform of 100 samples is too short", torch.zeros(0, 100))


def test_other_window_lengths_are_centred():
    """The window tensor decides, not the spec's win_length: a checkpoint's may be shorter."""
    module, x = make(), noise(2, 1200)
    expected = make(win_length=320, hop_length=200)(x)
    assert torch.equal(ops.features(x, torch.hann_window(320), module.mel_scale.fb, module.spec), expected)


@any_device
def test_autocast_changes_nothing(device):
    module, x = make().to(device), noise(2, 1200).to(device)
    with torch.autocast(device, torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.float32 and torch.equal(y, module(x))


def test_vmap_over_rows_with_lengths():
    module = frontend("kaldi-fbank")
    x, lengths = noise(3, 8000), torch.tensor([8000, 5000, 300])
    together, _ = module(x, lengths)
    torch.testing.assert_close(torch.vmap(lambda row, n: module(row, n)[0])(x, lengths), together, rtol=1e-5, atol=1e-4)
