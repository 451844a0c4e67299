"""Limits that keep the code readable: lengths of files, numbers of parameters and attributes, uses of Any."""

import re

from source_files import source_files

MOST_LINES, MOST_PARAMETERS, MOST_ATTRIBUTES, MOST_ANY = 400, 12, 12, 150


def is_kernel(one):
    return one.file.stem.endswith("_numba") or one.name == "optimize/search/kernels.py"


def is_estimator(one):
    return one.name.startswith("optimize/estimators/")


def test_files_are_read_in_one_sitting():
    lengths = {one.name: len(one.text.splitlines()) for one in source_files()}
    assert lengths
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def parameters(arguments):
    """The number of parameters, of which `**others` counts as one."""
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([one for one in found if one.arg not in ("self", "cls")]) + (arguments.kwarg is not None)


def test_functions_have_at_most_12_parameters():
    counts = {
        f"{one.name}:{name}": parameters(arguments)
        for one in source_files()
        if not is_kernel(one) and not is_estimator(one)
        for name, arguments in one.functions
    }
    assert counts
    assert {place: count for place, count in counts.items() if count > MOST_PARAMETERS} == {}


def test_classes_have_at_most_12_attributes():
    found = [
        (f"{one.name}:{name}", sorted(attributes))
        for one in source_files()
        if not is_estimator(one)
        for name, attributes in one.attributes
    ]
    assert found
    assert [(place, names) for place, names in found if len(names) > MOST_ATTRIBUTES] == []


def test_any_is_rare():
    assert sum(len(re.findall(r"\bAny\b", one.text)) for one in source_files()) <= MOST_ANY
