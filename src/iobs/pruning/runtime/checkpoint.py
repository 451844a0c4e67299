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
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar
from weakref import WeakValueDictionary, finalize

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from iobs.core.files import expanded
from iobs.core.outputs import PARTIAL
from iobs.errors import CheckpointError, OtherRunError
from iobs.pruning.report import JsonObject
from iobs.pruning.runtime.fingerprint import differences
from iobs.pruning.runtime.ranks import current
from iobs.pruning.runtime.scratch import lock_folder

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
        identity: settings, data and weights of the run as JSON values; from `fingerprint.identity_of`.

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
