"""Rows of one problem that several processes solve together: the masks are those of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import iobs
from iobs.core.masks import RowsOf, top_mask, top_mask_of
from iobs.core.partition import Partition
from iobs.core.quadratic import Quadratic
from iobs.solvers.kernels.project import project, project_torch


class Meeting:
    """Sums of threads that stand for processes."""

    def __init__(self, size):
        self.size, self.barrier, self.given = size, threading.Barrier(size, timeout=600), [None] * size

    def sum(self, rank, tensor):
        self.given[rank] = tensor.clone()
        self.barrier.wait()
        total = sum(self.given[1:], start=self.given[0])
        self.barrier.wait()
        tensor.copy_(total)


class Peer:
    def __init__(self, meeting, rank):
        self.meeting, self.rank, self.size = meeting, rank, meeting.size

    def sum(self, tensor):
        self.meeting.sum(self.rank, tensor)


def together(size, rows, task):
    """The results of a task (peer, rows of this peer) of every peer, joined along the rows."""
    meeting = Meeting(size)

    def part(rank):
        try:
            return task(Peer(meeting, rank), slice(rows * rank // size, rows * (rank + 1) // size))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return torch.cat([*pool.map(part, range(size))])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pattern", [iobs.Unstructured(0.7), iobs.Unstructured(keep=3), iobs.Unstructured(0.5, "row")])
def test_mask_of_shared_rows_is_that_of_the_whole_matrix_also_with_ties(seed, pattern):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(13, 24, generator=generator).abs()
    scores = scores.round(decimals=[0, 1, 9][seed % 3])  # many ties, some, none
    size = 2 + seed % 3
    found = together(size, 13, lambda peer, own: top_mask(scores[own], RowsOf(pattern, 13, peer)))
    assert torch.equal(found, top_mask(scores, pattern))


def test_mask_of_shared_rows_keeps_nothing_or_everything():
    scores = torch.rand(6, 4)
    for keep in (0, 24):
        found = together(2, 6, lambda peer, own: top_mask_of(scores[own], Partition(1, 24, keep, peer, 6, keep)))  # noqa: B023
        assert bool((found == (keep > 0)).all())


@pytest.mark.parametrize("form", [project, project_torch])
def test_projection_of_shared_rows_is_that_of_the_whole_matrix(form):
    generator = torch.Generator().manual_seed(0)
    dense, target, linear = (torch.randn(31, 40, generator=generator) for _ in range(3))
    mask = torch.rand(31, 40, generator=generator) > 0.5
    pattern = iobs.Unstructured(0.6)

    def projected(peer, own):
        x, t, m = dense[own].clone(), target[own].clone(), mask[own].clone()
        groups = (pattern if peer is None else RowsOf(pattern, 31, peer)).groups(x.shape)
        form(x, t, m, linear[own].clone(), groups, 0.7, 1.4)
        return torch.stack([x, t, m.float()], 1)

    assert torch.equal(together(3, 31, projected), projected(None, slice(None)))


@pytest.mark.parametrize("solver", [iobs.ADMM("fast"), iobs.ADMM(), iobs.SparseGPT(block=48)], ids=str)
@pytest.mark.parametrize("pattern", [iobs.Unstructured(0.6), iobs.Unstructured(0.6, "row"), iobs.NM(2, 4)], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_shared_rows_are_solved_as_the_whole_problem(solver, pattern, size):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(256, 256, generator=generator) / 16
    inputs = torch.randn(600, 256, generator=generator) @ mixing
    weight = torch.randn(90, 256, generator=generator)
    linear, hessian = weight @ (inputs.T @ inputs) * 1.1, inputs.T @ inputs
    whole = iobs.solve(Quadratic(hessian, linear, weight), pattern, solver, damping=0.01)

    def part(peer, own):
        problem = Quadratic(hessian, linear[own], weight[own])
        return iobs.solve(problem, RowsOf(pattern, 90, peer), solver, damping=0.01).weight

    found = together(size, 90, part)
    zeros = [int((one == 0).sum()) for one in (found, whole.weight)]
    assert zeros[0] == zeros[1]
    equal = ((found == 0) == (whole.weight == 0)).double().mean()
    assert equal > 0.999  # products of fewer rows are rounded differently, and near-ties fall either way
    least = float(whole.problem.loss(weight * 1.1).sum())
    losses = [float(whole.problem.loss(one).sum()) - least for one in (found, whole.weight)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_weights_of_shared_rows_have_one_unit():
    """Rows of very different sizes compete in one unit: those of the other process are not scaled away."""
    weight = torch.cat([torch.full((20, 256), 1e-30), torch.full((20, 256), 1e20)]) * torch.rand(40, 256)
    hessian = torch.eye(256)
    pattern = iobs.Unstructured(0.5)
    found = together(
        2,
        40,
        lambda peer, own: (
            iobs.solve(Quadratic.at(weight[own], hessian), RowsOf(pattern, 40, peer), iobs.SparseGPT(256)).weight
        ),
    )
    assert torch.equal(found != 0, top_mask(weight.double() * 1e-20, pattern))
