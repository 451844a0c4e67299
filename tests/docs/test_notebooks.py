"""The tutorials are in step with the code: executed as they are, with names that exist."""

import ast
import importlib
import json
import pkgutil
import re
import sys

import pytest
from code_blocks import ROOT, TUTORIALS, name_of

sys.path.insert(0, str(ROOT / "docs"))
from run_notebooks import source_hash

MOST_BYTES = 200_000
TUTORIAL = pytest.mark.parametrize("file", TUTORIALS, ids=name_of)


def notebook(file):
    return json.loads(file.read_text(encoding="utf8"))


def code_of(file):
    return ["".join(cell["source"]) for cell in notebook(file)["cells"] if cell["cell_type"] == "code"]


def dotted(node):
    """The dotted name of an expression such as iobs.errors.CheckpointError, or None."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner else None


@TUTORIAL
def test_outputs_belong_to_the_sources(file):
    content = notebook(file)
    assert content["metadata"]["iobs"]["source"] == source_hash(content["cells"]), "run: make notebooks"
    counts = [cell["execution_count"] for cell in content["cells"] if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))


@TUTORIAL
def test_outputs_are_small_and_hold_no_error_and_no_path(file):
    assert file.stat().st_size <= MOST_BYTES
    outputs = [output for cell in notebook(file)["cells"] for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.search(r"/(tmp|home|root|Users|work)/", json.dumps(outputs))


@TUTORIAL
def test_names_of_iobs_exist(file):
    for cell in code_of(file):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("iobs"):
                module = importlib.import_module(node.module)
                submodules = {one.name for one in pkgutil.iter_modules(getattr(module, "__path__", []))}
                assert all(alias.name in submodules or hasattr(module, alias.name) for alias in node.names)
            name = dotted(node) or ""
            if name.startswith("iobs."):
                value = importlib.import_module("iobs")
                for part in name.split(".")[1:]:
                    value = getattr(value, part)


@pytest.mark.slow
@TUTORIAL
@pytest.mark.timeout(600)
def test_tutorial_runs(file, monkeypatch, tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    space = {"__name__": "__main__"}
    for cell in code_of(file):
        exec(compile(cell, name_of(file), "exec"), space)  # the tutorial's own code
