"""The house: floors import downwards only, and `import iobs` stays light."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "iobs"
FLOORS = ["errors", "core", "solvers", "optimize prune", "models", "data evaluate report", "paper", "cli"]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names.split()}
APART = {("optimize", "prune"), ("prune", "optimize")}
LIBRARIES = {
    "transformers": {"models", "data", "evaluate", "paper"},
    "timm": {"models", "data", "evaluate", "paper"},
    "datasets": {"models", "data", "evaluate", "paper"},
    "lm_eval": {"models", "data", "evaluate", "paper"},
}


def imports_of(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: write imports in full"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def floor_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "iobs" and len(parts) > 1 and parts[1] in LEVEL else None


FILES = sorted(file for file in SOURCE.rglob("*.py") if file.name != "__main__.py" and file.parent != SOURCE)
FILES += [file for file in SOURCE.glob("*.py") if file.stem in LEVEL]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_imports_go_downwards_only(file):
    own = file.relative_to(SOURCE).parts[0].removesuffix(".py")
    for module in imports_of(file):
        other = floor_of(module)
        if other is not None and other != own:
            assert LEVEL[other] <= LEVEL[own], f"{own} imports {module}, which is above it"
            assert (own, other) not in APART, f"{own} imports {module}"
        library = module.split(".")[0]
        if library in LIBRARIES:
            assert own in LIBRARIES[library], f"{own} imports {library}"


def test_importing_iobs_loads_no_heavy_library():
    heavy = ["transformers", "timm", "datasets", "lm_eval", "sklearn", "matplotlib", "pandas", "torchvision"]
    code = f"import sys, iobs; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


APART_FROM_SOURCE = [
    file for folder in ("benchmarks", "examples", "scripts") for file in (SOURCE.parents[1] / folder).glob("*.py")
]


@pytest.mark.parametrize("file", APART_FROM_SOURCE, ids=lambda file: file.name)
def test_what_scripts_import_exists(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "iobs":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
