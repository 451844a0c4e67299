"""Places of tensors between their uses: on the device, in main memory, or in files that are mapped into memory."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from iobs.errors import OutputError, ProblemError

Place = Literal["auto", "device", "memory", "disk"]
PLACES: tuple[Place, ...] = get_args(Place)
_PORTABLE = 1  # flag of cudaHostRegister: the memory is page-locked for all GPUs


def reserve(file: Path, size: int) -> None:
    """Create a file of `size` bytes with its space on the disk reserved.

    Without the reservation, writing into a mapped file kills the process if the disk is full.

    Raises:
        OSError: the disk is full.
    """
    with file.open("wb") as opened:
        if sys.platform != "linux" or not size:
            return
        try:
            os.posix_fallocate(opened.fileno(), 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # raised by file systems without reservations
                raise


def write_mapped(file: Path, hidden: Tensor) -> Tensor:
    """A copy of a tensor in a file that is mapped into memory, so that it takes no anonymous memory."""
    reserve(file, hidden.numel() * hidden.element_size())
    kept = torch.from_file(str(file), shared=True, size=hidden.numel(), dtype=hidden.dtype)
    return kept.reshape(hidden.shape).copy_(hidden)


def empty_locked(like: Tensor) -> Tensor:
    """An empty tensor of a shape and dtype in page-locked memory, which takes its own bytes and less than a page more.

    torch's allocator of such memory rounds the bytes up to a power of two, and keeps them until the process ends.

    Args:
        like: of that shape and dtype, not empty. `unlock` comes before the memory is freed.

    Raises:
        OutputError: the system locks no more memory.
    """
    raw = torch.empty(like.nbytes + mmap.PAGESIZE, dtype=torch.uint8)
    start = -raw.data_ptr() % mmap.PAGESIZE  # no two locked ranges share a page
    aligned = raw[start : start + like.nbytes].view(like.dtype).reshape(like.shape)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]
    code = int(runtime.cudaHostRegister(aligned.data_ptr(), like.nbytes, _PORTABLE))
    if code:
        raise OutputError(
            f"Main memory for the hidden states cannot be page-locked (CUDA error {code}); free some, put them in "
            'files (streams "disk"), or give fewer samples.'
        )
    return aligned


def unlock(tensor: Tensor) -> None:
    """End the lock of a tensor from `empty_locked`; after an error of the device, which lasts, the lock lasts too."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]
    runtime.cudaHostUnregister(tensor.data_ptr())


def parse_place(name: str) -> Place:
    """The place with a name.

    Raises:
        ProblemError: there is no such place.
    """
    for place in PLACES:
        if name == place:
            return place
    raise ProblemError(f'streams must be "auto", "device", "memory" or "disk", got {name!r}.')


def choose_place(place: Place, on_cpu: bool, needed: int, free: Mapping[Place, int]) -> Place:
    """Choose the place of hidden states and fitted parameters.

    "auto" is the first of device, main memory and disk with enough room. A CPU takes the disk, because a mapped file
    stays in main memory as long as the system has room for it. A mapped file takes no anonymous memory.

    Args:
        place: as the user says.
        on_cpu: True if the device of the computations is a CPU.
        needed: bytes.
        free: bytes of the device besides what the run itself takes, of main memory, and of the disk, in this order.

    Raises:
        ProblemError: there is no such place.
        OutputError: no place has enough room.
    """
    if parse_place(place) != "auto":
        return place
    if on_cpu:
        return "disk"
    for candidate, room in free.items():
        if needed <= room:
            return candidate
    device, memory, disk = (f"{free[candidate] / 1e9:.1f} GB" for candidate in PLACES[1:])
    raise OutputError(
        f"The hidden states take {needed / 1e9:.1f} GB. The device has {device} left, main memory {memory} and the "
        f"disk {disk}; free some, or give fewer samples."
    )


def require_place(place: Place, needed: int, memory: int) -> None:
    """Raise unless main memory has room for hidden states and fitted parameters that were asked to be there.

    Args:
        place: as the user says.
        needed: bytes.
        memory: free bytes of main memory; 0 where the system does not say.

    Raises:
        OutputError: it has too little room.
    """
    if place == "memory" and 0 < memory < needed:
        raise OutputError(
            f"The hidden states take {needed / 1e9:.1f} GB, and main memory has {memory / 1e9:.1f} GB left; put them "
            'in files (streams "disk"), or give fewer samples.'
        )


@dataclass
class Storage:
    """Tensors by name, kept in one place until they are replaced.

    Args:
        place: "device", "memory" (page-locked for a GPU, which then copies without a detour) or "disk".
        device: of the computations.
        folder: of the files.

    Attributes:
        kept: the stored tensors.
    """

    place: Place
    device: torch.device
    folder: Path
    kept: dict[str, Tensor] = field(default_factory=dict)
    _locked: set[str] = field(default_factory=set, init=False)  # names of those in page-locked memory

    def keep(self, name: str, tensor: Tensor) -> Tensor:
        """Store a tensor; the tensor that had this name before is overwritten.

        Raises:
            OSError: the disk is full.
        """
        if self.place == "device":
            return tensor
        before = self.kept.get(name)
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            return before.copy_(tensor)
        if self.place == "disk":
            self.kept[name] = write_mapped(self.folder / name, tensor)
            return self.kept[name]
        if before is not None:
            self._drop(name)
        locks = self.device.type == "cuda" and torch.cuda.is_available() and tensor.nbytes > 0
        self.kept[name] = empty_locked(tensor) if locks else torch.empty(tensor.shape, dtype=tensor.dtype)
        if locks:
            self._locked.add(name)
        return self.kept[name].copy_(tensor)

    def clear(self) -> None:
        """Drop all tensors, and give page-locked memory back to the system."""
        for name in [*self.kept]:
            self._drop(name)

    def _drop(self, name: str) -> None:
        kept = self.kept.pop(name)
        if name in self._locked:
            self._locked.remove(name)
            unlock(kept)

    def park(self, name: str, tensor: Tensor) -> Tensor:
        """Store a tensor in a file if this is where tensors are, and if the CPU can compute with it there.

        Raises:
            OSError: the disk is full.
        """
        return self.keep(name, tensor) if self.place == "disk" and tensor.device.type == "cpu" else tensor

    def fetch(self, stored: Tensor) -> Tensor:
        """A copy of a stored tensor on the device."""
        return stored.to(self.device, copy=True)
