#!/usr/bin/env python3
"""Rewrite the benchmark tables of README.md from benchmarks/*.json; with --check, only say whether they are up to date.

The files are those of bench.py, bench_frontends.py (frontends-*.json), parity.py (parity-*.json) and cold_start.py
(cold-start-*.json). What has no file has no table.

The tables lie between ``<!-- benchmarks:begin -->`` and ``<!-- benchmarks:end -->``. Nothing in them is typed by hand, and the
same JSON files always give the same text. Exit status: 0, or 1 if --check finds another text, or 2 without the markers.
"""

from __future__ import annotations

import argparse
import json
import statistics
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
    """How many times as long the first takes."""
    if not slower or not faster:
        return "–"
    ratio = slower / faster
    return f"{ratio:.1f}×" if ratio < 10 else f"{ratio:.0f}×"


def _mib(value: int | None) -> str:
    return "–" if value is None else "0" if value == 0 else f"{value / 2**20:.1f}" if value >= 2**20 / 20 else "< 0.1"


def _size_of(value: int) -> str:
    return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 2**10:.0f} KiB"


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
    if relu := [entry["compiled_relu_us"] for entry in record["host"] if "compiled_relu_us" in entry]:
        note += f" Compiled, a ReLU takes {_us(statistics.median(relu))} µs."
    return [_markdown(header, rows), "", note]


def _in_situ(entries: Sequence[Figures]) -> list[str]:
    header = ["in front of a model", "front-end µs", "torchaudio", "share of GPU time", "torchaudio"]
    header += ["GPU time of a step, µs", "torchaudio", "wall time of a step, µs", "torchaudio"]
    rows = []
    for entry in entries:
        both = entry["flashmel"], entry["torchaudio"]
        shares = [f"{100 * f['front_end_us'] / f['gpu_us']:.1f} %" for f in both]
        rows.append(
            [
                f"{entry['model']}, {entry['mode']}",
                *(_us(f["front_end_us"]) for f in both),
                *shares,
                *(_us(f[of_step]) for of_step in ("gpu_us", "wall_us") for f in both),
            ]
        )
    note = (
        "32 × 10 s at 16 kHz, 400/160/80 and a logarithm, in front of six convolutions, or two and six transformer layers of width "
        "256, in bfloat16 autocast: kernel time by torch.profiler, and the median wall time of a step without it."
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
    return _folded(summary, _markdown(header, rows))


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


def frontends_section(record: Figures) -> str:
    """The cases asked for by name, and every front-end folded away."""
    header = ["front-end", "forward µs", "plain µs", "ratio", "forward + backward µs", "plain µs", "ratio", "call to result µs"]
    named: list[Sequence[str]] = []
    every: list[Sequence[str]] = []
    for entry in record["cases"]:
        row = [entry["label"]]
        for what in ("gpu_us", "step_us"):
            own, plain = entry[what], entry[f"plain_{what}"]
            row += [_us(own), _us(plain), f"{own / plain:.2f}×"]
        (every if entry["label"] == entry["name"] else named).append([*row, _us(entry.get("call_to_result_us"))])
    note = (
        "GPU time of one call by replay of a CUDA graph. Plain: the mel spectrogram alone, of the same window, filters, hop and "
        "power. Call to result: wall time of an eager call, until the GPU is done."
    )
    lines = [f"**Front-ends on {record['gpu']}**, flashmel {record['flashmel']}, torch {record['torch']}", ""]
    lines += [_markdown(header, named), ""] if named else []
    lines += [note]
    lines += ["", *_folded(f"Each of {len(every)}, 32 × 10 s", _markdown(header, every))] if every else []
    return "\n".join(lines)


def parity_section(records: Sequence[Figures]) -> str:
    """One table of all records: the same audio's on a CPU and a GPU side by side."""
    records = sorted(records, key=lambda r: (r["audio"] != "synthetic", r["audio"], r["machine"].get("gpu", "")))
    header = ["front-end", "reference"]
    for record in records:
        where = f"{record['machine'].get('gpu', 'CPU')}, {record['audio']}"
        header += [f"{where}: from reference", "from float64"]
    cases = {case: entry for record in reversed(records) for case, entry in record["cases"].items()}
    ordered = dict.fromkeys(case for record in records for case in record["cases"])
    rows = [
        [case, cases[case]["reference"], *(_both(r["cases"].get(case, {}).get(of)) for r in records for of in ("ref", "f64"))]
        for case in ordered
    ]
    note = (
        "Mean / largest absolute difference over the valid frames of three rows in one batch: from what the reference makes of "
        "each alone, and from the front-end in float64."
    )
    folded = _folded("Front-ends against their references and float64", f"{_markdown(header, rows)}\n\n{note}")
    notes = [f"- {note}" for record in records for note in record.get("notes", [])]
    return "\n".join([*folded, "", *notes] if notes else folded)


def _both(difference: Figures | None) -> str:
    return "–" if difference is None else f"{_error(difference['mean'])} / {_error(difference['max'])}"


def _folded(summary: str, text: str) -> list[str]:
    return [f"<details><summary>{summary}</summary>", "", text, "", "</details>"]


# Of a process with each way to its kernels: figures of cold_start.py, with and without a GPU.
COLD = {
    "first_call_ms": "first call, 400/160",
    "first_gradient_ms": "its first gradient",
    "second_first_call_ms": "first call, 1024/256",
    "second_first_gradient_ms": "its first gradient",
    "cubin_ms": "kernel in hand, 400/160",
    "backward_cubin_ms": "its gradient's",
    "second_cubin_ms": "kernel in hand, 1024/256",
    "second_backward_cubin_ms": "its gradient's",
}
WAYS = {"compile": "compiled", "cached": "from the cache", "bundle": "from a bundle"}


def cold_start_section(record: Figures) -> str:
    rows = []
    for part in ("gpu", "without_gpu"):
        medians = {way: found["median"] for way, found in record.get(part, {}).get("ways", {}).items()}
        for name, label in COLD.items():
            if any(name in found for found in medians.values()):
                rows.append([label, *(_us(medians.get(way, {}).get(name)) for way in WAYS)])
    machine, large = record["machine"], record["large_bundle"]
    note = (
        f"Medians of new processes, without their imports. A bundle of {large['configurations']} configurations for "
        f"{len(large['cubin_bytes'])} architectures has {large['kernels']} kernels, {_size_of(large['bytes'])} (zipped "
        f"{_size_of(large['zip_bytes'])}), compiled in {large['seconds']:.0f} s."
    )
    heading = _heading(record, f"Cold start on {machine.get('gpu') or machine['cpu']}", [f"{machine['cores']} cores"])
    return "\n".join([*heading, _markdown(["ms", *WAYS.values()], rows), "", note, *_notes(record)])


def report(folder: Path) -> str:
    """The text between the markers: GPUs first, each kind by file name."""
    files = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}

    def named(prefix: str) -> list[Figures]:
        return [record for name, record in files.items() if name.startswith(f"{prefix}-")]

    records = [r for r in files.values() if r.get("schema") == 1 and "cases" in r]  # a sweep is no benchmark
    sections = [gpu_section(r) for r in records if r["device"] == "cuda"]
    sections += [cpu_section(r) for r in records if r["device"] == "cpu"]
    sections += [frontends_section(r) for r in named("frontends")]
    sections += [parity_section(found)] if (found := named("parity")) else []
    sections += [cold_start_section(r) for r in named("cold-start")]
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
