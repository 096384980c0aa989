"""A cold start when something breaks. Each test injects a fault for real and sees the right bytes or one clear message, and nothing
half-written left behind. PROJECT.md lists all faults and their tests, those in test_jit, test_bundle and test_download too."""

import errno
import hashlib
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from cases import noise
from server import answer, endless, endless_redirect, hang_up, redirect, serving

import flashmel
from flashmel import MelSpectrogram
from flashmel.jit import bundle, cache, compiler, download, driver, toolchain
from flashmel.jit.machine import Machine
from flashmel.jit.source import Specialisation, sources
from flashmel.plan import Architecture, architecture, make_plan
from flashmel.spec import StftSpec

pytestmark = pytest.mark.usefixtures("own_bundles")
SPEC, HOPPER = StftSpec(64, 64, 16), architecture(9, 0)
TINY = Specialisation(SPEC, make_plan(SPEC, HOPPER), HOPPER, "float32", "float32", True)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def fresh(nvrtc_version):
    """What the compiler makes, without cache and bundles."""
    return compiler.compile_cubin(sources(TINY), "sm_90")[0]


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def process(before="", after="", **options):
    """A process that gets the cubin of TINY as a first call would, and prints its digest."""
    code = f"""
import hashlib, importlib.util, os, resource, sys, time
from pathlib import Path
package = Path({flashmel.__file__!r})
# The package without its __init__: the way to a cubin needs no torch, which takes seconds to import.
found = importlib.util.spec_from_file_location("flashmel", package, submodule_search_locations=[str(package.parent)])
sys.modules["flashmel"] = importlib.util.module_from_spec(found)
from flashmel.jit import cache, compiler, driver
from flashmel.jit.source import Specialisation
from flashmel.plan import architecture, make_plan
from flashmel.spec import StftSpec
spec, arch = StftSpec(64, 64, 16), architecture(9, 0)
kernel = Specialisation(spec, make_plan(spec, arch), arch, "float32", "float32", True)
{textwrap.dedent(before)}
print(hashlib.sha256(driver.cubin(kernel)).hexdigest(), flush=True)
{textwrap.dedent(after)}
"""
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def outcome(running):
    out, err = running.communicate(timeout=120)
    return out.strip(), err


# --- processes -------------------------------------------------------------------------------------------------------------------


def test_sixteen_processes_on_one_empty_cache(fresh, folder, tmp_path):
    wait = f"""
    print("ready", flush=True)
    while not os.path.exists({str(tmp_path / "go")!r}):
        time.sleep(0.005)
    """
    running = [process(wait) for _ in range(16)]
    for one in running:
        assert one.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    assert [outcome(one) for one in running] == [(hashlib.sha256(fresh).hexdigest(), "")] * 16
    assert files(folder) == [f"{compiler.cache_key(sources(TINY), 'sm_90')}.cubin"]
    assert cache.load(folder, folder.joinpath(files(folder)[0]).stem) == fresh


def test_killed_while_it_compiles(fresh, folder):
    running = process("""
    compile_cubin = compiler.compile_cubin
    compiler.compile_cubin = lambda *a: (print("compiling", flush=True), [compile_cubin(*a) for _ in range(50)][0])[1]
    """)
    assert running.stdout.readline() == "compiling\n"
    time.sleep(0.1)
    running.kill()
    assert outcome(running) == ("", "") and running.returncode == -signal.SIGKILL
    assert not folder.exists() or files(folder) == []
    assert driver.cubin(TINY) == fresh and len(files(folder)) == 1


def test_killed_while_it_writes(fresh, folder):
    """At a place in the file, not only between the steps (test_jit.py): half of the entry is on disk."""
    running = process("""
    class Half:
        def __init__(self, file):
            self.file = file
        def write(self, data):
            self.file.write(data[:len(data) // 2])
            self.file.flush()
            print("half", flush=True)
            time.sleep(60)
    import contextlib
    whole_file = cache.whole_file
    @contextlib.contextmanager
    def slow(path):
        with whole_file(path) as file:
            yield Half(file)
    cache.whole_file = slow
    """)
    assert running.stdout.readline() == "half\n"
    running.kill()
    running.communicate()
    (left,) = files(folder)
    assert left.endswith(".tmp") and driver.cubin(TINY) == fresh
    os.utime(folder / left, (0, 0))
    cache.store(folder, "another", b"")
    assert left not in files(folder) and len(files(folder)) == 2, "swept away an hour later"


@pytest.mark.skipif(os.name != "posix", reason="fork is a thing of POSIX")
@pytest.mark.gpu
@pytest.mark.parametrize("warm", [False, True])
def test_a_child_forked_after_the_parent_used_cuda(warm):
    mel, x = MelSpectrogram(n_fft=64, hop_length=16, n_mels=10).cuda(), noise(2, 999).cuda()
    if warm:
        mel(x)
    reader, writer = multiprocessing.Pipe(duplex=False)

    def child():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                mel(x)
                writer.send(("computed", [str(w.message) for w in caught]))
            except Exception as error:
                writer.send((str(error), [str(w.message) for w in caught]))

    forked = multiprocessing.get_context("fork").Process(target=child)
    forked.start()
    assert reader.poll(60), "the child hangs"
    message, caught = reader.recv()
    forked.join()
    assert "spawn" in message and "fork" in message, message
    assert not [text for text in caught if "plain torch" in text], "swallowed into the plain path"
    torch.testing.assert_close(mel(x).cpu(), mel.cpu()(x.cpu()), rtol=1e-4, atol=1e-4)  # the parent goes on


def test_the_drivers_refusal_in_a_forked_child_is_explained(monkeypatch):
    status = type("Status", (int,), {"name": "CUDA_ERROR_NOT_INITIALIZED"})(3)
    kernel = object.__new__(driver.Kernel)
    kernel._driver = type("Driver", (), {"cuGetErrorString": staticmethod(lambda status: (0, b"initialization error"))})
    with pytest.raises(driver.DriverError, match="cuInit failed: .*forked from one that used CUDA.*spawn"):
        kernel._checked("cuInit", status)


# --- the cache's folder and what is in it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-1], lambda b: b[: len(b) // 2], lambda b: b[:500] + bytes([b[500] ^ 4]) + b[501:]],
    ids=["last-byte", "half", "bit"],
)
def test_a_damaged_entry_is_compiled_again(fresh, folder, damage):
    driver.cubin(TINY)
    (name,) = files(folder)
    (folder / name).write_bytes(damage((folder / name).read_bytes()))
    assert driver.cubin(TINY) == fresh and cache.load(folder, Path(name).stem) == fresh and files(folder) == [name]


def only_memory(fresh, folder, **options):
    """A first call must give the right bytes with one warning."""
    digest, err = outcome(process(after="driver.cubin(kernel)", env={**os.environ, "FLASHMEL_CACHE_DIR": str(folder)}, **options))
    assert digest == hashlib.sha256(fresh).hexdigest()
    assert err.count("Warning: ") == 1 and f"could not be stored in {folder}" in err and "FLASHMEL_CACHE_DIR" in err
    return err


def test_a_folder_that_can_never_be_made(fresh):
    if not os.path.isdir("/proc/self"):
        pytest.skip("no /proc, in which nobody may make a folder")
    only_memory(fresh, Path("/proc/flashmel"))


def test_the_disk_refuses_halfway(fresh, folder):
    """A limit on the size of files stands for a quota: the first 10 kB are written, the rest is not."""
    import resource

    folder.mkdir()
    err = only_memory(fresh, folder, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)))
    assert os.strerror(errno.EFBIG) in err and files(folder) == []


@pytest.mark.parametrize("option,number", [("size=16k", errno.ENOSPC), ("ro", errno.EROFS)], ids=["full", "read-only"])
def test_a_file_system_that_is_full_or_read_only(fresh, folder, option, number):
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "none", str(folder)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount: {mounted.stderr.strip()}")
    try:
        assert os.strerror(number) in only_memory(fresh, folder) and files(folder) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away; test_jit.py pretends")
def test_a_kernel_of_somebody_else(fresh, folder):
    folder.mkdir()
    folder.chmod(0o777)
    key = compiler.cache_key(sources(TINY), "sm_90")
    cache.store(folder, key, b"anything")
    os.chown(folder / f"{key}.cubin", 12345, 12345)
    with pytest.warns(UserWarning, match=r"kernel of another user \(uid 12345\)"):
        assert driver.cubin(TINY) == fresh


# --- the compiler ----------------------------------------------------------------------------------------------------------------


def test_an_upgraded_compiler_makes_its_own(fresh, folder, monkeypatch):
    version = toolchain.compiler_version()
    monkeypatch.setattr(toolchain, "compiler_version", lambda: "12.0")
    cache.store(folder, compiler.cache_key(sources(TINY), "sm_90"), b"what NVRTC 12.0 made")
    assert driver.cubin(TINY) == b"what NVRTC 12.0 made"
    monkeypatch.setattr(toolchain, "compiler_version", lambda: version)
    assert driver.cubin(TINY) == fresh and len(files(folder)) == 2


def test_an_architecture_that_the_compiler_does_not_know(nvrtc_version, folder):
    arch = Architecture(999, HOPPER.shared_per_block)
    with pytest.raises(compiler.CompileError) as caught:
        driver.cubin(Specialisation(SPEC, make_plan(SPEC, arch), arch, "float32", "float32", True))
    assert f"NVRTC {nvrtc_version} does not know sm_999, only sm_75, " in str(caught.value) and "pip install" in str(caught.value)
    assert not folder.exists()


def test_no_compiler(folder):
    """The bindings are there, the library is not: what a container without the NVRTC package has."""
    digest, err = outcome(process("""
    sys.modules["cuda.bindings.nvrtc"] = None
    """))
    assert digest == "" and "ToolchainError: NVRTC cannot be loaded" in err and "pip install 'flashmel[cu13]'" in err
    assert not folder.exists()


# --- bundles ---------------------------------------------------------------------------------------------------------------------


def test_a_bundle_for_other_gpus(fresh, tmp_path):
    bundle.write_bundle(tmp_path / "bundle", 13, [("a" * 64, "sm_80", "for another", b"\x7fELF")])
    flashmel.load_bundle(tmp_path / "bundle")
    assert driver.cubin(TINY) == fresh
    with pytest.raises(bundle.BundleError, match="none of its 1 kernels fits .sm_80 of CUDA 13: not for sm_90"):
        flashmel.load_bundle(tmp_path / "bundle", archs=["sm_90"])


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b"\0" + b[1:]], ids=["truncated", "tampered"])
def test_a_bundle_that_was_damaged_since_gives_way_to_the_compiler(fresh, tmp_path, change):
    identity = compiler.identity(sources(TINY), "sm_90")
    built = bundle.write_bundle(tmp_path / "bundle", 13, [(identity, "sm_90", "tiny", fresh)])
    flashmel.load_bundle(built.path)
    (built.path / f"{identity}.cubin").write_bytes(change(fresh))
    with pytest.warns(UserWarning, match="is damaged.*it is not used"):
        assert driver.cubin(TINY) == fresh
    with pytest.raises(bundle.BundleError, match="is damaged"):
        flashmel.load_bundle(built.path)


A, B = "a" * 64, "b" * 64
FIRST, SECOND = b"\x7fELF" + bytes(300_000), b"\x7fELF2"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture
def server(tmp_path, certificates, monkeypatch):
    """A server of two kernels, of which the second is fetched without harm."""
    bundle.write_bundle(tmp_path / "served", 13, [(A, "sm_90", "first", FIRST), (B, "sm_90", "second", SECOND)])
    monkeypatch.setattr(bundle, "this_machine", lambda: Machine(("sm_90",), 13))
    monkeypatch.setattr(bundle, "_CONNECTIONS", 1)
    with serving(tmp_path / "served", certificates) as running:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
        monkeypatch.setenv("no_proxy", "localhost")
        yield running


def silent(request):
    request.send_response(200)
    request.send_header("Content-Length", "300004")
    request.end_headers()
    request.wfile.write(FIRST[:1000])
    time.sleep(3)


def dripping(request):
    request.send_response(200)
    request.end_headers()
    while True:
        request.wfile.write(b"x")
        time.sleep(0.05)


FAULTS = {
    "dies midway": (answer(200, body=FIRST[:100_000], announced=len(FIRST)), "the connection ended 200004 bytes early"),
    "ends too soon": (answer(200, body=FIRST[:100_000]), "is not the file that the manifest lists .100000 bytes of 300004"),
    "hangs up": (hang_up, "cannot be downloaded: "),
    "wrong bytes": (answer(200, body=b"\x7fELG" + FIRST[4:]), "is not the file that the manifest lists"),
    "too long": (answer(200, body=FIRST + b"x"), "longer than the 300004 bytes expected"),
    "endless": (endless, "longer than the 300004 bytes expected"),
    "http": (redirect("http://localhost/x"), "the server redirects to http://localhost/x, which is not https"),
    "http by way of https": (redirect("/step", 307), "the server redirects to http://localhost/x, which is not https"),
    "endless redirect": (endless_redirect("/step"), "the server redirects to http://localhost/x, which is not https"),
    "file": (redirect("file:///etc/passwd"), "the server answers 302"),
    "absent": (answer(404), "the server answers 404"),
    "forbidden": (answer(403), "the server answers 403"),
    "broken": (answer(500, body=b"sorry"), "the server answers 500"),
    "silent": (silent, "timed out"),
    "dripping": (dripping, "took more than 1 s, of which [0-9]+ bytes came"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_server_that_fails(server, folder, monkeypatch, name):
    fault, message = FAULTS[name]
    monkeypatch.setattr(download, "_SILENCE_SECONDS", 0.4)
    monkeypatch.setattr(download, "_FILE_SECONDS", 0.6)
    server.faults |= {f"{A}.cubin": fault, "step": redirect("http://localhost/x")}
    with pytest.raises(bundle.BundleError, match=message) as caught:
        flashmel.load_bundle(server.base)
    assert server.base in str(caught.value) and f"{A}.cubin" in str(caught.value)
    assert flashmel.loaded_bundles() == () and bundle.find(A) is None
    assert [path for path in files(folder) if not path.endswith(f"{B}.cubin")] == [], "no manifest, nothing unverified, no rest"
    server.faults.clear()
    before = len(server.requests)
    flashmel.load_bundle(server.base)
    assert (bundle.find(A), bundle.find(B)) == (FIRST, SECOND) and len(files(folder)) == 3
    assert server.requests[before:][:2] == ["/manifest.json", f"/{A}.cubin"]


@pytest.mark.parametrize(
    "fault,message",
    [
        (answer(200, body=b'{"schema": 1, ', announced=500), "manifest.json cannot be downloaded: the connection ended"),
        (answer(200, body=b'{"schema": 1, '), "manifest.json is not a bundle's manifest"),
        (answer(200, body=b"<html>"), "manifest.json is not a bundle's manifest"),
        (answer(200, body=b'{"schema": 1, "kernels": []}'), "none of its 0 kernels fits .it is empty"),
        (endless, "manifest.json cannot be downloaded: it is longer than"),
        (redirect("http://localhost/manifest.json"), "redirects to http://localhost/manifest.json, which is not https"),
        (answer(404), "manifest.json cannot be downloaded: the server answers 404"),
    ],
    ids=["dies", "truncated", "a page", "empty", "endless", "http", "absent"],
)
def test_a_manifest_that_fails(server, folder, fault, message):
    server.faults["manifest.json"] = fault
    with pytest.raises(bundle.BundleError, match=message):
        flashmel.load_bundle(server.base)
    assert not folder.exists() and len(server.requests) == 1


def test_another_bundle_than_expected_at_the_address(server, folder):
    with pytest.raises(bundle.BundleError, match=f"{server.base}: the manifest's sha256 is [0-9a-f]{{64}}, expected {A}"):
        flashmel.load_bundle(server.base, digest=A)
    assert not folder.exists() and len(server.requests) == 1


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", f"x/{A}.cubin", f"{A}.cubin?x", f"https://localhost/{A}.cubin"])
def test_a_manifest_that_leads_elsewhere(server, folder, tmp_path, name):
    manifest = tmp_path / "served" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"{A}.cubin"', f'"{name}"'))
    with pytest.raises(bundle.BundleError, match="a file name must be a digest and .cubin"):
        flashmel.load_bundle(server.base)
    assert not folder.exists() and len(server.requests) == 1


def test_a_full_disk_while_downloading(server, folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        with pytest.raises(bundle.BundleError, match="cannot be written to .* .No space left on device.: set FLASHMEL_CACHE_DIR"):
            flashmel.load_bundle(server.base)
    assert files(folder) == []
    flashmel.load_bundle(server.base)
    assert len(files(folder)) == 3


def test_killed_while_it_downloads(server, folder):
    server.faults[f"{B}.cubin"] = silent
    running = process(f"""
    from flashmel.jit import bundle
    from flashmel.jit.machine import Machine
    bundle._CONNECTIONS, bundle.this_machine = 1, lambda: Machine((), None)
    bundle.load_bundle({server.base!r})
    """)
    deadline = time.monotonic() + 30
    while f"/{B}.cubin" not in server.requests and time.monotonic() < deadline:
        time.sleep(0.01)
    running.kill()
    assert outcome(running) == ("", "")
    assert [path.rsplit("/", 1)[-1] for path in files(folder)] == [f"{A}.cubin"]
    server.faults.clear()
    flashmel.load_bundle(server.base)
    assert bundle.find(B) == SECOND and server.requests.count(f"/{A}.cubin") == 1


def test_a_first_call_with_a_server_that_is_gone(fresh, server):
    """It is compiled, with one warning; or, where that is forbidden, one error says both."""
    flashmel.configure(bundle_urls=[server.base])
    server.close()
    with pytest.warns(UserWarning, match="manifest.json cannot be downloaded: .*; this bundle is not used") as caught:
        assert driver.cubin(TINY) == driver.cubin(TINY) == fresh
    assert len(caught) == 1


def test_a_first_call_with_a_server_that_is_gone_and_no_jit(server, monkeypatch):
    flashmel.configure(bundle_urls=[server.base])
    server.close()
    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(driver.MissingKernelError, match=f"0 loaded; {server.base}: manifest.json cannot be downloaded"):
            driver.cubin(TINY)
