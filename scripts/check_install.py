#!/usr/bin/env python3
"""Ask pip what installing flashmel beside a torch would change, in a fresh environment for each; needs a package index.

    python scripts/check_install.py

The environments hold the metadata of a torch and of what it pins, which is all that pip looks at; nothing is installed. The torch
and what it pins must stay as they are, and the bindings must be of the CUDA version expected. Exit status: 0, or 1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Packages = dict[str, tuple[str, list[str]]]  # name -> version, requirements
NVRTC_12, NVRTC_13 = "nvidia-cuda-nvrtc-cu12==12.8.93", "nvidia-cuda-nvrtc==13.0.88"

# What torch's builds ask for, as far as flashmel asks for it too.
ENVIRONMENTS: dict[str, Packages] = {
    "torch 2.8 for CUDA 12": {"torch": ("2.8.0", [NVRTC_12]), "nvidia-cuda-nvrtc-cu12": ("12.8.93", [])},
    "torch 2.10 for CUDA 12": {
        "torch": ("2.10.0", [NVRTC_12, "cuda-bindings==12.9.4"]),
        "nvidia-cuda-nvrtc-cu12": ("12.8.93", []),
        "cuda-bindings": ("12.9.4", []),
    },
    "torch 2.11 for CUDA 13": {
        "torch": ("2.11.0", [NVRTC_13, "cuda-bindings>=13.0.3,<14"]),
        "nvidia-cuda-nvrtc": ("13.0.88", []),
        "cuda-bindings": ("13.0.3", []),
    },
    "torch 2.8 for CPUs": {"torch": ("2.8.0+cpu", [])},
}
# (environment, extra, major version of the bindings)
EXPECTED = (
    ("torch 2.8 for CUDA 12", "", 13),
    ("torch 2.8 for CUDA 12", "cu12", 12),
    ("torch 2.10 for CUDA 12", "", 12),
    ("torch 2.10 for CUDA 12", "cu12", 12),
    ("torch 2.11 for CUDA 13", "", 13),
    ("torch 2.11 for CUDA 13", "cu13", 13),
    ("torch 2.8 for CPUs", "", 13),
    ("torch 2.8 for CPUs", "cu12", 12),
    ("torch 2.8 for CPUs", "cu13", 13),
)


def environment(folder: Path, packages: Packages) -> Path:
    """A virtual environment in which pip takes the packages for installed; returns its Python."""
    venv.create(folder, with_pip=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for name, (version, requirements) in packages.items():
        place = site / f"{name.replace('-', '_')}-{version}.dist-info"
        place.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requirements)]
        (place / "METADATA").write_text("\n".join(lines) + "\n")
        (place / "INSTALLER").write_text("pip\n")
        (place / "RECORD").write_text("")
    return folder / "bin" / "python"


def changes(python: Path, extra: str) -> dict[str, str]:
    """Name -> version of what pip would install."""
    target = f"{ROOT}[{extra}]" if extra else str(ROOT)
    command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", target]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(done.stdout)["install"]}


def check(name: str, extra: str, major: int, folder: Path) -> bool:
    """Print what pip would do; whether it is right."""
    packages = ENVIRONMENTS[name]
    what = f"flashmel{f'[{extra}]' if extra else ''} beside {name}"
    try:
        found = changes(environment(folder, packages), extra)
    except RuntimeError as error:
        print(f"{what}: pip fails: {error}")
        return False
    bindings = found.get("cuda-bindings") or packages["cuda-bindings"][0]
    right = not set(found) & set(packages) and int(bindings.split(".")[0]) == major
    listed = ", ".join(f"{package} {version}" for package, version in sorted(found.items()))
    print(f"{what}: {'right' if right else 'WRONG'}: bindings {bindings}; installs {listed}")
    return right


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        results = [check(*row, Path(folder) / str(number)) for number, row in enumerate(EXPECTED)]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
