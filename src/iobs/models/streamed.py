"""A model directory as a module without weights, and the files that they are read from, a block at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from iobs.errors import LayerSelectionError, ModelError, first_line
from iobs.models.huggingface import check_directory
from iobs.models.output import expanded
from iobs.models.shards import Entry, read_entries
from iobs.models.vision_shim import ensure_torchvision
from iobs.prune.layers import Layer, Selection, select
from iobs.prune.trace import Block, inside


@dataclass
class Directory:
    """The tensors of a model directory by name, read one at a time."""

    path: Path
    shards: dict[Path, dict[str, Entry]] = field(default_factory=dict)
    metadata: dict[Path, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for file in check_directory(self.path, allow_pickle=False):
            self.shards[file], self.metadata[file] = read_entries(file)

    @property
    def entries(self) -> dict[str, Entry]:
        """Every tensor of every file."""
        return {name: entry for entries in self.shards.values() for name, entry in entries.items()}

    def read(
        self, names: Sequence[str], device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The named tensors on a device, floating ones in another dtype where one is given."""
        wanted = set(names)
        for file, entries in self.shards.items():
            present = wanted & entries.keys()
            if present:
                with safe_open(file, framework="pt") as opened:
                    for name in sorted(present):
                        stored = opened.get_tensor(name)
                        wanted_dtype = dtype if dtype is not None and stored.is_floating_point() else stored.dtype
                        yield name, stored.to(device, wanted_dtype, copy=True)


@dataclass
class StreamedModel:
    """A module whose blocks have no weights yet; everything else is loaded.

    Blocks are loaded in `arithmetic`, what they are computed in; the files keep the dtypes that they had.
    """

    directory: Directory
    module: nn.Module
    blocks: list[Block]
    selection: Selection
    device: torch.device
    arithmetic: torch.dtype
    surplus: frozenset[str] = frozenset()  # tensors of the files that the module has no place for

    @classmethod
    def open(
        cls,
        path: Path,
        include: Any = None,
        skip: Any = None,
        *,
        device: str = "cpu",
        arithmetic: torch.dtype | None = None,
    ) -> StreamedModel:
        """Build the module of a directory and load what lies outside its blocks.

        Args:
            path: the directory.
            include: name patterns of layers to prune.
            skip: name patterns of layers that stay dense.
            device: where blocks are computed.
            arithmetic: what blocks are computed in; by default the widest dtype of the weights to be pruned, so that
                none of them is rounded further, but float32 on processors that would have to imitate 16-bit numbers,
                which takes several times as long.

        Raises:
            ModelError: the directory is damaged, its files name their tensors otherwise than the module does, or the
                module has no list of equal blocks, or its weights are quantised.
            LayerSelectionError: no chosen layer is inside a block.
        """
        path = expanded(path)
        directory = Directory(path)
        module = _skeleton(path)
        surplus = _surplus(module, directory)
        blocks = _blocks(module)
        prefixes = tuple(f"{block.path}." for block in blocks)
        outside = [name for name in directory.entries if not name.startswith(prefixes) and name not in surplus]
        _move_buffers(module, device)
        _fill(module, directory.read(outside, device))
        _tie(module)
        parameters = module.named_parameters(remove_duplicate=False)
        _require_all(directory, [name for name, one in parameters if one.is_meta and not name.startswith(prefixes)])
        chosen = select(module, include, skip, check_finite=False)
        layers = tuple(one for one in chosen.layers if any(inside(one, block.path) for block in blocks))
        dropped = {one.name: "outside the blocks" for one in chosen.layers if one not in layers}
        if not layers:
            raise LayerSelectionError(
                f"Block by block only layers inside the blocks are pruned, and {', '.join(dropped)} is outside; choose "
                "others, or prune the network in memory."
            )
        selection = Selection(layers, {**chosen.skipped, **dropped})
        place, widest = torch.device(device), _widest({one.key: directory.entries[one.key].dtype for one in layers})
        return cls(directory, module, blocks, selection, place, arithmetic or _native(widest, place), surplus)

    def names(self, block: Block) -> list[str]:
        """The names of a block's tensors."""
        names = self.directory.entries.keys() - self.surplus
        return sorted(name for name in names if name.startswith(f"{block.path}."))

    def load(self, block: Block) -> None:
        """Bring a block's weights into memory."""
        _fill(self.module, self.directory.read(self.names(block), self.device, self.arithmetic))

    def drop(self, block: Block) -> None:
        """Let a block's weights go."""
        self.module.get_submodule(block.path).to("meta")

    def drop_outside(self) -> None:
        """Let all weights go: the embedding has been run, and the head is not run at all."""
        for holder in self.module.modules():
            for name, parameter in holder._parameters.items():
                holder._parameters[name] = None if parameter is None else nn.Parameter(parameter.to("meta"), False)

    def rounded(self, layer: Layer, weight: Tensor) -> Tensor:
        """A weight as the layer's file can hold it."""
        return weight.to(self.directory.entries[layer.key].dtype)


def _widest(stored: Mapping[str, torch.dtype]) -> torch.dtype:
    """The dtype that holds the numbers of all the named weights: of bfloat16 and float16 together that is float32."""
    for name, dtype in stored.items():
        if dtype.itemsize < 2:
            raise ModelError(f"{name} is quantised ({dtype}); prune the weights that it was made from.")
    return reduce(torch.promote_types, stored.values())


def _native(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype itself, or float32 where a CPU has no instructions for it."""
    if device.type != "cpu" or stored not in (torch.bfloat16, torch.float16):
        return stored
    able = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16") if stored is torch.bfloat16 else ("avx512_fp16", "amx_fp16")
    return stored if any(able.get(name) for name in names) else torch.float32


def _skeleton(path: Path) -> nn.Module:
    """The module with parameters that take no memory and buffers that are real."""
    ensure_torchvision()
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with _parameters_on_meta():
            factory: Any = transformers.AutoModelForCausalLM
            module: nn.Module = factory.from_config(config, dtype=config.dtype)
    except Exception as error:  # transformers raises every kind
        raise ModelError(f"{path} cannot be opened as a language model: {first_line(error)}") from error
    return module.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _surplus(module: nn.Module, directory: Directory) -> frozenset[str]:
    """The tensors that the module has no place for, once all that it needs is there."""
    state, entries = module.state_dict(), directory.entries
    strange = [name for name in entries if name not in state]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    there = {id(parameters[name]) for name in entries if name in parameters}  # under all names of what is tied
    missing = [name for name in state if name not in entries and id(parameters.get(name)) not in there]
    if strange and missing:
        raise ModelError(
            f"{directory.path} names its tensors otherwise than {type(module).__name__} does ({strange[0]}), so it "
            "cannot be pruned block by block; prune it in memory instead."
        )
    _require_all(directory, missing)
    if strange:
        warnings.warn(
            f"{directory.path} holds {len(strange)} tensors that {type(module).__name__} has no place for, "
            f"{strange[0]} the first; they are not used, and are written as they are.",
            stacklevel=2,
        )
    wrong = [name for name, entry in entries.items() if name in state and tuple(state[name].shape) != entry.shape]
    if wrong:
        raise ModelError(
            f"{wrong[0]} has the shape {entries[wrong[0]].shape} in the files of {directory.path} and "
            f"{tuple(state[wrong[0]].shape)} by its configuration; one of them is wrong."
        )
    return frozenset(strange)


def _require_all(directory: Directory, missing: Sequence[str]) -> None:
    if missing:
        raise ModelError(f"{directory.path} lacks {len(missing)} weights, {missing[0]} the first; complete the files.")


def _blocks(module: nn.Module) -> list[Block]:
    """The elements of the module's list that holds the most weights: its decoder blocks."""
    lists = {path: found for path, found in module.named_modules() if isinstance(found, nn.ModuleList)}
    if not lists:
        raise ModelError(f"{type(module).__name__} has no list of blocks; prune it in memory instead.")
    path = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return [Block(f"{path}.{name}", 0) for name, _ in lists[path].named_children()]


def _fill(module: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        path, _, last = name.rpartition(".")
        holder = module.get_submodule(path)
        if last in holder._parameters:
            holder._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            holder._buffers[last] = tensor


def _move_buffers(module: nn.Module, device: str) -> None:
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            holder._buffers[name] = None if buffer is None else buffer.to(device)


def _tie(module: nn.Module) -> None:
    """Give weights that the files hold once to every module that uses them."""
    module.tie_weights()  # type: ignore[operator]
