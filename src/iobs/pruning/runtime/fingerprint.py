"""Fingerprints of settings, samples and weights: two runs with equal fingerprints give the same result."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType

import numpy as np
import torch
from torch import Tensor, nn

import iobs
from iobs.pruning.runtime.differences import DIGEST
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch


def identity_of(
    settings: Mapping[str, object], state: Iterable[tuple[str, Tensor]], fit: Sequence[Batch], heldout: Sequence[Batch]
) -> dict[str, object]:
    """The identity of a run: settings, library versions, and shapes and digests of all weights and samples.

    Args:
        settings: as JSON values.
        state: name and tensor of every parameter and buffer.
        fit: calibration batches.
        heldout: held-out batches.
    """
    data = {"calibration data": _data(fit), "held-out data": _data(heldout)}
    versions = {"version of iobs": iobs.__version__, "version of torch": torch.__version__}
    return {**settings, **versions, **data, "weights": {name: _tensor(value) for name, value in state}}


def _data(batches: Sequence[Batch]) -> dict[str, object]:
    """Numbers and shapes that say in what data differ, and the digest that says whether they do."""
    tensors = [[*data_batches.tensors(batch)] for batch in batches]
    shapes = dict.fromkeys(f"{tuple(one.shape[1:])} {one.dtype}" for batch in tensors for one in batch)
    return {
        "samples": sum(data_batches.size(batch) for batch in batches),
        "batches": len(tensors),
        "shapes of a sample": ", ".join(shapes),
        "contents": _digest([one for batch in tensors for one in batch], fingerprint([*map(_beside_tensors, batches)])),
    }


def _beside_tensors(value: object) -> object:
    """A batch, or an entry of one, without the contents of its tensors: names, flags and numbers are left."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return {name: _beside_tensors(one) for name, one in value.items()}
    return [*map(_beside_tensors, value)] if isinstance(value, list | tuple) else value


def _tensor(value: Tensor) -> dict[str, object]:
    return {"shape": f"{tuple(value.shape)} {value.dtype}", "contents": _digest([value])}


def _digest(tensors: Iterable[Tensor], beside: str = "") -> str:
    total = hashlib.sha256(beside.encode())
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"{DIGEST}{total.hexdigest()[:16]}"


def fingerprint(value: object, depth: int = 6) -> str:
    """A text that is equal for equal settings, in every process.

    It describes a function by code and closure, a module by layers, numbers and state, and a container by its entries.
    An object without a repr of its own is described by its class and attributes, anything else by its repr.

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
    return f"{name} {DIGEST}{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def _parts(value: object) -> Sequence[object]:
    """The parts that identify a value; empty if its repr identifies it."""
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        closed = [_content(cell) for cell in getattr(value, "__closure__", None) or ()]
        given = [getattr(value, name, None) for name in ("__defaults__", "__kwdefaults__", "__self__")]
        return [code.co_code, code.co_names, *code.co_consts, *given, *closed]
    if isinstance(value, nn.Module):
        return [repr(value), *_numbers(value), *value.state_dict().items()]
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


def _numbers(module: nn.Module) -> list[tuple[str, str, object]]:
    """Settings of a module and of those inside that neither its repr nor its state may show, as a label smoothing.

    They are numbers and flags, and what torch's own modules name as constants. Other texts may be paths of a machine.
    """
    return [
        (path, name, value)
        for path, one in module.named_modules()
        for name, value in sorted(vars(one).items())
        if not name.startswith("_") and name != "training"
        if isinstance(value, int | float) or (isinstance(value, str) and name in getattr(one, "__constants__", ()))
    ]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None
