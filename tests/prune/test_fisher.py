"""The Fisher information in blocks against a dense one, and the peers' methods against brute force."""

import itertools

import pytest
import torch
from torch import nn

from iobs.errors import CalibrationError, NonFiniteError, NotPositiveDefiniteError, ProblemError
from iobs.prune.fisher import METHODS, BlockFisher, gradient_rows, keep_largest
from iobs.prune.layers import select
from iobs.prune.parts import Part
from iobs.prune.peers import prune_by_fisher

SIZES = (6, 5)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 11, generator=generator) @ torch.randn(11, 11, generator=generator)
    return torch.randn(11, generator=generator), rows


def dense(fisher):
    matrix = torch.zeros(11, 11, dtype=torch.float64)
    for part in fisher.slices():
        matrix[part, part] = fisher.rows[:, part].double().T @ fisher.rows[:, part].double() / len(fisher.rows)
    return matrix + fisher.damping * torch.eye(11, dtype=torch.float64)


def cost(fisher, weights, result):
    difference = (result - weights).double()
    return float(difference @ dense(fisher) @ difference)


def test_layers_are_cut_evenly_and_leave_no_small_block_behind():
    fisher = BlockFisher(torch.zeros(1, 2304 + 640 + 1001 + 7), 0.1, 500, (2304, 640, 1001, 7))
    found = [part.stop - part.start for part in fisher.slices()]
    assert found == [576, 576, 576, 576, 640, 500, 501, 7]
    assert [part.start for part in fisher.slices()] == [0, *itertools.accumulate(found)][:-1]


@pytest.mark.parametrize("block", [1, 2, 100])
def test_blocks_never_cross_layers_and_multiply_as_the_dense_matrix(problem, block):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, block, SIZES)
    assert all((part.start < 6) == (part.stop <= 6) for part in fisher.slices())
    assert torch.allclose(fisher.matmul(weights).double(), dense(fisher) @ weights.double(), rtol=1e-4, atol=1e-4)
    assert torch.allclose(fisher.diagonal().double(), dense(fisher).diagonal(), rtol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("keep", [1, 5, 10])
def test_exact_count_and_never_better_than_the_best_mask(problem, method, keep):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, 2, SIZES)
    result = METHODS[method](weights, fisher, keep)
    assert int((result != 0).sum()) == keep
    best = min(
        cost(fisher, weights, fisher.refit(weights, mask))
        for chosen in itertools.combinations(range(11), keep)
        for mask in [torch.isin(torch.arange(11), torch.tensor(chosen))]
    )
    assert cost(fisher, weights, result) >= best * (1 - 1e-3)


@pytest.mark.parametrize("method", ["woodfisher", "cbs"])
def test_one_removal_is_the_best_of_all(problem, method):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, 11, (11,))
    inverse = torch.linalg.inv(dense(fisher))
    best = float((weights.double().square() / inverse.diagonal()).min())
    assert cost(fisher, weights, METHODS[method](weights, fisher, 10)) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("method", ["cbs", "chita"])
def test_searches_find_better_masks_than_those_that_they_start_from(method):
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
def test_joint_updates_beat_their_own_start(problem, keep):
    weights, rows = problem
    fisher = BlockFisher(rows, 0.1, 2, SIZES)
    plain = cost(fisher, weights, METHODS["magnitude"](weights, fisher, keep))
    refitted = cost(fisher, weights, fisher.refit(weights, keep_largest(weights.abs(), keep)))
    assert refitted <= plain * (1 + 1e-5)
    assert cost(fisher, weights, METHODS["chita"](weights, fisher, keep)) <= plain * (1 + 1e-5)


def test_diagonal_fisher_makes_woodfisher_and_cbs_the_same(problem):
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


def test_gradient_rows_average_to_the_gradient_of_the_mean_loss(network):
    model, data = network
    layers = select(model).layers
    rows = gradient_rows(model, layers, Part(data, [0, 1]))
    loss = sum(nn.functional.cross_entropy(model(x), y) for x, y in data) / 2
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [model[0].weight, model[2].weight])])
    assert torch.allclose(rows.mean(0), expected, atol=1e-6)


@pytest.mark.parametrize(("method", "stages"), [*((method, 1) for method in METHODS), ("chita", 3)])
def test_networks_keep_the_exact_global_count(network, method, stages):
    model, data = network
    biases = [model[0].bias.clone(), model[2].bias.clone()]
    report = prune_by_fisher(model, data, 0.7, method=method, stages=stages, block=16)
    assert sum(row.zeros for row in report.audit) == 66 - 20  # 30 % of 66, halves up
    assert sum(int((model[i].weight == 0).sum()) for i in (0, 2)) == 46
    assert len(report.rounds) == stages
    assert all(torch.equal(bias, model[i].bias) for bias, i in zip(biases, (0, 2), strict=True))
    assert type(report).from_dict(report.as_dict()) == report


def test_what_is_wrong_is_said_before_any_work(network):
    model, data = network
    with pytest.raises(ProblemError, match="no method"):
        prune_by_fisher(model, data, 0.5, method="obd")
    with pytest.raises(ProblemError, match="positive"):
        prune_by_fisher(model, data, 0.5, stages=0)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_any_size(method):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 2))
    data = [(torch.randn(50, 30), 100 * torch.randn(50, 2))]
    report = prune_by_fisher(model, data, 0.5, method=method)
    assert report.best.sparsity == report.sparsity == pytest.approx(0.5)


def test_magnitude_leaves_kept_weights_to_the_last_bit():
    torch.manual_seed(0)
    model = nn.Linear(30, 40).double()
    before = model.weight.detach().clone()
    prune_by_fisher(model, [torch.randn(5, 30).double()], 0.5, method="magnitude")
    kept = model.weight != 0
    assert torch.equal(model.weight[kept], before[kept])


def test_data_that_does_not_fit_is_named(network):
    model, data = network
    with pytest.raises(CalibrationError, match="cannot take calibration batch 2"):
        prune_by_fisher(model, [*data, (torch.randn(4, 9), torch.zeros(4, dtype=torch.int64))], 0.5)


class RootOfZero(nn.Module):
    """Its gradient is NaN where the first input is zero."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x):
        hidden = self.body(x)
        return self.head(hidden + (hidden * x[:, :1]).square().sum(1, keepdim=True).sqrt())


@pytest.mark.parametrize("method", ["woodfisher", "cbs", "chita"])
def test_a_gradient_that_is_not_finite_names_its_sample(network, method):
    data = network[1]
    data[1][0][4, 0] = 0.0
    model = RootOfZero()
    before = model.body.weight.detach().clone()
    with pytest.raises(NonFiniteError, match=r"sample 4 of calibration batch 1 .* layer 'body'"):
        prune_by_fisher(model, data, 0.5, method=method)
    assert torch.equal(model.body.weight, before)


def test_a_fisher_without_a_factor_names_its_layer():
    rows = torch.zeros(1, 11)
    rows[0, 6:] = 1e8
    fisher = BlockFisher(rows, 1e-6, 2, SIZES, ("first", "second"))
    for method in ("woodfisher", "cbs"):
        with pytest.raises(NotPositiveDefiniteError, match="layer 'second'"):
            METHODS[method](torch.ones(11), fisher, 5)
