"""Limits that keep the code readable: lengths of files, numbers of parameters and attributes, uses of Any."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src" / "iobs"
FILES = sorted(SOURCE.rglob("*.py"))
MOST_LINES, MOST_PARAMETERS, MOST_ATTRIBUTES, MOST_ANY = 400, 12, 12, 150


def name_of(file):
    return str(file.relative_to(SOURCE))


def is_kernel(file):
    return file.stem.endswith("_numba") or name_of(file) == "optimize/search/kernels.py"


def is_estimator(file):
    return file.is_relative_to(SOURCE / "optimize" / "estimators")


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_file_is_read_in_one_sitting(file):
    assert len(file.read_text(encoding="utf8").splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    "file", [file for file in FILES if not is_kernel(file) and not is_estimator(file)], ids=name_of
)
def test_functions_have_at_most_12_parameters(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.FunctionDef):
            found = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            named = [one for one in found if one.arg not in ("self", "cls")]
            assert len(named) + (node.args.kwarg is not None) <= MOST_PARAMETERS, node.name


@pytest.mark.parametrize("file", [file for file in FILES if not is_estimator(file)], ids=name_of)
def test_classes_have_at_most_12_attributes(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf8"))):
        if isinstance(node, ast.ClassDef):
            names = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign)}
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    names |= {inner.attr} if isinstance(inner.value, ast.Name) and inner.value.id == "self" else set()
            assert len(names) <= MOST_ATTRIBUTES, f"{node.name}: {sorted(names)}"


def test_any_is_rare():
    used = sum(len(re.findall(r"\bAny\b", file.read_text(encoding="utf8"))) for file in FILES)
    assert used <= MOST_ANY
