#!/usr/bin/env python3
"""Rewrite the benchmark tables of README.md from benchmarks/*.json; with --check, only say whether they are up to date.

The tables lie between ``<!-- benchmarks:begin -->`` and ``<!-- benchmarks:end -->``. Nothing in them is typed by hand, and the
same JSON files always give the same text. Exit status: 0, or 1 if --check finds another text, or 2 without the markers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
Figures = dict[str, Any]


def _us(value: float | None) -> str:
    """Microseconds with three significant digits."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(slower: float | None, faster: float | None) -> str:
    """How many times as long the first takes; below 1 where it is the quicker one, and shown so."""
    if not slower or not faster:
        return "–"
    ratio = slower / faster
    return f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def _mib(value: int | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value / 2**20:.1f}" if value >= 2**20 // 10 else f"{value} B"


def _error(value: float | str | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:.1e}"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, without the columns in which no row has a figure."""
    kept = [i for i in range(len(header)) if any(row[i] != "–" for row in rows)]
    header, rows = [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _size(entry: Figures) -> str:
    dtypes = "" if entry["in_dtype"] == entry["out_dtype"] == "float32" else f", {entry['in_dtype']} → {entry['out_dtype']}"
    return f"{entry['batch']} × {entry['samples']}{dtypes}"


def _notes(record: Figures) -> list[str]:
    """What the record itself has to say, and which cases failed."""
    # One line, no table characters: an error text is a compiler's log at worst.
    lines = [f"- {note}" for note in record.get("notes", [])]
    for key, what in (("cases", ""), ("host", ", host,"), ("training", ", training,")):
        failed = [entry for entry in record.get(key, []) if "error" in entry]
        lines += [f"- {entry['label']}{what} failed: {entry['error'].splitlines()[0][:200]}" for entry in failed]
    return ["", *lines] if lines else []


def _heading(record: Figures, name: str, details: Sequence[str]) -> list[str]:
    versions = record["versions"]
    software = [f"flashmel {versions['flashmel']}", f"torch {versions['torch']}", f"torchaudio {versions['torchaudio']}"]
    quick = " — **a quick run: few repeats, not for comparison**" if record["quick"] else ""
    return [f"**{name}** ({', '.join(details)}), {', '.join(software)}, {record['date'][:10]}{quick}", ""]


def gpu_section(record: Figures) -> str:
    machine, against = record["machine"], record.get("against")
    details = [f"{machine['sm_count']} SMs"]
    details += [f"copy bandwidth {record['copy_gb_per_s']:.0f} GB/s"] if "copy_gb_per_s" in record else []
    details += [f"driver {machine['driver']}"] if machine["driver"] else []
    other = f"flashmel {against['version']} µs" if against and against.get("version") else None
    speed: list[Sequence[str]] = []
    rest: list[Sequence[str]] = []
    for entry in record["cases"]:
        own, ta = entry.get("flashmel", {}), entry.get("torchaudio", {})
        time_us, ta_us = own.get("gpu_us"), ta.get("gpu_us")
        row = [entry["label"], _size(entry), _us(time_us), _us(ta_us), _ratio(ta_us, time_us)]
        row += [_us(entry.get("against", {}).get("gpu_us"))] if other else []
        speed.append([*row, _us(entry.get("floor_us")), _ratio(time_us, entry.get("floor_us"))])
        row = [entry["label"], _us(own.get("host_us")), _us(ta.get("host_us")), _mib(own.get("extra_bytes"))]
        row += [_mib(ta.get("extra_bytes")), _error(own.get("tolerance_fraction"))]
        rest.append([*row, _error(own.get("peak_error")), _error(ta.get("peak_error"))])
    header = [
        "case",
        "batch × samples",
        "flashmel µs",
        "torchaudio µs",
        "ratio",
        *([other] if other else []),
        "floor µs",
        "× floor",
    ]
    speed_table = _markdown(header, speed)
    header = ["case", "host µs", "torchaudio", "extra MiB", "torchaudio", "difference", "error", "torchaudio"]
    speed_note = (
        "GPU time of one call: CUDA-graph replays, without launch gaps, inputs rotated beyond the L2 cache. Floor: a copy of as "
        "many bytes as input and output, at the copy bandwidth of the same run."
    )
    rest_note = (
        "Host: how long one eager call keeps the Python thread. Extra: peak memory beyond input and output. Difference: largest, "
        "from torchaudio, as a fraction of the tolerance (1e-4 + 1e-4·|value|; 1e-2 for half outputs). Error: largest, against "
        "float64 on the same tables, relative to the frame's own peak."
    )
    tables = [speed_table, "", speed_note, "", _markdown(header, rest), "", rest_note]
    if record.get("host"):
        tables += ["", *_host(record)]
    if record.get("in_situ"):
        tables += ["", *_in_situ(record["in_situ"])]
    if record.get("training"):
        tables += ["", *_training(record["training"])]
    if "sizes" in record:
        tables += ["", *_sizes(record["sizes"])]
    return "\n".join([*_heading(record, machine["gpu"], details), *tables, *_notes(record)])


def _host(record: Figures) -> list[str]:
    other = record.get("against", {}).get("version")
    eager = {entry["name"]: entry.get("against", {}).get("host_us") for entry in record["cases"]}
    ways = {"eager_us": "eager", "autograd_us": "recording a gradient", "compiled_us": "compiled", "replay_us": "graph replay"}
    header = ["host µs a call", *(f"{who}, {way}" for way in ways.values() for who in ("flashmel", "torchaudio"))]
    header += [f"flashmel {other}, eager"] if other else []
    rows = []
    for entry in record["host"]:
        row = [_us(entry.get(who, {}).get(way)) for way in ways for who in ("flashmel", "torchaudio")]
        rows.append([entry["label"], *row, *([_us(eager.get(entry["name"]))] if other else [])])
    note = (
        "How long one call keeps the Python thread, its GPU work left running: eager, with a gradient to be recorded, in a graph "
        "of torch.compile (guards and output allocation included), and as the replay of a CUDA graph."
    )
    return [_markdown(header, rows), "", note]


def _in_situ(entries: Sequence[Figures]) -> list[str]:
    header = ["in front of a model", "front-end µs", "torchaudio", "share of GPU time", "torchaudio", "step µs", "torchaudio"]
    rows = []
    for entry in entries:
        both = entry["flashmel"], entry["torchaudio"]
        shares = [f"{100 * f['front_end_us'] / f['gpu_us']:.1f} %" for f in both]
        rows.append(
            [
                f"{entry['model']}, {entry['mode']}",
                *(_us(f["front_end_us"]) for f in both),
                *shares,
                *(_us(f["wall_us"]) for f in both),
            ]
        )
    note = (
        "32 × 10 s at 16 kHz, 400/160/80 and a logarithm, in front of six convolutions, or two and six transformer layers of width "
        "256, in bfloat16 autocast: kernel time by torch.profiler, and the wall time of a step without it."
    )
    return [_markdown(header, rows), "", note]


def _training(entries: Sequence[Figures]) -> list[str]:
    header = ["case", "forward + backward µs", "torchaudio", "ratio", "× forward", "extra MiB", "torchaudio", "error", "torchaudio"]
    rows = []
    for entry in entries:
        own, ta = entry.get("flashmel", {}), entry.get("torchaudio", {})
        times = [f.get("step_us") for f in (own, ta)]
        row = [entry["label"], *map(_us, times), _ratio(times[1], times[0]), _ratio(times[0], own.get("forward_us"))]
        row += [_mib(f.get("extra_bytes")) for f in (own, ta)]
        rows.append([*row, *(_error(f.get("gradient_error")) for f in (own, ta))])
    equal = [sum(entry.get(who, {}).get("bit_equal", False) for entry in entries) for who in ("flashmel", "torchaudio")]
    note = (
        "Forward + backward: GPU time of one step to the waveform's gradient, measured like the forward pass; × forward: how many "
        "of flashmel's forward passes it takes. Extra: peak memory beyond waveform, mel spectrogram and their gradients. Error: "
        "largest, of the waveform's gradient against float64 autograd on the same tables, relative to its peak. Gradients equal "
        f"to the bit in {entries[0]['runs']} runs: flashmel's in {equal[0]} of {len(entries)} cases, torchaudio's in {equal[1]}."
    )
    return [_markdown(header, rows), "", note]


def _sizes(entries: Sequence[Figures]) -> list[str]:
    header = ["n_fft", "flashmel µs", "torchaudio µs", "ratio", "floor µs", "error", "torchaudio"]
    rows = []
    for entry in entries:
        own, ta = entry.get("flashmel", {}), entry.get("torchaudio", {})
        times = [f.get("gpu_us") for f in (own, ta)]
        row = [str(entry["n_fft"]), *map(_us, times), _ratio(times[1], times[0]), _us(entry.get("floor_us"))]
        rows.append([*row, _error(own.get("peak_error")), _error(ta.get("peak_error"))])
    summary = "32 × 160000 samples at many sizes (hops of n_fft / 4, 128 filters)"
    return [f"<details><summary>{summary}</summary>", "", _markdown(header, rows), "", "</details>"]


def cpu_section(record: Figures) -> str:
    machine = record["machine"]
    header = ["case", "batch × samples", "flashmel ms", "torchaudio ms", "ratio", "extra MiB", "torchaudio extra MiB", "error"]
    rows = []
    for entry in record["cases"]:
        own, ta = entry.get("flashmel", {}), entry.get("torchaudio", {})
        times = [f.get("wall_us") for f in (own, ta)]
        row = [entry["label"], _size(entry), *(_us(t and t / 1e3) for t in times), _ratio(times[1], times[0])]
        rows.append([*row, _mib(own.get("extra_bytes")), _mib(ta.get("extra_bytes")), _error(own.get("peak_error"))])
    note = "Wall time of one call, both libraries taking turns, the median. Extra: peak resident memory beyond input and output."
    details = [f"{machine['cores']} cores", f"{machine['threads']} threads"]
    return "\n".join([*_heading(record, machine["cpu"], details), _markdown(header, rows), "", note, *_notes(record)])


def report(folder: Path) -> str:
    """The text between the markers: GPUs first, each kind by file name."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    records = [record for record in records if record.get("schema") == 1 and "cases" in record]  # a sweep is no benchmark
    sections = [gpu_section(r) for r in records if r["device"] == "cuda"]
    sections += [cpu_section(r) for r in records if r["device"] == "cpu"]
    return "\n\n".join(sections) or "No benchmark has been recorded yet: run `python scripts/bench.py`."


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the README is not up to date")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", metavar="FILE")
    parser.add_argument("--benchmarks", type=Path, default=ROOT / "benchmarks", metavar="DIR")
    args = parser.parse_args(argv)
    old = args.readme.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{args.readme} lacks the line {BEGIN if not begin else END}", file=sys.stderr)
        return 2
    new = f"{before}{BEGIN}\n{report(args.benchmarks)}\n{END}{after}"
    if args.check and new != old:
        print(f"{args.readme} is not what the benchmarks say: run scripts/report.py", file=sys.stderr)
    elif new != old:
        args.readme.write_text(new, encoding="utf-8")
    return int(args.check and new != old)


if __name__ == "__main__":
    sys.exit(main())
