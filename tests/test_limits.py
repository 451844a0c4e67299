"""Limits that keep the code readable: numbers of parameters, uses of Any."""

import re

from source_files import source_files

MOST_PARAMETERS, MOST_ANY = 12, 150


def is_kernel(one):
    return one.file.stem.endswith("_numba") or one.name == "optimize/search/kernels.py"


def is_estimator(one):
    return one.name.startswith("optimize/estimators/")


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


def test_any_is_rare():
    assert sum(len(re.findall(r"\bAny\b", one.text)) for one in source_files()) <= MOST_ANY
