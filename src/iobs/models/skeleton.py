"""The module of a directory of transformers without its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from iobs.core.files import weight_files
from iobs.errors import ModelError, first_line
from iobs.models.shards import read_entries
from iobs.models.vision_shim import ensure_torchvision
from iobs.pruning.network.layers import find_layers
from iobs.pruning.runtime.memory import giving_memory_back


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
        config = transformers.AutoConfig.from_pretrained(path)
        with giving_memory_back(), _parameters_on_meta():
            factory: Any = transformers.AutoModelForCausalLM
            module: nn.Module = factory.from_config(config, dtype=config.dtype)
    except Exception as error:  # transformers raises exceptions of every kind
        raise ModelError(f"{path} cannot be opened as a language model: {first_line(error)}") from error
    return module.eval()


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
