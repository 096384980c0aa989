"""The kernel's source files and the generated ``config.h`` that specialises them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import ClassVar, TypeAlias

import numpy as np

from ..plan import Architecture, BackwardPlan, LaunchPlan, factor_entries, factor_offsets
from ..spec import Epilogue, Normalization, StftSpec

# Names of torch dtypes, without torch, and of the kernel's types (numbers.cuh).
_TYPES = {"float32": "float", "int16": "short", "float16": "Half", "bfloat16": "Bfloat16"}
INPUT_TYPES = tuple(_TYPES)
OUTPUT_TYPES = ("float32", "float16", "bfloat16")
# Kinds of normalisation, for people to read.
_KINDS = {"maximum": "a floor below the maximum", "mean": "mean over time", "variance": "mean and variance over time"}


@dataclass(frozen=True)
class Specialisation:
    """Everything that is a constant in the kernel: one cubin each."""

    spec: StftSpec
    plan: LaunchPlan
    arch: Architecture
    input_type: str
    output_type: str
    filters_in_shared: bool
    ragged: bool = False  # rows have lengths of their own
    affine: bool = False  # filters have factors and summands of their own
    summary: str = ""  # of the features, stored too: their "extremes" or "moments"

    def __str__(self) -> str:
        spec = self.spec
        parts = [f"{self.input_type} in, {self.output_type} out"]
        parts += [f"n_fft {spec.n_fft}", f"hop_length {spec.hop_length}", f"power {spec.power:g}"]
        flags = {
            "with lengths": self.ragged,
            "a gain and bias for each filter": self.affine,
            "the first of two launches": self.summary,
        }
        parts += [text for text, holds in flags.items() if holds]
        return f"{self.unit.removesuffix('.cu')} kernel for {self.arch.name}, {', '.join(parts)}: {self.plan}"

    @property
    def threads(self) -> int:
        """Of a block, at most."""
        return self.plan.teams * self.plan.threads

    @property
    def shared_bytes(self) -> int:
        """Of shared memory that a launch needs, without the filters."""
        return self.plan.shared_bytes

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


def sources(s: AnySpecialisation) -> dict[str, str]:
    """What is compiled for a specialisation: its translation unit, the headers, ``config.h``."""
    return {name: text for name, text in kernel_sources().items() if name in (s.unit, *_included(s.unit))} | {
        "config.h": config_header(s)
    }


@cache
def _included(unit: str) -> set[str]:
    """Names of the headers that a file includes, and those include."""
    names = set(re.findall(r'^#include "(\w+\.cuh)"', kernel_sources()[unit], re.MULTILINE))
    return names.union(*map(_included, names))


def config_header(s: AnySpecialisation) -> str:
    """``config.h``: the fields of the spec and the plan under their own names."""
    if isinstance(s, NormalizeSpecialisation):
        return _normalize_header(s)
    spec, plan, end = s.spec, s.plan, s.spec.epilogue
    values = {
        **_rows(spec, s.ragged),
        "margin": spec.margin,
        "right_margin": max(0, spec.right_margin),
        "pad": spec.pad,
        **{field.name: int(getattr(plan, field.name)) for field in fields(plan)},
        "points": plan.points,
        "threads_per_frame": plan.threads_per_frame,
        "bin_slices": plan.bin_slices,
        **factor_offsets(plan),
        "factor_entries": factor_entries(plan),
        "filters_in_shared": int(s.filters_in_shared),
        "affine": int(s.affine),
        "extremes": int(s.summary == "extremes"),
        "moments": int(s.summary == "moments"),
        "support": spec.support,
        "remove_dc": int(spec.remove_dc),
        "preemphasis_in_frame": int(spec.preemphasis_scope == "frame"),
        "epsilon_is_added": int(spec.epsilon_mode == "add"),
        "floor_is_added": int(end.floor_mode == "add" and end.floor > 0),
        "has_log_floor": int(end.log is not None and end.log_floor > -math.inf),
    }
    numbers = {
        "power": spec.power,
        "preemphasis": spec.preemphasis,
        "epsilon": spec.epsilon,
        "floor": end.floor,
        "log_of_floor": log_of_floor(end),
        "log_floor": max(end.log_floor, -3e38),
        "gain": end.gain,
        "bias": end.bias,
        "pad_value": end.pad_value,
    }
    choices = {"pad_mode": f"PadMode::{spec.pad_mode}", "log": f"Log::{end.log or 'none'}"}
    return _struct(s.input_type, s.output_type, values, numbers, choices)


@dataclass(frozen=True)
class NormalizeSpecialisation:
    """The same for the kernel that normalises features over time."""

    rule: Normalization
    spec: StftSpec  # whose features they are
    arch: Architecture
    input_type: str
    output_type: str
    ragged: bool = False

    unit: ClassVar[str] = "normalize.cu"
    entry_points: ClassVar[tuple[str, ...]] = ("normalize",)
    threads: ClassVar[int] = 256  # of a block
    together: ClassVar[int] = 8  # features of which a block takes mean and variance: 32 bytes side by side, or a warp for each
    shared_bytes: ClassVar[int] = 4 * 64  # a number for each of a block's warps and of these features
    filters_in_shared: ClassVar[bool] = False

    def __str__(self) -> str:
        parts = [f"{self.input_type} in, {self.output_type} out", *(["with lengths"] if self.ragged else [])]
        return f"normalize kernel for {self.arch.name}, {', '.join(parts)}, the second of two launches: {_KINDS[self.rule.kind]}"


# What names one kernel, of either sort.
AnySpecialisation: TypeAlias = Specialisation | NormalizeSpecialisation


def _normalize_header(s: NormalizeSpecialisation) -> str:
    rule = s.rule
    values = {
        **_rows(s.spec, s.ragged),
        "block_threads": s.threads,
        "together": s.together,
        "ddof": rule.ddof,
        "eps_of_variance": int(rule.eps_mode == "variance" and rule.eps > 0),
    }
    # A floor below the maximum is found in features that have gain and bias already.
    numbers = {"range": rule.range * rule.gain, "eps": rule.eps, "gain": rule.gain, "bias": rule.bias, "pad_value": rule.pad_value}
    return _struct(s.input_type, s.output_type, values, numbers, {"kind": f"Kind::{rule.kind}"})


def log_of_floor(end: Epilogue) -> float:
    """The smallest logarithm; where it is none or infinite, a number below all."""
    scale = {None: 0.0, "ln": math.log(10), "log10": 1.0, "db": 10.0}[end.log]
    return scale * math.log10(end.floor) if end.floor > 0 and scale else -3e38


def _rows(spec: StftSpec, ragged: bool) -> dict[str, int]:
    """What rows.cuh needs to know of a spec, and how features are stored."""
    around, end = 2 * spec.pad + spec.margin + spec.right_margin, spec.epilogue
    fitted = end.n_frames is not None or end.frame_multiple > 1
    return {
        "n_fft": spec.n_fft,
        "hop_length": spec.hop_length,
        "around": around,
        "minimum_padded": spec.minimum_length - 2 * spec.pad + around,
        "ragged": int(ragged),
        "masked_frames": end.masked_frames,
        "fitted": int(fitted),
        "has_padding": int(ragged or fitted or end.masked_frames > 0),
        "time_major": int(end.time_major),
    }


def _struct(input_type: str, output_type: str, values: dict[str, int], numbers: dict[str, float], choices: dict[str, str]) -> str:
    lines = ["#pragma once", "struct Config {"]
    lines += [f"  using Input = {_TYPES[input_type]};", f"  using Output = {_TYPES[output_type]};"]
    for name, value in values.items():
        lines.append(f"  static constexpr {'int' if abs(value) < 2**31 else 'long long'} {name} = {value};")
    # Rounded here: of a literal that is no float NVRTC warns.
    lines += [f"  static constexpr float {name} = {float(np.float32(value)).hex()}f;" for name, value in numbers.items()]
    lines += [f"  static constexpr {value.partition('::')[0]} {name} = {value};" for name, value in choices.items()]
    return "\n".join([*lines, "};", ""])
