"""From the kernel's source to bytes on disk, without a GPU: the cache's promises, the key, the messages."""

import ctypes
import dataclasses
import errno
import hashlib
import importlib.util
import os
import pwd
import re
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from pathlib import Path

import pytest

from flashmel import environment
from flashmel.jit import cache, compiler, driver, toolchain
from flashmel.jit.source import INPUT_TYPES, OUTPUT_TYPES, Specialisation, config_header, kernel_sources
from flashmel.plan import architecture, make_plan
from flashmel.spec import StftSpec

KEY, DATA = "k" * 64, bytes(range(256)) * 500
HOPPER = architecture(9, 0)


def specialise(input_type="float32", output_type="float32", **kwargs):
    spec = StftSpec(**{"n_fft": 400, "win_length": 400, "hop_length": 160, **kwargs})
    return Specialisation(spec, make_plan(spec, HOPPER), HOPPER, input_type, output_type)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    find = toolchain.find  # some tests put another in its place
    find.cache_clear()
    yield tmp_path / "cache"
    find.cache_clear()


@pytest.fixture
def tools(monkeypatch):
    """A stand-in for the toolchain, so that these tests run where there is none."""
    found = toolchain.Toolchain("13.0", (Path("a"), Path("b")), (("nvidia-mathdx", "25.6.0"), ("nvidia-cuda-cccl", "13.3")))
    monkeypatch.setattr(toolchain, "find", lambda: found)
    return found


@pytest.fixture
def compilations(tools, monkeypatch):
    """Counts what is compiled; each is given other bytes."""
    calls = []
    monkeypatch.setattr(compiler, "compile_cubin", lambda sources, arch: (calls.append(arch), (b"cubin %d" % len(calls), ""))[1])
    return calls


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# --- cache ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [DATA, b"", b"\0"], ids=["kernel", "empty", "one-byte"])
def test_round_trip(own_cache, data):
    assert cache.load(own_cache, KEY) is None
    cache.store(own_cache, KEY, data)
    assert cache.load(own_cache, KEY) == data and cache.load(own_cache, "other") is None
    cache.store(own_cache, KEY, b"newer")
    assert cache.load(own_cache, KEY) == b"newer" and names(own_cache) == [f"{KEY}.cubin"]
    assert own_cache.stat().st_mode & 0o077 == 0, "others could put their code there"


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b"",
        lambda b: b[:10],
        lambda b: b[:32],
        lambda b: b[:-1],
        lambda b: b[: len(b) // 2],
        lambda b: b + b"\0",
        lambda b: b"\0" * len(b),
        lambda b: b[:100] + bytes([b[100] ^ 1]) + b[101:],
        lambda b: bytes([b[0] ^ 128]) + b[1:],
        lambda b: b[32:],
    ],
    ids=["empty", "in-digest", "digest-alone", "last-byte", "half", "longer", "zeros", "bit-of-data", "bit-of-digest", "no-digest"],
)
def test_a_damaged_entry_is_a_miss_and_heals(own_cache, damage):
    cache.store(own_cache, KEY, DATA)
    entry = own_cache / f"{KEY}.cubin"
    entry.write_bytes(damage(entry.read_bytes()))
    assert cache.load(own_cache, KEY) is None
    cache.store(own_cache, KEY, DATA)
    assert cache.load(own_cache, KEY) == DATA


def refused(folder):
    """Store must warn, once, naming the folder and the remedy, and raise nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.store(folder, KEY, DATA)
    (warning,) = caught
    assert str(folder) in str(warning.message) and "FLASHMEL_CACHE_DIR" in str(warning.message)
    assert cache.load(folder, KEY) is None
    return str(warning.message)


def test_the_folder_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file")
    refused(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_write_permission(tmp_path):
    tmp_path.chmod(0o500)
    refused(tmp_path)
    refused(tmp_path / "below")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_refuses_files(own_cache, monkeypatch, number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    assert os.strerror(number) in refused(own_cache)


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing(own_cache, monkeypatch, step):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), refuse)
    assert "No space left" in refused(own_cache)
    assert names(own_cache) == []


def test_an_entry_that_is_a_folder(own_cache):
    (own_cache / f"{KEY}.cubin").mkdir(parents=True)
    refused(own_cache)


def writer(folder, before="", size=200_000):
    """A process that loads cache.py alone (which therefore needs nothing else of flashmel, nor torch) and stores an entry."""
    code = f"""
import importlib.util, os, signal
module_spec = importlib.util.spec_from_file_location("cache", {cache.__file__!r})
cache = importlib.util.module_from_spec(module_spec)
module_spec.loader.exec_module(cache)
from pathlib import Path
{before}
for _ in range(20):
    cache.store(Path({str(folder)!r}), {KEY!r}, os.urandom({size}))
    assert len(cache.load(Path({str(folder)!r}), {KEY!r})) == {size}  # whoever wrote it: whole
"""
    return subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)


def test_eight_writers_at_once(own_cache):
    processes = [writer(own_cache) for _ in range(8)]
    errors = [process.communicate()[1] for process in processes]
    assert errors == [""] * 8
    assert names(own_cache) == [f"{KEY}.cubin"] and len(cache.load(own_cache, KEY)) == 200_000


@pytest.mark.parametrize("step", ["os.fsync", "Path.replace"])
def test_a_writer_killed_midway(own_cache, step):
    process = writer(own_cache, f"{step} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert cache.load(own_cache, KEY) is None and list(own_cache.glob("*.cubin")) == []
    cache.store(own_cache, KEY, DATA)
    assert cache.load(own_cache, KEY) == DATA


# --- key -----------------------------------------------------------------------------------------------------------------------


def test_key_depends_on_all_that_decides_the_cubin(tools, monkeypatch):
    sources = {"kernel.cu": "k", "load.cuh": "l", "config.h": "c"}
    reference = compiler.cache_key(sources, "sm_90")
    assert re.fullmatch("[0-9a-f]{64}", reference)
    assert compiler.cache_key(dict(reversed(sources.items())), "sm_90") == reference
    keys = [reference, *(compiler.cache_key({**sources, name: "x"}, "sm_90") for name in sources)]
    keys += [compiler.cache_key({**sources, "more.cuh": ""}, "sm_90"), compiler.cache_key(sources, "sm_100")]
    keys += [compiler.cache_key({"kernel.cu": "kl", "load.cuh": "", "config.h": "c"}, "sm_90")]  # the same text, cut elsewhere
    for other in (
        dataclasses.replace(tools, nvrtc="13.1"),
        dataclasses.replace(tools, versions=(("nvidia-mathdx", "25.6.1"), tools.versions[1])),
        dataclasses.replace(tools, versions=(tools.versions[0], ("nvidia-cuda-cccl", "13.2"))),
    ):
        monkeypatch.setattr(toolchain, "find", lambda other=other: other)
        keys.append(compiler.cache_key(sources, "sm_90"))
    monkeypatch.setattr(toolchain, "find", lambda: tools)
    monkeypatch.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "--use_fast_math"))
    keys.append(compiler.cache_key(sources, "sm_90"))
    assert len(set(keys)) == len(keys)


def test_key_does_not_depend_on_where_things_lie(tools, monkeypatch):
    before = compiler.cache_key({"kernel.cu": "k", "config.h": "c"}, "sm_90")
    monkeypatch.setattr(toolchain, "find", lambda: dataclasses.replace(tools, include=(Path("elsewhere"),)))
    assert compiler.cache_key({"kernel.cu": "k", "config.h": "c"}, "sm_90") == before


# --- driver.cubin: cache before compiler -----------------------------------------------------------------------------------------


def test_the_second_time_comes_from_disk(own_cache, compilations):
    assert [driver.cubin(specialise()) for _ in range(3)] == [b"cubin 1"] * 3 and compilations == ["sm_90"]
    # What differs per call or is not in the kernel makes no other kernel; what is in it does.
    assert driver.cubin(specialise(win_length=320, normalized="window")) == b"cubin 1"
    changes = ({"power": 1.0}, {"pad": 1}, {"hop_length": 161}, {"center": False}, {"pad_mode": "constant"})
    others = [specialise("int16"), specialise(output_type="float16"), *(specialise(**kwargs) for kwargs in changes)]
    assert len({driver.cubin(s) for s in others}) == len(others) == len(compilations) - 1
    assert len(names(own_cache)) == len(compilations)


def test_a_damaged_kernel_is_compiled_again(own_cache, compilations):
    driver.cubin(specialise())
    (entry,) = own_cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert driver.cubin(specialise()) == driver.cubin(specialise()) == b"cubin 2"


def test_no_place_for_the_cache(tmp_path, compilations, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="compiled again in the next process"):
        assert driver.cubin(specialise()) == b"cubin 1"


def test_no_home(compilations, monkeypatch):
    """A container's made-up user: no HOME, no entry in the password file."""
    for name in ("FLASHMEL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert environment.cache_dir() is None
    assert driver.cubin(specialise()) == b"cubin 1"
    assert dict(toolchain.describe())["kernel cache"].startswith("none")


def test_a_failed_compilation_is_not_stored(own_cache, tools, monkeypatch):
    def fail(*_):
        raise compiler.CompileError("no")

    monkeypatch.setattr(compiler, "compile_cubin", fail)
    with pytest.raises(compiler.CompileError):
        driver.cubin(specialise())
    assert not own_cache.exists()


def test_cache_folder(monkeypatch, tmp_path):
    assert environment.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("FLASHMEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert environment.cache_dir() == tmp_path / "xdg" / "flashmel"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert environment.cache_dir() == tmp_path / "home" / ".cache" / "flashmel"
    assert not list(tmp_path.iterdir()), "asking makes nothing"


def test_frames_per_block(monkeypatch):
    monkeypatch.delenv("FLASHMEL_FPB", raising=False)
    assert environment.frames_per_block() is None
    for text, value in (("", None), ("8", 8), (" 16 ", 16)):
        monkeypatch.setenv("FLASHMEL_FPB", text)
        assert environment.frames_per_block() == value
    for text in ("many", "8.0"):
        monkeypatch.setenv("FLASHMEL_FPB", text)
        with pytest.raises(ValueError, match=f"FLASHMEL_FPB must be an integer, got '{text}'"):
            environment.frames_per_block()


# --- toolchain -----------------------------------------------------------------------------------------------------------------


def made(root, *, without=None):
    """A folder like site-packages/nvidia, all headers but one in it; two of them, as a namespace package may be."""
    for i, (header, folder, package) in enumerate(toolchain._HEADERS):
        if package != without:
            path = root / f"part{i % 2}" / folder / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return types.SimpleNamespace(submodule_search_locations=[str(root / "part0"), str(root / "part1")])


@pytest.mark.parametrize("package", [package for _, _, package in toolchain._HEADERS])
def test_a_missing_header_names_its_package(tmp_path, monkeypatch, package):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: made(tmp_path, without=package))
    header = {package: header for header, _, package in toolchain._HEADERS}[package]
    with pytest.raises(toolchain.ToolchainError, match=f"{re.escape(header)} not found .*part1.*: pip install {package}$"):
        toolchain.find()
    rows = dict(toolchain.describe())
    assert rows[package].startswith("missing: ") and package in rows[package]
    assert [name for name, text in rows.items() if text.startswith("missing: ") and name != "NVRTC"] == [package]


def test_headers_in_two_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: made(tmp_path))
    monkeypatch.setattr(toolchain, "_nvrtc_version", lambda: "13.0")
    tools = toolchain.find()
    assert tools.nvrtc == "13.0" and all(path.is_dir() and tmp_path in path.parents for path in tools.include)
    assert [name for name, _ in tools.versions] == [package for _, _, package in toolchain._HEADERS]


def test_nothing_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(toolchain.ToolchainError, match="no package named nvidia"):
        toolchain.find()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(toolchain.ToolchainError, match="NVRTC cannot be loaded .*pip install 'cuda-python"):
        toolchain._nvrtc_version()
    assert all(text.startswith("missing: ") for _, text in toolchain.describe()[:-1])
    with pytest.raises(toolchain.ToolchainError):
        driver.cubin(specialise())


def test_describe(own_cache):
    def row():
        return dict(toolchain.describe())["kernel cache"]

    packages = [package for _, _, package in toolchain._HEADERS]
    assert [name for name, _ in toolchain.describe()] == ["NVRTC", *packages, "kernel cache"]
    assert row() == f"{own_cache}: 0 kernels, 0 KiB" and not own_cache.exists()
    cache.store(own_cache, KEY, bytes(2048 - hashlib.sha256().digest_size))
    assert row() == f"{own_cache}: 1 kernels, 2 KiB"


def test_compile_error_carries_log_configuration_and_versions():
    try:
        tools = toolchain.find()
    except toolchain.ToolchainError as error:
        pytest.skip(f"no compiler: {error}")
    sources = {"kernel.cu": '#include "config.h"\nint x = undeclared_name;\n', "config.h": "// the config\n"}
    with pytest.raises(compiler.CompileError) as caught:
        compiler.compile_cubin(sources, "sm_90")
    message = str(caught.value)
    for part in ("NVRTC_ERROR_COMPILATION", "sm_90", "undeclared_name", "kernel.cu(2)", "// the config", f"NVRTC {tools.nvrtc}"):
        assert part in message
    for name, version in tools.versions:
        assert f"{name} {version}" in message
    with pytest.raises(compiler.CompileError, match="NVRTC_ERROR_INVALID_OPTION"):
        compiler.compile_cubin({"kernel.cu": "", "config.h": ""}, "sm_1")


# --- sources -------------------------------------------------------------------------------------------------------------------


def test_kernel_sources():
    sources = kernel_sources()
    assert "kernel.cu" in sources and "config.h" not in sources and all(text.strip() for text in sources.values())
    included = {name for text in sources.values() for name in re.findall(r'#include "(.*)"', text)}
    assert included == {*sources, "config.h"} - {"kernel.cu"}, "a file that nothing includes, or that is not there"


def test_config_header_is_the_spec_and_the_plan():
    s = specialise("int16", "bfloat16", pad=-3, power=0.7, pad_mode="circular", center=False)
    text = config_header(s)
    values = dict(re.findall(r"static constexpr int (\w+) = (-?\d+);", text))
    for name, value in {**dataclasses.asdict(s.plan), "n_fft": 400, "hop_length": 160, "margin": 0, "pad": -3}.items():
        assert values[name] == str(value)
    assert int(values["threads_per_frame"]) == s.plan.threads // s.plan.frames_per_block
    (power,) = re.findall(r"constexpr float power = (\S+)f;", text)
    assert float.fromhex(power) == 0.7
    assert "PadMode::circular;" in text and "using Input = short;" in text and "using Output = __nv_bfloat16;" in text
    assert text.count("#include") == 1 and "#include <cuda_bf16.h>" in text
    assert config_header(dataclasses.replace(s)) == text


@pytest.mark.parametrize("input_type", INPUT_TYPES)
@pytest.mark.parametrize("output_type", OUTPUT_TYPES)
def test_config_header_includes_what_its_types_need(input_type, output_type):
    text = config_header(specialise(input_type, output_type))
    assert ("cuda_fp16.h" in text) == ("__half" in text) == ("float16" in (input_type, output_type))
    assert ("cuda_bf16.h" in text) == ("__nv_bfloat16" in text) == ("bfloat16" in (input_type, output_type))


def test_every_constant_that_the_kernel_reads_is_in_the_header():
    used = {name for text in kernel_sources().values() for name in re.findall(r"\bConfig::(\w+)", text)}
    assert used - set(re.findall(r"(?:using|static constexpr \w+) (\w+) =", config_header(specialise()))) == set()


def test_launch_parameters_are_the_kernels():
    body = re.search(r"struct Params \{(.*?)\};", kernel_sources()["kernel.cu"], re.DOTALL)[1]
    declared = re.sub(r"//.*", "", body)
    fields = [
        (name.strip(" *"), ctypes.c_void_p if "*" in kind + name else {"long long": ctypes.c_int64, "int": ctypes.c_int32}[kind])
        for kind, listed in re.findall(r"((?:const )?(?:void|float4|int4|float|long long|int))\b\s*([^;]*);", declared)
        for name in listed.split(",")
    ]
    assert fields == driver.LaunchParams._fields_
