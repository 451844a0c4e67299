"""Open data sources by name (--data), and draw calibration batches from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from iobs.core.files import expanded
from iobs.core.specs import is_function_spec, require_data
from iobs.data.images import IMAGE_SUFFIXES, ImageFiles, read_arrays, read_images, statistics_of, transform_of
from iobs.data.tables import read_columns
from iobs.data.text import CORPORA, PIECE, Part, calibration_windows, corpus_documents, embedded_text, read_documents
from iobs.errors import CalibrationError, DataError, listed
from iobs.models import EMBEDDED, LoadedModel
from iobs.models.factory import call_function

_TABLES_OF_PAIRS = (".csv", ".tsv", ".parquet")

Batch: TypeAlias = Tensor | tuple[Tensor | Mapping[str, Tensor], Tensor] | Mapping[str, Tensor]


@dataclass(frozen=True)
class TextSource:
    """Text documents, to be tokenised and cut into windows."""

    name: str
    documents: Callable[[], Iterable[str]]


@dataclass(frozen=True)
class ArraySource:
    """Inputs (N, ...) and, if known, targets: classes (N,) int64, or real numbers (N, ...) float32.

    Inputs of type `ImageFiles` are read from files on access.
    """

    name: str
    inputs: Tensor | ImageFiles
    targets: Tensor | None


@dataclass(frozen=True)
class BatchSource:
    """Batches that a function of the user returned."""

    name: str
    batches: list[Batch]


@dataclass(frozen=True)
class PairSource:
    """Labelled pairs of texts.

    Attributes:
        name: of the source.
        pairs: two texts each.
        labels: one number for each pair; the order of these numbers is what counts.
    """

    name: str
    pairs: tuple[tuple[str, str], ...]
    labels: tuple[float, ...]


Source: TypeAlias = TextSource | ArraySource | BatchSource | PairSource


def open_source(specs: Sequence[str], part: Part, model: LoadedModel) -> Source:
    """Open a data source.

    Args:
        specs: text files, or one of: a corpus, an .npz file, a folder or zip file of images, FILE.py:function, or for
            the evaluation of an embedding model a table of labelled pairs of texts (`read_pairs`). Default (empty):
            the embedded model uses the embedded text; other language models use C4 for calibration and WikiText-2 for
            evaluation, as pruning papers do.
        part: part of a corpus to read, and the purpose of the default.
        model: the model that the data is for.

    Raises:
        DataError: a source does not exist or cannot be read, several sources are not all text files, or `specs` is
            empty and the model has no default.
    """
    if not specs:
        return _default(part, model)
    require_data(specs, CORPORA)
    if len(specs) == 1:
        spec = specs[0]
        if spec in CORPORA:
            return TextSource(spec, lambda: corpus_documents(spec, part))
        if is_function_spec(spec):
            return BatchSource(spec, _checked(spec, call_function(spec, _listed)))
        path = expanded(spec)
        if path.suffix.lower() == ".npz" and path.is_file():
            return ArraySource(spec, *read_arrays(path, statistics_of(model)))
        if path.is_dir() or (path.suffix.lower() == ".zip" and path.is_file()):
            return ArraySource(spec, *read_images(path, transform_of(model), statistics_of(model)))
        if part == "evaluation" and model.task == "other" and path.suffix.lower() in _TABLES_OF_PAIRS:
            return read_pairs(path, spec)
    files = [expanded(spec) for spec in specs]
    for file in files:
        _require_text(file, len(files))
    piece = PIECE if part == "calibration" else None
    return TextSource(", ".join(specs), lambda: chain.from_iterable(read_documents(file, piece) for file in files))


def _require_text(file: Path, count: int) -> None:
    """Check by its ending that one of `count` files holds no images, arrays or code.

    Raises:
        DataError: it does; the message says how such data are given.
    """
    ending = file.suffix.lower()
    if ending == ".py":
        raise DataError(f"{file} is Python code; name its function that returns batches, as {file}:FUNCTION.")
    if ending in IMAGE_SUFFIXES:
        raise DataError(f"{file} is one image; give a folder or zip of images.")
    if ending in (".npz", ".zip") and count > 1:
        raise DataError(f"{file} is one of {count} sources, and only text files can be several; give it alone.")
    if ending in (".npy", ".pt", ".pth", ".safetensors"):
        raise DataError(f"{file} is no text; write arrays with numpy.savez(FILE.npz, images=..., labels=...).")


def calibration_batches(
    source: Source, model: LoadedModel, *, samples: int, length: int, seed: int, batch: int = 8
) -> list[Batch]:
    """Draw calibration batches from a source. Batches of a `BatchSource` are returned unchanged.

    Args:
        source: result of `open_source`.
        model: the model to calibrate; provides tokenizer, dtype and context length.
        samples: number of windows or images.
        length: tokens per window, at most the context of the model.
        seed: seed of the draw.
        batch: samples per batch.

    Raises:
        CalibrationError: `samples` is less than 1, or the text is shorter than one window.
        ModelError: the source is text and the model has no tokenizer.
    """
    if samples < 1:
        raise CalibrationError(f"{samples} calibration samples were asked for; at least 1 is needed.")
    if isinstance(source, BatchSource):
        return source.batches
    if isinstance(source, PairSource):
        raise CalibrationError(f"{source.name} holds pairs of texts to score a model on; calibrate on texts.")
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
    """Iterate over batches of `batch` samples in the given order: inputs in the model's dtype, and targets if known."""
    dtype = next((value.dtype for value in model.module.parameters() if value.is_floating_point()), torch.float32)
    for chosen in torch.split(order, batch):
        inputs = source.inputs[chosen].to(dtype)
        yield inputs if source.targets is None else (inputs, source.targets[chosen])


def _default(part: Part, model: LoadedModel) -> Source:
    if model.source == str(EMBEDDED):
        split = "calibration" if part == "calibration" else "heldout"
        return TextSource("embedded text", lambda: embedded_text(split))  # type: ignore[arg-type]
    if model.task != "causal-lm":
        raise DataError(
            f"{model.source} needs --data: an .npz, a folder or zip of images, or "
            "FILE.py:function that returns batches."
        )
    name = "c4" if part == "calibration" else "wikitext2"
    return TextSource(name, lambda: corpus_documents(name, part))


def _listed(value: object) -> object:
    """Convert a generator or data loader of batches to a list; other values are returned unchanged."""
    if isinstance(value, Tensor | Mapping | str) or not isinstance(value, Iterable):
        return value
    return list(value)


def _checked(spec: str, batches: object) -> list[Batch]:
    """Check the batches that a function of the user returned; pairs become tuples.

    Raises:
        CalibrationError: the result is not a list, is empty, or holds something that is not a batch.
    """
    if not isinstance(batches, list):
        raise CalibrationError(f"{spec} returned {type(batches).__name__}; it must return a list of batches.")
    if not batches:
        raise CalibrationError(f"{spec} returned no batch.")
    checked: list[Batch] = []
    for number, entry in enumerate(batches, 1):
        pair = isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[1], Tensor)
        inputs = entry[0] if pair else entry
        mapping = isinstance(inputs, Mapping) and all(isinstance(part, Tensor) for part in inputs.values())
        if not (isinstance(inputs, Tensor) or mapping):
            raise CalibrationError(
                f"{spec}: batch {number} is {type(entry).__name__}; a batch is a tensor, "
                "(inputs, targets), or a mapping of tensors; inputs are a tensor or such a mapping."
            )
        checked.append(tuple(entry) if pair else entry)
    return checked


def read_pairs(file: Path, name: str) -> PairSource:
    """Read a table with a header, two columns of text and one of numbers; rows with a missing entry are left out.

    Raises:
        DataError: the file cannot be read, has other columns, or fewer than three whole rows.
    """
    columns = read_columns(file)
    texts = [values for values in columns.values() if values.dtype.kind == "O"]
    numbers = [values for values in columns.values() if values.dtype.kind in "biuf"]
    if len(texts) != 2 or len(numbers) != 1:
        raise DataError(
            f"{file} has the columns {listed([*columns])}; pairs of texts are two columns of text and one of numbers, "
            "such as sentence1, sentence2 and score."
        )
    rows = [
        (str(first), str(second), float(label))
        for first, second, label in zip(*texts, *numbers, strict=True)
        if first is not None and second is not None and label == label
    ]
    if len(rows) < 3:
        raise DataError(f"{file} has {len(rows)} whole rows; a rank correlation needs three pairs at least.")
    return PairSource(name, tuple((first, second) for first, second, _ in rows), tuple(label for *_, label in rows))
