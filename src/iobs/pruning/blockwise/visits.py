"""Visits of a model's blocks to a device: parameters and buffers of a block move there, and back.

A visiting parameter stays the same object, with its data on the device. So optimizers, tied weights and name patterns
see no difference. What is outside the blocks stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iobs.pruning.calibration.blocks import Block
from iobs.pruning.network.modes import replaced_forwards


class Visits:
    """Tensors of a model that lie in main memory, and visit a device.

    Args:
        model: the model, in main memory.
        device: the device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self._away: dict[int, tuple[Tensor, Tensor]] = {}  # visiting tensors with their data in main memory
        self._residents: set[int] = set()  # identities of the tensors that stay on the device

    def settle(self, blocks: Sequence[Block]) -> None:
        """Bring everything outside the blocks to the device, and send the blocks back.

        Parameters that two blocks share count as outside. So does the first parameter of the model, whose device tells
        models where they compute. Changes on the device are lost.

        Args:
            blocks: disjoint or nested.
        """
        self.send_all()
        outermost = sorted(blocks, key=lambda block: block.path.count("."))
        owners: dict[int, set[str | None]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in _named(self.model):
            owner = next((block.path for block in outermost if block.holds(name)), None)
            owners.setdefault(id(tensor), set()).add(owner)
            tensors[id(tensor)] = tensor
        inside = {key for key, found in owners.items() if len(found) == 1 and None not in found}
        inside -= {id(parameter) for parameter in list(self.model.parameters())[:1]}
        self._residents = tensors.keys() - inside
        self.bring(tensors[key] for key in self._residents)

    def members(self, holds: Callable[[str], bool]) -> list[Tensor]:
        """The tensors that visit the device, among those whose names `holds` accepts."""
        found = {id(tensor): tensor for name, tensor in _named(self.model) if holds(name)}
        return [tensor for key, tensor in found.items() if key not in self._residents]

    def bring(self, tensors: Iterable[Tensor]) -> None:
        """Move tensors to the device, as copies; those that are there stay."""
        for tensor in tensors:
            if id(tensor) not in self._away:
                self._away[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.to(self.device, copy=True)

    def send(self, tensors: Iterable[Tensor], changed: Collection[int] = ()) -> None:
        """Move tensors back to their place in main memory.

        Args:
            tensors: those that are on the device.
            changed: identities of the tensors whose values are kept; the values of others are as before.
        """
        for tensor in tensors:
            if id(tensor) in self._away:
                _, data = self._away[id(tensor)]
                if id(tensor) in changed:
                    data.copy_(tensor.data)
                tensor.data = data
                del self._away[id(tensor)]

    def send_all(self, changed: Collection[int] = ()) -> None:
        """Move all tensors back; arguments as in `send`."""
        self.send([tensor for tensor, _ in self._away.values()], changed)

    def at_home(self, tensor: Tensor) -> Tensor:
        """The values of a tensor in main memory, which a visit does not change."""
        return self._away[id(tensor)][1] if id(tensor) in self._away else tensor.detach()

    @contextmanager
    def on_call(self, blocks: Iterable[Block]) -> Iterator[None]:
        """Context in which the model can be called, without gradients: a block visits the device for its own call.

        A block that is there already is called as it is.
        """
        paths = dict.fromkeys(block.path for block in blocks)
        modules = [self.model.get_submodule(path) for path in paths]
        with replaced_forwards([(module, self._visiting(module)) for module in modules]):
            yield

    def _visiting(self, module: nn.Module) -> Callable[..., object]:
        """The forward of a module, before which its tensors come to the device, and after which they leave."""
        forward = module.forward
        tensors = {id(tensor): tensor for _, tensor in _named(module)}

        @wraps(forward)
        def run(*args: object, **kwargs: object) -> object:
            away = [tensor for key, tensor in tensors.items() if key not in self._residents]
            if any(id(tensor) in self._away for tensor in away):
                return forward(*args, **kwargs)
            try:
                self.bring(away)
                return forward(*args, **kwargs)
            finally:
                self.send(away)

        return run


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names, without those of lazy layers that were never called."""
    for found in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        yield from ((name, tensor) for name, tensor in found if not is_lazy(tensor))


def parts_of(model: nn.Module) -> list[Block]:
    """The elements of the outermost lists and sequences of a model, which can visit the device before a chain is known.

    Elements without modules inside are left out: their weights stay on the device, where hooks read them.
    """
    found: list[Block] = []
    for path, module in model.named_modules():
        within = any(path == one.path or path.startswith(f"{one.path}.") for one in found)
        if within or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for name, child in module.named_children():
            if any(True for _ in child.children()):
                found.append(Block(f"{path}.{name}" if path else name, 0))
    return found
