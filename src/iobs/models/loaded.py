"""`LoadedModel`, the result of every loader: a module, its tokenizer if any, and a function that writes both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor, nn

from iobs.errors import ModelError
from iobs.models.output import output_directory
from iobs.models.sixteen_bits import bytes_saved

Task = Literal["causal-lm", "image-classification", "other"]


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that iobs uses."""

    def __call__(self, text: list[str], *, verbose: bool) -> Mapping[str, list[list[int]]]:
        """Tokenise texts: `input_ids` holds one list of token numbers per text, special tokens included."""
        ...

    def save_pretrained(self, save_directory: str | Path) -> object:
        """Write the tokenizer files."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A network in eval mode, ready to be pruned or scored.

    Attributes:
        module: the network.
        tokenizer: its tokenizer, or None.
        source: the MODEL argument, as the user wrote it.
        task: the meaning of its outputs; "other" if unknown.
        context: maximum number of tokens in a window; None without a limit.
        writer: writes module and tokenizer into an existing empty directory.
    """

    module: nn.Module
    tokenizer: Tokenizer | None
    source: str
    task: Task
    context: int | None
    writer: Callable[[LoadedModel, Path], None]

    def save(self, directory: str | Path) -> None:
        """Write a directory that `iobs.models.load` reads; it appears complete or not at all.

        Raises:
            OutputError: the directory is not empty, or cannot be written.
        """
        with output_directory(Path(directory)) as temporary:
            self.writer(self, temporary)

    def write(self, directory: Path) -> None:
        """Write into an existing empty directory, such as one from `output_directory`."""
        self.writer(self, directory)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ModelError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ModelError(
                f"{self.source} has no tokenizer, so text cannot be fed to it. A network for images takes an .npz, a "
                "folder or a zip of images; any network takes --data FILE.py:function, which returns batches; a "
                "language model needs its tokenizer files (tokenizer.json)."
            )
        return self.tokenizer

    def window_length(self, length: int) -> int:
        """Tokens in a window: `length`, or the context of the model if that is shorter."""
        return length if self.context is None else min(length, self.context)


def unwritable(reason: str) -> Callable[[LoadedModel, Path], None]:
    """The writer of a model that cannot be written: it raises ModelError with a reason."""

    def refuse(model: LoadedModel, directory: Path) -> None:
        raise ModelError(reason)

    return refuse


def parameter_count(module: nn.Module) -> int:
    """Number of parameters; tied parameters count once."""
    return sum(parameter.numel() for parameter in module.parameters())


def size_in_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers in the dtypes they are saved in: about the size of the weight file."""
    tensors: Sequence[Tensor] = [*module.parameters(), *module.buffers()]
    return sum(tensor.nbytes for tensor in tensors) - bytes_saved(module)
