"""Imports go downwards only between packages and modules, and `import iobs` loads no heavy library."""

import ast
import importlib
import subprocess
import sys

import pytest
from source_files import SOURCE, source_files

FLOORS = [
    "errors openmp",
    "core",
    "solvers inference",
    "optimize pruning",
    "models",
    "data evaluate report transformers exports vocabulary",
]
FLOORS += ["cli"]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names.split()}
APART = {("optimize", "pruning"), ("pruning", "optimize")}
LIBRARIES = {
    "transformers": {"models", "data", "evaluate", "transformers"},
    "peft": {"transformers"},
    "timm": {"models", "data", "evaluate"},
    "datasets": {"models", "data", "evaluate"},
    "lm_eval": {"models", "data", "evaluate"},
}


# Modules of the two large packages; each imports only from earlier lines.
MODULES = {
    "pruning": [
        "keep_sparse",
        "samples",
        "coverage",
        "report",
        "recipe",
        "structured_report",
        "network",
        "structure",
        "runtime",
        "forecast",
        "callbacks",
        "calibration",
        "audit",
        "store",
        "descent",
        "layerwise",
        "widths",
        "workspace",
        "decisions",
        "plan",
        "baselines",
        "reconstruction",
        "cost",
        "blockwise",
        "algorithm",
        "structured",
        "driver",
    ],
    "optimize": [
        "objectives",
        "problem",
        "curvature",
        "refit",
        "search",
        "bounds",
        "methods estimators",
        "minimize",
    ],
}


def floor_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "iobs" and len(parts) > 1 and parts[1] in LEVEL else None


def test_imports_go_downwards_only():
    checked, wrong = set(), []
    for one in source_files():
        own = one.name.split("/")[0].removesuffix(".py")
        if one.file.name == "__main__.py" or ("/" not in one.name and own not in LEVEL):
            continue
        checked.add(own)
        for module in one.imported():
            other, library = floor_of(module), module.split(".")[0]
            if other is not None and other != own and LEVEL[other] > LEVEL[own]:
                wrong.append(f"{one.name} imports {module}, which is above it")
            if (own, other) in APART or (library in LIBRARIES and own not in LIBRARIES[library]):
                wrong.append(f"{one.name} imports {module}")
    assert checked == set(LEVEL)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("package", MODULES)
def test_modules_import_downwards_only(package):
    level = {name: number for number, names in enumerate(MODULES[package]) for name in names.split()}
    wrong = []
    for one in source_files():
        first, _, inside = one.name.removesuffix(".py").partition("/")
        own = inside.split("/")[0]
        if first != package or inside == "__init__":
            continue
        assert own in level, f"{one.name} is missing in MODULES of {package}"
        for module in one.imported():
            names = module.split(".")
            inside_too = names[:2] == ["iobs", package] and len(names) > 2 and names[2] in level and names[2] != own
            if inside_too and level[names[2]] >= level[own]:
                wrong.append(f"{one.name} imports {module}, which is not below it")
    assert not wrong, "\n".join(wrong)


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
