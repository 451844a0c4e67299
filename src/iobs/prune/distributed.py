"""Several processes as one: samples and solves are shared out, Grams and gradients are summed.

Under `torchrun` every rank holds the network. Each sees its own share of the calibration batches; Grams are summed in
float64, so that every rank has what one process would have had. The layers that share an input are solved side by
side, one on each rank, and their weights are broadcast.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor
from torch import distributed as dist

from iobs.errors import DistributedError, first_line
from iobs.prune.batches import Batch, size, take
from iobs.prune.gram import Gram
from iobs.prune.parts import Part

# Longer than any layer's solve. A rank that dies is noticed at once: by its connection, or by torchrun.
PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; one alone where there is no torchrun."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes and talks for all."""
        return self.rank == 0

    def share(self, part: Part) -> Part:
        """This rank's batches of a part: every size-th."""
        if self.size == 1:
            return part
        return Part(part.batches[self.rank :: self.size], part.numbers[self.rank :: self.size])

    def rows(self, batch: Batch) -> Batch:
        """This rank's samples of a batch: every size-th."""
        if self.size == 1:
            return batch
        return take(batch, torch.arange(self.rank, size(batch), self.size))

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size > 1:
            with explained():
                dist.all_reduce(tensor)

    def sum_gram(self, gram: Gram) -> None:
        """Give every rank the Gram of all samples."""
        for tensor in (gram.own, gram.cross, gram.dense):
            if tensor is not None:
                self.sum(tensor)
        count = torch.tensor(gram.count, device=gram.own.device)
        self.sum(count)
        gram.count = int(count)

    def require_enough(self, part: Part) -> None:
        """Every rank needs a batch of its own.

        Raises:
            DistributedError: there are fewer batches than ranks.
        """
        if len(part.batches) < self.size:
            raise DistributedError(
                f"{self.size} ranks share {len(part.batches)} calibration batches; give at least one batch for each, "
                "for example with a smaller batch size."
            )

    def wait(self) -> None:
        """Go on when every rank has come here.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size > 1:
            with explained():
                dist.barrier()  # of whatever backend the group has; a tensor would have to lie where that wants it

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every rank the source's tensor, in place.

        Raises:
            DistributedError: another rank is gone.
        """
        if self.size > 1:
            with explained():
                dist.broadcast(tensor, source)


ALONE = Ranks()


@contextmanager
def explained() -> Iterator[None]:
    """Failures of communication as one clear error.

    Raises:
        DistributedError: a rank died or does not answer.
    """
    try:
        yield
    except RuntimeError as error:
        raise DistributedError(
            f"Another rank is gone ({first_line(error, 'no answer')}), so this one stops too. Look at that rank's own "
            "output; with a checkpoint the run can be resumed."
        ) from error


def current() -> Ranks:
    """The ranks of this process: all of torch's default group, or itself alone."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size())
    return ALONE


def require_alone() -> None:
    """Refuse what only one process can do.

    Raises:
        DistributedError: there are several.
    """
    if current().size > 1:
        raise DistributedError("Pruning with one block in memory at a time is for one process; start without torchrun.")


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other processes where torchrun started several; leave them at the end.

    Other programs that start processes set some of torchrun's variables too: without all of them a process is alone.
    On a machine with GPUs "cuda" is then each process's own one.

    Raises:
        DistributedError: they cannot be reached.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() or os.environ["WORLD_SIZE"] == "1":
        yield ALONE
        return
    gpus = torch.cuda.is_available()
    try:
        if gpus:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        # What lies on the CPU is summed by gloo either way.
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"The other ranks cannot be reached ({first_line(error, 'no answer')}). Start all of them with torchrun, "
            "or, where there are none, unset WORLD_SIZE."
        ) from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
