"""Imports go downwards only between packages and modules, and `import iobs` loads no heavy library."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "iobs"
FLOORS = [
    "errors",
    "core",
    "solvers inference",
    "optimize pruning",
    "models",
    "data evaluate report transformers exports",
]
FLOORS += ["paper", "cli"]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names.split()}
APART = {("optimize", "pruning"), ("pruning", "optimize")}
LIBRARIES = {
    "transformers": {"models", "data", "evaluate", "paper", "transformers"},
    "peft": {"transformers"},
    "timm": {"models", "data", "evaluate", "paper"},
    "datasets": {"models", "data", "evaluate", "paper"},
    "lm_eval": {"models", "data", "evaluate", "paper"},
}


# Modules of the two large packages; each imports only from earlier lines.
MODULES = {
    "pruning": [
        "keep_sparse",
        "samples",
        "coverage",
        "report",
        "structured_report",
        "recipe",
        "network",
        "structure",
        "runtime",
        "forecast",
        "callbacks",
        "progress",
        "calibration",
        "audit",
        "store",
        "allocation",
        "finetune",
        "layerwise",
        "widths",
        "workspace",
        "decisions",
        "baselines",
        "reconstruction",
        "cost",
        "blockwise",
        "algorithm",
        "removable",
        "structured",
        "whole",
        "structured_plan",
        "driver",
    ],
    "optimize": [
        "objectives",
        "problem",
        "curvature",
        "refit",
        "search",
        "methods bounds estimators",
        "minimize",
    ],
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


@pytest.mark.parametrize("package", MODULES)
def test_modules_import_downwards_only(package):
    level = {name: number for number, names in enumerate(MODULES[package]) for name in names.split()}
    for file in sorted((SOURCE / package).rglob("*.py")):
        parts = file.relative_to(SOURCE / package).with_suffix("").parts
        if parts == ("__init__",):
            continue
        assert parts[0] in level, f"{file} is missing in MODULES of {package}"
        for module in imports_of(file):
            names = module.split(".")
            if names[:2] == ["iobs", package] and len(names) > 2 and names[2] in level and names[2] != parts[0]:
                assert level[names[2]] < level[parts[0]], f"{file} imports {module}, which is not below it"


def test_modules_of_pruning_are_documented_in_their_order():
    lines = [line for line in importlib.import_module("iobs.pruning").__doc__.splitlines() if line.startswith("    ")]
    assert [line.split()[0] for line in lines] == MODULES["pruning"]
    assert "\n".join(lines) in (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf8")


def test_importing_iobs_loads_no_heavy_library():
    heavy = ["transformers", "timm", "datasets", "lm_eval", "sklearn", "matplotlib", "pandas", "torchvision"]
    code = f"import sys, iobs; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


APART_FROM_SOURCE = [
    file for folder in ("benchmarks", "examples", "scripts") for file in (SOURCE.parents[1] / folder).glob("*.py")
]


@pytest.mark.parametrize("file", APART_FROM_SOURCE, ids=lambda file: file.name)
def test_names_imported_by_scripts_exist(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "iobs":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
