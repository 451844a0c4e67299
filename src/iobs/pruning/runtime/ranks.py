"""Ranks: the processes of a distributed run, which share samples and solves.

Under `torchrun` every rank holds the model and sees its own share of the calibration batches. Grams are summed in
float64, so that every rank has the Gram of a single process. Either layers with the same input are solved at the same
time, one on each rank, or every rank solves some rows of each layer. The weights are broadcast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from iobs.errors import DistributedError, first_line, unless_out_of_memory
from iobs.pruning.samples.batches import Batch, Samples, size, take

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Time that a rank waits for another one: longer than the solve of a layer. Greedy removal, exact swaps and fixed zeros
# take hours for a layer of a large model (`cost.work`). The connection or torchrun reports a dead rank at once.
PATIENCE = timedelta(days=1)
_MEETING = timedelta(minutes=30)  # time in which all ranks must have been started
_BUCKET = 2**24  # most numbers in one reduction of several tensors, unless one tensor has more


@dataclass(frozen=True)
class Ranks:
    """The position of this process among the processes of a run.

    Args:
        rank: number of this process, from 0.
        size: number of processes; 1 without torchrun.
    """

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """True if this process writes files and calls callbacks for all."""
        return self.rank == 0

    def share(self, part: Samples) -> Samples:
        """This rank's batches: every `size`-th."""
        if self.size == 1:
            return part
        return Samples(part.batches[self.rank :: self.size], part.numbers[self.rank :: self.size])

    def rows(self, batch: Batch) -> Batch:
        """This rank's samples of a batch: every `size`-th; none of a batch with too few samples."""
        if self.size == 1:
            return batch
        return take(batch, torch.arange(size(batch))[self.rank :: self.size])

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size > 1:
            with explained(), _exchangeable(tensor) as there:
                dist.all_reduce(there)

    def total(self, value: float) -> float:
        """The sum of the values of all ranks.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size == 1:
            return value
        number = torch.tensor(value, dtype=torch.float64)
        self.sum(number)
        return float(number)

    def agreed(self, values: Sequence[float]) -> list[float]:
        """The values of the first rank: what ranks measure, such as times, they choose by alike.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size == 1:
            return [*values]
        numbers = torch.tensor(values, dtype=torch.float64)
        self.broadcast(numbers, 0)
        agreed: list[float] = numbers.tolist()
        return agreed

    def means(self, tensors: Sequence[Tensor], weight: float) -> list[Tensor]:
        """Weighted means of tensors over all ranks; the tensors themselves if there is one rank.

        Few reductions of many numbers take much less time than one reduction for each tensor.

        Args:
            tensors: on one device, of the same shapes on every rank.
            weight: of this rank, at least zero.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size == 1:
            return [*tensors]
        total = torch.tensor([weight], dtype=torch.float64, device=tensors[0].device)
        self.sum(total)
        share = weight / max(float(total), 1e-30)
        means: list[Tensor] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket]) * share
            self.sum(flat)
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            means += [part.reshape(tensor.shape).to(tensor.dtype) for part, tensor in zip(parts, bucket, strict=True)]
        return means

    def each(self, compute: Callable[[int], Tensor], count: int, like: Tensor) -> Iterator[Tensor]:
        """The results of `count` independent tasks, in order; every rank computes one of them at a time.

        Args:
            compute: number of the task, from 0 -> its result.
            count: number of tasks.
            like: a tensor of the shape and on the device of the results. With several ranks they come in float64, since
                the other ranks do not know their dtype.

        Raises:
            DistributedError: another rank is gone.
        """
        for start in range(0, count, self.size):
            place = start + self.rank
            computed = compute(place) if place < count else like
            for owner in range(min(self.size, count - start)):
                result = computed if self.size == 1 else computed.to(torch.float64, copy=True)
                self.broadcast(result, owner)
                yield result

    def part(self, rows: int) -> slice:
        """This rank's share of the rows of a matrix: consecutive rows, in the order of the ranks."""
        return _part(rows, self.rank, self.size)

    def gather(self, part: Tensor, rows: int) -> Tensor:
        """A whole matrix from the shares of all ranks.

        Args:
            part: this rank's rows, `part(rows)` of the matrix, (count, columns).
            rows: of the matrix.

        Raises:
            DistributedError: another rank is gone.
        """
        whole = part.new_empty(rows, part.shape[1])
        whole[self.part(rows)] = part
        for rank in range(self.size):
            self.broadcast(whole[_part(rows, rank, self.size)], rank)
        return whole

    def require_enough(self, part: Samples) -> None:
        """Raise unless there is a batch for every rank.

        Raises:
            DistributedError: there are fewer batches than ranks.
        """
        if len(part.batches) < self.size:
            raise DistributedError(
                f"{self.size} ranks share {len(part.batches)} calibration batches; give at least one batch for each, "
                "for example with a smaller batch size."
            )

    def wait(self) -> None:
        """Wait until every rank has reached this point.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size > 1:
            with explained():
                dist.barrier()  # works with every backend; a reduction would need a tensor on the backend's device

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace the tensor of every rank by that of the rank `source`, in place.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size > 1:
            with explained(), _exchangeable(tensor) as there:
                dist.broadcast(there, source)


ALONE = Ranks()


def _part(rows: int, rank: int, size: int) -> slice:
    return slice(rows * rank // size, rows * (rank + 1) // size)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of up to `_BUCKET` numbers together."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(held.numel() for held in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


@contextmanager
def _exchangeable(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or a copy on this process's GPU whose values it has on exit: a group of nccl alone takes no other."""
    if tensor.device.type != "cpu" or "cpu:" in dist.get_backend_config():
        yield tensor
        return
    there = tensor.to("cuda")
    yield there
    tensor.copy_(there)


@contextmanager
def explained() -> Iterator[None]:
    """Convert failures of communication into one error.

    Raises:
        DistributedError: a rank died or does not answer, or the process group cannot exchange what is asked.
    """
    try:
        yield
    except ValueError as error:
        raise DistributedError(
            f"The process group refuses an exchange ({first_line(error)}). Start the run with torchrun -m iobs, or "
            "give each rank a GPU of its own."
        ) from error
    except unless_out_of_memory(RuntimeError) as error:
        raise DistributedError(
            f"Another rank is gone ({first_line(error, 'no answer')}), so this one stops too. Look at that rank's own "
            "output; with a checkpoint the run can be resumed."
        ) from error


def current() -> Ranks:
    """The ranks of torch's default process group, or this process alone."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return ALONE


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the process group if torchrun started several processes; leave it on exit.

    Other launchers set some of torchrun's variables too: without all of them the process is alone. On a machine with a
    GPU for each of its processes the device "cuda" becomes this process's own GPU.

    Raises:
        DistributedError: the other ranks cannot be reached.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    try:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))  # by their number, so that all decide alike
        gpus = torch.cuda.is_available() and processes <= torch.cuda.device_count()
        if gpus:
            torch.cuda.set_device(local_rank)
        store, rank, size = _met()
        # gloo reduces tensors on the CPU in both cases.
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"The other ranks cannot be reached ({first_line(error, 'no answer')}). Start all of them with torchrun, "
            "or, where there are none, unset WORLD_SIZE."
        ) from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _met() -> tuple[Store, int, int]:
    """Wait until all ranks have been started; returns their common store, this rank and the number of ranks.

    Raises:
        RuntimeError, ValueError: a rank cannot be reached, or the variables of torchrun are wrong.
    """
    from torch.distributed.rendezvous import rendezvous  # some builds of torch have no processes

    store, rank, size = next(iter(rendezvous("env://", timeout=_MEETING)))
    store.set(f"iobs/{rank}", "started")
    store.wait([f"iobs/{other}" for other in range(size)], _MEETING)
    return store, rank, size
