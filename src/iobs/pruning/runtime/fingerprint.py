"""Identities of runs: fingerprints of settings, samples and weights, and their differences in words.

Two runs with equal identities give the same result. An identity is nested JSON; digests in it begin with `_DIGEST`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, CodeType

import numpy as np
import torch
from torch import Tensor, nn

import iobs
from iobs.errors import listed
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch

_DIGEST = "sha256 "
_MOST_SHOWN = 4  # differences in one message
_Keys = tuple[str, ...]


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
    beside = [*map(_beside_tensors, batches)]
    shapes = dict.fromkeys(f"{tuple(tensor.shape[1:])} {tensor.dtype}" for batch in tensors for tensor in batch)
    return {
        "samples": sum(data_batches.size(batch) for batch in batches),
        "batches": len(tensors),
        "shapes of a sample": ", ".join(shapes),
        "contents": _digest((tensor for batch in tensors for tensor in batch), fingerprint(beside)),
    }


def _beside_tensors(value: object) -> object:
    """A batch, or an entry of one, without the contents of its tensors: names, flags and numbers are left."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, Mapping):
        return {name: _beside_tensors(entry) for name, entry in value.items()}
    return [*map(_beside_tensors, value)] if isinstance(value, list | tuple) else value


def _tensor(value: Tensor) -> dict[str, object]:
    return {"shape": f"{tuple(value.shape)} {value.dtype}", "contents": _digest([value])}


def _digest(tensors: Iterable[Tensor], beside: str = "") -> str:
    total = hashlib.sha256(beside.encode())
    for tensor in tensors:
        total.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return f"{_DIGEST}{total.hexdigest()[:16]}"


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
    return f"{name} {_DIGEST}{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def _parts(value: object) -> Sequence[object]:
    """The parts that identify a value; empty if its repr identifies it."""
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        closed = [_content(cell) for cell in getattr(value, "__closure__", None) or ()]
        bound = [getattr(value, name, None) for name in ("__defaults__", "__kwdefaults__", "__self__")]
        return [code.co_code, code.co_names, *code.co_consts, *bound, *closed]
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
        return [(item.name, getattr(value, item.name)) for item in fields(value)]
    # Objects with a repr of their own, such as loggers, may have attributes that differ between processes.
    default_repr = " object at 0x" in repr(value) and hasattr(value, "__dict__")
    return sorted(vars(value).items(), key=str) if default_repr else []


def _numbers(module: nn.Module) -> list[tuple[str, str, object]]:
    """Settings of a module and of those inside that neither its repr nor its state may show, as a label smoothing.

    They are numbers and flags, and what torch's own modules name as constants. Other texts may be paths of a machine.
    """
    return [
        (path, name, value)
        for path, child in module.named_modules()
        for name, value in sorted(vars(child).items())
        if not name.startswith("_") and name != "training"
        if isinstance(value, int | float) or (isinstance(value, str) and name in getattr(child, "__constants__", ()))
    ]


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> str:
    """The differing settings with old and new value, and the data and weights with other contents.

    Args:
        old: identity of the stored run.
        new: identity of this run.

    Returns:
        A list separated by semicolons; empty if the identities are equal.
    """
    lines: list[str] = []
    for name in {**old, **new}:
        differing = [*_differing((name,), old.get(name), new.get(name))]
        plain = [_values(*difference) for difference in differing if not _is_digest(*difference)]
        lines += plain or _contents(name, [keys for keys, *_ in differing])
    rest = len(lines) - _MOST_SHOWN
    return "; ".join([*lines[:_MOST_SHOWN], *([f"and {rest} more"] if rest > 0 else [])])


def _differing(keys: _Keys, old: object, new: object) -> Iterator[tuple[_Keys, object, object]]:
    """The innermost values that differ, with their keys."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from _differing((*keys, str(key)), old.get(key), new.get(key))
    elif old != new:
        yield keys, old, new


def _is_digest(_: _Keys, old: object, new: object) -> bool:
    return all(isinstance(value, str) and value.startswith(_DIGEST) for value in (old, new))


def _contents(name: str, entries: list[_Keys]) -> list[str]:
    """One line for all tensors of an entry whose shapes agree."""
    if not entries:
        return []
    inner = [".".join(keys[1:-1]) for keys in entries]
    if not inner[0]:
        return [f"the {name} have the same shapes and other contents"]
    more = f" and {len(inner) - 1} more tensors" if len(inner) > 1 else ""
    return [f"the {name} {inner[0]}{more} have the same shapes and other contents"]


def _values(keys: _Keys, old: object, new: object) -> str:
    name = ".".join(keys)
    if isinstance(old, list) and isinstance(new, list) and all(isinstance(entry, str) for entry in [*old, *new]):
        gone, added = [entry for entry in old if entry not in new], [entry for entry in new if entry not in old]
        if gone or added:
            parts = [f"without {listed(gone, 2)}"] * bool(gone) + [f"with {listed(added, 2)}"] * bool(added)
            return f"{name} are {len(new)} instead of {len(old)}: now {' and '.join(parts)}"
    before, after = _shown(old), _shown(new)
    if before == after:  # a function with other code, or an object with other contents
        return f"{name} is {after} with other contents"
    return f"{name} was {before} and is {after}"


def _shown(value: object) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    text = re.sub(rf" ?{_DIGEST}[0-9a-f]+", "", text) or "something else"
    return text if len(text) <= 80 else f"{text[:77]}..."
