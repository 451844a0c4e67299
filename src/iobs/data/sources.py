"""What --data may name, and how it becomes calibration batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from iobs.data.documents import CORPORA, PIECE, Part, corpus_documents, read_documents
from iobs.data.images import Pictures, read_arrays, read_pictures
from iobs.data.normalisation import statistics_of, transform_of
from iobs.data.topics import embedded_text
from iobs.data.windows import calibration_windows
from iobs.errors import CalibrationError, DataError
from iobs.models import EMBEDDED, LoadedModel
from iobs.models.factory import call_function, is_function_spec

Batch: TypeAlias = Tensor | tuple[Tensor | Mapping[str, Tensor], Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True)
class TextSource:
    """Documents, which a tokenizer turns into windows."""

    name: str
    documents: Callable[[], Iterable[str]]


@dataclass(frozen=True)
class ArraySource:
    """Inputs (N, ...) and, where known, targets: classes (N,) int64, or real numbers (N, ...) float32.

    Pictures in files come when they are asked for.
    """

    name: str
    inputs: Tensor | Pictures
    targets: Tensor | None


@dataclass(frozen=True)
class BatchSource:
    """Ready batches, as the user's own function gave them."""

    name: str
    batches: list[Batch]


Source: TypeAlias = TextSource | ArraySource | BatchSource


def open_source(specs: Sequence[str], part: Part, model: LoadedModel) -> Source:
    """What --data names: text files, a corpus, arrays, pictures, FILE.py:function, or nothing (a default).

    Without any, the embedded model takes the embedded text and every other language model C4 for calibration and
    WikiText-2 for evaluation, as pruning papers do.

    Raises:
        DataError: the source does not exist, cannot be read, or several that are not text files were named.
    """
    if not specs:
        return _default(part, model)
    if len(specs) == 1:
        spec = specs[0]
        if spec in CORPORA:
            return TextSource(spec, lambda: corpus_documents(spec, part))
        if is_function_spec(spec):
            return BatchSource(spec, _checked(spec, call_function(spec, _listed)))
        path = Path(spec).expanduser()
        if path.suffix.lower() == ".npz" and path.is_file():
            return ArraySource(spec, *read_arrays(path, statistics_of(model)))
        if path.is_dir() or (path.suffix.lower() == ".zip" and path.is_file()):
            return ArraySource(spec, *read_pictures(path, transform_of(model), statistics_of(model)))
    files = [Path(spec).expanduser() for spec in specs]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"{file} is not a file; --data takes text files (.txt, .jsonl, also .gz), one .npz, one folder or zip "
                f"of pictures, one FILE.py:function, or one of {', '.join(CORPORA)}."
            )
    piece = PIECE if part == "calibration" else None
    return TextSource(", ".join(specs), lambda: _all_documents(files, piece))


def calibration_batches(
    source: Source, model: LoadedModel, *, samples: int, length: int, seed: int, batch: int = 8
) -> list[Batch]:
    """Draw calibration batches from a source; ready batches are taken as they are.

    Args:
        source: what `open_source` gave.
        model: the model that will see them; gives the tokenizer and the longest window.
        samples: windows or pictures to draw.
        length: tokens in a window, shortened to the model's context.
        seed: of the draw.
        batch: samples in a batch.

    Raises:
        CalibrationError: the source is empty or shorter than one window.
        ModelError: text was given and the model has no tokenizer.
    """
    if samples < 1:
        raise CalibrationError(f"{samples} calibration samples were asked for; at least 1 is needed.")
    if isinstance(source, BatchSource):
        return source.batches
    if isinstance(source, TextSource):
        return [
            *calibration_windows(
                model.require_tokenizer(),
                source.documents(),
                samples,
                model.window_length(length),
                seed,
                batch=batch,
                labels=model.task == "causal-lm",
            )
        ]
    drawn = torch.randperm(len(source.inputs), generator=torch.Generator().manual_seed(seed))[:samples]
    return [*array_batches(source, model, drawn, batch)]


def array_batches(source: ArraySource, model: LoadedModel, order: Tensor, batch: int) -> Iterator[Batch]:
    """Inputs in the model's dtype, with targets where there are any, in the given order, `batch` at a time."""
    dtype = next((one.dtype for one in model.module.parameters() if one.is_floating_point()), torch.float32)
    for chosen in torch.split(order, batch):
        inputs = source.inputs[chosen].to(dtype)
        yield inputs if source.targets is None else (inputs, source.targets[chosen])


def _default(part: Part, model: LoadedModel) -> Source:
    if model.source == str(EMBEDDED):
        split = "calibration" if part == "calibration" else "heldout"
        return TextSource("embedded text", lambda: embedded_text(split))  # type: ignore[arg-type]
    if model.task != "causal-lm":
        raise DataError(
            f"{model.source} needs --data: an .npz, a folder or zip of pictures, or "
            "FILE.py:function that returns batches."
        )
    name = "c4" if part == "calibration" else "wikitext2"
    return TextSource(name, lambda: corpus_documents(name, part))


def _all_documents(files: Sequence[Path], piece: int | None) -> Iterator[str]:
    for file in files:
        yield from read_documents(file, piece)


def _listed(value: Any) -> Any:
    """What a user's function returned; a generator or loader of batches as a list."""
    if isinstance(value, Tensor | Mapping | str) or not isinstance(value, Iterable):
        return value
    return list(value)


def _checked(spec: str, batches: Any) -> list[Batch]:
    """The batches that a user's function returned, checked one by one.

    Raises:
        CalibrationError: it returned no list, an empty one, or one that holds something else.
    """
    if not isinstance(batches, list):
        raise CalibrationError(f"{spec} returned {type(batches).__name__}; it must return a list of batches.")
    if not batches:
        raise CalibrationError(f"{spec} returned no batch.")
    for number, entry in enumerate(batches, 1):
        pair = isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[1], Tensor)
        given = entry[0] if pair else entry
        mapping = isinstance(given, Mapping) and all(isinstance(part, Tensor) for part in given.values())
        if not (isinstance(given, Tensor) or mapping):
            raise CalibrationError(
                f"{spec}: batch {number} is {type(entry).__name__}; a batch is a tensor, "
                "(inputs, targets), or a mapping of tensors; inputs are a tensor or such a mapping."
            )
        if pair:
            batches[number - 1] = tuple(entry)
    return batches
