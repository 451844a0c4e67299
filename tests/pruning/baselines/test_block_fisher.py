"""Block-diagonal Fisher against a dense matrix, and WoodFisher, CBS and CHITA against brute force."""

import itertools
from functools import cache

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import CalibrationError, NonFiniteError, NotPositiveDefiniteError, PatternError, ProblemError
from iobs.pruning import baselines
from iobs.pruning.baselines import (
    BlockFisher,
    cbs,
    chita,
    gradient_rows,
    keep_largest,
    magnitude,
    woodfisher,
)
from iobs.pruning.network.selection import select
from iobs.pruning.recipe import NETWORK_SOLVERS
from iobs.pruning.samples.batches import Samples

SIZES = (6, 5)
METHODS = {"magnitude": magnitude, "woodfisher": woodfisher, "cbs": cbs, "chita": chita}


def prune(model, data, sparsity, solver="chita", **options):
    return iobs.prune(model, data, sparsity, iobs.Recipe(solver=solver), holdout=0.0, **options)


@cache
def weights_and_rows():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 11, generator=generator) @ torch.randn(11, 11, generator=generator)
    return torch.randn(11, generator=generator), rows


@pytest.fixture
def problem():
    return tuple(one.clone() for one in weights_and_rows())


def dense(fisher):
    matrix = torch.zeros(11, 11, dtype=torch.float64)
    for part in fisher.slices():
        matrix[part, part] = fisher.rows[:, part].double().T @ fisher.rows[:, part].double() / len(fisher.rows)
    return matrix + fisher.damping * torch.eye(11, dtype=torch.float64)


def cost(fisher, weights, result):
    difference = (result - weights).double()
    return float(difference @ dense(fisher) @ difference)


def test_blocks_are_of_nearly_equal_size_in_each_layer():
    fisher = BlockFisher(torch.zeros(1, 2304 + 640 + 1001 + 7), 0.1, 500, (2304, 640, 1001, 7))
    found = [part.stop - part.start for part in fisher.slices()]
    assert found == [576, 576, 576, 576, 640, 500, 501, 7]
    assert [part.start for part in fisher.slices()] == [0, *itertools.accumulate(found)][:-1]


@pytest.mark.parametrize("block", [1, 2, 100])
def test_block_fisher_multiplies_as_the_dense_matrix(problem, block):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, block, SIZES)
    assert all((part.start < 6) == (part.stop <= 6) for part in fisher.slices())
    assert torch.allclose(fisher.matmul(weights).double(), dense(fisher) @ weights.double(), rtol=1e-4, atol=1e-4)
    assert torch.allclose(fisher.diagonal().double(), dense(fisher).diagonal(), rtol=1e-4)


@cache
def best_cost(keep):
    """The cost of the best weights on the best mask, of all masks that keep this number of weights."""
    weights, rows = weights_and_rows()
    fisher = BlockFisher(rows, 0.1, 2, SIZES)
    return min(
        cost(fisher, weights, fisher.refit(weights, mask))
        for chosen in itertools.combinations(range(11), keep)
        for mask in [torch.isin(torch.arange(11), torch.tensor(chosen))]
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep", [1, 5, 10])
def test_methods_keep_the_count_and_not_beat_the_best_mask(problem, method, keep):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, 2, SIZES)
    result = METHODS[method](weights, fisher, keep)
    assert int((result != 0).sum()) == keep
    assert cost(fisher, weights, result) >= best_cost(keep) * (1 - 1e-3)


@pytest.mark.parametrize("method", ["woodfisher", "cbs"])
def test_removal_of_one_weight_is_optimal(problem, method):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, 11, (11,))
    inverse = torch.linalg.inv(dense(fisher))
    best = float((weights.double().square() / inverse.diagonal()).min())
    assert cost(fisher, weights, METHODS[method](weights, fisher, 10)) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("method", ["cbs", "chita"])
def test_searches_improve_their_initial_mask(method):
    found, started = [], []
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(40, 11, generator=generator) @ torch.randn(11, 11, generator=generator)
        weights, fisher = torch.randn(11, generator=generator), BlockFisher(rows, 0.1, 11, (11,))
        # CBS judges a mask by the removal alone, CHITA by the best weights on it.
        start, judged = {
            "cbs": ("woodfisher", lambda result, weights=weights: weights * (result != 0)),
            "chita": ("magnitude", lambda result, weights=weights, fisher=fisher: fisher.refit(weights, result != 0)),
        }[method]
        started.append(cost(fisher, weights, judged(METHODS[start](weights, fisher, 5))))
        found.append(cost(fisher, weights, judged(METHODS[method](weights, fisher, 5))))
    assert all(one <= other * (1 + 1e-4) for one, other in zip(found, started, strict=True))
    assert sum(found) < 0.9 * sum(started)


@pytest.mark.parametrize("keep", [3, 6])
def test_chita_and_refit_improve_on_magnitude(problem, keep):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, 2, SIZES)
    plain = cost(fisher, weights, METHODS["magnitude"](weights, fisher, keep))
    refitted = cost(fisher, weights, fisher.refit(weights, keep_largest(weights.abs(), keep)))
    assert refitted <= plain * (1 + 1e-5)
    assert cost(fisher, weights, METHODS["chita"](weights, fisher, keep)) <= plain * (1 + 1e-5)


def test_search_of_chita_never_raises_the_loss_and_changes_masks():
    changed = 0
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(20, 40, generator=generator) @ torch.randn(40, 40, generator=generator)
        fisher, weights = BlockFisher(rows, 1e-2, 40, (40,)), torch.randn(40, generator=generator)
        plain, searched = chita(weights, fisher, 10), chita(weights, fisher, 10, searches=5)
        same = torch.equal(searched != 0, plain != 0)
        assert same or fisher.loss(searched - weights) < fisher.loss(plain - weights)
        assert int((searched != 0).sum()) == 10
        changed += not same
    assert changed >= 2


def test_search_of_chita_stops_at_the_best_mask():
    weights = torch.arange(1.0, 9.0)
    fisher = BlockFisher(torch.eye(8), 0.5, 8, (8,))  # a multiple of the identity: magnitude is optimal
    assert torch.equal(chita(weights, fisher, 3, searches=4), chita(weights, fisher, 3))


def test_woodfisher_equals_cbs_if_fisher_is_diagonal(problem):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, 1, SIZES)
    expected = weights * keep_largest(weights.square() * fisher.diagonal(), 4)
    for method in ("woodfisher", "cbs"):
        assert torch.allclose(METHODS[method](weights, fisher, 4), expected, atol=1e-5)


@pytest.fixture
def network():
    generator = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    data = [(torch.randn(10, 8, generator=generator), torch.randint(3, (10,), generator=generator)) for _ in range(2)]
    return model, data


def test_gradient_rows_average_to_the_mean_gradient(network):
    model, data = network
    layers = select(model).layers
    rows = gradient_rows(model, layers, Samples(data, [0, 1]))
    loss = sum(nn.functional.cross_entropy(model(x), y) for x, y in data) / 2
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [model[0].weight, model[2].weight])])
    assert torch.allclose(rows.mean(0), expected, atol=1e-6)


@pytest.mark.parametrize(("method", "stages"), [*((method, 1) for method in NETWORK_SOLVERS), ("chita", 3)])
def test_prune_by_fisher_keeps_the_exact_global_count(network, method, stages):
    model, data = network
    biases = [model[0].bias.clone(), model[2].bias.clone()]
    report = prune(model, data, 0.7, NETWORK_SOLVERS[method](stages=stages, block=16))
    assert sum(row.zeros for row in report.audit) == 66 - 20  # 30 % of 66, halves up
    assert sum(int((model[i].weight == 0).sum()) for i in (0, 2)) == 46
    assert len(report.rounds) == 1
    assert all(torch.equal(bias, model[i].bias) for bias, i in zip(biases, (0, 2), strict=True))
    assert type(report).from_dict(report.as_dict()) == report


def test_prune_by_fisher_refuses_bad_arguments(network):
    model, data = network
    with pytest.raises(ProblemError, match=r"no solver 'obd'.*sparsegpt.*chita"):
        prune(model, data, 0.5, "obd")
    with pytest.raises(ProblemError, match="positive"):
        prune(model, data, 0.5, iobs.CHITA(stages=0))
    with pytest.raises(ProblemError, match="searches"):
        prune(model, data, 0.5, iobs.CHITA(searches=-1))
    with pytest.raises(PatternError, match="one count over all layers"):
        prune(model, data, iobs.Unstructured(0.5, per="row"))
    with pytest.raises(ProblemError, match="blocks: not with a solver of the whole network"):
        iobs.prune(model, data, 0.5, "fast", solver="chita")


@pytest.mark.parametrize("method", NETWORK_SOLVERS)
def test_prune_by_fisher_accepts_large_gradients(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))
    data = [(torch.randn(50, 30), 100 * torch.randn(50, 2))]
    report = prune(model, data, 0.5, method)
    assert report.best.sparsity == report.sparsity == pytest.approx(0.5)


def test_magnitude_keeps_the_bits_of_kept_weights():
    torch.manual_seed(0)
    model = nn.Linear(30, 40).double()
    before = model.weight.detach().clone()
    prune(model, [torch.randn(5, 30).double()], 0.5, "global-magnitude")
    kept = model.weight != 0
    assert torch.equal(model.weight[kept], before[kept])


def test_prune_by_fisher_names_the_batch_that_does_not_fit(network):
    model, data = network
    with pytest.raises(CalibrationError, match="cannot take calibration batch 2"):
        prune(model, [*data, (torch.randn(4, 9), torch.zeros(4, dtype=torch.int64))], 0.5)


class RootOfZero(nn.Module):
    """The gradient is NaN for samples whose first input is zero."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden + (hidden * x[:, :1]).square().sum(1, keepdim=True).sqrt())


@pytest.mark.parametrize("method", ["woodfisher", "cbs", "chita"])
def test_prune_by_fisher_names_sample_of_nonfinite_gradient(network, method):
    data = network[1]
    data[1][0][4, 0] = 0.0
    model = RootOfZero()
    before = model.body.weight.detach().clone()
    with pytest.raises(NonFiniteError, match=r"sample 4 of calibration batch 1 .* layer 'body'"):
        prune(model, data, 0.5, method)
    assert torch.equal(model.body.weight, before)


def test_methods_name_the_layer_of_a_singular_fisher():
    rows = torch.zeros(1, 11)
    rows[0, 6:] = 1e8
    fisher = BlockFisher(rows, 1e-6, 2, SIZES, ("first", "second"))
    for method in ("woodfisher", "cbs"):
        with pytest.raises(NotPositiveDefiniteError, match="layer 'second'"):
            METHODS[method](torch.ones(11), fisher, 5)


@pytest.mark.parametrize("sparsity", [0.05, 0.1, 0.5, 0.97])
@pytest.mark.parametrize("count", [2, 3, 15])
def test_stages_divide_density_by_equal_factors(sparsity, count):
    levels = baselines.stages(sparsity, count)
    assert len(levels) == count
    assert levels[0] == pytest.approx(min(0.1, sparsity))
    assert levels[-1] == sparsity
    densities = [1 - level for level in levels]
    factors = [later / earlier for earlier, later in itertools.pairwise(densities)]
    assert factors == pytest.approx([(densities[-1] / densities[0]) ** (1 / (count - 1))] * (count - 1))


def test_stages_of_one_is_the_sparsity_alone():
    assert [*baselines.stages(0.7, 1)] == [0.7]


@pytest.mark.parametrize("stages", [1, 4])
def test_every_stage_takes_gradients_and_prunes_further(network, monkeypatch, stages):
    zeros, reported = [], []

    def counted(model, layers, samples):
        zeros.append(sum(int((model[i].weight == 0).sum()) for i in (0, 2)))
        return gradient_rows(model, layers, samples)

    class Watching(iobs.Callback):
        def on_measure(self, task, done, total):
            reported.append((done, total))

    monkeypatch.setattr(baselines, "gradient_rows", counted)
    prune(*network, 0.7, iobs.CHITA(stages=stages, block=16), callbacks=[Watching()])
    assert len(zeros) == stages
    assert zeros == [0, *(66 - round(66 * (1 - level)) for level in baselines.stages(0.7, stages))][:-1]
    assert reported == [(number, stages) for number in range(1, stages + 1)]
