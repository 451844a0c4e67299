"""Training and eval mode of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode (no dropout) for all modules; each module gets its own mode back."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        _set_modes(model, training)


def _set_modes(module: nn.Module, training: Mapping[nn.Module, bool]) -> None:
    """Restore training modes; by `train` where all inner modules were training, since modules may override it."""
    if all(training.get(inner, inner.training) for inner in module.modules()):
        module.train()
        return
    module.training = training.get(module, module.training)
    for child in module.children():
        _set_modes(child, training)
