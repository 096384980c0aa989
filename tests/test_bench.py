"""The benchmark's own machinery, on the CPU: it writes valid JSON, and the report is a function of the JSON alone."""

import copy
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

import flashmel

SCRIPTS = Path(__file__).parents[1] / "scripts"
README = "# Title\n\n<!-- benchmarks:begin -->\nold\n<!-- benchmarks:end -->\n\nafter\n"


def _load(name):
    spec = importlib.util.spec_from_file_location(f"{name}_under_test", SCRIPTS / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cpu_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "benchmarks" / "cpu.json"
    command = [sys.executable, str(SCRIPTS / "bench.py"), "--device", "cpu", "--quick", "--training", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return out, done.stdout


def test_cpu_run_writes_every_figure(cpu_run):
    path, printed = cpu_run
    record = json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))
    assert (record["schema"], record["device"], record["quick"]) == (1, "cpu", True)
    assert record["machine"]["cpu"] and record["machine"]["cores"] >= 1
    assert record["versions"]["torch"] and record["versions"]["torchaudio"]
    assert record["copy_gb_per_s"] > 0
    assert [entry["name"] for entry in record["cases"]] == ["cpu-batch", "cpu-clips"]
    for entry in record["cases"]:
        assert entry["name"] in printed
        assert "error" not in entry
        assert entry["floor_us"] > 0
        for who in ("flashmel", "torchaudio"):
            figures = entry[who]
            assert figures["wall_us"] > 0 and figures["extra_bytes"] >= 0
            assert figures["written"] and figures["peak_error"] < 1e-4
        assert entry["flashmel"]["tolerance_fraction_float64"] <= 1
        assert entry["torchaudio"]["tolerance_fraction"] < 1e-2  # its difference from itself: only how sums are ordered
    assert str(SCRIPTS.parent) not in path.read_text()
    assert [entry["name"] for entry in record["training"]] == ["cpu-batch", "cpu-clips"]
    for entry, case in zip(record["training"], record["cases"], strict=True):
        assert "error" not in entry and f"{entry['name']}, training" not in printed
        assert (entry["batch"], entry["samples"], entry["runs"]) == (case["batch"], case["samples"], 5)
        for who in ("flashmel", "torchaudio"):
            figures = entry[who]
            assert figures["forward_us"] > 0 and figures["step_us"] > 0 and figures["extra_bytes"] >= 0
            assert abs(figures["step_us"] - figures["forward_us"] - figures["backward_us"]) < 1e-4 * figures["step_us"]
            assert 0 < figures["gradient_error"] < 1e-6
        assert entry["flashmel"]["bit_equal"]


def test_report_writes_the_block_and_checks_it(cpu_run, tmp_path):
    report = _load("report")
    readme = tmp_path / "README.md"
    readme.write_text(README)
    arguments = ["--readme", str(readme), "--benchmarks", str(cpu_run[0].parent)]
    assert report.main([*arguments, "--check"]) == 1
    assert readme.read_text() == README
    assert report.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n\n<!-- benchmarks:begin -->\n") and text.endswith("<!-- benchmarks:end -->\n\nafter\n")
    assert "old" not in text and "8 × 30 s" in text and "a quick run" in text
    assert "forward + backward" not in text  # a table of GPUs only
    assert report.main([*arguments, "--check"]) == 0
    assert report.main(arguments) == 0 and readme.read_text() == text
    readme.write_text("no markers")
    assert report.main(arguments) == 2 and readme.read_text() == "no markers"


def _gpu_record(bench):
    case = bench.GPU_CASES[0]
    figures = {"gpu_us": 45.04, "gpu_us_runs": [45.0, 45.08], "gpu_warm_us": 44.0, "host_us": 20.0, "extra_bytes": 0}
    figures |= {
        "tolerance_fraction": 0.03,
        "tolerance_fraction_float64": 0.03,
        "peak_error": 3.5e-7,
        "written": True,
        "poisoned": True,
    }
    slow = figures | {"gpu_us": 722.0, "extra_bytes": 961 * 2**20}
    entry = {"name": case.name, "label": case.label, "batch": 32, "samples": 480000, "in_dtype": "int16", "out_dtype": "float16"}
    entry |= {"target_us": 45.0, "published_us": 112.7, "floor_us": 26.2, "flashmel": figures, "torchaudio": slow}
    failed = {k: v for k, v in entry.items() if k not in ("flashmel", "torchaudio", "floor_us")}
    failed |= {"label": "another", "error": "ValueError: no\nlog", "against": {"error": "also no"}}
    entry["against"] = figures | {"gpu_us": 20.0}
    machine = {"gpu": "NVIDIA H200", "sm_count": 132, "driver": None, "cpu": "c", "cores": 16, "threads": 16}
    versions = {"flashmel": "0.2.0", "torch": "2", "torchaudio": "2"}
    record = {"schema": 1, "device": "cuda", "quick": False, "date": "2026-01-02T03:04:05+00:00", "machine": machine}
    both = {"flashmel": {"eager_us": 17.0, "compiled_us": 101.0}, "torchaudio": {"eager_us": 130.0}}
    record["host"] = [{"name": case.name, "label": case.label, "compiled_relu_us": relu} | both for relu in (46.0, 48.0)]
    return record | {"versions": versions, "copy_gb_per_s": 4226.0, "against": {"version": "0.1.0"}, "cases": [entry, failed]}


def test_gpu_record_is_printed_and_reported(tmp_path, capsys):
    bench, report = _load("bench"), _load("report")
    record = _gpu_record(bench)
    bench.print_results(copy.deepcopy(record))
    printed = capsys.readouterr().out
    assert "45.0" in printed and "16.03" in printed and "whisper, other: also no" in printed
    bench.write_json(tmp_path / "gpu.json", record)
    text = report.report(tmp_path)
    row = next(line for line in text.splitlines() if "whisper" in line)
    assert "| 45.0 | 722 | 16× | 20.0 | 26.2 | 1.7× |" in row
    assert "| 20.0 | 20.0 | 0 | 961.0 | 3.0e-02 | 3.5e-07 | 3.5e-07 |" in text
    assert "| 17.0 | 130 | 101 |" in text and "Compiled, a ReLU takes 47.0 µs." in text
    assert "32 × 480000, int16 → float16" in row and "flashmel 0.1.0 µs" in text and "NVIDIA H200" in text
    assert "- another failed: ValueError: no" in text and "log" not in text
    assert {len({line.count("|") for line in block.splitlines()}) for block in text.split("\n\n") if block[0] == "|"} == {1}


def test_front_ends_are_reported(tmp_path):
    report = _load("report")
    times = {"gpu_us": 33.0, "plain_gpu_us": 30.0, "step_us": 250.0, "plain_step_us": 200.0}
    entry = {"label": "nemo", "name": "nemo", "batch": 32, "samples": 160000, "n_features": 80} | times
    long = entry | {"label": "nemo, 1 x 300 s", "call_to_result_us": 77.7}
    record = {"gpu": "NVIDIA H200", "torch": "2", "cuda": "13.0", "flashmel": "0.2.0", "cases": [entry, long]}
    path = tmp_path / "frontends-nvidia-h200.json"
    path.write_text(json.dumps(record))
    text = report.report(tmp_path)
    named, every = text.split("<details>")
    assert text.startswith("**Front-ends on NVIDIA H200**, flashmel 0.2.0, torch 2\n")
    assert "| nemo, 1 x 300 s | 33.0 | 30.0 | 1.10× | 250 | 200 | 1.25× | 77.7 |" in named
    assert "<summary>Each of 1, 32 × 10 s</summary>\n\n| front-end |" in every
    assert "| nemo | 33.0 | 30.0 | 1.10× | 250 | 200 | 1.25× |\n" in every and "call to result" not in every
    path.write_text(json.dumps(record | {"cases": [entry]}))
    assert "call to result" not in report.report(tmp_path) and "| nemo | 33.0 |" in report.report(tmp_path)


def test_parity_is_reported(tmp_path):
    """A CPU's and a GPU's side by side, with what only one of them has."""
    report = _load("report")

    def entry(scale, **more):
        errors = {"mean": scale, "max": 100 * scale}
        return {"front-end": "whisper", "options": {}, "reference": "librosa", "f64": errors, "ref": errors} | more

    def write(name, machine, audio, **cases):
        record = {"machine": {"cpu": "c"} | machine, "audio": audio, "cases": cases}
        (tmp_path / f"parity-{name}.json").write_text(json.dumps(record))

    write("cpu-jfk", {}, "jfk.flac", whisper=entry(3e-7))
    write("cuda", {"gpu": "NVIDIA H200"}, "synthetic", whisper=entry(2e-7), ast=entry(4e-7))
    without = {k: v for k, v in entry(5e-7, reason="No module").items() if k != "ref"}
    write("cpu", {}, "synthetic", whisper=entry(1e-7), nemo=without)
    lines = report.report(tmp_path).splitlines()
    assert lines[0] == "<details><summary>Front-ends against their references and float64</summary>"
    columns = [f"{where}: from reference | from float64" for where in ("CPU, synthetic", "NVIDIA H200, synthetic", "CPU, jfk.flac")]
    assert f"| front-end | reference | {' | '.join(columns)} |" in lines
    cells = [f"{digit}.0e-07 / {digit}.0e-05" for digit in range(6)]
    assert f"| whisper | librosa | {' | '.join(cells[i] for i in (1, 1, 2, 2, 3, 3))} |" in lines
    assert f"| nemo | librosa | – | {cells[5]} | – | – | – | – |" in lines
    assert f"| ast | librosa | – | – | {cells[4]} | {cells[4]} | – | – |" in lines


def test_a_cold_start_is_reported(tmp_path):
    bench, report = _load("bench"), _load("report")
    large = {"configurations": 50, "kernels": 300, "seconds": 205.19, "bytes": 12268945, "zip_bytes": 4029329}
    ways = {way: {"median": {"import_torch_ms": 9.0, "cubin_ms": ms}} for way, ms in (("compile", 609.7), ("cached", 3.364))}
    record = {key: value for key, value in _gpu_record(bench).items() if key != "cases"}
    record |= {"device": "cpu", "machine": {"cpu": "EPYC", "cores": 2, "threads": 2}, "without_gpu": {"ways": ways}}
    record["large_bundle"] = large | {"cubin_bytes": {"sm_80": {}, "sm_90": {}}}
    path = tmp_path / "cold-start-x.json"
    path.write_text(json.dumps(record))
    before = report.report(tmp_path)
    assert before.startswith("**Cold start on EPYC** (2 cores), flashmel 0.2.0, ")
    assert "| ms | compiled | from the cache |\n| --- | ---: | ---: |\n| kernel in hand, 400/160 | 610 | 3.36 |\n\n" in before
    assert "50 configurations for 2 architectures has 300 kernels, 11.7 MiB (zipped 3.8 MiB), compiled in 205 s." in before
    record["gpu"] = {"ways": {way: {"median": {"first_call_ms": 1.5}} for way in ("compile", "cached", "bundle")}}
    record["machine"]["gpu"] = "NVIDIA H200"
    path.write_text(json.dumps(record))
    text = report.report(tmp_path)
    assert text.startswith("**Cold start on NVIDIA H200**")
    assert "| first call, 400/160 | 1.50 | 1.50 | 1.50 |\n| kernel in hand, 400/160 | 610 | 3.36 | – |" in text


def _training(bench):
    figures = {"forward_us": 45.0, "step_us": 180.4, "step_us_runs": [180.3, 180.5], "backward_us": 135.4}
    figures |= {"extra_bytes": 4096, "gradient_error": 2.5e-7, "bit_equal": True}
    slow = figures | {"step_us": 3608.0, "extra_bytes": 2**30, "gradient_error": 3.5e-7, "bit_equal": False}
    entry = {"name": "whisper", "label": "whisper", "batch": 32, "samples": 480000, "runs": 100}
    broken = entry | {"label": "another", "flashmel": figures, "torchaudio": {"forward_us": None}, "error": "OSError: no\nlog"}
    return [entry | {"flashmel": figures, "torchaudio": slow}, broken, entry | {"error": "at once"}]


def test_training_is_printed_and_reported(tmp_path, capsys):
    bench, report = _load("bench"), _load("report")
    record = _gpu_record(bench)
    bench.write_json(tmp_path / "gpu.json", record)
    before = report.report(tmp_path)
    record["training"] = _training(bench)
    bench.print_results(copy.deepcopy(record))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = ["whisper", "180.4", "3608.0", "20.00", "45.0", "4.01", "135.4", "0.00", "1024.00"]
    assert [*start, "2.5e-07", "3.5e-07", "yes", "NO"] in printed and ["whisper,", "training:", "at", "once"] in printed
    bench.write_json(tmp_path / "gpu.json", record)
    text = report.report(tmp_path)
    assert "| whisper | 180 | 3608 | 20× | 4.0× | < 0.1 | 1024.0 | 2.5e-07 | 3.5e-07 |" in text
    assert "| another | 180 | – | – | 4.0× | < 0.1 | – | 2.5e-07 | – |" in text
    assert "in 100 runs: flashmel's in 2 of 3 cases, torchaudio's in 0." in text
    assert "- another, training, failed: OSError: no" in text and "log" not in text
    assert [line for line in before.splitlines() if line not in text.splitlines()] == []  # the rest is as without
    assert {len({line.count("|") for line in block.splitlines()}) for block in text.split("\n\n") if block[0] == "|"} == {1}
    record["training"] = []
    bench.write_json(tmp_path / "gpu.json", record)
    assert report.report(tmp_path) == before


def test_a_wrong_gradient_is_recorded_and_the_rest_continue(tmp_path, monkeypatch):
    bench = _load("bench")
    for name in ("small", "clip", "whisper-pcm"):
        monkeypatch.setitem(bench.CASES, name, bench.replace(bench.CASES[name], batch=2, samples=16000))
    exact, step = bench.exact_gradient, bench.gradient
    monkeypatch.setattr(bench, "exact_gradient", lambda *args: exact(*args) * (1.01 if args[0].n_fft == 400 else 1))
    turns = itertools.cycle((1, 1 + 1e-6))
    monkeypatch.setattr(bench, "gradient", lambda *args: step(*args) * next(turns))
    monkeypatch.setattr(bench, "worker", lambda *args, **kwargs: {"bytes": 0})
    out = tmp_path / "out.json"
    package = str(Path(flashmel.__file__).resolve().parents[1])  # the one that this process has imported
    arguments = ["--device", "cpu", "--quick", "--cases", "clip,whisper-pcm,small", "--package", package, "--out", str(out)]
    assert bench.main([*arguments, "--training"]) == 1
    record = json.loads(out.read_text())
    assert not any("error" in entry for entry in record["cases"])
    clip, small = record["training"]  # no int16: it has no gradient
    assert "0.0099 of its peak" in clip["error"] and clip["flashmel"]["step_us"] > 0
    assert small["error"] == "the gradient changes from run to run" and not small["flashmel"]["bit_equal"]


def test_a_failing_case_is_recorded_and_the_rest_continue(tmp_path, monkeypatch):
    bench = _load("bench")
    real = bench.flashmel_transform

    def broken(case, device, package):
        if case.name == "small":
            raise ValueError("this one fails")
        transform = real(case, device, package)
        return (lambda x: transform(x) * 1.01) if case.name == "clip" else transform

    monkeypatch.setattr(bench, "flashmel_transform", broken)
    monkeypatch.setattr(bench, "worker", lambda *args, **kwargs: {"bytes": 0})
    out = tmp_path / "out.json"
    package = str(Path(flashmel.__file__).resolve().parents[1])  # the one that this process has imported
    arguments = ["--device", "cpu", "--quick", "--cases", "small,clip,cpu-clips", "--package", package, "--out", str(out)]
    assert bench.main(arguments) == 1
    small, clip, last = json.loads(out.read_text())["cases"]
    assert small["error"] == "ValueError: this one fails"
    assert "times the tolerance" in clip["error"] and clip["flashmel"]["wall_us"] > 0
    assert "error" not in last


def test_pcm_case_meets_the_contract_on_the_cpu(tmp_path):
    bench = _load("bench")
    case = bench.replace(bench.CASES["whisper-pcm"], batch=1, samples=16000)
    figures = bench.check(case, bench.torchaudio_transform(case, "cpu"), "cpu")
    assert 0 < figures["tolerance_fraction"] < 1 and figures["output_bytes"] == 2 * 128 * 101
    bench.write_json(tmp_path / "x.json", {"a": [float("inf"), float("nan")]})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": ["inf", "nan"]}


def test_unknown_case_is_named():
    with pytest.raises(SystemExit, match="unknown case nope; known: whisper,"):
        _load("bench").main(["--device", "cpu", "--cases", "nope"])
