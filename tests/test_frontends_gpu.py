"""Front-ends on a GPU: their numbers, one launch or two, no wait; rows alone and in batches, bit for bit."""

import copy

import pytest
import torch
from cases import noise
from conftest import compile_kernels
from test_frontends import GATES, all_names, audio, parity  # noqa: F401  (a fixture)

from flashmel import MFCC, frontends
from flashmel.frontends import frontend
from flashmel.plan import architecture
from flashmel.testing import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:running in plain torch", "error:the gradient runs")]
NORMALISED = [name for name in frontends.names() if frontends.recipe(name).normalization is not None]


@pytest.fixture(scope="module", autouse=True)
def kernels():
    """All that is needed here, compiled by all cores."""
    arch = architecture(*torch.cuda.get_device_capability())
    modules = map(frontend, frontends.names())
    compile_kernels(kernel for module in modules for kernel in frontends.specialisations(module, arch, gradient=True))


@pytest.mark.parametrize("case", parity.REFERENCES)
def test_against_float64(case, audio):  # noqa: F811
    """To the bounds of the plain path."""
    record = parity.measure(case, audio(frontends.recipe(parity.REFERENCES[case][0]).sample_rate), "cuda")
    _, _, mean, largest = GATES[case]
    assert record["f64"]["mean"] <= 1.5 * mean and record["f64"]["max"] <= 1.5 * largest, record["f64"]


@all_names
def test_rows_do_not_depend_on_their_batch(name, audio):  # noqa: F811
    module = frontend(name).cuda()
    x = audio(module.sample_rate, 1.5)
    n = len(x)
    batch = torch.stack((x, x.flip(0), 0.5 * x, torch.zeros(n))).cuda()
    ends = [n, n - 1234, n // 2, n]
    junk = batch.clone()
    for row, end in zip(junk, ends, strict=True):
        row[end:] = torch.nan
    plain, (ragged, frames) = module(batch), module(junk, torch.tensor(ends, device="cuda"))
    assert ragged.isfinite().all() and torch.equal(ragged, module(junk, torch.tensor(ends, device="cuda"))[0])
    axis = -2 if module.spec.epilogue.time_major else -1
    for i, end in enumerate(ends):
        assert torch.equal(plain[i], module(batch[i]))
        alone, own = (y.narrow(axis, 0, int(frames[i])) for y in (module(batch[i, :end].contiguous()), ragged[i]))
        assert torch.equal(own, alone)


@all_names
def test_gradients(name, audio):  # noqa: F811
    """Against float64, without and with lengths; twice the same bits."""
    module = frontend(name).cuda()
    exact = copy.deepcopy(module).cpu().double()
    x = audio(module.sample_rate, 1.0)
    waveform = torch.stack((x, 0.3 * x.flip(0)))
    lengths = torch.tensor([len(x), len(x) // 2])
    generator = torch.Generator().manual_seed(0)
    waveform += 1e-3 * torch.randn(waveform.shape, generator=generator)  # the gradient of silence hangs on rounding

    def gradient(module, waveform, lengths, weight):
        leaf = waveform.clone().requires_grad_()
        out = module(leaf) if lengths is None else module(leaf, lengths)[0]
        return torch.autograd.grad((out * weight).sum(), leaf)[0]

    for given in (None, lengths):
        with torch.no_grad():
            shape = (module(waveform.cuda()) if given is None else module(waveform.cuda(), given.cuda())[0]).shape
        weight = torch.randn(shape, generator=generator)
        on_gpu = (waveform.cuda(), None if given is None else given.cuda(), weight.cuda())
        actual = gradient(module, *on_gpu)
        expected = gradient(exact, waveform.double(), given, weight.double())
        peak = expected.abs().amax(-1, keepdim=True)
        assert_close(actual.cpu().double() / peak, expected / peak, atol=2e-3, rtol=2e-3)
        if name not in NORMALISED:
            assert torch.equal(actual, gradient(module, *on_gpu))


@pytest.mark.parametrize("n_samples", [10239, 10240, 10241])
def test_gradients_of_rows_that_end_with_a_tile(n_samples):
    """Of pre-emphasised waveforms, so many that a row is one segment of several tiles."""
    module = frontend("nemo-none").cuda()
    x = noise(300, n_samples)
    weight = torch.randn(300, *module(x[0].cuda()).shape, generator=torch.Generator().manual_seed(0))
    leaf, exact = x.cuda().requires_grad_(), x[:3].double().requires_grad_()
    (actual,) = torch.autograd.grad(module(leaf), leaf, weight.cuda())
    (expected,) = torch.autograd.grad(frontend("nemo-none").double()(exact), exact, weight[:3].double())
    peak = expected.abs().amax(-1, keepdim=True)
    assert_close(actual[:3].cpu().double() / peak, expected / peak, atol=1e-3, rtol=1e-3)


@all_names
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_outputs(name, dtype, audio):  # noqa: F811
    module = frontend(name).cuda()
    x = audio(module.sample_rate, 1.0)[None].cuda()
    torch.testing.assert_close(frontend(name, dtype=dtype).cuda()(x), module(x).to(dtype), rtol=1e-2, atol=1e-2)


@all_names
def test_launches(name):
    """One, or with normalisation two; what follows is padding, stacking and output lengths, and nothing waits for the GPU."""
    module = frontend(name).cuda()
    x, lengths = noise(3, 32000).cuda(), torch.tensor([32000, 20000, 9000], device="cuda")
    for given in ((x,), (x, lengths)):
        module(*given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for given in ((x,), (x, lengths)):
            module(*given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        module(x)
        torch.cuda.synchronize()
    launched = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in e.name]
    own = [name for name in launched if name in ("mel_spectrogram", "normalize")]
    assert own == ["mel_spectrogram", "normalize"][: 1 + (name in NORMALISED)], launched
    recipe = module.recipe
    if recipe.n_samples is None and recipe.sample_multiple == recipe.stack == 1:
        assert launched == own


@pytest.mark.parametrize("name", ["whisper", "parakeet", "kaldi-fbank", "hifigan"])
def test_in_a_cuda_graph(name):
    module = frontend(name).cuda()
    x, lengths = noise(2, 32000).cuda(), torch.tensor([32000, 20000], device="cuda")
    module(x, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, frames = module(x, lengths)
    x.copy_(noise(2, 32000, seed=1))
    lengths.copy_(torch.tensor([12345, 32000]))
    graph.replay()
    expected, expected_frames = module(x, lengths)
    assert torch.equal(y, expected) and torch.equal(frames, expected_frames)


@pytest.mark.parametrize("name", ["whisper", "parakeet", "kaldi-fbank", "hifigan"])
def test_compiled(name):
    module = frontend(name).cuda()
    x, lengths = noise(2, 32000).cuda(), torch.tensor([32000, 20000], device="cuda")
    y, frames = torch.compile(module, fullgraph=True)(x, lengths)
    torch.testing.assert_close(y, module(x, lengths)[0], rtol=1e-4, atol=1e-4)
    assert torch.equal(frames, module(x, lengths)[1])


@pytest.mark.parametrize("kwargs", [{}, {"log_mels": True}, {"scope": "channels"}])
def test_cepstra(kwargs, audio):  # noqa: F811
    module = MFCC(16000, melkwargs={"n_mels": 64}, **kwargs).cuda()
    x = torch.stack((audio(16000, 1.0), 0.01 * audio(16000, 1.0)))
    expected = copy.deepcopy(module).cpu().double()(x.double())
    torch.testing.assert_close(module(x.cuda()).cpu().double(), expected, rtol=1e-4, atol=2e-3)
