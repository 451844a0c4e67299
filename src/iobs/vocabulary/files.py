"""Removal of tokens in the files of a model that is too large for the memory: one tensor is read at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from iobs.core.files import expanded, weight_index
from iobs.errors import ModelError
from iobs.models import LoadedModel
from iobs.models.directory import Directory
from iobs.models.huggingface import check_directory, stored_dtype
from iobs.models.output import REPORTS, copy_companions
from iobs.models.skeleton import skeleton, without_weights
from iobs.models.weights import ShardWriter
from iobs.vocabulary.rows import tensors_of_tokens


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
