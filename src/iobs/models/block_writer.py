"""Writer of the files of a pruned model, block by block."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from iobs.models.companions import REPORTS, copy_companions
from iobs.models.shards import ShardWriter
from iobs.models.streamed import StreamedModel
from iobs.pruning.calibration.blocks import Block


@dataclass
class BlockWriter:
    """Write the files of the pruned model block by block, in the layout of the source's files.

    Args:
        streamed: the model and the source's files.
        directory: of the written files.
        writes: False counts the zeros and writes nothing, on all ranks but the first.

    Attributes:
        zeros: number of zeros of every written parameter, by name; a shared parameter has one name. Tensors that are
            converted have their name in the files.
    """

    streamed: StreamedModel
    directory: Path
    writes: bool = True
    zeros: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> BlockWriter:
        source, module = self.streamed.directory, self.streamed.module
        first = {id(parameter): name for name, parameter in module.named_parameters()}
        parameters = module.named_parameters(remove_duplicate=False)
        self.names = {name: first[id(parameter)] for name, parameter in parameters}
        self.writers: dict[Path, ShardWriter] = {}
        if self.writes:
            copy_companions(source.path, self.directory, keep_index=True, leave=REPORTS)
            self.writers = {
                file: ShardWriter(self.directory / file.name, entries, source.metadata[file])
                for file, entries in source.shards.items()
            }
        inner = {name for block in self.streamed.blocks for name in self.streamed.names(block)}
        self._put(source.unchanged([name for name in source.entries if name not in inner]))
        return self

    def block(self, block: Block, pruned: set[str]) -> None:
        """Write a block: pruned tensors from memory, the others bit for bit from the source."""
        source, state = self.streamed.directory, self.streamed.module.state_dict()
        for names in source.together(pruned):  # none of the tensors of a conversion is in memory when the next begins
            rounded = ((name, state[name].to(source.entries[name].dtype)) for name in names)
            self._put(map(self._unrounded, source.changed(dict(rounded))))
        self._put(source.unchanged({*self.streamed.names(block)} - source.with_others(pruned)))

    def _unrounded(self, named: tuple[str, Tensor]) -> tuple[str, Tensor]:
        """A tensor of the files; its own bits if it was only rounded for the computations, as an expert left out."""
        source, (name, tensor) = self.streamed.directory, named
        arithmetic = self.streamed.arithmetic
        if source.name_of(name) is None and torch.promote_types(arithmetic, tensor.dtype) is not arithmetic:
            for _, own in source.stored([name]):
                if torch.equal(own.to(arithmetic).to(own.dtype), tensor.to(own.dtype)):
                    return name, own
        return named

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor into the file that holds it in the source; a second call replaces it."""
        self._put(self.streamed.directory.changed({name: tensor}))

    def _put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors by their name in the files."""
        for name, tensor in tensors:
            counted = self._counted(name)
            for file, entries in self.streamed.directory.shards.items():
                if name in entries:
                    written = tensor.to(entries[name].dtype)
                    if counted is not None:
                        self.zeros[counted] = int((written == 0).sum())
                    if self.writes:
                        self.writers[file].put(name, written)

    def _counted(self, source: str) -> str | None:
        """The name under which the zeros of a tensor of the files are counted; None for one that is no parameter."""
        name = self.streamed.directory.name_of(source)
        return source if name is None else self.names.get(name)

    def __exit__(self, kind: Any, *_: Any) -> None:
        for writer in self.writers.values():
            writer.opened.close() if kind else writer.close()
