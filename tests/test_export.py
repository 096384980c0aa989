"""What leaves Python: to_torch() and its numbers, torch.export, AOTInductor, ONNX by onnxruntime."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, INPUT_DTYPES, PAD_MODES, POWERS, Case, noise, speech
from torch import Tensor, nn
from torch.export import Dim

from flashmel import MelSpectrogram
from flashmel.testing import assert_close, peak_error

any_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def make(**kwargs: Any) -> MelSpectrogram:
    return MelSpectrogram(**{"n_mels": 40, **kwargs}).eval()


def assert_same(actual: Tensor, module: MelSpectrogram, x: Tensor) -> None:
    """To 3e-6 of a frame's peak from the float64 module, test_reference's bound for the float32 one; half to its rounding."""
    expected = copy.deepcopy(module).double()(x)
    assert peak_error(actual, expected) < (1e-3 if module.dtype == torch.float16 else 3e-6)
    assert actual.dtype == module(x).dtype


def dynamic(shortest: int) -> dict[str, Any]:
    """Any batch and any length of two frames or more: torch takes a size of 1 for a constant."""
    return {"waveform": {0: Dim("batch"), 1: Dim("time", min=shortest)}}


# --- to_torch() ----------------------------------------------------------------------------------------------------------------


# Larger sizes have tables of up to 1 GB, and no more branches.
@any_device
@pytest.mark.parametrize("case", [case for case in CASES if case.kwargs.get("n_fft", 0) <= 2048], ids=lambda case: case.name)
def test_same_numbers(case: Case, device: str):
    module, x = MelSpectrogram(**case.kwargs).to(device), speech(*case.shape).to(device)
    y = module.to_torch()(x)
    assert_same(y, module, x)
    assert_close(y, module(x))
    assert y.is_contiguous()
    module.double()
    assert peak_error(module.to_torch()(x.double()), module(x.double())) < 1e-13


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_dtypes(dtype: torch.dtype):
    for module in (make(), make(dtype=torch.float16), make(dtype=torch.bfloat16).double()):
        x = noise(2, 1200, dtype=dtype)
        y = module.to_torch()(x)
        assert y.dtype == module(x).dtype
        tolerance = 1e-2 if module.dtype else 1e-4
        assert_close(y, module(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("x", [noise(0, 1200), noise(2, 0, 1200), noise(1200, 2).T, noise(3, 1200)[:, ::2], noise(2, 3, 1, 900)],
                         ids=["no-rows", "no-channels", "transposed", "strided", "four-dimensions"])  # fmt: skip
def test_shapes(x: Tensor):
    module = make()
    torch.testing.assert_close(module.to_torch()(x), module(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "x,kwargs",
    [
        (torch.zeros(2, 0), {}),
        (torch.zeros(2, 200), {}),
        (torch.zeros(2, 199), {"pad_mode": "circular"}),
        (torch.zeros(2, 1000), {"pad": -450}),
        (torch.zeros(2, 399), {"center": False}),
        (torch.tensor(1.0), {}),
        (torch.zeros(2, 1200, dtype=torch.int32), {}),
        (torch.zeros(2, 1200, device="meta"), {}),
    ],
)
def test_errors_are_the_modules(x: Tensor, kwargs: dict[str, Any]):
    module = make(**kwargs)
    with pytest.raises(ValueError) as expected:
        module(x)
    with pytest.raises(ValueError, match=re.escape(str(expected.value))):
        module.to_torch()(x)


@pytest.mark.parametrize("power", POWERS)
@pytest.mark.parametrize("mode", PAD_MODES)
def test_gradients(power: float, mode: str):
    module = MelSpectrogram(n_fft=8, win_length=5, hop_length=3, n_mels=2, pad=-1, power=power, pad_mode=mode).double().to_torch()
    x = noise(2, 12, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(module, (x,))
    assert torch.autograd.gradgradcheck(module, (x,))


@pytest.mark.parametrize("power", POWERS)
def test_no_gradient_at_silence(power: float):
    module, x = make(power=power).to_torch(), noise(2, 8000)
    x[0], x[1, :4000] = 0, 0
    x.requires_grad_()
    y = module(x)
    assert (y[0] == 0).all() and (y[1, :, :10] == 0).all()
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    assert first.isfinite().all() and (first[0] == 0).all() and (first[1, 4500:] != 0).any()
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all() and (second[0] == 0).all()


def test_a_snapshot():
    module, x = make(), noise(2, 1200)
    plain, expected = module.to_torch(), module(x)
    module.mel_scale.fb.zero_()
    module.spectrogram.window.zero_()
    torch.testing.assert_close(plain(x), expected, rtol=1e-4, atol=1e-5)
    assert not plain.state_dict() and not list(plain.parameters())


def test_a_converted_model_keeps_the_tables():
    plain, x = make().to_torch(), noise(2, 1200)
    expected = plain(x)
    model = copy.deepcopy(nn.Sequential(plain)).half()
    assert torch.equal(model(x), expected)
    assert model.to("meta")(x.to("meta")).shape == expected.shape


@any_device
def test_autocast_changes_nothing(device: str):
    plain, x = make().to(device).to_torch(), noise(2, 1200).to(device)
    with torch.autocast(device, torch.bfloat16):
        y = plain(x)
    assert torch.equal(y, plain(x))


def test_compile():
    torch._dynamo.reset()
    module = make()
    compiled = torch.compile(module.to_torch(), fullgraph=True, dynamic=True, backend="eager")
    for shape in ((2, 1200), (3, 4001)):
        assert_same(compiled(noise(*shape)), module, noise(*shape))


# --- torch.export and AOTInductor ----------------------------------------------------------------------------------------------

LENGTHS = ((2, 1600), (1, 600), (5, 4001))
CONFIGS = {
    "defaults": {},
    "others": {"power": 1.0, "normalized": True, "pad_mode": "circular", "pad": -3, "dtype": torch.float16},
    "no-center": {"center": False, "normalized": "frame_length"},
}


@pytest.mark.parametrize("config", CONFIGS)
def test_an_exported_module_keeps_the_operator(config: str, tmp_path: Path):
    module = make(**CONFIGS[config])
    torch.export.save(torch.export.export(module, (noise(2, 1600),), dynamic_shapes=dynamic(600)), tmp_path / "mel.pt2")
    program = torch.export.load(tmp_path / "mel.pt2")
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert called == [torch.ops.flashmel.mel_spectrogram.default]
    for shape in LENGTHS:
        assert torch.equal(program.module()(noise(*shape)), module(noise(*shape)))


@pytest.mark.parametrize("config", CONFIGS)
def test_to_torch_exports_standard_real_operators(config: str):
    module = make(**CONFIGS[config])
    program = torch.export.export(module.to_torch(), (noise(2, 1600),), dynamic_shapes=dynamic(600))
    operators = [node for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    assert {node.target.namespace for node in operators} == {"aten"}
    values = torch.utils._pytree.tree_leaves([node.meta["val"] for node in operators])
    assert not any(isinstance(value, Tensor) and value.is_complex() for value in values)
    for shape in LENGTHS:
        assert_same(program.module()(noise(*shape)), module, noise(*shape))


_SAVE_AND_LOAD = """
import sys
import torch
path, device = sys.argv[1:]
print(torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(
    torch.export.export(torch.nn.ReLU(), (torch.ones(3, device=device),)), package_path=path))(torch.ones(3, device=device)))
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++, and there is no g++")
@any_device
def test_aot_inductor_keeps_the_operator(device: str, tmp_path: Path):
    """The package calls the operator through torch's dispatcher, hence Python: flashmel must be imported where it is loaded."""
    own = [sys.executable, "-c", _SAVE_AND_LOAD, tmp_path / "relu.pt2", device]
    if subprocess.run(own, capture_output=True).returncode != 0:  # a crash: seen with torch 2.11 on a GPU
        pytest.skip(f"AOTInductor of torch {torch.__version__} cannot load a package with a ReLU alone on this machine's {device}")
    module = make(**CONFIGS["others"]).to(device)
    program = torch.export.export(module, (noise(2, 1600).to(device),), dynamic_shapes=dynamic(600))
    path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "mel.pt2"))
    with zipfile.ZipFile(path) as package:
        assert any(b"flashmel::mel_spectrogram" in package.read(name) for name in package.namelist() if name.endswith(".json"))
    compiled = torch._inductor.aoti_load_package(path)
    for shape in LENGTHS:
        x = noise(*shape).to(device)
        assert torch.equal(compiled(x), module(x))


# --- ONNX ----------------------------------------------------------------------------------------------------------------------


def to_onnx(module: nn.Module, x: Tensor) -> Any:
    pytest.importorskip("onnxscript", reason="torch's exporter needs it, torch does not bring it")
    return torch.onnx.export(module, (x,), dynamic_shapes={"waveform": {0: "batch", 1: "time"}}, dynamo=True, verbose=False)


@pytest.mark.parametrize(
    "kwargs,dtype",
    [
        ({"hop_length": 160}, torch.float32),
        ({"pad_mode": "circular", "pad": 33, "power": 1.0, "normalized": True}, torch.int16),
        ({"pad_mode": "replicate", "pad": -33, "dtype": torch.float16}, torch.float16),
        ({"pad_mode": "constant", "n_fft": 225, "hop_length": 77, "win_length": 200}, torch.float64),
        ({"center": False, "power": 3.0}, torch.float32),
    ],
    ids=["reflect", "circular", "replicate", "constant", "no-center"],
)
def test_onnx(kwargs: dict[str, Any], dtype: torch.dtype):
    onnxruntime = pytest.importorskip("onnxruntime", reason="not every platform has wheels of it")
    module = make(**kwargs)
    program = to_onnx(module.to_torch(), noise(2, 4000, dtype=dtype))
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for shape in ((2, 4000), (1, 400), (3, 401), (2, 16000), (5, 997)):
        x = noise(*shape, dtype=dtype)
        if dtype == torch.float32:
            x[0] = 0
        (y,) = session.run(None, {"waveform": x.numpy()})
        assert_same(torch.from_numpy(y), module, x)


def test_onnx_of_the_module_itself_names_the_operator():
    with pytest.raises(Exception, match=r"No ONNX function found for .*flashmel\.mel_spectrogram"):
        to_onnx(make(), noise(2, 4000))
