"""Blocks of a model in main memory that visit a device: their parameters and buffers move there, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iobs.pruning.calibration.blocks import Block
from iobs.pruning.network.copies import dense_copy
from iobs.pruning.network.modes import replaced_forwards, state


class MemoryBlocks:
    """A model in main memory whose blocks visit a device. What is outside the blocks stays on the device.

    A visiting parameter stays the same object, with its data on the device. So optimizers, tied weights and name
    patterns see no difference.

    Args:
        module: the model, in main memory.
        device: the device.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
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
        for name, tensor in _named_tensors(self.module):
            owner = next((block.path for block in outermost if block.holds(name)), None)
            owners.setdefault(id(tensor), set()).add(owner)
            tensors[id(tensor)] = tensor
        inside = {key for key, paths in owners.items() if len(paths) == 1 and None not in paths}
        inside -= {id(parameter) for parameter in list(self.module.parameters())[:1]}
        self._residents = tensors.keys() - inside
        self._bring(tensors[key] for key in self._residents)

    def visitors(self, block: Block) -> list[Tensor]:
        """The tensors of a block that visit the device."""
        tensors = {id(tensor): tensor for name, tensor in _named_tensors(self.module) if block.holds(name)}
        return [tensor for key, tensor in tensors.items() if key not in self._residents]

    def load(self, block: Block) -> None:
        """Move copies of a block to the device; tensors that are there stay."""
        self._bring(self.visitors(block))

    def drop(self, block: Block) -> None:
        """Give the tensors of a block their values in main memory."""
        self._send(self.visitors(block))

    def save(self, changed: Iterable[str]) -> None:
        """Copy the values of parameters on the device to main memory."""
        for name in changed:
            parameter = self.module.get_parameter(name)
            if id(parameter) in self._away:
                self._away[id(parameter)][1].copy_(parameter.data)

    def send_all(self) -> None:
        """Give all tensors their values in main memory."""
        self._send([tensor for tensor, _ in self._away.values()])

    def at_home(self, tensor: Tensor) -> Tensor:
        """The values of a tensor in main memory, which a visit does not change."""
        return self._away[id(tensor)][1] if id(tensor) in self._away else tensor.detach()

    def dense_copy(self, blocks: Sequence[Block], originals: Mapping[str, Tensor]) -> MemoryBlocks:
        """A second model: its blocks lie in copies of the original weights, and matrices outside them are shared.

        Args:
            blocks: of the model.
            originals: the copies, by name; other tensors of the blocks are shared.

        Raises:
            ModelError: an attribute of a module cannot be copied.
        """
        shared: dict[int, object] = {}
        inside = {id(tensor) for block in blocks for tensor in self.visitors(block)}
        for name, tensor in state(self.module):
            if id(tensor) in inside:
                data = originals.get(name, self.at_home(tensor)).detach()
                shared[id(tensor)] = nn.Parameter(data, False) if isinstance(tensor, nn.Parameter) else data
            elif name not in originals:
                shared[id(tensor)] = tensor
        dense = MemoryBlocks(dense_copy(self.module, shared), self.device)
        copies = dict(_named_tensors(dense.module))
        names = [name for name, tensor in _named_tensors(self.module) if id(tensor) in self._residents]
        dense._residents = {id(copies[name]) for name in names}
        return dense

    @contextmanager
    def on_call(self, blocks: Iterable[Block]) -> Iterator[None]:
        """Context in which the model can be called, without gradients: a block visits the device for its own call.

        A block that is there already is called as it is.
        """
        paths = dict.fromkeys(block.path for block in blocks)
        modules = [self.module.get_submodule(path) for path in paths]
        with replaced_forwards([(module, self._visiting(module)) for module in modules]):
            yield

    def _visiting(self, module: nn.Module) -> Callable[..., object]:
        """The forward of a module, before which its tensors come to the device, and after which they leave."""
        forward = module.forward
        tensors = {id(tensor): tensor for _, tensor in _named_tensors(module)}

        @wraps(forward)
        def run(*args: object, **kwargs: object) -> object:
            visitors = [tensor for key, tensor in tensors.items() if key not in self._residents]
            if any(id(tensor) in self._away for tensor in visitors):
                return forward(*args, **kwargs)
            try:
                self._bring(visitors)
                return forward(*args, **kwargs)
            finally:
                self._send(visitors)

        return run

    def _bring(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self._away:
                self._away[id(tensor)] = tensor, tensor.data
                tensor.data = tensor.data.to(self.device, copy=True)

    def _send(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) in self._away:
                _, tensor.data = self._away.pop(id(tensor))


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all their names, without those of lazy layers that were never called."""
    for tensors in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        yield from ((name, tensor) for name, tensor in tensors if not is_lazy(tensor))


def parts_of(model: nn.Module) -> list[Block]:
    """The elements of the outermost lists and sequences of a model, which can visit the device before a chain is known.

    Elements without modules inside are left out: their weights stay on the device, where hooks read them.
    """
    parts: list[Block] = []
    for path, module in model.named_modules():
        within = any(path == part.path or path.startswith(f"{part.path}.") for part in parts)
        if within or not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        for name, child in module.named_children():
            if any(True for _ in child.children()):
                parts.append(Block(f"{path}.{name}" if path else name, 0))
    return parts
