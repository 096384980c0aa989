"""Bundles of kernels: what is built is used, without a compiler; whatever is wrong with one is said, and nothing of it used."""

import json
import shutil
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
from cases import noise

import flashmel
from flashmel import MelSpectrogram, cli, fused
from flashmel.jit import bundle, compiler, driver, toolchain
from flashmel.jit.source import Specialisation, sources
from flashmel.plan import architecture, make_plan
from flashmel.spec import StftSpec

pytestmark = pytest.mark.usefixtures("own_bundles")
SPEC = StftSpec(64, 64, 16)
ARCHS = [architecture(8, 0), architecture(9, 0)]
A, B = "a" * 64, "b" * 64


@pytest.fixture
def folder(tmp_path):
    """A bundle of two kernels, of bytes that nobody compiled."""
    bundle.write_bundle(
        tmp_path / "bundle", 13, [(A, "sm_80", "first", b"\x7fELF" + bytes(1000)), (B, "sm_90", "second", b"\x7fELF2")]
    )
    return tmp_path / "bundle"


def edit(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def zipped(folder):
    return shutil.make_archive(str(folder), "zip", folder)


@pytest.mark.parametrize("pack", [lambda folder: folder, zipped], ids=["folder", "zip"])
def test_what_is_written_is_read(folder, pack):
    loaded = flashmel.load_bundle(pack(folder))
    assert bundle.find(A) == b"\x7fELF" + bytes(1000) and bundle.find(B) == b"\x7fELF2" and bundle.find("c" * 64) is None
    assert flashmel.loaded_bundles() == (loaded,) and [variant.arch for variant in loaded.variants] == ["sm_80", "sm_90"]
    assert flashmel.load_bundle(pack(folder), loaded.digest).digest == loaded.digest and len(flashmel.loaded_bundles()) == 1
    assert sorted(path.name for path in folder.iterdir()) == [f"{A}.cubin", f"{B}.cubin", "manifest.json"]


@pytest.mark.parametrize(
    "damage,message",
    [
        (lambda f: (f / f"{A}.cubin").write_bytes(b""), "is damaged"),
        (lambda f: (f / f"{A}.cubin").write_bytes((f / f"{A}.cubin").read_bytes()[:-1]), "is damaged"),
        (lambda f: (f / f"{A}.cubin").write_bytes((f / f"{A}.cubin").read_bytes() + b"x"), "is damaged"),
        (lambda f: (f / f"{A}.cubin").write_bytes(b"\x7fELG" + bytes(1000)), "is damaged"),
        (lambda f: (f / f"{A}.cubin").unlink(), f"{A}.cubin cannot be read"),
        (lambda f: (f / "manifest.json").unlink(), "manifest.json cannot be read"),
        (lambda f: (f / "manifest.json").write_bytes((f / "manifest.json").read_bytes()[:-20]), "is not a bundle's manifest"),
        (lambda f: (f / "manifest.json").write_bytes(b""), "is not a bundle's manifest"),
        (lambda f: (f / "manifest.json").write_text("[]"), "is not a bundle's manifest"),
        (lambda f: (f / "manifest.json").write_bytes(b"\xff\xfe"), "is not a bundle's manifest"),
        (lambda f: edit(f, lambda m: m.update(schema=2)), "the bundle's format is 2, this version of flashmel reads 1"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(file="../secret")), "a file name must be a digest and .cubin"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(file=f"/tmp/{A}.cubin")), "a file name must be a digest and .cubin"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(file=3)), "is not a bundle's manifest"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(size=10**12)), "has 1000000000000 bytes"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(size=True)), "has True bytes"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(sha256="x")), "has no sha256"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(sha256=B)), "is damaged"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(arch="x86")), "is for 'x86'"),
        (lambda f: edit(f, lambda m: m["kernels"][0].pop("size")), "is not a bundle's manifest"),
        (lambda f: edit(f, lambda m: m["kernels"][0].update(more=1)), "is not a bundle's manifest"),
    ],
)
@pytest.mark.parametrize("pack", [lambda folder: folder, zipped], ids=["folder", "zip"])
def test_what_is_wrong_is_said_and_nothing_used(folder, damage, message, pack):
    damage(folder)
    with pytest.raises(bundle.BundleError, match=message) as caught:
        flashmel.load_bundle(pack(folder))
    assert str(folder) in str(caught.value)
    assert flashmel.loaded_bundles() == () and bundle.find(A) is None and bundle.find(B) is None


def test_what_is_no_bundle(tmp_path):
    (tmp_path / "file").write_bytes(b"no zip")
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    for name in ("file", "empty.zip", "nothing", "."):
        with pytest.raises(bundle.BundleError, match="manifest.json cannot be read"):
            flashmel.load_bundle(tmp_path / name)


def test_a_zip_that_is_cut_off(folder):
    path = zipped(folder)
    with open(path, "r+b") as file:
        file.truncate(200)
    with pytest.raises(bundle.BundleError, match="cannot be read"):
        flashmel.load_bundle(path)


def test_a_zip_with_any_byte_flipped(folder):
    """Compressed or not, in the directory of the archive or in a file: the right bytes, or a BundleError."""
    path, expected = zipped(folder), b"\x7fELF" + bytes(1000)
    intact = Path(path).read_bytes()
    refused = 0
    for place in range(0, len(intact), 3):
        Path(path).write_bytes(intact[:place] + bytes([intact[place] ^ 0xFF]) + intact[place + 1 :])
        bundle._loaded.clear()
        try:
            flashmel.load_bundle(path)
        except bundle.BundleError:
            refused += 1
        else:
            assert bundle.find(A) == expected and bundle.find(B) == b"\x7fELF2"
    assert refused > len(intact) // 6


def test_another_bundle_than_expected(folder):
    with pytest.raises(bundle.BundleError, match=f"sha256 is [0-9a-f]{{64}}, expected {A}"):
        flashmel.load_bundle(folder, digest=A)
    assert flashmel.loaded_bundles() == ()


def test_damaged_after_it_was_loaded(folder):
    flashmel.load_bundle(folder)
    (folder / f"{A}.cubin").write_bytes(b"\x7fELG" + bytes(1000))
    with pytest.warns(UserWarning, match="is damaged.*it is not used"):
        assert bundle.find(A) is None
    assert bundle.find(B) == b"\x7fELF2"


def test_a_folder_with_something_in_it(tmp_path):
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(bundle.BundleError, match="is not empty"):
        bundle.write_bundle(tmp_path, 13, [])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_from_the_command_to_a_machine_without_a_compiler(nvrtc_version, tmp_path, monkeypatch, capsys):
    arguments = ["--n-fft", "64", "--hop-length", "16", "--n-mels", "10", "--gradient", "--arch", "sm_80,sm_90"]
    assert cli.main(["bundle", "build", *arguments, "-o", str(tmp_path / "bundle")]) == 0
    printed = capsys.readouterr().out
    assert f"{tmp_path / 'bundle'}: 4 kernels, manifest sha256 " in printed
    digest = printed.split()[-1]
    assert cli.main(["bundle", "list", str(tmp_path / "bundle"), "--arch", "sm_90"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("accepted: ") == 2 and printed.count("rejected, not for sm_90: ") == 2 and digest in printed
    assert cli.main(["bundle", "build", *arguments, "-o", str(tmp_path / "bundle")]) == 1
    assert "is not empty" in capsys.readouterr().err

    kernels = [Specialisation(SPEC, make_plan(SPEC, arch), arch, "float32", "float32", True) for arch in ARCHS]
    compiled = [compiler.compile_cubin(sources(s), s.arch.name)[0] for s in kernels]
    shutil.rmtree(tmp_path / "cache")

    def no_compiler():
        raise toolchain.ToolchainError("none here")

    monkeypatch.setattr(toolchain, "nvrtc_version", no_compiler)
    with pytest.raises(toolchain.ToolchainError):
        driver.cubin(kernels[0])
    flashmel.load_bundle(tmp_path / "bundle", digest)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [driver.cubin(s) for s in kernels] == compiled
    (tmp_path / "bundle" / json.loads((tmp_path / "bundle" / "manifest.json").read_text())["kernels"][0]["file"]).write_bytes(b"x")
    assert cli.main(["bundle", "list", str(tmp_path / "bundle")]) == 1
    assert "is damaged" in capsys.readouterr().out


@pytest.mark.gpu
def test_on_a_gpu_without_a_compiler(tmp_path, monkeypatch):
    module, x = MelSpectrogram(hop_length=160, n_mels=40).cuda(), noise(2, 8000).cuda().requires_grad_()
    tables = module.spectrogram.window, module.mel_scale.fb
    arch, _ = fused._device(0)
    kernels = fused.specialisations(*tables, module.spec, arch, gradient=True)
    bundle.write_bundle(
        tmp_path / "bundle", 13, [(compiler.identity(sources(s), arch.name), arch.name, str(s), driver.cubin(s)) for s in kernels]
    )
    mel = module(x)
    (expected,) = torch.autograd.grad(mel.sum(), x)
    for name in ("_plans", "_kernels", "_tables", "_calls"):
        monkeypatch.setattr(fused, name, {})
    monkeypatch.setattr(compiler, "compile_cubin", lambda *_: pytest.fail("compiled"))
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "another"))
    flashmel.load_bundle(tmp_path / "bundle")
    again = module(x)
    assert torch.equal(again, mel) and torch.equal(torch.autograd.grad(again.sum(), x)[0], expected)
