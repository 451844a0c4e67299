"""Model directories without weights: the tokenizer and the context length, for reading calibration data."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from iobs.core.files import expanded
from iobs.errors import ModelError, first_line
from iobs.models.huggingface import check_directory, context_of, has_tokenizer, load_tokenizer
from iobs.models.loaded import LoadedModel
from iobs.models.vision_shim import ensure_torchvision

__all__ = ["without_weights"]


def without_weights(path: Path, module: nn.Module) -> LoadedModel:
    """The tokenizer and the context length of a model directory, without weights, for reading calibration data.

    Args:
        path: the directory.
        module: its module, with or without weights.

    Raises:
        ModelError: the directory is damaged.
    """
    path = expanded(path)
    check_directory(path, allow_pickle=False)
    ensure_torchvision()
    import transformers

    def refuse(model: LoadedModel, folder: Path) -> None:
        raise ModelError("A model whose weights are not in memory cannot be written.")

    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises exceptions of every kind
        raise ModelError(f"{path} cannot be opened as a language model: {first_line(error)}") from error
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    return LoadedModel(nn.Module(), tokenizer, str(path), "causal-lm", context_of(config, tokenizer, module), refuse)
