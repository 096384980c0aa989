"""(sources, architecture) to cubin, through NVRTC. Compiling may only raise; it never falls back by itself."""

from __future__ import annotations

import hashlib
from typing import Any

from . import toolchain

_OPTIONS = (
    "--std=c++17",
    "-default-device",
    "--prec-sqrt=false",  # power 1 to 1 ulp instead of half an ulp, without a slow path that costs registers
    "-DCUFFTDX_USE_SEPARATE_TWIDDLES",  # else the cubin carries twiddle tables of every size: 2.4 MB
    "-DCUFFTDX_DISABLE_CUTLASS_DEPENDENCY",  # headers we do not use: a third of the compile time
    "-DCUFFTDX_DETAIL_MANUAL_IMPL_FILTER",  # with the next: only the float32 transforms
    "-DCUFFTDX_DETAIL_INCLUDE_PRECISION_FP32",
)
# cuFFTDx's records of transforms by architecture. A kernel of thread transforms needs one architecture's float32 records
# (a thread's transform is the same everywhere; cuFFTDx reads those of sm_90): empty files take the others' place. In the cubin
# they would leave a megabyte of symbol names.
_EMPTY_HEADERS = tuple(
    f"cufftdx/database/records/{arch}/database_{precision}_fwd.hpp.inc"
    for arch in (700, 750, 800, 890, 900, 1000, 1200)
    for precision in ("fp16", "fp32", "fp64")
    if (arch, precision) != (900, "fp32")
)


class CompileError(RuntimeError):
    """NVRTC refused the source; the message carries its log, the generated configuration, and the versions."""


def cache_key(sources: dict[str, str], arch: str) -> str:
    """Digest of all that decides the cubin: sources, options, architecture, and the versions of compiler and headers.

    Raises:
        ToolchainError: a part of the toolchain is missing.
    """
    tools = toolchain.find()
    parts = {"schema": "1", "nvrtc": tools.nvrtc, "arch": arch, "options": " ".join(_OPTIONS), **dict(tools.versions)}
    parts |= {f"source {name}": text for name, text in sorted(sources.items())}
    digest = hashlib.sha256()
    for label, value in parts.items():
        for text in (label, value):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def compile_cubin(sources: dict[str, str], arch: str, extra_options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile ``kernel.cu`` with the other sources as its headers.

    Args:
        sources: file name to text; ``kernel.cu`` and ``config.h`` among them.
        arch: ``sm_90`` and the like.
        extra_options: further NVRTC options.

    Returns:
        (cubin, compiler log).

    Raises:
        ToolchainError: a part of the toolchain is missing.
        CompileError: with the log.
    """
    tools = toolchain.find()
    from cuda.bindings import nvrtc

    headers = {name: text for name, text in sources.items() if name != "kernel.cu"} | dict.fromkeys(_EMPTY_HEADERS, "")
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            sources["kernel.cu"].encode(),
            b"kernel.cu",
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        options = [*_OPTIONS, f"--gpu-architecture={arch}", *(f"--include-path={path}" for path in tools.include), *extra_options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log_bytes = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        _checked(nvrtc.nvrtcGetProgramLog(program, log_bytes))
        log = log_bytes.rstrip(b"\0 ").decode(errors="replace")
        if int(status) != 0:
            versions = ", ".join(f"{name} {version}" for name, version in (("NVRTC", tools.nvrtc), *tools.versions))
            raise CompileError(f"{status.name} for {arch} ({versions})\n{log}\n--- config.h\n{sources['config.h']}")
        cubin = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return cubin, log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise CompileError(f"NVRTC failed: {status.name}")
    return values[0] if values else None
