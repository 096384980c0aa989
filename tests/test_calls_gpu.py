"""The call path on a GPU: a call costs a launch, whatever changes between calls is seen, and devices do not mix."""

import gc
import os
import pickle

import pytest
import torch
import torch.multiprocessing
from cases import noise

from flashmel import MelSpectrogram, fused
from flashmel.functional import mel_spectrogram

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("error:running in plain torch", "error:the gradient runs")]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def make(**kwargs):
    return MelSpectrogram(**{"hop_length": 160, "n_mels": 40, **kwargs}).cuda()


# --- calls that are recalled ---------------------------------------------------------------------------------------------------


def test_what_changes_between_calls_is_seen():
    """All calls look alike to whoever compares shapes alone."""
    module, x = make(), noise(2, 8000).cuda()
    before = module(x)
    assert torch.equal(module(x), before)
    module.mel_scale.fb.mul_(2)
    assert torch.equal(module(x), 2 * before)
    module.spectrogram.window = 2 * module.spectrogram.window
    assert torch.equal(module(x), 8 * before)
    module.mel_scale.fb.data = module.mel_scale.fb / 2  # neither a new tensor nor a new version
    assert torch.equal(module(x), 4 * before)
    module.load_state_dict(make().state_dict())
    assert torch.equal(module(x), before)
    assert torch.equal(module(x.flip(0)), before.flip(0))
    half = module(x.half())
    assert not torch.equal(half, before) and torch.equal(module(x), before)
    view = noise(2, 16001).cuda()[:, 1:8001]  # not where a chunk begins
    assert torch.equal(module(view), module(view.clone()))
    strided = noise(8000, 2).cuda().T
    assert torch.equal(module(strided), module(strided.contiguous()))
    module.dtype = torch.float16
    assert module(x).dtype == torch.float16


def test_modules_that_die_leave_nothing_behind():
    x = noise(2, 8000).cuda()
    results = []
    for scale in range(1, 12):  # addresses and ids are given out again
        module = make(window_fn=lambda n, scale=scale: scale * torch.ones(n))
        results.append(float(module(x).sum()) / scale**2)
        assert float(module(x).sum()) / scale**2 == results[-1]
        del module
        gc.collect()
    assert max(results) / min(results) - 1 < 1e-5
    assert len(fused._calls) <= fused._MAX_CALLS


def test_thousands_of_lengths_keep_memory_flat():
    module = make()
    x = noise(1, 60000).cuda()
    module(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for length in range(10000, 15000):
        module(x[:, :length])
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before and len(fused._calls) <= fused._MAX_CALLS


def test_a_warm_call_is_one_kernel_and_no_copy():
    module, x = make(), noise(2, 80000).cuda()
    module(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(10):
            module(x)
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 10 and all("mel_spectrogram" in e.name for e in on_device), {e.name for e in on_device}
    names = {e.name for e in profile.events()}
    assert not any("Memcpy" in name or "cudaStreamSynchronize" in name or "cudaMalloc" in name for name in names), names


def test_little_memory_is_enough():
    """64 MiB beside the output, once the first call has been made."""
    module, x = make(), noise(64, 160000).cuda()
    expected = module(x).cpu()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    hog = torch.empty(max(0, free - 64 * 2**20 - 4 * expected.numel()), dtype=torch.uint8, device="cuda")
    assert torch.equal(module(x).cpu(), expected)
    del hog
    torch.cuda.empty_cache()  # what comes after needs memory of the driver's


def test_out_is_written_by_the_kernel():
    module, x = make(), noise(2, 80000).cuda()
    out = torch.empty_like(module(x))
    arguments = x, module.spectrogram.window, module.mel_scale.fb, 400, 160
    mel_spectrogram(*arguments, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        out.fill_(torch.nan)
        mel_spectrogram(*arguments, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert torch.equal(out, module(x))


# --- graphs --------------------------------------------------------------------------------------------------------------------


def test_graphs_on_several_streams_at_once():
    module = make()
    inputs = [noise(4, 30000, seed=seed).cuda() for seed in range(3)]
    module(inputs[0])
    graphs = []
    for x in inputs:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            module(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            y = module(x)
        graphs.append((graph, stream, x, y))
    for seed in range(3, 6):
        for i, (graph, stream, x, _) in enumerate(graphs):
            x.copy_(noise(4, 30000, seed=10 * seed + i))
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for _, _, x, y in graphs:
            assert torch.equal(y, module(x))


# --- devices -------------------------------------------------------------------------------------------------------------------


@two_devices
def test_a_device_that_is_not_current():
    x = noise(2, 8000)
    expected = make()(x.cuda()).cpu()
    module = MelSpectrogram(hop_length=160, n_mels=40).to("cuda:1")
    for _ in range(3):
        y = module(x.to("cuda:1"))
        assert y.device.index == 1 and torch.equal(y.cpu(), expected) and torch.cuda.current_device() == 0
    leaf = x.to("cuda:1").requires_grad_()
    (d,) = torch.autograd.grad(module(leaf).sum(), leaf)
    assert d.device.index == 1 and d.isfinite().all()
    for index in (0, 1, 0):
        assert torch.equal(module.to(f"cuda:{index}")(x.to(f"cuda:{index}")).cpu(), expected)
    with pytest.raises(ValueError, match="move the module with"):
        module.to("cuda:0")(x.to("cuda:1"))


@two_devices
def test_data_parallel(monkeypatch):
    module = torch.nn.Sequential(MelSpectrogram(hop_length=160, n_mels=40), torch.nn.Linear(51, 3)).cuda()
    x = noise(6, 8000).cuda()
    expected = module(x)
    parallel = torch.nn.DataParallel(module)
    torch.testing.assert_close(parallel(x), expected)
    made, upload = [], fused._uploaded
    monkeypatch.setattr(fused, "_uploaded", lambda *arguments: made.append(1) or upload(*arguments))
    for _ in range(3):
        torch.testing.assert_close(parallel(x), expected)
    assert not made, "tables were made for new copies of the same buffers"
    module[0].mel_scale.fb.mul_(2)
    torch.testing.assert_close(parallel(x), module(x))


def _train(rank, world, port, queue):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.distributed.init_process_group("nccl", rank=rank, world_size=world)
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8000, 8000), MelSpectrogram(hop_length=160, n_mels=40)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    model(noise(4, 8000)[2 * rank : 2 * rank + 2].cuda()).log1p().mean().backward()
    if rank == 0:
        queue.put(model.module[0].weight.grad.square().sum().item())
    torch.distributed.destroy_process_group()


@two_devices
def test_distributed_data_parallel():
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(_train, (2, 29611, queue), nprocs=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8000, 8000), MelSpectrogram(hop_length=160, n_mels=40)).cuda()
    model(noise(4, 8000).cuda()).log1p().mean().backward()
    assert queue.get() == pytest.approx(model[0].weight.grad.square().sum().item(), rel=1e-4)


def _in_a_worker(module, queue):
    queue.put(module.cuda()(noise(2, 8000).cuda()).cpu().numpy())


def test_spawned_worker():
    module = make()
    expected = module(noise(2, 8000).cuda()).cpu()
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_in_a_worker, args=(pickle.loads(pickle.dumps(module.cpu())), queue))
    process.start()
    result = queue.get()
    process.join()
    assert process.exitcode == 0 and torch.equal(torch.from_numpy(result), expected)
