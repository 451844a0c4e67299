"""Calibration batches: a tensor, a tuple (inputs, labels), or a mapping as Hugging Face models take; their samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from iobs.errors import CalibrationError, IOBSError, NonFiniteError, unless_out_of_memory

# A tensor, a tuple or list (inputs, labels), or a mapping by the names of the model's arguments.
Batch: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]

_NESTED = (Tensor, Mapping, tuple, list)  # what may hold tensors inside a batch
_TEXT = {"input_ids", "attention_mask", "token_type_ids", "position_ids", "labels"}  # of batches of text alone

AT_ONCE = 2048  # most positions of text in a forward pass of a large model whose logits or gradients are kept

# Names of `forward` in the causal language models of transformers, of which none uses labels except for its loss.
_CAUSAL = re.compile(r"(ForCausalLM|(?<!With)LMHeadModel)\.forward$")

# Exceptions that models raise for inputs of the wrong kind.
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError, ArithmeticError)


def collect(batches: Iterable[Batch] | Batch) -> list[Batch]:
    """Collect the batches into a list and check them.

    Args:
        batches: the data.

    Raises:
        CalibrationError: there is no batch, or a batch is empty or of an unknown type, or the data are one tuple
            (inputs, labels) in place of a list of batches.
        NonFiniteError: NaN or infinity in a batch; names the batch.
    """
    if isinstance(batches, (Tensor, Mapping)):
        batches = [batches]
    if isinstance(batches, tuple) and _is_pair(batches):
        raise CalibrationError("A single batch (inputs, labels) goes into a list: [(inputs, labels)].")
    try:
        iterator = iter(batches)
    except TypeError:
        raise CalibrationError(
            f"Calibration data must be an iterable of batches, such as a list of tensors; got {type(batches).__name__}."
        ) from None
    result = [*iterator]
    if not result:
        raise CalibrationError("There is no calibration data: give at least one batch of inputs.")
    for index, batch in enumerate(result):
        if size(batch, index) == 0:
            raise CalibrationError(f"Calibration batch {index} is empty.")
        for tensor in tensors(batch):
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise NonFiniteError(f"Calibration batch {index} holds NaN or infinity; leave it out or repair it.")
    return result


def _is_pair(batches: tuple[object, ...]) -> bool:
    """True if a tuple is one batch (inputs, labels), not several batches of inputs, as `Tensor.split` returns."""
    kinds = {(value.ndim, value.dtype) for value in batches if isinstance(value, Tensor)}
    return len(kinds) > 1 or (len(batches) == 2 and batches[0] is batches[1])


def tensors(batch: Batch) -> list[Tensor]:
    """The tensors of a batch, including those of mappings, tuples and lists inside it."""
    if isinstance(batch, Tensor):
        return [batch]
    values: Iterable[object] = batch.values() if isinstance(batch, Mapping) else batch
    return [tensor for value in values if isinstance(value, _NESTED) for tensor in tensors(value)]


def size(batch: Batch, index: int = 0) -> int:
    """Number of samples in a batch: the first dimension, which all its tensors share.

    A batch whose inputs cannot be split (`is_whole`) counts as one sample.

    Raises:
        CalibrationError: the batch is of another type or holds no tensor, its inputs are a tuple, or inputs and labels
            differ in length.
    """
    if not isinstance(batch, (Tensor, Mapping, tuple, list)):
        raise CalibrationError(
            f"Calibration batch {index} is a {type(batch).__name__}; "
            "a batch is a tensor, a tuple (inputs, labels), or a mapping of tensors."
        )
    if isinstance(batch, (tuple, list)) and any(isinstance(entry, (tuple, list)) and tensors(entry) for entry in batch):
        raise CalibrationError(
            f"Calibration batch {index} holds tensors in a tuple within a tuple; name the model's inputs in a mapping "
            "instead: ({name: tensor, ...}, labels)."
        )
    if is_whole(batch):
        return 1
    sizes = _lengths(batch)
    if not sizes:
        raise CalibrationError(f"Calibration batch {index} holds no tensor with a dimension for samples.")
    if len(sizes) > 1:
        raise CalibrationError(f"The tensors of calibration batch {index} differ in their number of samples: {sizes}.")
    return sizes.pop()


def _lengths(batch: Batch) -> set[int]:
    return {tensor.shape[0] for tensor in tensors(batch) if tensor.ndim}


def is_whole(batch: Batch) -> bool:
    """True if a batch cannot be split into samples: it counts as one.

    The inputs are then a mapping that holds tensors in a list, or a mapping whose tensors differ in their first
    dimension. Examples are the patches of several images, and the nodes and edges of a graph.
    """
    arguments = inputs(batch)
    if not isinstance(arguments, Mapping):
        return False
    listed = any(isinstance(value, (tuple, list)) and tensors(value) for value in arguments.values())
    return listed or len(_lengths(arguments)) > 1


def positions(batch: Batch) -> int:
    """Number of positions per sample: its tokens, or 1 if the batch is not text.

    Masks of truth values, whole numbers beside pictures, and labels of zeros and ones beside them are no text.
    """
    arguments = inputs(batch)
    named = arguments.items() if isinstance(arguments, Mapping) else [("", arguments)]
    pictures = any(tensor.is_floating_point() and tensor.ndim > 3 for tensor in tensors(arguments))
    texts = (
        tensor.shape[1]
        for name, value in named
        for tensor in (tensors(value) if isinstance(value, _NESTED) else ())
        if tensor.ndim == 2 and not tensor.is_floating_point() and _is_text(name, tensor, pictures)
    )
    return max(texts, default=1)


def position_count(batch: Batch) -> int:
    """Number of positions of all samples of a batch."""
    return size(batch) * positions(batch)


def _is_text(name: str, rows: Tensor, pictures: bool) -> bool:
    """True if an entry of whole numbers or truth values, (samples, positions), is text, by its name and company."""
    if name == "labels" and pictures:
        return bool((rows > 1).any())  # captions, not classes
    return name in _TEXT or (rows.dtype != torch.bool and not pictures)


def take(batch: Batch, rows: Tensor) -> Batch:
    """The samples of a batch at the given rows, int64; a batch that cannot be split is returned whole."""
    if is_whole(batch):
        return batch
    return mapped(batch, lambda tensor: tensor[rows.to(tensor.device)] if tensor.ndim else tensor)


def neighbours(batch: Batch, start: int, stop: int) -> Batch:
    """Neighbouring samples of a batch, as views of its tensors; a batch that cannot be split is returned whole."""
    if is_whole(batch):
        return batch
    return mapped(batch, lambda tensor: tensor[start:stop] if tensor.ndim else tensor)


def pieces(batch: Batch, most: int = AT_ONCE) -> Iterator[Batch]:
    """Parts of a batch with neighbouring samples, as views of its tensors; a batch that fits is one part.

    Args:
        batch: the batch; one that cannot be split is one part.
        most: positions of text in a part; a part has at least one sample.
    """
    count, length = size(batch), max(1, most // max(1, positions(batch)))
    for start in range(0, count, length):
        yield batch if length >= count else neighbours(batch, start, start + length)


def first_sample(batch: Batch) -> Batch:
    """The first sample of a batch, as a batch of one."""
    return take(batch, torch.zeros(1, dtype=torch.int64))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with all tensors on a device."""
    return mapped(batch, lambda tensor: tensor.to(device))


def mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """A batch of the same structure whose tensors are the results of `change`."""
    if isinstance(batch, Tensor):
        return change(batch)

    def changed(value: object) -> object:
        return mapped(value, change) if isinstance(value, _NESTED) else value

    if isinstance(batch, Mapping):
        return {key: changed(value) for key, value in batch.items()}
    return [*map(changed, batch)] if isinstance(batch, list) else tuple(map(changed, batch))


def join(batches: Sequence[Any]) -> Batch:
    """Concatenate batches; entries that are not tensors come from the first batch."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat([*batches]) if first.ndim else first
    if isinstance(first, Mapping):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, (tuple, list)):
        return tuple(
            join(entries) if isinstance(entries[0], (Tensor, Mapping)) else entries[0]
            for entries in zip(*batches, strict=True)
        )
    other: Batch = first
    return other


def layout(batch: Batch) -> tuple[object, ...]:
    """The names and shapes of the tensors of one sample."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape[1:])
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return tuple((name, layout(value)) for name, value in entries if isinstance(value, _NESTED))


def kind_of(batch: Batch) -> tuple[object, ...]:
    """The names, shapes and dtypes of the tensors of one sample: a model that takes it takes others of its kind."""
    return layout(batch), tuple(tensor.dtype for tensor in tensors(batch))


def inputs(batch: Batch) -> Batch:
    """The arguments of the model: the first entry of a tuple, otherwise the whole batch."""
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def forward(model: nn.Module, batch: Batch, with_loss: bool = False) -> object:
    """Call the model on a batch: mappings as keywords, anything else as the one positional argument.

    The model receives copies on its device, because it may change its input in place.

    Args:
        model: the model.
        batch: the batch.
        with_loss: also compute the model's own loss, from labels in the batch. Otherwise a causal language model of
            transformers receives no labels. Its loss takes a multiple of the memory of its outputs.
    """
    device, arguments = next(model.parameters()).device, inputs(batch)
    if not with_loss and isinstance(arguments, Mapping) and _labels_change_only_the_loss(model, arguments):
        arguments = {name: value for name, value in arguments.items() if name != "labels"}
    arguments = mapped(arguments, lambda tensor: tensor.to(device, copy=True))
    return model(**arguments) if isinstance(arguments, Mapping) else model(arguments)


def _labels_change_only_the_loss(model: nn.Module, arguments: Mapping[str, object]) -> bool:
    """True if the labels of a batch change nothing but the loss: those of a causal language model of transformers.

    An encoder-decoder makes the inputs of its decoder from its labels. Models of other authors may use labels as well,
    and so may a subclass or an instance with a forward of its own.
    """
    tokens, labels = arguments.get("input_ids"), arguments.get("labels")
    if "forward" in vars(model) or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    if not (isinstance(tokens, Tensor) and isinstance(labels, Tensor) and labels.shape == tokens.shape):
        return False
    function = getattr(type(model), "forward", None)
    place, name = getattr(function, "__module__", None) or "", getattr(function, "__qualname__", "")
    return place.startswith("transformers.models.") and _CAUSAL.search(name) is not None


def shapes(batch: Batch) -> str:
    """The shapes and dtypes of the tensors of a batch, for an error message."""
    names = (f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}" for tensor in tensors(batch))
    return f"tensors of shape {', '.join(names)}"


def called(model: nn.Module, batch: Batch, name: str, kind: type[IOBSError]) -> object:
    """Call the model as `forward` does with labels, and raise `kind` if it rejects the batch.

    Args:
        model: the model.
        batch: the batch.
        name: of the batch, for the message.
        kind: class of the error.
    """
    try:
        return forward(model, batch, with_loss=True)
    except unless_out_of_memory(*REFUSALS) as error:
        raise kind(f"The model cannot take {name}: {type(error).__name__}: {error}") from error


def require_known_tokens(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Raise unless the embedding of a language model has a row for every token id of batches of text.

    Models may replace the ids of images or sounds, so only batches of text alone are checked. On a GPU an unknown id is
    an error that no tensor of the process outlives.

    Raises:
        CalibrationError: it has none; names the batch.
    """
    embedding = _embedding_of(model)
    if embedding is None:
        return
    for number, batch in enumerate(batches):
        arguments = inputs(batch)
        ids = arguments.get("input_ids") if isinstance(arguments, Mapping) and arguments.keys() <= _TEXT else None
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32) or not ids.numel():
            continue
        least, most = (int(value) for value in ids.aminmax())
        if least < 0 or most >= embedding.num_embeddings:
            raise CalibrationError(
                f"Calibration batch {number} holds the token id {least if least < 0 else most}, and the model knows "
                f"the ids 0 to {embedding.num_embeddings - 1}. Take the model's own tokenizer; after adding a token to "
                "it, such as one for padding, call model.resize_token_embeddings."
            )


def _embedding_of(model: nn.Module) -> nn.Embedding | None:
    """The embedding of tokens that a model of transformers states; None for other models."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


@torch.no_grad()
def require_all_accepted(model: nn.Module, batches: Sequence[Batch], ends: tuple[type[Exception], ...] = ()) -> None:
    """Call the model on the first sample of one batch of each kind; kinds differ in shapes or dtypes.

    Args:
        model: the model.
        batches: calibration data.
        ends: exceptions by which the caller ends a call early.

    Raises:
        CalibrationError: the model rejects a batch; names its number, its shapes and the model's own error.
    """
    checked = set()
    for number, batch in enumerate(batches):
        if kind_of(batch) in checked:
            continue
        checked.add(kind_of(batch))
        with suppress(*ends):
            called(model, first_sample(batch), f"calibration batch {number}, {shapes(batch)}", CalibrationError)


# ---- samples: subsets of them, splits, new batches, and windows of text that are joined
_JOINED = {"input_ids", "attention_mask"}  # arguments of a model that can be joined


@dataclass(frozen=True)
class Samples:
    """Samples in batches, and for each batch the number of the caller's batch that it comes from."""

    batches: list[Batch] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)

    def add(self, batch: Batch, flags: Tensor, number: int) -> None:
        """Add the samples of a batch at which `flags`, (samples,) bool, is True."""
        if bool(flags.any()):
            self.batches.append(batch if bool(flags.all()) else take(batch, flags.nonzero()[:, 0]))
            self.numbers.append(number)

    def first(self, count: int, tokens: int | None = None) -> Samples:
        """The first `count` samples; with `tokens`, at most as many as fit that many tokens, and at least one."""
        if tokens is not None:
            count = min(count, max(1, tokens // max(map(positions, self.batches), default=1)))
        first = Samples()
        for batch, number in zip(self.batches, self.numbers, strict=True):
            missing = count - first.samples
            if missing <= 0:
                break
            first.add(batch, torch.arange(size(batch)) < missing, number)
        return first

    def pick(self, rows: Tensor) -> Batch:
        """One batch of the samples at the given positions, int64, counted over all batches; needs `alike`.

        Samples of one batch come in the given order, and batches in theirs.
        """
        sizes = torch.tensor([size(batch) for batch in self.batches])
        ends = sizes.cumsum(0)
        owners = torch.searchsorted(ends, rows, right=True)
        places = rows - (ends - sizes)[owners]
        return join([take(self.batches[owner], places[owners == owner]) for owner in torch.unique(owners).tolist()])

    @property
    def alike(self) -> bool:
        """True if the samples of all batches have tensors of the same names and shapes, so that they can be joined."""
        if len(self.batches) > 1 and any(map(is_whole, self.batches)):
            return False
        return len({layout(batch) for batch in self.batches}) == 1

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> Samples:
        """All samples of the given batches, which are numbered from 0."""
        return cls(list(batches), list(range(len(batches))))

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(size(batch) for batch in self.batches)


def rebatched(part: Samples, count: int) -> Samples:
    """The samples in batches of `count`; unchanged if their shapes differ."""
    return _regrouped(part, torch.split(torch.arange(part.samples), count))


def even(part: Samples) -> Samples:
    """The samples in batches whose sizes differ by at most one; unchanged if their shapes differ.

    There are as few batches as possible, and none is larger than the largest given batch.
    """
    count = -(-part.samples // max(map(size, part.batches)))
    return _regrouped(part, torch.tensor_split(torch.arange(part.samples), count))


def _regrouped(part: Samples, groups: Sequence[Tensor]) -> Samples:
    return Samples.of([part.pick(rows) for rows in groups]) if part.alike else part


def split(part: Samples, share: float, seed: int) -> tuple[Samples, Samples]:
    """Split the samples at random into calibration and held-out samples.

    Args:
        part: the samples.
        share: of the samples that is held out, in [0, 1).
        seed: of the draw over all batches.

    Returns:
        At least one calibration sample, and the held-out samples; there are none if the share rounds to zero.
    """
    sizes = [size(batch, index) for index, batch in enumerate(part.batches)]
    total = sum(sizes)
    count = min(round(total * share), total - 1)
    held = torch.zeros(total, dtype=torch.bool)
    held[torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:count]] = True
    calibration, heldout = Samples(), Samples()
    for batch, flags, number in zip(part.batches, torch.split(held, sizes), part.numbers, strict=True):
        calibration.add(batch, ~flags, number)
        heldout.add(batch, flags, number)
    return calibration, heldout


def divide(part: Samples, parts: int, seed: int) -> list[Samples]:
    """Divide the samples at random into disjoint parts, one for each round.

    Raises:
        CalibrationError: there are fewer samples than parts.
    """
    if part.samples < parts:
        raise CalibrationError(f'data="fresh" needs a sample for each of {parts} rounds, got {part.samples} samples.')
    sizes = [size(batch) for batch in part.batches]
    owner = torch.randperm(part.samples, generator=torch.Generator().manual_seed(seed)) % parts
    divided = [Samples() for _ in range(parts)]
    for batch, owners, number in zip(part.batches, torch.split(owner, sizes), part.numbers, strict=True):
        for index, samples in enumerate(divided):
            samples.add(batch, owners == index, number)
    return divided


def packed(model: nn.Module, part: Samples, tokens: int) -> Samples:
    """Half of the windows of a text joined to windows of at most `tokens` tokens, beside the other half.

    Weights that are fitted on short windows only match the dense model at the positions of these windows, and lose at
    later positions. In a causal model the text that is joined behind a window changes no output of this window.

    Args:
        model: only a causal decoder with a stated context has its windows joined.
        part: samples. Windows with padding, of unequal length or with other arguments than ids and mask are unchanged.
        tokens: most tokens of a joined window; the context of the model is another limit.

    Returns:
        A batch of joined windows, and a batch of the others; or `part` itself if nothing is joined.
    """
    if not part.batches or not all(map(_is_full_text, part.batches)) or not part.alike or not _is_causal(model):
        return part
    length = positions(part.batches[0])
    context = int(getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0)
    count = min(tokens, context) // length
    if count < 2 or part.samples < count:
        return part
    rows = torch.arange(part.samples)
    group = rows // count
    joins = (group % 2 == 0) & (group < part.samples // count)  # every second group of windows
    joined = mapped(part.pick(rows[joins]), lambda tensor: tensor.reshape(-1, count * length))
    others = [part.pick(rows[~joins])] if not bool(joins.all()) else []
    return Samples([joined, *others], [part.numbers[0], part.numbers[-1]][: 1 + len(others)])


def _is_full_text(batch: Batch) -> bool:
    """True if a batch holds ids of tokens, perhaps a mask, no padding, and nothing else."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch or not batch.keys() <= _JOINED:
        return False
    mask = batch.get("attention_mask")
    if any(not isinstance(value, Tensor) or value.ndim != 2 for value in batch.values()):
        return False
    return mask is None or (mask.shape == batch["input_ids"].shape and bool(mask.all()))


def _is_causal(model: nn.Module) -> bool:
    """True if every attention of a model declares itself causal, as Hugging Face modules do."""
    declared = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return bool(declared) and all(declared)
