"""Rows of a model that belong to tokens: embedding, output head, and ids of tokens in configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from iobs.errors import ModelError
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
    found: set[int] = set()
    for config in _configs(model):
        for name, value in vars(config).items():
            if name.endswith(_IDS):
                found.update(number for number in (value if isinstance(value, list) else [value]) if _is_id(number))
    return found


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
    found: dict[int, Any] = {}
    for module in model.modules():
        for name in ("config", "generation_config"):
            config = getattr(module, name, None)
            if hasattr(config, "to_dict"):
                found[id(config)] = config
                parts = [value for value in vars(config).values() if hasattr(value, "to_dict")]
                found |= {id(part): part for part in parts}
    return [*found.values()]


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
