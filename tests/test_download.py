"""Bundles by https, from a server of our own: only what fits, every byte verified, and what was finished is kept."""

import hashlib
import warnings
from pathlib import Path

import pytest
from server import answer, redirect, serving

import flashmel
from flashmel import environment
from flashmel.jit import bundle, cache
from flashmel.jit.machine import Machine

pytestmark = pytest.mark.usefixtures("own_bundles")
A, B, C = "a" * 64, "b" * 64, "c" * 64
KERNELS = [
    (A, "sm_80", "first", b"\x7fELF" + bytes(300_000)),
    (B, "sm_90", "second", b"\x7fELF2"),
    (C, "sm_90", "third", b"\x7fELF3"),
]


def machine(monkeypatch, *archs, cuda=13):
    monkeypatch.setattr(bundle, "this_machine", lambda: Machine(archs, cuda))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture
def built(tmp_path):
    return bundle.write_bundle(tmp_path / "served", 13, KERNELS)


@pytest.fixture
def server(built, certificates, monkeypatch):
    with serving(built.path, certificates) as running:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "cert.pem"))
        monkeypatch.setenv("no_proxy", "localhost")
        yield running


def held(tmp_path):
    return sorted(path.name for path in tmp_path.glob("cache/bundles/*/*"))


def names(requests):
    return sorted(path.rsplit("/", 1)[-1] for path in requests)


def test_only_what_fits_this_machine(server, built, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_90")
    loaded = flashmel.load_bundle(server.base, built.digest)
    assert names(server.requests) == [f"{B}.cubin", f"{C}.cubin", "manifest.json"] == held(tmp_path)
    assert loaded.digest == built.digest and loaded.path == tmp_path / "cache" / "bundles" / built.digest
    assert bundle.find(B) == b"\x7fELF2" and bundle.find(C) == b"\x7fELF3" and bundle.find(A) is None
    assert flashmel.loaded_bundles() == (loaded,)


def test_all_without_a_gpu_or_those_asked_for(server, tmp_path, monkeypatch):
    machine(monkeypatch, cuda=None)
    flashmel.load_bundle(server.base + "/", archs=["sm_80"])
    assert held(tmp_path) == [f"{A}.cubin", "manifest.json"] and bundle.find(B) is None
    flashmel.load_bundle(server.base)
    assert len(held(tmp_path)) == 4 and names(server.requests).count(f"{A}.cubin") == 1, "what is there is not fetched again"
    assert [bundle.find(name) for name in (A, B, C)] == [data for *_, data in KERNELS]


def test_without_a_connection_if_the_digest_is_known(server, built, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_90")
    flashmel.load_bundle(server.base, built.digest)
    server.close()
    bundle._loaded.clear()
    monkeypatch.setattr(cache, "whole_file", lambda *_: pytest.fail("written to what may be read-only"))
    flashmel.load_bundle(server.base, built.digest)
    assert bundle.find(B) == b"\x7fELF2"
    with pytest.raises(bundle.BundleError, match="manifest.json cannot be downloaded: .*refused"):
        flashmel.load_bundle(server.base)


def test_damaged_since_the_download(server, built, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_90")
    loaded = flashmel.load_bundle(server.base, built.digest)
    (loaded.path / f"{B}.cubin").write_bytes(b"\x7fELF!")
    with pytest.warns(UserWarning, match="is damaged"):
        assert bundle.find(B) is None
    flashmel.load_bundle(server.base, built.digest)  # heals
    assert bundle.find(B) == b"\x7fELF2" and names(server.requests).count(f"{C}.cubin") == 1


def test_a_query_stays_and_redirects_to_https_are_followed(server, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_90")
    server.faults["manifest.json"] = redirect(f"{server.base}/manifest.json?moved")
    with pytest.raises(bundle.BundleError, match="manifest.json cannot be downloaded: .*30[0-9]"):
        flashmel.load_bundle(server.base)  # to itself, again and again
    server.faults[f"{B}.cubin"] = redirect(f"{server.base}/second", 307)
    server.faults["second"] = answer(200, body=b"\x7fELF2")
    del server.faults["manifest.json"]
    flashmel.load_bundle(server.base + "?token=1")
    assert bundle.find(B) == b"\x7fELF2" and f"/{C}.cubin?token=1" in server.requests


@pytest.mark.parametrize(
    "address,message",
    [
        ("http://localhost/x", "only https addresses are downloaded from"),
        ("ftp://localhost/x", "only https addresses are downloaded from"),
        ("file:///tmp/x", "only https addresses are downloaded from"),
        ("https:///x", "only https addresses are downloaded from"),
        ("https://localhost/x.zip", "a zip file is not downloaded"),
        ("https://localhost:1/x", "manifest.json cannot be downloaded: .*refused"),
        ("https://localhost:port/x", "manifest.json cannot be downloaded: "),
    ],
)
def test_addresses_that_cannot_be(address, message, tmp_path):
    for ask in (flashmel.load_bundle, flashmel.bundle_variants):
        with pytest.raises(bundle.BundleError, match=message) as caught:
            ask(address)
        assert address in str(caught.value)
    assert not flashmel.has_bundle(address) and not (tmp_path / "cache").exists()


def test_a_server_that_nobody_vouches_for(server, monkeypatch, tmp_path):
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(bundle.BundleError, match="manifest.json cannot be downloaded: .*CERTIFICATE_VERIFY_FAILED"):
        flashmel.load_bundle(server.base)
    assert server.requests == [] and not (tmp_path / "cache").exists()


def test_nothing_that_fits(server, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_89", "sm_120")
    with pytest.raises(bundle.BundleError, match="none of its 3 kernels fits .*sm_80 of CUDA 13: not for sm_89, sm_120"):
        flashmel.load_bundle(server.base)
    machine(monkeypatch, "sm_90", cuda=12)
    with pytest.raises(bundle.BundleError, match="needs a driver for CUDA 13, this one is for CUDA 12"):
        flashmel.load_bundle(server.base)
    assert not flashmel.has_bundle(server.base) and not (tmp_path / "cache").exists() and flashmel.loaded_bundles() == ()


def test_no_place_to_download_to(server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    flashmel.configure(cache_dir=tmp_path / "file")
    with pytest.raises(bundle.BundleError, match=r"cannot be written to .*/file/bundles/.*FLASHMEL_CACHE_DIR.*configure"):
        flashmel.load_bundle(server.base)


def test_variants(server, built, monkeypatch):
    machine(monkeypatch, "sm_90")
    for place in (server.base, built.path):
        assert [(v.variant.description, v.reason) for v in flashmel.bundle_variants(place)] == [
            ("first", "not for sm_90"),
            ("second", None),
            ("third", None),
        ]
        assert [v.accepted for v in flashmel.bundle_variants(place, ["sm_80"])] == [True, False, False]
        assert flashmel.has_bundle(place) and not flashmel.has_bundle(place, ["sm_75"])
    assert names(server.requests) == ["manifest.json"] * 4, "the kernels themselves are not asked for"
    (built.path / f"{B}.cubin").unlink()
    assert f"{B}.cubin cannot be read" in flashmel.bundle_variants(built.path)[1].reason
    machine(monkeypatch, cuda=None)
    assert [v.accepted for v in flashmel.bundle_variants(built.path)] == [True, False, True]
    for wrong in ("sm_90", ["90"], []):
        with pytest.raises(ValueError, match="archs must be names like 'sm_90' in a list"):
            flashmel.bundle_variants(built.path, wrong)


def test_a_driver_that_is_too_old_for_a_loaded_kernel(built, monkeypatch):
    flashmel.load_bundle(built.path)
    machine(monkeypatch, "sm_90", cuda=12)
    with pytest.warns(UserWarning, match="needs a driver for CUDA 13, this one is for CUDA 12; it is not used"):
        assert bundle.find(B) is None


# --- configure -------------------------------------------------------------------------------------------------------------------


def test_configured_bundles_load_when_a_kernel_is_needed(server, built, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_90")
    flashmel.configure(bundle_urls={server.base: built.digest}, cache_dir=tmp_path / "mine")
    assert server.requests == [] and flashmel.loaded_bundles() == () and bundle.expected() and not (tmp_path / "mine").exists()
    assert bundle.find(B) == b"\x7fELF2" and bundle.find(A) is None
    (loaded,) = flashmel.loaded_bundles()
    assert loaded.path == tmp_path / "mine" / "bundles" / built.digest and len(server.requests) == 3
    flashmel.configure(bundle_urls=[])
    assert bundle.find(C) == b"\x7fELF3", "what is loaded stays"


def test_a_configured_bundle_that_fails_is_tried_once(server, built, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_90")
    server.faults["manifest.json"] = answer(404)
    flashmel.configure(bundle_urls=[server.base, str(built.path)])
    with pytest.warns(UserWarning, match="the server answers 404 .*; this bundle is not used"):
        assert bundle.find(B) == b"\x7fELF2"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bundle.find(C) == b"\x7fELF3"
    assert len(server.requests) == 1 and "1 loaded; " in bundle.describe() and "404" in bundle.describe()


def test_configure(monkeypatch, tmp_path):
    flashmel.configure(cache_dir=str(tmp_path / "own"))
    assert environment.cache_dir() == tmp_path / "own", "before the environment's"
    flashmel.configure(bundle_urls=["a", Path("b")])
    assert environment.cache_dir() == tmp_path / "own" and environment.bundle_urls() == {"a": None, "b": None}
    flashmel.configure(cache_dir="")
    assert environment.cache_dir() == tmp_path / "cache" and environment.bundle_urls() == {"a": None, "b": None}
    for wrong, message in (
        (["http://a"], "http://a is not https"),
        ({"https://a": "abc"}, "digest of https://a must be a sha256 in hexadecimal, got 'abc'"),
    ):
        with pytest.raises(ValueError, match=message):
            flashmel.configure(bundle_urls=wrong, cache_dir=tmp_path / "other")
    with pytest.raises(TypeError, match="must be a sequence of addresses or a mapping to digests, got the string 'https://a'"):
        flashmel.configure(bundle_urls="https://a")
    assert environment.bundle_urls() == {"a": None, "b": None} and environment.cache_dir() == tmp_path / "cache"


def test_downloads_are_listed_and_removed(server, tmp_path, monkeypatch):
    machine(monkeypatch, "sm_90")
    flashmel.load_bundle(server.base)
    (folder,) = bundle.downloads(tmp_path / "cache")
    assert cache.usage(folder) == (2, 10) and hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest() == folder.name
    (folder / "x.tmp").write_bytes(b"half")
    bundle.remove_downloads(tmp_path / "cache")
    assert bundle.downloads(tmp_path / "cache") == [] and not folder.exists()
