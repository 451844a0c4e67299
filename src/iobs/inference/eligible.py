"""Layers that `iobs.accelerate` may replace: what their model does with them, found in a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from iobs.core.modes import in_eval_mode
from iobs.errors import NonFiniteError
from iobs.inference.decodable import changed
from iobs.inference.modules import StoredLayer, can_store, matrix_of

_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # compute with the weights of layers inside
HOOKED = "with a hook or a forward of their own stay dense, since their stored form would not have it"
READ = "stay dense, since the model reads their weights, which a stored form unpacks each time"


def replaceable(model: nn.Module) -> tuple[dict[str, nn.Module], list[str]]:
    """The layers that have a stored form and may be replaced, by name, and notes on those that may not."""
    found = {name: one for name, one in model.named_modules() if can_store(one)}
    inside = {part for one in model.modules() if isinstance(one, _READERS) for part in one.modules()}
    hooked = {one for one in found.values() if changed(one) and one not in inside}
    counts = {HOOKED: len(hooked), READ: sum(one in inside for one in found.values())}
    left = {name: one for name, one in found.items() if one not in hooked and one not in inside}
    return left, [f"{count} layers {reason}" for reason, count in counts.items() if count]


def require_finite(layers: Mapping[str, nn.Module]) -> None:
    """Check the weights of layers before any of them is replaced.

    Raises:
        NonFiniteError: one holds NaN or infinite entries; names the layer.
    """
    for name, layer in layers.items():
        if not bool(torch.isfinite(matrix_of(layer)).all()):
            raise NonFiniteError(f"The weight of {name!r} holds NaN or infinity; a stored layer needs finite ones.")


def tokens_seen(model: nn.Module, layers: Mapping[str, nn.Module], example: object) -> dict[str, int]:
    """The most tokens that each layer sees in a forward pass of the example."""
    found: dict[str, int] = {}

    def counting(name: str) -> Callable[..., None]:
        def count(_: nn.Module, __: object, output: Tensor) -> None:
            found[name] = max(found.get(name, 1), output.numel() // len(matrix_of(layers[name])))

        return count

    handles = [layer.register_forward_hook(counting(name)) for name, layer in layers.items()]
    try:
        _run(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return found


def weights_read(model: nn.Module, example: object) -> list[str]:
    """Names of the stored layers whose weight a forward pass of the example reads."""
    names = {one: name for name, one in model.named_modules() if isinstance(one, StoredLayer)}
    with _reads() as found:
        _run(model, example)
    return [name for one, name in names.items() if one in found]


@contextmanager
def _reads() -> Iterator[set[StoredLayer]]:
    """Collect the stored layers whose weight is read."""
    weight, found = StoredLayer.weight, set[StoredLayer]()

    def noted(layer: StoredLayer) -> Tensor:
        found.add(layer)
        return layer.unpacked()

    StoredLayer.weight = property(noted)  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        StoredLayer.weight = weight  # type: ignore[method-assign]


@torch.no_grad()
def _run(model: nn.Module, example: object) -> None:
    """A forward pass as in inference: it changes no statistics of a batch norm."""
    with in_eval_mode(model):
        if isinstance(example, Mapping):
            model(**example)
        elif isinstance(example, (tuple, list)):
            model(*example)
        else:
            model(example)
