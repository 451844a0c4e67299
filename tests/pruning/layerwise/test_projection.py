"""Projection of single layers: singular Hessians, dead columns, N:M groups, non-finite results."""

import copy

import pytest
import torch
from menagerie import SmallTransformer, token_batches
from torch import nn

import iobs
from iobs.errors import DampingWarning, NonFiniteError, PatternError
from iobs.pruning.layerwise import problem, projection
from iobs.pruning.layerwise.patterns import rows_compete
from iobs.pruning.network.layers import find_layers
from iobs.solvers import solve_many


def test_projection_to_nearly_all_zeros_is_exact():
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).eval()
    report = iobs.prune(network, [torch.randn(60, 8)], iobs.Unstructured(0.999), "fast")
    assert report.weights - report.zeros == round(0.001 * 448)


def test_projection_names_the_layer_of_a_nonfinite_solution(monkeypatch):
    model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), [torch.randn(20, 8)]
    before = copy.deepcopy(model.state_dict())
    solve = projection.solve_layer

    def broken(task, statistics, ranks):
        solutions = solve(task, statistics, ranks)
        for solution in solutions if task.layer.name == "2" else ():
            solution.weight[0, 0] = torch.nan
        return solutions

    monkeypatch.setattr(projection, "solve_layer", broken)
    with pytest.raises(NonFiniteError, match=r"pruned weight of layer '2' holds NaN or infinity in torch.float32"):
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def transformer():
    """Two blocks and few tokens."""
    torch.manual_seed(0)
    return SmallTransformer(depth=2).eval(), token_batches(size=4)


@pytest.mark.parametrize("pattern", [iobs.NM(2, 4), iobs.NM(4, 8)], ids=str)
def test_projection_to_n_of_m_holds_in_every_group(pattern):
    model, data = transformer()
    iobs.prune(model, data, pattern, "one-shot")
    for layer in find_layers(model):
        if layer.name != "head":
            kept = (layer.read(model).reshape(-1, pattern.of) != 0).sum(1)
            assert int(kept.max()) <= pattern.keep


def test_projection_accepts_singular_gram_and_dead_columns():
    """Fewer samples than inputs, and inputs that are always zero: their weights are removed, the count is exact."""
    model = nn.Sequential(nn.Linear(40, 10), nn.ReLU(), nn.Linear(10, 4)).eval()
    inputs = torch.randn(12, 40)
    inputs[:, :6] = 0
    report = iobs.prune(model, [inputs], iobs.Unstructured(0.5), "one-shot", holdout=0)
    assert report.best.layers[0].dead_columns == 6
    assert not model[0].weight[:, :6].any()
    assert report.audit[0].zeros == report.audit[0].asked


def test_projection_damps_a_singular_hessian_with_a_warning():
    model = nn.Sequential(nn.Linear(40, 10)).eval()
    with pytest.warns(DampingWarning, match="layer_name_0|'0'|^0"):
        iobs.prune(model, [torch.randn(8, 40)], iobs.Unstructured(0.5), "one-shot", damping=0.0, holdout=0)


def test_two_of_four_names_all_layers_it_does_not_divide():
    model = nn.Sequential(nn.Linear(7, 8), nn.Linear(8, 8), nn.Linear(8, 3)).eval()
    with pytest.raises(PatternError, match=r"divisible by 4, got 7.*0 \(8 x 7\)"):
        iobs.prune(model, [torch.randn(30, 7)], iobs.NM(2, 4), "one-shot")


@pytest.mark.parametrize("target", ["layer", "dense", "residual"])
def test_layers_with_one_input_share_their_factorisations(target, monkeypatch):
    solved = []

    def counting(problems, *rest, **options):
        solved.append(len(problems))
        return solve_many(problems, *rest, **options)

    monkeypatch.setattr(problem, "solve_many", counting)
    model, data = transformer()
    iobs.prune(model, data, 0.5, iobs.Recipe(target=target))
    assert solved == [3, 3]  # q, k and v of two blocks


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (iobs.Unstructured(0.5), True),
        (iobs.Unstructured(0.5) & iobs.Grid(4), True),
        (iobs.Unstructured(0.5, per="row"), False),
        (iobs.NM(2, 4), False),
        (iobs.NM(2, 4) & iobs.Grid(4), False),
        (iobs.Grid(4), False),
    ],
    ids=str,
)
def test_rows_compete_where_a_count_is_theirs_together(pattern, expected):
    assert rows_compete(pattern) is expected
