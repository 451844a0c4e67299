"""Models without their weights: the module of a directory of transformers, its blocks and shapes, its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from iobs.core.files import expanded, weight_files
from iobs.errors import ModelError, first_line
from iobs.models.huggingface import context_of, has_tokenizer, know_nemotron_nas, load_tokenizer
from iobs.models.loaded import LoadedModel, unwritable
from iobs.models.vision_shim import ensure_torchvision
from iobs.models.weights import read_entries
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.cost.machines import Network
from iobs.pruning.network.layers import find_layers
from iobs.pruning.network.selection import select
from iobs.pruning.runtime.memory import giving_memory_back
from iobs.pruning.store import Names


def skeleton(path: Path) -> nn.Module:
    """The module with parameters on the meta device and real buffers.

    Its code allocates every parameter on the CPU before it moves. A heap that keeps freed memory would get gaps as
    large as the model. Later tensors fill such gaps, and their pages stay resident after they are freed.

    Args:
        path: directory with a configuration of transformers.

    Raises:
        ModelError: the configuration describes no language model.
    """
    ensure_torchvision()
    import transformers

    try:
        know_nemotron_nas(path)
        config = transformers.AutoConfig.from_pretrained(path)
        with giving_memory_back(), _parameters_on_meta():
            factory: Any = transformers.AutoModelForCausalLM
            module: nn.Module = factory.from_config(config, dtype=config.dtype)
        if (path / "generation_config.json").is_file():
            module.generation_config = transformers.GenerationConfig.from_pretrained(path)  # type: ignore[assignment]
    except Exception as error:  # transformers raises exceptions of every kind
        raise ModelError(f"{path} cannot be opened as a language model: {first_line(error)}") from error
    return module.eval()


def blocks_of(module: nn.Module) -> list[Block]:
    """The elements of the ModuleList with the most weights: the decoder blocks."""
    lists = {path: child for path, child in module.named_modules() if isinstance(child, nn.ModuleList)}
    if not lists:
        raise ModelError(f"{type(module).__name__} has no list of blocks; prune it in memory instead.")
    path = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return [Block(f"{path}.{name}", 0) for name, _ in lists[path].named_children()]


def matrices_in_files(path: Path) -> list[str] | None:
    """Names of the prunable matrices of a language model if its files hold each of them under its name, else None.

    The files of other models need the module: they hold matrices transposed, several in one tensor, or tied.
    """
    if not (path / "config.json").is_file():
        return None
    try:
        module = skeleton(path)
    except ModelError:
        return None
    shapes = {name: entry.shape for file in weight_files(path) for name, entry in read_entries(file)[0].items()}
    layers = find_layers(module)
    held = all(
        isinstance(module.get_submodule(layer.path), nn.Linear) and shapes.get(f"{layer.name}.weight") == layer.shape
        for layer in layers
    )
    return [layer.name for layer in layers] if held else None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Register new parameters of all modules on the meta device, where they take no memory."""
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


def shapes_of(path: str | Path, include: Names = None, ignore: Names = None, depthwise: bool = False) -> Network:
    """The shapes of the model that a config.json describes.

    Args:
        path: a directory with config.json.
        include: names of the layers to prune; see `iobs.prune`.
        ignore: names of the layers that stay dense.
        depthwise: also prune depthwise convolutions.

    Raises:
        ModelError: the configuration is not of a language model with a list of blocks.
        LayerSelectionError: a name pattern matches nothing.
    """
    module = skeleton(expanded(Path(path)))
    blocks = blocks_of(module)
    chosen = select(module, include, ignore, depthwise=depthwise, check_finite=False).layers
    layers = [layer for layer in chosen if any(block.holds(layer.path) for block in blocks)]
    parameters = dict(module.named_parameters())
    context = context_of(module.config, None, module)  # type: ignore[arg-type]
    sizes = [sum(parameter.numel() for name, parameter in parameters.items() if block.holds(name)) for block in blocks]
    total = sum(parameter.numel() for parameter in parameters.values())
    vocabulary = int(getattr(module.config, "vocab_size", 0))
    dtype = next(module.parameters()).dtype
    hidden = int(getattr(module.config, "hidden_size", 0) or 0)
    outside = total - sum(sizes)
    return Network(layers, max(sizes), outside, total, vocabulary, dtype.itemsize, hidden, len(blocks), context)


def without_weights(path: Path, module: nn.Module) -> LoadedModel:
    """The tokenizer and the context length of a model directory, without weights, for reading calibration data.

    Args:
        path: the directory.
        module: its module, with or without weights.

    Raises:
        ModelError: the tokenizer's files are damaged.
    """
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    context = context_of(module.config, tokenizer, module)  # type: ignore[arg-type]
    refuse = unwritable("A model whose weights are not in memory cannot be written.")
    return LoadedModel(nn.Module(), tokenizer, str(path), "causal-lm", context, refuse)
