"""Checkpoints: a journal of everything dear that a run has computed, one file an entry, each written at once or not.

A resumed run starts again from the beginning and takes from the journal what is there: a solved layer's weights, the
state after gradient steps. What is cheap (forward passes between blocks) is computed again, on the same bits, so the
resumed run ends exactly where an undisturbed one would have.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import CellType, CodeType
from typing import Any, ClassVar
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from iobs.errors import CheckpointError
from iobs.prune import batches as data_batches
from iobs.prune.batches import Batch
from iobs.prune.distributed import current

if sys.platform != "win32":
    import fcntl

RUN = "run.json"
_SUFFIX = ".safetensors"
_PARTIAL = ".partial"
_GENERATOR = "generator"
_GPU_GENERATOR = "generator of GPU "


class Journal:
    """Entries of a run in a directory, by key.

    Args:
        directory: made if it is not there.
        identity: what the run is, as JSON values; from `identity_of`.

    Raises:
        CheckpointError: the directory belongs to another run (the message names what differs), another process is at
            work with it, or it cannot be written.
    """

    def __init__(self, directory: str | Path, identity: Mapping[str, Any]) -> None:
        self.directory = Path(os.path.expanduser(directory))
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            # The first rank writes for all of a run; the others only read what it has found.
            self._lock = _Lock.of(self.directory) if current().first else None
            found = [*self.directory.iterdir()]
            strangers = [entry for entry in found if not (_is_ours(entry) or _is_leftover(entry))]
            if strangers:
                raise CheckpointError(
                    f"{self.directory} holds {strangers[0].name}, which is no checkpoint; give another."
                )
            for leftover in filter(_is_leftover, found):
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
        # What was there at the start: ranks that share a journal must all take the same entries from it.
        self.known = {entry.name for entry in self.directory.glob(f"*{_SUFFIX}")}

    def _require_same(self, identity: dict[str, Any]) -> None:
        try:
            stored = json.loads((self.directory / RUN).read_text(encoding="utf8"))
        except ValueError as error:
            raise CheckpointError(
                f"{self.directory / RUN} is damaged; remove the directory and start again."
            ) from error
        different = [key for key in {**stored, **identity} if stored.get(key) != identity.get(key)]
        if different:
            shown = "; ".join(
                f"{key} was {_short(stored.get(key))} and is {_short(identity.get(key))}" for key in different[:3]
            )
            raise CheckpointError(
                f"The checkpoint in {self.directory} is of another run: {shown}. Give what it was started with, or "
                "another directory."
            )

    def __contains__(self, key: str) -> bool:
        return self._file(key).name in self.known

    def put(self, key: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Write an entry and make sure that it is on the disk; the random generators' states go with it.

        Raises:
            CheckpointError: it cannot be written; entries written before stay good.
        """
        everything = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        everything |= _generators()
        self._write(self._file(key), save(everything, {"values": json.dumps(values)}))

    def discard(self, key: str) -> None:
        """Remove an entry that a later one has replaced, if it is there."""
        self._file(key).unlink(missing_ok=True)

    def get(self, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read an entry, and set the random generators to where they stood.

        Raises:
            CheckpointError: the entry is damaged.
        """
        file = self._file(key)
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
                values: dict[str, Any] = json.loads(opened.metadata()["values"])
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{file} is damaged ({error}); remove this file and resume again.") from error
        torch.set_rng_state(tensors.pop(_GENERATOR))
        for name in [name for name in tensors if name.startswith(_GPU_GENERATOR)]:
            torch.cuda.set_rng_state(tensors.pop(name), int(name.removeprefix(_GPU_GENERATOR)))
        return tensors, values

    def _file(self, key: str) -> Path:
        return self.directory / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}{_SUFFIX}"

    def _write(self, file: Path, content: bytes) -> None:
        partial = file.with_name(f".{file.name}{_PARTIAL}")
        try:
            with partial.open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())
            partial.replace(file)
            _sync_directory(self.directory)
        except OSError as error:
            raise _unwritable(self.directory, error) from error


class _Lock:
    """A directory's lock, held until nothing refers to it; whoever asks again in this process is given the same."""

    held: ClassVar[WeakValueDictionary[tuple[int, int], _Lock]] = WeakValueDictionary()

    def __init__(self, directory: Path) -> None:
        handle = locked(directory)
        if handle is not None:
            finalize(self, os.close, handle)

    @classmethod
    def of(cls, directory: Path) -> _Lock:
        """The lock.

        Raises:
            BlockingIOError: another process holds it.
        """
        found = directory.stat()
        place = found.st_dev, found.st_ino
        lock = cls.held.get(place) or cls(directory)
        cls.held[place] = lock
        return lock


def locked(directory: Path) -> int | None:
    """A handle that holds a directory's lock; None where there are no such locks.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the directory cannot be opened.
    """
    if sys.platform == "win32":
        return None
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def _generators() -> dict[str, Tensor]:
    """The states of torch's own random generators, by name."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {_GENERATOR: torch.get_rng_state()} | {f"{_GPU_GENERATOR}{index}": one for index, one in enumerate(gpus)}


def identity_of(
    settings: Mapping[str, Any], state: Iterable[tuple[str, Tensor]], fit: Iterable[Batch], heldout: Iterable[Batch]
) -> dict[str, Any]:
    """What makes two runs the same run: settings, libraries, every weight, every sample."""
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


def fingerprint(value: Any, depth: int = 6) -> str:
    """What tells a setting from another from one process to the next.

    A function is its code and what it closes over, a module its layers and its numbers, a container what it holds,
    another object its class and its state, and anything else what it says of itself.
    """
    if isinstance(value, Tensor):
        return _digest([value])
    inner = _parts(value) if depth else []
    if not inner:
        return re.sub(r" at 0x[0-9A-Fa-f]+", "", repr(value))
    name = getattr(value, "__qualname__", type(value).__qualname__)
    parts = " ".join(fingerprint(entry, depth - 1) for entry in inner)
    return f"{name} {hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def _parts(value: Any) -> list[Any]:
    """What a value is made of, as far as its own words would not tell."""
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
    # Loggers and the like have words of their own, and parts that differ from one process to the next.
    silent = " object at 0x" in repr(value) and hasattr(value, "__dict__")
    return sorted(vars(value).items(), key=str) if silent else []


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _is_ours(entry: Path) -> bool:
    return entry.name == RUN or (len(entry.stem) == 24 and entry.suffix == _SUFFIX)


def _is_leftover(entry: Path) -> bool:
    """Whether it is an entry that a crash kept from being written whole."""
    name = entry.name
    return name.startswith(".") and name.endswith(_PARTIAL) and _is_ours(Path(name[1 : -len(_PARTIAL)]))


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unwritable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint in {directory} cannot be written ({error.strerror or error}); free some space or mount the "
        "disk again and resume: what was written before is still good."
    )
