"""Checkpoints: one safetensors file per expensive result, each written atomically.

A resumed run starts from the beginning and reads the entries of the checkpoint: the weights of solved layers, the state
after gradient steps. Cheap results (forward passes between blocks) are recomputed on the same bits. The resumed run
therefore ends in the same bits as an uninterrupted one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CellType, CodeType
from typing import ClassVar
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

import iobs
from iobs.core.files import expanded
from iobs.core.outputs import PARTIAL
from iobs.errors import CheckpointError, OtherRunError, listed
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import lock_folder
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Batch

RUN = "run.json"
_SUFFIX = ".safetensors"
_GENERATOR = "generator"
_SECONDS = "seconds"
_GPU_GENERATOR = "generator of GPU "


class Checkpoint:
    """Interface of a checkpoint, and the null checkpoint of a run without one: it stores nothing.

    Attributes:
        earlier: seconds that the earlier parts of a resumed run took, up to their last entry.
    """

    earlier: float = 0.0

    def __contains__(self, key: str) -> bool:
        return False

    def put(self, key: str, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
        """Store an entry."""

    def get(self, key: str) -> tuple[dict[str, Tensor], JsonObject]:
        """Read an entry."""
        raise KeyError(key)

    def drop(self, key: str) -> None:
        """Remove an entry that no resumed run reads any more; do nothing without the entry."""

    def remembered(self, key: str, compute: Callable[[], JsonObject]) -> JsonObject:
        """The JSON values of an entry; computed and stored if there is no such entry."""
        if key in self:
            return self.get(key)[1]
        values = compute()
        self.put(key, {}, values)
        return values

    def tensors(self, key: str, compute: Callable[[], Mapping[str, Tensor]]) -> Mapping[str, Tensor]:
        """The tensors of an entry; computed and stored if there is no such entry."""
        if key in self:
            return self.get(key)[0]
        tensors = compute()
        self.put(key, tensors, {})
        return tensors

    def number(self, key: str, compute: Callable[[], float]) -> float:
        """The number of an entry; computed and stored if there is no such entry."""
        return float(self.remembered(key, lambda: {"value": compute()})["value"])


class DiskCheckpoint(Checkpoint):
    """Entries of a run in a directory, by key. Only the first rank writes.

    Args:
        directory: created if it does not exist.
        identity: settings, data and weights of the run as JSON values; from `identity_of`.

    Raises:
        CheckpointError: the directory belongs to another run (the message names the difference), is in use by another
            process, or cannot be written.
    """

    def __init__(self, directory: str | Path, identity: Mapping[str, object]) -> None:
        self.directory = expanded(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # Only the first rank writes, so only the first rank needs the lock.
            self._lock = _Lock.of(self.directory) if current().first else None
            entries = [*self.directory.iterdir()]
            foreign = [entry for entry in entries if not (_is_ours(entry) or _is_leftover(entry))]
            if foreign:
                raise CheckpointError(
                    f"{self.directory} holds {foreign[0].name}, which is no checkpoint; give another directory."
                )
            for leftover in filter(_is_leftover, entries):
                leftover.unlink(missing_ok=True)
        except BlockingIOError as error:
            raise CheckpointError(
                f"Another process is at work with the checkpoint in {self.directory}; wait until it ends, or give "
                "another output or checkpoint."
            ) from error
        except OSError as error:
            raise _unwritable(self.directory, error) from error
        plain = json.loads(json.dumps(identity))
        if (self.directory / RUN).is_file():
            self._require_same(plain)
        elif any(self.directory.iterdir()):
            raise CheckpointError(f"{self.directory} has lost its {RUN}; remove the directory and start again.")
        else:
            self._write(self.directory / RUN, json.dumps(plain, indent=1).encode("utf8"))
        # Entries at the start: all ranks of a run must read the same entries.
        files = [*self.directory.glob(f"*{_SUFFIX}")]
        self._names = {entry.name for entry in files}
        self.earlier = max(map(_seconds_of, files), default=0.0)
        self._opened = time.perf_counter()

    def _require_same(self, identity: JsonObject) -> None:
        try:
            stored = json.loads((self.directory / RUN).read_text(encoding="utf8"))
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory / RUN} is damaged; remove the directory and start again."
            ) from error
        different = differences(stored, identity)
        if different:
            raise OtherRunError(
                f"The checkpoint in {self.directory} is of another run: {different}. Give the settings that it was "
                "started with, or another directory, or remove this one."
            )

    def __contains__(self, key: str) -> bool:
        return self._file(key).name in self._names

    def put(self, key: str, tensors: Mapping[str, Tensor], values: Mapping[str, object]) -> None:
        """Write an entry and the states of torch's random generators, and sync them to disk.

        Raises:
            CheckpointError: the entry cannot be written; earlier entries stay valid.
        """
        if not current().first:
            return
        everything = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        everything |= _generators()
        seconds = self.earlier + time.perf_counter() - self._opened
        self._write(self._file(key), save(everything, {"values": json.dumps(values), _SECONDS: repr(seconds)}))

    def get(self, key: str) -> tuple[dict[str, Tensor], JsonObject]:
        """Read an entry, and restore the states of torch's random generators.

        Raises:
            CheckpointError: the entry is damaged.
        """
        file = self._file(key)
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
                values: JsonObject = json.loads(opened.metadata()["values"])
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); remove this file and resume again.") from error
        torch.set_rng_state(tensors.pop(_GENERATOR))
        for name in [name for name in tensors if name.startswith(_GPU_GENERATOR)]:
            state, number = tensors.pop(name), int(name.removeprefix(_GPU_GENERATOR))
            if number < torch.cuda.device_count():  # the machine that wrote the entry may have more GPUs
                torch.cuda.set_rng_state(state, number)
        return tensors, values

    def drop(self, key: str) -> None:
        """Remove an entry; a file that cannot be removed only takes room."""
        if current().first:
            with suppress(OSError):
                self._file(key).unlink(missing_ok=True)

    def _file(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}{_SUFFIX}"

    def _write(self, file: Path, content: bytes) -> None:
        partial = file.with_name(f".{file.name}{PARTIAL}")
        try:
            with partial.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            partial.replace(file)
            _sync_directory(self.directory)
        except OSError as error:
            raise _unwritable(self.directory, error) from error


def open_checkpoint(directory: str | Path | None, identity: Callable[[], Mapping[str, object]]) -> Checkpoint:
    """Open the checkpoint in a directory; the null checkpoint for None.

    The first rank creates it, and no rank writes before all ranks have opened it.

    Args:
        directory: of the checkpoint, or None.
        identity: computes the identity of the run.

    Raises:
        CheckpointError: as `DiskCheckpoint`.
    """
    if directory is None:
        return Checkpoint()
    ranks, facts = current(), identity()
    checkpoint = DiskCheckpoint(directory, facts) if ranks.first else None
    ranks.wait()
    checkpoint = checkpoint or DiskCheckpoint(directory, facts)
    ranks.wait()
    return checkpoint


class _Lock:
    """The lock of a directory, one object per process, released when nothing refers to it any more."""

    held: ClassVar[WeakValueDictionary[tuple[int, int], _Lock]] = WeakValueDictionary()

    def __init__(self, directory: Path) -> None:
        handle = lock_folder(directory)
        if handle is not None:
            finalize(self, os.close, handle)

    @classmethod
    def of(cls, directory: Path) -> _Lock:
        """The lock of a directory.

        Raises:
            BlockingIOError: another process holds the lock.
        """
        status = directory.stat()
        key = status.st_dev, status.st_ino
        lock = cls.held.get(key) or cls(directory)
        cls.held[key] = lock
        return lock


def _seconds_of(file: Path) -> float:
    """Seconds from the start of a run to an entry, pauses excluded; 0 for a damaged entry, which `get` reports."""
    try:
        with safe_open(file, framework="pt") as opened:
            return float(opened.metadata()[_SECONDS])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return 0.0


def _generators() -> dict[str, Tensor]:
    """The states of torch's random generators, by name."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {_GENERATOR: torch.get_rng_state()} | {f"{_GPU_GENERATOR}{index}": state for index, state in enumerate(gpus)}


def _is_ours(entry: Path) -> bool:
    return entry.name == RUN or (len(entry.stem) == 24 and entry.suffix == _SUFFIX)


def _is_leftover(entry: Path) -> bool:
    """True if a crash left an entry incomplete."""
    name = entry.name
    return name.startswith(".") and name.endswith(PARTIAL) and _is_ours(Path(name[1 : -len(PARTIAL)]))


def _sync_directory(directory: Path) -> None:
    """Make sure that the names of new files are on the disk, where the file system can do so.

    Windows cannot open a directory, and does so itself. Some network and shared folders sync files alone.
    """
    if sys.platform == "win32":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint in {directory} cannot be written ({error.strerror or error}); free some space or mount the "
        "disk again and resume: what was written before is still good."
    )


# ---- identities of runs: fingerprints of settings, samples and weights, and their differences in words
# Two runs with equal identities give the same result. An identity is nested JSON; digests in it begin with `_DIGEST`.
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
