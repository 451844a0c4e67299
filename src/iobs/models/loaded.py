"""What every loader returns: a module, its tokenizer where it has one, and how it is written back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.models.halves import bytes_saved
from iobs.models.output import output_directory

Task = Literal["causal-lm", "image-classification", "other"]


class Tokenizer(Protocol):
    """The little that iobs needs of a Hugging Face tokenizer."""

    def __call__(self, text: list[str], *, verbose: bool) -> Any:
        """A mapping whose `input_ids` are lists of token numbers, special tokens included."""
        ...

    def save_pretrained(self, save_directory: str | Path) -> Any:
        """Write the tokenizer's files."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A network in eval mode, ready to be pruned or scored.

    Attributes:
        module: the network.
        tokenizer: its tokenizer, or None.
        source: the MODEL that it was loaded from, as the user wrote it.
        task: what its outputs mean, where that is known.
        context: the most tokens that it may see at once, or None where it has no such limit.
        writer: writes module and tokenizer into an existing empty directory.
    """

    module: nn.Module
    tokenizer: Tokenizer | None
    source: str
    task: Task
    context: int | None
    writer: Callable[[LoadedModel, Path], None]

    def save(self, directory: str | Path) -> None:
        """Write a directory that `iobs.models.load` reads back; all of it appears at once, or nothing does.

        Raises:
            OutputError: the directory exists and is not empty, or cannot be written.
        """
        with output_directory(Path(directory)) as temporary:
            self.writer(self, temporary)

    def write(self, directory: Path) -> None:
        """Write into an existing directory, one that `output_directory` made."""
        self.writer(self, directory)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer, where text has to become tokens.

        Raises:
            ModelError: there is none.
        """
        if self.tokenizer is None:
            raise ModelError(
                f"{self.source} has no tokenizer, so text cannot be fed to it; add its tokenizer files "
                "(tokenizer.json) or give --data FILE.py:function that returns batches."
            )
        return self.tokenizer

    def window_length(self, asked: int) -> int:
        """Tokens in a window: as asked, but never more than the model's context."""
        return asked if self.context is None else min(asked, self.context)


def parameter_count(module: nn.Module) -> int:
    """Number of parameters, shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def size_in_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers as they are saved, which is about what the file needs."""
    tensors: Sequence[Tensor] = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors) - bytes_saved(module)
