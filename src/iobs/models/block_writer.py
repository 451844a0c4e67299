"""Writer of the files of a pruned model, block by block."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        zeros: number of zeros of every written parameter, by name; a shared parameter has one name.
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
        for name, tensor in source.read([name for name in source.entries if name not in inner]):
            self.put(name, tensor)
        return self

    def block(self, block: Block, pruned: set[str]) -> None:
        """Write a block: pruned tensors from memory, the others bit for bit from the source."""
        source, state = self.streamed.directory, self.streamed.module.state_dict()
        for name in pruned:
            self.put(name, state[name].to(source.entries[name].dtype))
        for name, tensor in source.read([name for name in self.streamed.names(block) if name not in pruned]):
            self.put(name, tensor)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write a tensor into the file that holds it in the source; a second call replaces it."""
        if name in self.names:
            self.zeros[self.names[name]] = int((tensor == 0).sum())
        for file, entries in self.streamed.directory.shards.items():
            if self.writes and name in entries:
                self.writers[file].put(name, tensor)

    def __exit__(self, kind: Any, *_: Any) -> None:
        for writer in self.writers.values():
            writer.opened.close() if kind else writer.close()
