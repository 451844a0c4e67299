"""Rows of a model that belong to tokens, in memory and in files: embedding, output head, ids in configurations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from iobs.core.files import expanded, weight_index
from iobs.errors import ModelError
from iobs.models import LoadedModel
from iobs.models.directory import Directory
from iobs.models.huggingface import check_directory, stored_dtype
from iobs.models.output import REPORTS, copy_companions
from iobs.models.skeleton import skeleton, without_weights
from iobs.models.weights import ShardWriter
from iobs.pruning.network.copies import dense_copy

_IDS = ("_token_id", "_token_index")  # ends of the names of ids in configurations
_LISTS = ("suppress_tokens", "begin_suppress_tokens")  # lists of ids, from which removed tokens are left out


def with_rows(model: nn.Module, rows: Tensor) -> nn.Module:
    """A copy of a model with some rows of its embedding and output head; it shares all other tensors with the model.

    Args:
        model: a model of transformers.
        rows: (tokens,) int64, the kept rows in their new order.

    Raises:
        ModelError: the model has no embedding of tokens, or it has fewer rows than asked for.
    """
    embedding = embedding_of(model)
    size = len(embedding.weight)
    if int(rows.max()) >= size:
        raise ModelError(f"The tokenizer has token {int(rows.max()):,}, and the embedding of the model {size:,} rows.")
    numbers = {int(row): number for number, row in enumerate(rows)}
    smaller = {id(tensor): _sliced(tensor, rows) for tensor in tensors_of_tokens(model)}
    shared: dict[int, object] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    narrower = dense_copy(model, {**shared, **smaller})
    sliced = {id(tensor) for tensor in smaller.values()}
    for module in narrower.modules():
        attributes = vars(module)
        if attributes.get("vocab_size") == size:
            attributes["vocab_size"] = len(rows)
        if id(module._parameters.get("weight")) in sliced:
            for name in ("num_embeddings", "out_features"):
                if name in attributes:
                    attributes[name] = len(rows)
        if not isinstance(module, nn.Embedding) or id(module.weight) in sliced:  # tables of positions have their own
            padding = attributes.get("padding_idx")
            attributes |= {} if padding is None else {"padding_idx": numbers.get(padding)}
    for config in _configs(narrower):
        _renumber(vars(config), numbers, size)
    return narrower


def embedding_of(model: nn.Module) -> nn.Embedding:
    """The embedding of tokens.

    Raises:
        ModelError: the model says of none, or it is not an ordinary one.
    """
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        embedding = None
    if not isinstance(embedding, nn.Embedding) or "weight" not in embedding._parameters:
        raise ModelError(
            f"{type(model).__name__} has no embedding of tokens from which rows can be removed; only language models "
            "of transformers do."
        )
    return embedding


def named_ids(model: nn.Module) -> set[int]:
    """Ids of tokens that the configurations of a model name, such as those of the beginning and end of a text."""
    ids: set[int] = set()
    for config in _configs(model):
        for name, value in vars(config).items():
            if name.endswith(_IDS):
                ids.update(number for number in (value if isinstance(value, list) else [value]) if _is_id(number))
    return ids


def tensors_of_tokens(model: nn.Module) -> Iterator[Tensor]:
    """The tensors with a row for each token: embedding, head and its bias; tied ones may come twice."""
    size = len(embedding_of(model).weight)
    yield embedding_of(model).weight
    head = model.get_output_embeddings()  # type: ignore[operator]
    if head is not None:
        yield from (value for value in head._parameters.values() if value is not None and len(value) == size)
    for name, buffer in model.named_buffers():
        if name.endswith("final_logits_bias"):  # of BART and its kin, (1, tokens)
            yield buffer


def _sliced(tensor: Tensor, rows: Tensor) -> Tensor:
    rows = rows.to(tensor.device)
    if not isinstance(tensor, nn.Parameter):
        return tensor[..., rows]
    return nn.Parameter(tensor.detach()[rows], tensor.requires_grad)


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a model, of its parts, and of generation."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        for name in ("config", "generation_config"):
            config = getattr(module, name, None)
            if hasattr(config, "to_dict"):
                configs[id(config)] = config
                parts = [value for value in vars(config).values() if hasattr(value, "to_dict")]
                configs |= {id(part): part for part in parts}
    return [*configs.values()]


def _renumber(settings: dict[str, Any], numbers: Mapping[int, int], size: int) -> None:
    """Give the ids in a configuration their new numbers; an id without a token becomes None."""
    for name, value in settings.items():
        if name == "vocab_size" and value == size:
            settings[name] = len(numbers)
        elif isinstance(value, list) and (name.endswith(_IDS) or name in _LISTS):
            settings[name] = [numbers[number] for number in value if number in numbers]
        elif name.endswith(_IDS) and _is_id(value):
            settings[name] = numbers.get(value)


def _is_id(value: object) -> bool:
    return type(value) is int and value >= 0


def open_without_weights(directory: str | Path) -> LoadedModel:
    """A language model whose parameters have no values, for `reduce_vocabulary`: its files are read when it writes.

    Args:
        directory: a model directory with safetensors.

    Raises:
        ModelError: it is none, or describes no language model.
    """
    path = expanded(directory)
    module = skeleton(path)
    module.to(stored_dtype(check_directory(path, allow_pickle=False)))  # for the size of the files
    return replace(without_weights(path, module), module=module)


def write_rows(model: LoadedModel, smaller: LoadedModel, rows: Tensor, directory: Path) -> None:
    """Write the files of a model with some rows of its embedding and head; all else is written as it is stored.

    Args:
        model: from `open_without_weights`.
        smaller: the same with fewer rows.
        rows: (tokens,) int64, the rows that are left.
        directory: an existing directory.

    Raises:
        ModelError: the files are damaged, or hold the rows in another layout.
    """
    source = Directory(Path(model.source))
    source.use_names_of(model.module)
    cut = {id(tensor): tensor for tensor in tensors_of_tokens(model.module)}
    every = [*model.module.named_parameters(remove_duplicate=False), *model.module.named_buffers()]
    names = {name for name, tensor in every if id(tensor) in cut and name in source.entries}
    stored = {name for name, tensor, _ in source.write(names, {}) if tensor.shape[0] == len(next(iter(cut.values())))}
    if len(stored) != len(names):
        raise ModelError(f"{model.source} holds its embedding in a layout from which no rows can be taken one by one.")
    smaller.module.config.save_pretrained(directory)  # type: ignore[operator, union-attr]
    copy_companions(source.path, directory, keep_index=True, leave=REPORTS)
    with ExitStack() as stack:
        writers: dict[str, ShardWriter] = {}
        for file, entries in source.shards.items():
            fewer = {
                name: replace(entry, shape=(len(rows), *entry.shape[1:])) if name in stored else entry
                for name, entry in entries.items()
            }
            writers |= dict.fromkeys(
                entries, stack.enter_context(ShardWriter(directory / file.name, fewer, source.metadata[file]))
            )
        for name, tensor, _ in source.write(source.entries, {}):
            writers[name].put(name, tensor[rows] if name in stored else tensor)
    _correct_index(directory)


def _correct_index(directory: Path) -> None:
    """Give the index of shards their new size in bytes."""
    file = weight_index(directory)
    if file is not None:
        index = json.loads(file.read_text(encoding="utf8"))
        total = sum(entry.bytes for entries in Directory(directory).shards.values() for entry in entries.values())
        index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        file.write_text(json.dumps(index, indent=2), encoding="utf8")
