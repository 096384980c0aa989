"""How the package hangs together: imports point one way, and importing it touches no GPU and no disk."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashmel

ROOT = Path(flashmel.__file__).parent
# Every module, lowest first: each may import only those before it. A new module gets its place here.
ORDER = (
    "version", "environment", "spec", "filterbank", "plan", "tables", "reference",
    "jit", "jit.cache", "jit.download", "jit.machine", "jit.bundle", "jit.toolchain", "jit.compiler", "jit.source", "jit.driver",
    "buffers", "normalize", "recipes", "fused", "ops", "functional", "export", "transform", "losses", "cepstrum", "stream",
    "frontends", "__init__", "testing",
    "cli.console", "cli.arguments", "cli.picture", "cli.ahead", "cli.mel", "cli.frontends", "cli.demo", "cli.warm", "cli.bundle",
    "cli.cache", "cli.doctor", "cli", "__main__",
)  # fmt: skip
NEED_SPEC_ALONE = ("filterbank", "plan", "tables", "reference")
WITHOUT_TORCH = ("version", "environment", "spec", "plan", "tables", *(name for name in ORDER if name.startswith("jit")))


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


TREES = {name_of(path): ast.parse(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.py"))}
PACKAGES = {name_of(path) for path in ROOT.glob("*/__init__.py")}


def imports(tree, module="x"):
    """(absolute name, is it inside a function) of everything that runs as an import: not what stands under TYPE_CHECKING."""
    parts = module.split(".")

    def walk(node, in_function):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, in_function) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            levels = node.level - (module in PACKAGES)  # a package's own name is its first
            package = ["flashmel", *parts[: len(parts) - levels]] if node.level else []
            base = ".".join([*package, *filter(None, [node.module])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if base == "flashmel" or full.removeprefix("flashmel.") in TREES else base), in_function
        inner = in_function or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inner)

    yield from walk(tree, False)


def own(module):
    """Modules of flashmel that ``module`` imports; ``from . import X`` of a name that is no module is the package itself."""
    names = [name.removeprefix("flashmel.") for name, _ in imports(TREES[module], module) if name.split(".")[0] == "flashmel"]
    return {name if name in TREES else "__init__" for name in names}


def test_every_module_has_its_place():
    assert set(TREES) == set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_arrows_never_point_back(module):
    assert own(module) <= set(ORDER[: ORDER.index(module)])
    if module in NEED_SPEC_ALONE:
        assert own(module) <= {"spec"}
    if module == "testing":
        assert not own(module), "the error metrics judge any package: they lean on none"


@pytest.mark.parametrize("module", ORDER)
def test_what_only_some_may_import(module):
    found = list(imports(TREES[module], module))
    roots = {name.split(".")[0] for name, _ in found}
    assert "torch" not in roots or module not in WITHOUT_TORCH
    if "cuda" in roots:
        assert module.startswith("jit.") and all(in_function for name, in_function in found if name.split(".")[0] == "cuda")
    text = ast.unparse(TREES[module])
    assert ("torch.library" in text) == (module == "ops")
    assert ("os.environ" in text or "getenv" in text) == (module == "environment")


def test_importing_touches_nothing(tmp_path):
    code = (
        "import sys, torch; before = set(sys.modules); import flashmel, flashmel.jit.driver\n"  # torch imports parts of cuda itself
        "flashmel.MelSpectrogram(n_mels=40)(torch.zeros(2, 4000))\n"  # nor does the CPU path
        "assert not torch.cuda.is_initialized()\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert not new & {'cuda', 'torchaudio', 'librosa', 'soundfile', 'scipy', 'matplotlib'}, new\n"
    )
    env = {**os.environ, "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "xdg"), "PYTHONPATH": str(ROOT.parent)}
    subprocess.run([sys.executable, "-c", code], env=env | {"FLASHMEL_CACHE_DIR": str(tmp_path / "own")}, check=True, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []
