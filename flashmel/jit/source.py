"""The kernel's source files and the generated ``config.h`` that specialises them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files

from ..plan import Architecture, LaunchPlan
from ..spec import StftSpec
from ..tables import factor_offsets

# Names of torch dtypes, without torch: C++ type and the header that it needs.
_TYPES = {
    "float32": ("float", None),
    "int16": ("short", None),
    "float16": ("__half", "cuda_fp16.h"),
    "bfloat16": ("__nv_bfloat16", "cuda_bf16.h"),
}
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


@cache
def kernel_sources() -> dict[str, str]:
    """The text of kernel/, by file name."""
    folder = files(__package__).joinpath("..", "kernel")
    return {entry.name: entry.read_text("utf-8") for entry in folder.iterdir() if entry.name.endswith((".cu", ".cuh"))}


def config_header(s: Specialisation) -> str:
    """``config.h``: the fields of the spec and the plan under their own names."""
    spec, plan = s.spec, s.plan
    values = {
        "n_fft": spec.n_fft,
        "hop_length": spec.hop_length,
        "margin": spec.margin,
        "pad": spec.pad,
        **{field.name: getattr(plan, field.name) for field in fields(plan)},
        "threads_per_frame": plan.threads_per_frame,
        "bin_slices": plan.bin_slices,
        **factor_offsets(plan),
    }
    (input_type, input_header), (output_type, output_header) = _TYPES[s.input_type], _TYPES[s.output_type]
    lines = ["#pragma once", *sorted({f"#include <{header}>" for header in (input_header, output_header) if header})]
    lines += ["struct Config {", f"  using Input = {input_type};", f"  using Output = {output_type};"]
    lines += [f"  static constexpr int {name} = {value};" for name, value in values.items()]
    lines += [f"  static constexpr float power = {float(spec.power).hex()}f;"]
    lines += [f"  static constexpr PadMode pad_mode = PadMode::{spec.pad_mode};"]
    return "\n".join([*lines, "};", ""])
