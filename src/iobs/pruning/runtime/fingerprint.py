"""Fingerprints of settings, samples and weights: two runs with equal fingerprints give the same result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.metadata import version
from types import CellType, CodeType

import numpy as np
import torch
from torch import Tensor, nn

from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch


def identity_of(
    settings: Mapping[str, object], state: Iterable[tuple[str, Tensor]], fit: Iterable[Batch], heldout: Iterable[Batch]
) -> dict[str, object]:
    """The identity of a run: settings, library versions, and digests of all weights and samples.

    Args:
        settings: as JSON values.
        state: name and tensor of every parameter and buffer.
        fit: calibration batches.
        heldout: held-out batches.
    """
    digests = {f"weights {name}": _digest([value]) for name, value in state}
    data = {
        f"{name} data": _digest([tensor for batch in part for tensor in data_batches.tensors(batch)])
        for name, part in (("calibration", fit), ("held-out", heldout))
    }
    return {**settings, "iobs": version("iobs"), "torch": torch.__version__, **data, **digests}


def _digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]


def fingerprint(value: object, depth: int = 6) -> str:
    """A text that is equal for equal settings, in every process.

    It describes a function by code and closure, a module by layers and state, and a container by its entries. An object
    without a repr of its own is described by its class and attributes, anything else by its repr.

    Args:
        value: the setting.
        depth: levels of nesting to look into.
    """
    if isinstance(value, Tensor):
        return _digest([value])
    inner = _parts(value) if depth else []
    if not inner:
        return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    parts = " ".join(fingerprint(entry, depth - 1) for entry in inner)
    return f"{name} {hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def _parts(value: object) -> Sequence[object]:
    """The parts that identify a value; empty if its repr identifies it."""
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        closed = [_content(cell) for cell in getattr(value, "__closure__", None) or ()]
        given = [getattr(value, name, None) for name in ("__defaults__", "__kwdefaults__", "__self__")]
        return [code.co_code, code.co_names, *code.co_consts, *given, *closed]
    if isinstance(value, nn.Module):
        return [repr(value), *value.state_dict().items()]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, value.tolist() if value.dtype.hasobject else value.tobytes()]
    if isinstance(value, Mapping):
        return [*value.items()]
    if isinstance(value, list | tuple):
        return [*value]
    if isinstance(value, set | frozenset):
        return sorted(fingerprint(entry) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return [(one.name, getattr(value, one.name)) for one in fields(value)]
    # Objects with a repr of their own, such as loggers, may have attributes that differ between processes.
    default_repr = " object at 0x" in repr(value) and hasattr(value, "__dict__")
    return sorted(vars(value).items(), key=str) if default_repr else []


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
