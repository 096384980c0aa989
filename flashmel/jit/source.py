"""The kernel's source files and the generated ``config.h`` that specialises them."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from ..plan import Architecture, BackwardPlan, LaunchPlan, factor_entries, factor_offsets
from ..spec import StftSpec

# Names of torch dtypes, without torch, and of the kernel's types (epilogue.cuh).
_TYPES = {"float32": "float", "int16": "short", "float16": "Half", "bfloat16": "Bfloat16"}
INPUT_TYPES = tuple(_TYPES)
OUTPUT_TYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Specialisation:
    """Everything that is a constant in the kernel: one cubin each."""

    spec: StftSpec
    plan: LaunchPlan
    arch: Architecture
    input_type: str
    output_type: str
    filters_in_shared: bool

    def __str__(self) -> str:
        spec = self.spec
        return (
            f"{self.unit.removesuffix('.cu')} kernel for {self.arch.name}, {self.input_type} and {self.output_type}, "
            f"n_fft {spec.n_fft}, hop_length {spec.hop_length}, power {spec.power:g}: {self.plan}"
        )

    @property
    def unit(self) -> str:
        """Name of the file in kernel/ with the entry points."""
        return "backward.cu" if isinstance(self.plan, BackwardPlan) else "forward.cu"

    @property
    def entry_points(self) -> tuple[str, ...]:
        """The kernels in it, the main one first."""
        return ("mel_spectrogram_backward", "fold_edges") if isinstance(self.plan, BackwardPlan) else ("mel_spectrogram",)


@cache
def kernel_sources() -> dict[str, str]:
    """The text of kernel/, by file name."""
    folder = files(__package__).joinpath("..", "kernel")
    return {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith((".cu", ".cuh"))}


def sources(s: Specialisation) -> dict[str, str]:
    """What is compiled for a specialisation: its translation unit, the headers, ``config.h``."""
    return {name: text for name, text in kernel_sources().items() if name in (s.unit, *_included(s.unit))} | {
        "config.h": config_header(s)
    }


@cache
def _included(unit: str) -> set[str]:
    """Names of the headers that a file includes, and those include."""
    names = set(re.findall(r'^#include "(\w+\.cuh)"', kernel_sources()[unit], re.MULTILINE))
    return names.union(*map(_included, names))


def config_header(s: Specialisation) -> str:
    """``config.h``: the fields of the spec and the plan under their own names."""
    spec, plan = s.spec, s.plan
    values = {
        "n_fft": spec.n_fft,
        "hop_length": spec.hop_length,
        "margin": spec.margin,
        "pad": spec.pad,
        **{field.name: int(getattr(plan, field.name)) for field in fields(plan)},
        "points": plan.points,
        "threads_per_frame": plan.threads_per_frame,
        "bin_slices": plan.bin_slices,
        **factor_offsets(plan),
        "factor_entries": factor_entries(plan),
        "filters_in_shared": int(s.filters_in_shared),
    }
    lines = ["#pragma once", "struct Config {"]
    lines += [f"  using Input = {_TYPES[s.input_type]};", f"  using Output = {_TYPES[s.output_type]};"]
    lines += [f"  static constexpr int {name} = {value};" for name, value in values.items()]
    lines += [f"  static constexpr float power = {float(spec.power).hex()}f;"]
    lines += [f"  static constexpr PadMode pad_mode = PadMode::{spec.pad_mode};"]
    return "\n".join([*lines, "};", ""])
