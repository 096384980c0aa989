"""From the kernel's source to bytes on disk, without a GPU: the cache's promises, the key, the messages."""

import ctypes
import dataclasses
import enum
import errno
import hashlib
import importlib.metadata
import os
import pwd
import re
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import numpy as np
import pytest

from flashmel import environment
from flashmel.jit import bundle, cache, compiler, driver, machine, toolchain
from flashmel.jit.source import (
    INPUT_TYPES,
    OUTPUT_TYPES,
    NormalizeSpecialisation,
    Specialisation,
    config_header,
    kernel_sources,
    sources,
)
from flashmel.plan import architecture, factor_entries, factor_offsets, make_backward_plan, make_plan
from flashmel.spec import Normalization, StftSpec

KEY, DATA = "k" * 64, bytes(range(256)) * 500
HOPPER = architecture(9, 0)


def specialise(input_type="float32", output_type="float32", filters_in_shared=True, **kwargs):
    spec = StftSpec(**{"n_fft": 400, "win_length": 400, "hop_length": 160, **kwargs})
    return Specialisation(spec, make_plan(spec, HOPPER), HOPPER, input_type, output_type, filters_in_shared)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())
    monkeypatch.setenv("FLASHMEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASHMEL_NO_JIT", raising=False)
    asked = toolchain.nvrtc_version, toolchain.compiler_version  # some tests put others in their place
    for version in asked:
        version.cache_clear()
    yield tmp_path / "cache"
    for version in asked:
        version.cache_clear()


@pytest.fixture
def nvrtc(monkeypatch):
    """A stand-in for the compiler's version, so that these tests run where there is none."""
    for name in ("nvrtc_version", "compiler_version"):
        monkeypatch.setattr(toolchain, name, lambda: "13.0")


@pytest.fixture
def compilations(nvrtc, monkeypatch):
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
    assert cache.load(own_cache, KEY) is None and not entry.exists()
    cache.store(own_cache, KEY, DATA)
    assert cache.load(own_cache, KEY) == DATA


def refused(folder):
    """Store must warn, once in a process, naming the folder and the remedy, and raise nothing."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache.store(folder, KEY, DATA)
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

    monkeypatch.setattr(cache, "open", refuse, raising=False)
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


@pytest.mark.parametrize("mode,trusted", [(0o700, True), (0o755, True), (0o777, False), (0o1777, False), (0o775, False)], ids=oct)
def test_kernels_of_other_users(own_cache, monkeypatch, mode, trusted):
    """Where others may write, what they wrote may be anything; root's and one's own are used everywhere."""
    cache.store(own_cache, KEY, DATA)
    own_cache.chmod(mode)
    assert cache.load(own_cache, KEY) == DATA
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(
        os, "fstat", lambda number, fstat=os.fstat: os.stat_result((*fstat(number)[:4], owner + 2, *fstat(number)[5:]))
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [cache.load(own_cache, KEY) for _ in range(2)] == [DATA if trusted else None] * 2
    assert len(caught) == (not trusted)
    if not trusted:
        assert f"another user (uid {owner + 2})" in str(caught[0].message) and "FLASHMEL_CACHE_DIR" in str(caught[0].message)
    assert (own_cache / f"{KEY}.cubin").exists()


def test_what_was_used_longest_ago_goes_first(own_cache, monkeypatch):
    monkeypatch.setattr(cache, "MAX_BYTES", 3 * (1000 + 32))
    for i, key in enumerate("abc"):
        cache.store(own_cache, key, bytes(1000))
        os.utime(own_cache / f"{key}.cubin", (i, i))
    assert cache.load(own_cache, "a") is not None  # now the last one used
    cache.store(own_cache, "d", bytes(1000))
    assert names(own_cache) == ["a.cubin", "c.cubin", "d.cubin"]
    cache.store(own_cache, "larger than all", bytes(5000))
    assert cache.load(own_cache, "d") is None and len(names(own_cache)) <= 1


def test_what_killed_writers_leave_is_swept_away(own_cache):
    cache.store(own_cache, KEY, DATA)
    for name, age in (("old.tmp", 7200), ("new.tmp", 10)):
        (own_cache / name).write_bytes(b"half")
        os.utime(own_cache / name, (time.time() - age,) * 2)
    (own_cache / "notes.txt").write_text("mine")
    os.utime(own_cache / "notes.txt", (0, 0))
    cache.store(own_cache, "other", DATA)
    assert names(own_cache) == sorted([f"{KEY}.cubin", "new.tmp", "notes.txt", "other.cubin"])


def test_usage_and_clear(own_cache):
    assert cache.usage(own_cache) == (0, 0) == cache.clear(own_cache)
    for key in "ab":
        cache.store(own_cache, key, DATA)
    (own_cache / "c.tmp").write_bytes(b"half")
    (own_cache / "notes.txt").write_text("mine")
    assert cache.usage(own_cache) == (2, 2 * (len(DATA) + 32))
    assert cache.clear(own_cache) == (2, 2 * (len(DATA) + 32))
    assert names(own_cache) == ["notes.txt"] and cache.usage(own_cache) == (0, 0)


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


def test_key_depends_on_all_that_decides_the_cubin(nvrtc, monkeypatch):
    sources = {"kernel.cu": "k", "load.cuh": "l", "config.h": "c"}
    reference = compiler.cache_key(sources, "sm_90")
    assert re.fullmatch("[0-9a-f]{64}", reference)
    assert compiler.cache_key(dict(reversed(sources.items())), "sm_90") == reference
    keys = [reference, *(compiler.cache_key({**sources, name: "x"}, "sm_90") for name in sources)]
    keys += [compiler.cache_key({**sources, "more.cuh": ""}, "sm_90"), compiler.cache_key(sources, "sm_100")]
    keys += [compiler.cache_key({"kernel.cu": "kl", "load.cuh": "", "config.h": "c"}, "sm_90")]  # the same text, cut elsewhere
    with monkeypatch.context() as other:
        other.setattr(toolchain, "compiler_version", lambda: "13.1")
        keys.append(compiler.cache_key(sources, "sm_90"))
    with monkeypatch.context() as other:
        other.setattr(compiler, "_OPTIONS", (*compiler._OPTIONS, "--use_fast_math"))
        keys.append(compiler.cache_key(sources, "sm_90"))
    assert len(set(keys)) == len(keys)
    assert compiler.cache_key(sources, "sm_90") == reference


# --- driver.cubin: cache before compiler -----------------------------------------------------------------------------------------


def test_the_second_time_comes_from_disk(own_cache, compilations):
    assert [driver.cubin(specialise()) for _ in range(3)] == [b"cubin 1"] * 3 and compilations == ["sm_90"]
    # What differs per call or is not in the kernel makes no other kernel; what is in it does.
    assert driver.cubin(specialise(win_length=320, normalized="window")) == b"cubin 1"
    changes = ({"power": 1.0}, {"pad": 1}, {"hop_length": 161}, {"center": False}, {"pad_mode": "constant"})
    others = [specialise("int16"), specialise(output_type="float16"), specialise(filters_in_shared=False)]
    others += [specialise(**kwargs) for kwargs in changes]
    assert len({driver.cubin(s) for s in others}) == len(others) == len(compilations) - 1
    assert len(names(own_cache)) == len(compilations)


def test_what_happened_is_logged(own_cache, compilations, caplog):
    with caplog.at_level("INFO", logger="flashmel"):
        driver.cubin(specialise())
        driver.cubin(specialise())
    compiled, loaded = (record.getMessage() for record in caplog.records)
    assert compiled.startswith("compiled in 0.") and loaded.startswith(f"from {own_cache}, ")
    for part in ("forward kernel for sm_90", "float32", "n_fft 400", "hop_length 160", "20 x 10 points"):
        assert part in compiled and part in loaded


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


def test_a_failed_compilation_is_not_stored(own_cache, nvrtc, monkeypatch):
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


def test_frames_per_tile(monkeypatch):
    monkeypatch.delenv("FLASHMEL_FPB", raising=False)
    assert environment.frames_per_tile() is None
    for text, value in (("", None), ("8", 8), (" 16 ", 16)):
        monkeypatch.setenv("FLASHMEL_FPB", text)
        assert environment.frames_per_tile() == value
    for text in ("many", "8.0"):
        monkeypatch.setenv("FLASHMEL_FPB", text)
        with pytest.raises(ValueError, match=f"FLASHMEL_FPB must be an integer, got '{text}'"):
            environment.frames_per_tile()


def test_no_jit_means_no_compilation(own_cache, compilations, monkeypatch):
    monkeypatch.setattr(bundle, "_loaded", {})
    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    with pytest.raises(driver.MissingKernelError) as caught:
        driver.cubin(specialise())
    message = str(caught.value)
    for part in ("no bundle holds", "0 loaded", f"not in the cache ({own_cache})", "flashmel bundle build", "n_fft 400"):
        assert part in message and "FLASHMEL_NO_JIT is set" in message
    assert compilations == [] and not own_cache.exists()
    for allowed in ("0", ""):
        monkeypatch.setenv("FLASHMEL_NO_JIT", allowed)
        assert driver.cubin(specialise()) == b"cubin 1"
    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    assert driver.cubin(specialise()) == b"cubin 1", "from the cache"
    monkeypatch.setenv("FLASHMEL_NO_JIT", "yes")
    with pytest.raises(ValueError, match="FLASHMEL_NO_JIT must be 0 or 1, got 'yes'"):
        driver.cubin(specialise())


def test_no_jit_and_no_compiler(own_cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(toolchain, "_package_version", lambda name: "unknown")
    monkeypatch.setenv("FLASHMEL_NO_JIT", "1")
    with pytest.raises(driver.MissingKernelError, match="the cache cannot be asked .NVRTC cannot be loaded"):
        driver.cubin(specialise())


# --- this machine --------------------------------------------------------------------------------------------------------------


def driver_stand_in(monkeypatch, status=0, capabilities=(), version=13000):
    """cuda.bindings.driver, as far as a look at the machine needs it."""
    attributes = types.SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=0, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=1
    )
    module = types.SimpleNamespace(
        cuInit=lambda flags: (status,),
        cuDriverGetVersion=lambda: (0, version),
        cuDeviceGetCount=lambda: (0, len(capabilities)),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetAttribute=lambda attribute, device: (0, capabilities[device][attribute]),
        CUdevice_attribute=attributes,
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(driver=module))


def test_this_machine(monkeypatch):
    driver_stand_in(monkeypatch, capabilities=[(9, 0), (8, 9), (9, 0), (12, 0)], version=12080)
    assert machine.this_machine() == (("sm_90", "sm_89", "sm_120"), 12)
    driver_stand_in(monkeypatch, status=100)  # no device
    assert machine.this_machine() == ((), None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert machine.this_machine() == ((), None)


def test_a_driver_older_than_the_kernel_says_what_to_install(compilations, monkeypatch):
    class Refusal(enum.IntEnum):
        CUDA_ERROR_INVALID_IMAGE = 200

    driver_stand_in(monkeypatch, capabilities=[(9, 0)], version=12080)
    module = sys.modules["cuda.bindings"].driver
    module.cuDevicePrimaryCtxRetain = module.cuCtxGetCurrent = lambda *_: (0, 1)
    module.cuModuleLoadData = lambda data: (Refusal.CUDA_ERROR_INVALID_IMAGE,)
    module.cuGetErrorString = lambda status: (0, b"device kernel image is invalid")
    with pytest.raises(driver.DriverError) as caught:
        driver.Kernel(specialise(), 0)
    for part in ("cuModuleLoadData failed", "kernel image is invalid", "takes kernels of CUDA 12 and older", "flashmel[cu12]"):
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f", "GPU-8932f937", "MIG-GPU-1/3/0", "", "-1", "1,0"])
def test_names_of_devices_are_the_drivers_business(monkeypatch, name):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
    driver_stand_in(monkeypatch, capabilities=[(9, 0)])
    assert machine.this_machine().archs == ("sm_90",)
    package = Path(machine.__file__).parents[1]
    assert not [p for p in package.rglob("*.py") if re.search(r"environ.*VISIBLE_DEVICES|getenv.*VISIBLE", p.read_text("utf-8"))]


# --- toolchain -----------------------------------------------------------------------------------------------------------------


def stand_in(monkeypatch, status, major=13, minor=0):
    """cuda.bindings.nvrtc, as far as a version needs it."""
    module = types.SimpleNamespace(nvrtcVersion=lambda: (status, major, minor))
    monkeypatch.setitem(sys.modules, "cuda.bindings", types.SimpleNamespace(nvrtc=module))


class Status(enum.IntEnum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_INTERNAL_ERROR = 11


def test_nvrtc_version_is_asked_once(monkeypatch):
    stand_in(monkeypatch, Status.NVRTC_SUCCESS, 13, 2)
    assert toolchain.nvrtc_version() == "13.2"
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert toolchain.nvrtc_version() == "13.2"


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"nvidia-cuda-nvrtc": "13.0.88"}, "nvidia-cuda-nvrtc 13.0.88"),
        ({"nvidia-cuda-nvrtc-cu12": "12.9.86"}, "nvidia-cuda-nvrtc-cu12 12.9.86"),
        ({"nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-nvrtc-cu12": "12.9.86"}, "13.2"),  # which of them is loaded, it says itself
        ({}, "13.2"),
    ],
)
def test_the_compilers_package_tells_its_version(monkeypatch, packages, expected):
    stand_in(monkeypatch, Status.NVRTC_SUCCESS, 13, 2)
    monkeypatch.setattr(toolchain, "_package_version", lambda name: packages.get(name, "unknown"))
    assert toolchain.compiler_version() == expected


def test_a_broken_nvrtc(monkeypatch):
    stand_in(monkeypatch, Status.NVRTC_ERROR_INTERNAL_ERROR)
    with pytest.raises(toolchain.ToolchainError, match="nvrtcVersion failed: NVRTC_ERROR_INTERNAL_ERROR"):
        toolchain.nvrtc_version()

    def refuse():
        raise RuntimeError("Failed to dlopen libnvrtc.so.13")  # what cuda.bindings raises without the library

    monkeypatch.setattr(sys.modules["cuda.bindings"].nvrtc, "nvrtcVersion", refuse)
    with pytest.raises(toolchain.ToolchainError, match=r"dlopen libnvrtc.* pip install 'flashmel\[cu13\]'"):
        toolchain.nvrtc_version()


def test_nothing_installed(own_cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(toolchain.ToolchainError, match=r"NVRTC cannot be loaded .*pip install 'flashmel\[cu13\]'"):
        toolchain.nvrtc_version()
    assert dict(toolchain.describe())["NVRTC"].startswith("missing: NVRTC cannot be loaded")
    with pytest.raises(toolchain.ToolchainError):
        driver.cubin(specialise())
    with pytest.raises(toolchain.ToolchainError):
        compiler.compile_cubin({"kernel.cu": "", "config.h": ""}, "sm_90")
    assert not own_cache.exists()


def test_describe(own_cache, nvrtc, monkeypatch):
    def row():
        return dict(toolchain.describe())["kernel cache"]

    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"version of {name}")
    assert [name for name, _ in toolchain.describe()] == ["NVRTC", "kernel cache"]
    assert dict(toolchain.describe())["NVRTC"] == "13.0, nvidia-cuda-nvrtc version of nvidia-cuda-nvrtc"
    assert row() == f"{own_cache}: 0 kernels, 0 KiB" and not own_cache.exists()
    cache.store(own_cache, KEY, bytes(2048 - hashlib.sha256().digest_size))
    assert row() == f"{own_cache}: 1 kernels, 2 KiB"


def test_describe_a_library_from_elsewhere(nvrtc, monkeypatch):
    """A system's own NVRTC loads without the package."""

    def unknown(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", unknown)
    assert dict(toolchain.describe())["NVRTC"] == "13.0, nvidia-cuda-nvrtc unknown"


def test_compile_error_carries_log_configuration_and_version(nvrtc_version):
    sources = {"kernel.cu": '#include "config.h"\nint x = undeclared_name;\n', "config.h": "// the config\n"}
    with pytest.raises(compiler.CompileError) as caught:
        compiler.compile_cubin(sources, "sm_90")
    message = str(caught.value)
    for part in ("NVRTC_ERROR_COMPILATION", "sm_90", "undeclared_name", "kernel.cu(2)", "// the config", f"NVRTC {nvrtc_version}"):
        assert part in message
    with pytest.raises(compiler.CompileError, match=r"does not know sm_1, only sm_75, .* pip install"):
        compiler.compile_cubin({"kernel.cu": "", "config.h": ""}, "sm_1")


def test_an_empty_log_spoils_no_other_bytes(nvrtc_version):
    """NVRTC writes its log, one zero byte if there is none, into memory that it is given."""
    compiler.compile_cubin({"kernel.cu": 'extern "C" __global__ void f() {}\n', "config.h": ""}, "sm_90")
    assert bytes([32])[0] == 32


# --- sources -------------------------------------------------------------------------------------------------------------------


def test_kernel_sources():
    sources = kernel_sources()
    units = {name for name in sources if name.endswith(".cu")}
    assert units == {"forward.cu", "backward.cu", "normalize.cu"}
    assert "config.h" not in sources and all(text.strip() for text in sources.values())
    included = {name for text in sources.values() for name in re.findall(r'#include "(.*)"', text)}
    assert included == {*sources, "config.h"} - units, "a file that nothing includes, or that is not there"
    assert not any("#include <" in text for text in sources.values()), "headers from outside: a toolchain, and seconds to compile"


def test_config_header_is_the_spec_and_the_plan():
    s = specialise("int16", "bfloat16", pad=-3, power=0.7, pad_mode="circular", center=False)
    text = config_header(s)
    values = dict(re.findall(r"static constexpr int (\w+) = (-?\d+);", text))
    expected = {**dataclasses.asdict(s.plan), **factor_offsets(s.plan), "n_fft": 400, "hop_length": 160, "margin": 0, "pad": -3}
    for name, value in expected.items():
        assert values[name] == str(int(value))
    assert int(values["threads_per_frame"]) == s.plan.threads // s.plan.frames_per_tile
    assert values["filters_in_shared"] == "1" and values["factor_entries"] == str(factor_entries(s.plan))
    (power,) = re.findall(r"constexpr float power = (\S+)f;", text)
    assert float.fromhex(power) == np.float32(0.7), "the compiler warns of what is no float"
    assert "PadMode::circular;" in text and "using Input = short;" in text and "using Output = Bfloat16;" in text
    assert "#include" not in text
    assert config_header(dataclasses.replace(s)) == text


def test_types_are_the_kernels():
    declared = set(re.findall(r"^struct (\w+) \{", kernel_sources()["numbers.cuh"], re.MULTILINE)) | {"float", "short"}
    inputs, outputs = (
        {re.search(rf"using {which} = (\w+);", config_header(specialise(**{which.lower() + "_type": name})))[1] for name in names}
        for which, names in (("Input", INPUT_TYPES), ("Output", OUTPUT_TYPES))
    )
    assert outputs < inputs == declared and len(inputs) == len(INPUT_TYPES) and len(outputs) == len(OUTPUT_TYPES)


@pytest.mark.parametrize("unit", ["forward.cu", "backward.cu", "normalize.cu"])
def test_every_constant_that_a_kernel_reads_is_in_the_header(unit):
    s = specialise()
    if unit == "backward.cu":
        s = dataclasses.replace(s, plan=make_backward_plan(s.spec, s.arch, 40))
    elif unit == "normalize.cu":
        s = NormalizeSpecialisation(Normalization("variance"), s.spec, s.arch, "float32", "float16")
    text = sources(s)
    assert unit == s.unit and {"device.cuh", "rows.cuh", "config.h"} < set(text) and sum(name.endswith(".cu") for name in text) == 1
    used = {name for part in text.values() for name in re.findall(r"\bConfig::(\w+)", part)}
    assert used - set(re.findall(r"(?:using|static constexpr \w+) (\w+) =", text["config.h"])) == set()
    entry_points = re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(.*\)\s*)?(\w+)\(', text[unit])
    assert tuple(entry_points) == s.entry_points


PARAMS = {"forward.cu": driver.LaunchParams, "backward.cu": driver.BackwardParams, "normalize.cu": driver.NormalizeParams}


@pytest.mark.parametrize("unit,params", PARAMS.items())
def test_launch_parameters_are_the_kernels(unit, params):
    body = re.search(r"struct Params \{(.*?)\};", kernel_sources()[unit], re.DOTALL)[1]
    declared = re.sub(r"//.*", "", body)
    numbers = {"long long": ctypes.c_int64, "unsigned": ctypes.c_uint32, "int": ctypes.c_int32}
    kinds = "void|float4|float2|float|int4|long long|unsigned|int"
    fields = [
        (name.strip(" *"), ctypes.c_void_p if "*" in kind + name else numbers[kind])
        for kind, listed in re.findall(rf"((?:const )?(?:{kinds}))\b\s*([^;]*);", declared)
        for name in listed.split(",")
    ]
    assert fields == params._fields_
