"""(sources, architecture) to cubin, through NVRTC. Compiling may only raise; it never falls back by itself."""

from __future__ import annotations

import hashlib
from typing import Any

from . import toolchain

_OPTIONS = (
    "--std=c++17",
    "-default-device",  # for lambdas
    "--prec-sqrt=false",  # power 1 to 1 ulp instead of half an ulp, without a slow path that costs registers
)


class CompileError(RuntimeError):
    """NVRTC refused the source; the message carries its log, the generated configuration, and the compiler's version."""


def identity(sources: dict[str, str], arch: str) -> str:
    """Digest of what is compiled, and how: sources, options, architecture. Needs no compiler."""
    parts = {"schema": "3", "arch": arch, "options": " ".join(_OPTIONS)}
    return _digest(parts | {f"source {name}": text for name, text in sorted(sources.items())})


def cache_key(sources: dict[str, str], arch: str) -> str:
    """Digest of all that decides the cubin: the above, and the compiler's version.

    Raises:
        ToolchainError: there is no compiler.
    """
    return _digest({"identity": identity(sources, arch), "compiler": toolchain.compiler_version()})


def _digest(parts: dict[str, str]) -> str:
    """Every part counts, and where one ends and the next begins."""
    digest = hashlib.sha256()
    for label, value in parts.items():
        for text in (label, value):
            data = text.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def compile_cubin(sources: dict[str, str], arch: str, extra_options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Compile one translation unit.

    Args:
        sources: file name to text: one ``.cu`` file, and the headers that it may include, ``config.h`` among them.
        arch: ``sm_90`` and the like.
        extra_options: further NVRTC options.

    Returns:
        (cubin, compiler log).

    Raises:
        ToolchainError: there is no compiler.
        CompileError: with the log.
    """
    version = toolchain.nvrtc_version()
    from cuda.bindings import nvrtc

    (unit,) = (name for name in sources if name.endswith(".cu"))
    headers = {name: text for name, text in sources.items() if name != unit}
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            sources[unit].encode(),
            unit.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
    )
    try:
        options = [*_OPTIONS, f"--gpu-architecture={arch}", *extra_options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        # NVRTC writes into these. Not bytes: one byte of them, an empty log's length, is an object that all of Python shares.
        log_bytes = bytearray(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log_bytes))
        log = log_bytes.rstrip(b"\0").decode(errors="replace")
        if int(status) != 0:
            _check_known(arch, version)
            raise CompileError(f"{status.name} for {arch} (NVRTC {version})\n{log}\n--- config.h\n{sources['config.h']}")
        cubin = bytearray(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check_known(arch: str, version: str) -> None:
    """Raise CompileError if this NVRTC does not know an architecture."""
    from cuda.bindings import nvrtc

    known = [f"sm_{number}" for number in _checked(nvrtc.nvrtcGetSupportedArchs())]
    if arch not in known:
        raise CompileError(f"NVRTC {version} does not know {arch}, only {', '.join(known)}: {toolchain.INSTALL}")


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status) != 0:
        raise CompileError(f"NVRTC failed: {status.name}")
    return values[0] if values else None
