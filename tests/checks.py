"""Values and assertions that several test files share."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from iobs.pruning.network.layers import find_layers

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@contextmanager
def benchmarks():
    """The folder of the benchmarks on the import path."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(BENCHMARKS))


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(model, state):
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name


def zeros_of(model):
    return {layer.name: int((layer.read(model) == 0).sum()) for layer in find_layers(model)}


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def one_error(result):
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error:")]
    assert len(lines) == 1, result.stderr
    return lines[0]
