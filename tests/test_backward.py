"""The gradient of the waveform, on the CPU (plain torch) and on a GPU (fused): right, exact to the bit over runs, composable."""

import contextlib
import random
import warnings

import pytest
import torch
from cases import CASES, PAD_MODES, POWERS, all_cases, noise, speech
from conftest import compile_together

from flashmel import MelSpectrogram, fused, ops, reference
from flashmel.plan import UnsupportedError, make_backward_plan
from flashmel.tables import entries_per_bin
from flashmel.testing import assert_close, extra_memory

pytestmark = [
    pytest.mark.filterwarnings("error:the gradient runs in plain torch", "error:running in plain torch"),
    pytest.mark.usefixtures("compiled_ahead"),
]
any_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(device="cpu", **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # filters of zero
        return MelSpectrogram(**{"n_mels": 40, **kwargs}).to(device)


def tables(module, dtype=torch.float64):
    return module.spectrogram.window.to(dtype), module.mel_scale.fb.to(dtype)


def gradient(module, x, g):
    """Of sum(g * mel)."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(module(x), x, g)[0]


def exact(module, x, g):
    """The same by float64 autograd of the plain path."""
    x = x.detach().double().requires_grad_()
    return torch.autograd.grad(reference.features(x, *tables(module), module.spec, None), x, g.double())[0]


def check(module, x, g=None):
    g = noise(*module(x.detach()).shape, seed=7).to(x.device) if g is None else g
    actual, expected = gradient(module, x, g), exact(module, x, g)
    assert actual.shape == x.shape and actual.dtype == x.dtype and actual.device == x.device
    # A power below 1 has its largest gradients where bins are smallest, and there a bin's own rounding counts.
    scale = expected.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    assert_close(actual / scale, expected / scale, atol=2e-6 if module.power >= 1 else 3e-4, rtol=1e-5)
    return actual


def plan_of(module):
    """The gradient's plan on this GPU."""
    fb = module.mel_scale.fb
    arch, _ = fused._device(0)
    return make_backward_plan(module.spec, arch, fb.shape[1], entries_per_bin(fb.cpu().numpy()))


def skip_without_kernel(module):
    """A large size may have none on a small GPU; on a CPU plain torch has them all."""
    if module.mel_scale.fb.is_cuda:
        try:
            plan_of(module)
        except UnsupportedError as error:
            pytest.skip(str(error))


@pytest.fixture(autouse=True)
def every_warning_anew(monkeypatch):
    monkeypatch.setattr(ops, "_warned", set())


# --- numbers -------------------------------------------------------------------------------------------------------------------


@any_device
@all_cases
def test_against_float64(case, device):
    module = make(device, **case.kwargs)
    skip_without_kernel(module)
    check(module, noise(*case.shape).to(device))


@any_device
@all_cases
def test_adjoint_identity(case, device):
    """<J v, g> = <v, J^T g>, with J v by forward-mode differentiation in float64."""
    module = make(device, **case.kwargs)
    skip_without_kernel(module)
    x, v = noise(*case.shape).to(device), noise(*case.shape, seed=1).to(device)
    if module.power < 1:
        x = x + torch.linspace(0, 1, x.shape[-1], device=device)  # away from where the derivative has no bound
    plain = lambda x: reference.features(x, *tables(module), module.spec, None)  # noqa: E731
    _, tangent = torch.func.jvp(plain, (x.double(),), (v.double(),))
    g = noise(*tangent.shape, seed=2).to(device)
    forward, backward = tangent * g, gradient(module, x, g).double() * v
    assert abs(forward.sum() - backward.sum()) <= 1e-5 * max(forward.abs().sum(), backward.abs().sum())


def test_float64_against_finite_differences():
    for kwargs in ({}, {"power": 1.0, "pad": 3}, {"pad_mode": "circular", "center": True}, {"center": False, "normalized": True}):
        module = make(n_fft=32, hop_length=8, n_mels=5, **kwargs).double()
        x = noise(1, 100, dtype=torch.float64).requires_grad_()
        assert torch.autograd.gradcheck(module, x)
        assert torch.autograd.gradgradcheck(module, x)


@pytest.mark.gpu
def test_sizes_at_random():
    seed = random.SystemRandom().randrange(2**32)
    rng = random.Random(seed)
    modules = []
    while len(modules) < 32:
        n_fft = round(2 ** rng.uniform(1, 13.3))
        kwargs = {
            "n_fft": n_fft,
            "win_length": rng.randint(1, n_fft),
            "hop_length": rng.randint(max(1, n_fft // 12), 2 * n_fft),
            "pad": rng.choice([0, 0, rng.randint(0, n_fft)]),
            "power": rng.choice([1.0, 2.0, 3.0]),
            "pad_mode": rng.choice(PAD_MODES),
            "center": rng.random() < 0.8,
            "n_mels": rng.randint(1, 130),
        }
        with contextlib.suppress(UnsupportedError):
            module = make("cuda", **kwargs)
            plan_of(module)
            modules.append((kwargs, module))
    compile_together(module for _, module in modules)
    for kwargs, module in modules:
        shape = rng.randint(1, 5), rng.randint(module.n_fft, 5 * module.n_fft) + 3 * module.hop_length
        try:
            check(module, noise(*shape, seed=rng.randrange(2**31)).cuda())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {kwargs} on {shape}") from error


@any_device
@pytest.mark.parametrize("power", POWERS)
def test_silence_has_no_gradient(power, device):
    module = make(device, power=power)
    x = noise(2, 8000).to(device)
    x[0] = 0
    x[1, 2000:6000] = 0
    d = gradient(module, x, torch.ones_like(module(x)))
    assert d.isfinite().all() and not d[0].any() and not d[1, 2400:5600].any() and d[1, :1800].any()


@any_device
def test_not_a_number_stays_in_its_frames(device):
    module, x = make(device, hop_length=160), noise(2, 8000).to(device)
    g = torch.ones_like(module(x))
    expected = gradient(module, x, g)
    x[0, 4000] = torch.nan
    d = gradient(module, x, g)
    assert d[0, 4000].isnan() and torch.equal(d[1], expected[1])
    assert torch.equal(d[0, :3500], expected[0, :3500]) and torch.equal(d[0, 4500:], expected[0, 4500:])


@any_device
def test_a_frame_without_weight_takes_no_part(device):
    module, x = make(device, hop_length=160), noise(1, 8000).to(device)
    g = torch.zeros_like(module(x))
    g[..., 20] = 1
    d = gradient(module, x, g)
    assert not d[0, :2990].any() and not d[0, 3410:].any() and d[0, 3010:3390].any()


@any_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradient_in_the_waveforms_dtype(dtype, device):
    module, x = make(device), noise(2, 8000, dtype=dtype).to(device)
    g = noise(2, 40, 41, seed=1).to(device)
    d, expected = gradient(module, x, g), exact(module, x, g)
    assert d.dtype == dtype
    assert_close(d, expected, atol=1e-6 * float(expected.abs().max()), rtol=max(torch.finfo(dtype).eps, 1e-5))


@any_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs(dtype, device):
    module, x = make(device), noise(2, 8000).to(device)
    half = make(device, dtype=dtype)
    g = noise(2, 40, 41, seed=1).to(device, dtype)
    assert_close(gradient(half, x, g), gradient(module, x, g.float()), rtol=1e-6, atol=1e-7)


@any_device
def test_layouts_of_waveform_and_gradient(device):
    module, x = make(device), noise(3, 4, 4000).to(device)
    g = noise(*module(x).shape, seed=1).to(device)
    expected = gradient(module, x, g)
    assert torch.equal(gradient(module, x[1, 2], g[1, 2]), expected[1, 2])
    assert torch.equal(gradient(module, x, g.transpose(0, 1).contiguous().transpose(0, 1)), expected)
    assert torch.equal(gradient(module, x, g.mT.contiguous().mT), expected)
    wide = noise(3, 4, 4400, seed=3).to(device)
    wide[..., 200:4200] = x
    view = wide[..., 200:4200]
    assert torch.equal(gradient(module, view, g), expected)
    leaf = x.clone().requires_grad_()
    module(leaf).sum().backward()  # an expanded gradient
    assert torch.equal(leaf.grad, gradient(module, x, torch.ones_like(g)))
    assert gradient(module, x[:0], g[:0]).shape == (0, 4, 4000)


@any_device
def test_a_view_that_is_negated(device):
    """The imaginary part of a conjugate shares memory with numbers of the other sign."""
    module = make(device)
    x = torch.complex(noise(2, 4000), noise(2, 4000, seed=1)).to(device).conj().imag
    assert x.is_neg()
    g = noise(*module(x).shape, seed=2).to(device)
    assert torch.equal(module(x), module(x.resolve_neg()))
    assert torch.equal(gradient(module, x, g), gradient(module, x.resolve_neg(), g))
    assert torch.equal(gradient(module, x, g), -gradient(module, -x.resolve_neg(), g))


@any_device
def test_a_row_does_not_depend_on_its_batch(device):
    module, x = make(device, hop_length=160), noise(17, 30000).to(device)
    g = noise(*module(x).shape, seed=1).to(device)
    d = gradient(module, x, g)
    for i in (0, 9, 16):
        assert torch.equal(gradient(module, x[i], g[i]), d[i])
    assert torch.equal(gradient(module, x[3:5], g[3:5]), d[3:5])


@any_device
@pytest.mark.parametrize("runs", [pytest.param(100, id="100-runs")])
def test_bit_equal_over_runs(runs, device):
    module, x = make(device, hop_length=160), noise(5, 20000).to(device)
    g = noise(*module(x).shape, seed=1).to(device)
    torch.use_deterministic_algorithms(True)
    try:
        first = gradient(module, x, g)
        for _ in range(runs if device == "cuda" else 5):
            assert torch.equal(gradient(module, x, g), first)
    finally:
        torch.use_deterministic_algorithms(False)


@any_device
def test_a_dense_filterbank(device):
    module, x = make(device, n_fft=128, n_mels=30), noise(2, 3000).to(device)
    module.mel_scale.fb = torch.rand(65, 30, generator=torch.Generator().manual_seed(0)).to(device)
    check(module, x)
    module.mel_scale.fb = torch.rand(65, 1, generator=torch.Generator().manual_seed(0)).to(device)
    check(module, x)
    module.mel_scale.fb = torch.zeros(65, 4, device=device)
    assert not gradient(module, x, torch.ones_like(module(x))).any()


@any_device
def test_changed_tables_count(device):
    module, x = make(device), noise(2, 4000).to(device)
    check(module, x)
    module.mel_scale.fb.mul_(2)
    module.spectrogram.window.copy_(torch.hamming_window(400))
    check(module, x)


# --- what PyTorch does with it --------------------------------------------------------------------------------------------------


@any_device
def test_the_gradient_of_the_gradient(device):
    module, x = make(device), speech(2, 4000).to(device)
    g = noise(*module(x).shape, seed=1).to(device)

    def penalty(f, x, g):
        x = x.detach().requires_grad_()
        (d,) = torch.autograd.grad((f(x) * g).sum(), x, create_graph=True)
        return torch.autograd.grad(d.square().sum(), x)[0]

    expected = penalty(lambda x: reference.features(x, *tables(module), module.spec, None), x.double(), g.double())
    assert_close(penalty(module, x, g) / expected.abs().max(), expected / expected.abs().max(), atol=1e-5, rtol=1e-4)


@any_device
def test_gradients_of_the_tables(device):
    """By plain torch, with the waveform's beside them."""
    module, x = make(device), noise(2, 4000).to(device).requires_grad_()
    window, fb = (t.clone().requires_grad_() for t in (module.spectrogram.window, module.mel_scale.fb))
    g = noise(*module(x.detach()).shape, seed=1).to(device)
    actual = torch.autograd.grad(ops.features(x, window, fb, module.spec), (x, window, fb), g)
    exact_inputs = [t.detach().double().requires_grad_() for t in (x, window, fb)]
    expected = torch.autograd.grad(reference.features(*exact_inputs, module.spec, None), exact_inputs, g.double())
    for a, e in zip(actual, expected, strict=True):
        assert_close(a / e.abs().max(), e / e.abs().max(), atol=2e-6, rtol=1e-4)


@any_device
def test_the_operators_own_gradient(device):
    """Called directly, as a graph that was exported calls it."""
    module, x = make(device), noise(2, 4000).to(device).requires_grad_()
    s = module.spec
    fb = module.mel_scale.fb.clone().requires_grad_()
    y = torch.ops.flashmel.mel_spectrogram(x, module.spectrogram.window, fb, s.text)
    g = noise(*y.shape, seed=1).to(device)
    dx, dfb = torch.autograd.grad(y, (x, fb), g)
    assert_close(dx, gradient(module, x, g), atol=1e-6, rtol=1e-4)
    exact_fb = fb.detach().double().requires_grad_()
    spectrogram = reference.features(x.detach(), tables(module)[0], exact_fb, s, None)
    assert_close(dfb, torch.autograd.grad(spectrogram, exact_fb, g.double())[0], atol=1e-5, rtol=1e-4)


@any_device
@pytest.mark.parametrize("config", [{}, {"power": 1.0, "n_fft": 512}, {"pad": -5, "pad_mode": "constant"}], ids=str)
def test_opcheck(config, device):
    module, x = make(device, **config), noise(2, 1200).to(device)
    operands = (module.spectrogram.window, module.mel_scale.fb, module.spec.text)
    torch.library.opcheck(torch.ops.flashmel.mel_spectrogram_backward, (torch.rand_like(module(x)), x, *operands))
    torch.library.opcheck(torch.ops.flashmel.mel_spectrogram, (x.requires_grad_(), *operands))


@any_device
def test_compiled_training_step(device):
    torch._dynamo.reset()
    module, weight = make(device), torch.linspace(0.5, 1.5, 4000, device=device).requires_grad_()

    def loss(x, weight):
        return (module(x * weight) + 1e-3).log().square().mean()

    x = noise(2, 4000).to(device)
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    (actual,) = torch.autograd.grad(compiled(x, weight), weight)
    (expected,) = torch.autograd.grad(loss(x, weight), weight)
    assert_close(actual / expected.abs().max(), expected / expected.abs().max(), atol=1e-6, rtol=1e-4)


@any_device
def test_checkpoint_and_autocast(device):
    module, x = make(device), noise(2, 4000).to(device)
    g = noise(*module(x).shape, seed=1).to(device)
    expected = gradient(module, x, g)
    checkpointed = lambda x: torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False)  # noqa: E731
    assert torch.equal(gradient(checkpointed, x, g), expected)
    with torch.autocast(device, dtype=torch.bfloat16):  # torch says that a backward pass does not belong in here: it may be
        assert torch.equal(gradient(module, x, g), expected)


@any_device
def test_function_transforms(device):
    module, x = make(device), noise(3, 4000).to(device)
    g = noise(*module(x).shape, seed=1).to(device)
    expected = gradient(module, x, g)
    per_sample = torch.func.vmap(torch.func.grad(lambda x, g: (module(x) * g).sum()))
    assert_close(per_sample(x, g), expected, atol=1e-5 * float(expected.abs().max()), rtol=1e-4)
    assert_close(torch.func.vmap(module)(x), module(x), rtol=1e-5, atol=1e-6)


@any_device
def test_integers_have_no_gradient(device):
    module = make(device)
    assert not module(noise(2, 4000, dtype=torch.int16).to(device)).requires_grad


# --- on a GPU alone ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["whisper", "hifigan", "defaults"])
def test_nothing_is_kept_but_the_waveform(name):
    (case,) = (case for case in CASES if case.name == name)
    module, x = make("cuda", **case.kwargs), noise(16, 160000).cuda()
    g = torch.ones_like(module(x))

    def step():
        return gradient(module, x, g)

    mel_bytes = g.numel() * g.element_size()
    assert extra_memory(step) <= mel_bytes + 2**20  # beyond the gradient: mel itself, and the padding's edges


@pytest.mark.gpu
def test_in_a_cuda_graph():
    module, x = make("cuda", hop_length=160), noise(2, 20000).cuda().requires_grad_()
    g = noise(*module(x).shape, seed=1).cuda()
    torch.autograd.grad(module(x), x, g)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(module(x), x, g)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        (d,) = torch.autograd.grad(module(x), x, g)
    for seed in (5, 6):
        x.data.copy_(noise(2, 20000, seed=seed))
        graph.replay()
        assert torch.equal(d, gradient(module, x, g))


@pytest.mark.gpu
def test_a_size_without_a_kernel_runs_plain_and_says_so():
    module, x = make("cuda", n_fft=67 * 2), noise(2, 4000).cuda()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(module, x)
    assert any("67 is not a product of three numbers" in str(w.message) for w in caught)
