"""Allocation of sparsity over layers: optimal counts against brute force, bounds, whole networks."""

import copy
import itertools

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import LayerSelectionError, PatternError, ProblemError
from iobs.pruning.layerwise.problem import Task, solve_layer
from iobs.pruning.network.layers import Layer
from iobs.pruning.plan import curves
from iobs.pruning.plan.counts import Curve, keep_ranges, optimal_counts, within_support
from iobs.pruning.plan.curves import Damages
from iobs.pruning.recipe import Allocation

LAYERS = (Layer("a", (2, 5)), Layer("b", (1, 6)), Layer("c", (2, 4)))


def convex(layer, scale):
    """A curve of convex falling errors with one point for every count."""
    total = layer.weights
    return Curve(list(range(total + 1)), [scale * (total - keep) ** 2 / total for keep in range(total + 1)], scale)


@pytest.mark.parametrize("total", [0, 1, 7, 12, 23, 24])
def test_optimal_counts_equal_brute_force(total):
    scales = zip(LAYERS, (1.0, 3.0, 0.2), (1.0, 0.5, 4.0), strict=True)
    effects = {layer: convex(layer, scale).times(weight) for layer, scale, weight in scales}
    ranges = {layer: (0, layer.weights) for layer in LAYERS}
    counts = optimal_counts(effects, total, ranges)

    def cost(keeps):
        return sum(effects[layer].damages[keep] for layer, keep in zip(LAYERS, keeps, strict=True))

    choices = itertools.product(*(range(layer.weights + 1) for layer in LAYERS))
    best = min(cost(keeps) for keeps in choices if sum(keeps) == total)
    assert sum(counts.values()) == total
    assert cost([counts[layer] for layer in LAYERS]) == pytest.approx(best)


def test_optimal_counts_respect_bounds_or_raise():
    curves = {layer: convex(layer, 1.0) for layer in LAYERS}
    ranges = dict.fromkeys(LAYERS, (2, 5))
    counts = optimal_counts(curves, 9, ranges)
    assert sum(counts.values()) == 9
    assert all(2 <= count <= 5 for count in counts.values())
    with pytest.raises(PatternError, match="widen"):
        optimal_counts(curves, 16, ranges)


def test_curve_interpolates_its_points_and_falls():
    curve = Curve([2, 4, 8], [9.0, 1.0, 0.0], 10.0)
    assert [curve.at(keep) for keep in (2, 4, 8)] == pytest.approx([9.0, 1.0, 0.0])
    assert curve.at(3) == pytest.approx(3.0)
    assert curve.at(6) == pytest.approx(1 / 9)  # extrapolates the fall; a straight line to zero would give 0.5
    assert Curve([4, 8], [1.0, 0.0], 10.0).at(6) == pytest.approx(0.5)
    assert Curve([2, 4, 8], [1.0, 1.0, 0.0], 10.0).at(6) == pytest.approx(0.5)
    assert curve.at(1) > curve.at(2)
    assert curve.at(9) == 0.0  # keeping entries that are already zero costs nothing
    assert Curve([4], [0.0], 10.0).at(1) == pytest.approx(7.5)


def test_allocation_ranges_follow_name_patterns():
    allocation = Allocation(least=0.1, most=0.8, bounds={"b*": (0.5, 0.5), "re:c": (0.0, 0.25)})
    assert [*keep_ranges(allocation, LAYERS, 0.6).values()] == [(2, 9), (3, 3), (6, 8)]
    for pattern in ("d*", "re:("):
        with pytest.raises(LayerSelectionError, match="allocation bounds"):
            keep_ranges(Allocation(bounds={pattern: (0.0, 0.5)}), LAYERS, 0.6)


@pytest.mark.parametrize("settings", [{"criterion": "guess"}, {"most": 1.0}, {"bounds": {"a": (-0.1, 0.5)}}])
def test_allocation_refuses_impossible_settings(settings):
    with pytest.raises(ProblemError):
        Allocation(**settings)


@pytest.fixture
def network():
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 4))
    with torch.no_grad():
        for layer in (0, 2, 4):
            model[layer].weight.copy_(torch.randn(model[layer].weight.shape, generator=generator) / 4)
    return model, [torch.randn(50, 20, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("criterion", ["fisher", "search", "auto"])
def test_allocation_keeps_the_exact_global_count(network, criterion):
    model, data = network
    report = iobs.prune(
        model, data, iobs.Unstructured(0.8), "one-shot", allocation=Allocation(criterion, generations=3)
    )
    total = 20 * 16 + 16 * 12 + 12 * 4
    kept = sum(int((model[i].weight != 0).sum()) for i in (0, 2, 4))
    assert kept <= total // 5
    assert sum(row.asked for row in report.audit) == total - total // 5
    assert [row.name for row in report.allocation] == ["0", "2", "4"]
    assert all(sorted(row.errors, reverse=True) == row.errors for row in report.allocation)
    assert type(report).from_dict(report.as_dict()) == report


def test_some_rows_of_a_layer_show_its_errors(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 600), nn.ReLU(), nn.Linear(600, 16))
    data = [torch.randn(200, 40) @ torch.randn(40, 40) for _ in range(2)]
    found = []
    for rows in (1024, 60):  # every row of the first layer, every tenth
        monkeypatch.setattr(curves, "CURVE_ROWS", rows)
        report = iobs.prune(copy.deepcopy(model), data, 0.6, "one-shot", solver="sparsegpt", allocation="fisher")
        found.append([entry.errors for entry in report.allocation])
    (first, second), (sampled, same) = found
    assert second == same
    assert sampled != first
    assert sampled == pytest.approx(first, rel=0.2)


def test_curves_of_like_layers_have_the_shape_of_a_few(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(12)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)  # otherwise the signal dies out with the depth
    data, found, solves = [torch.randn(300, 24) @ torch.randn(24, 24)], [], []
    solved = curves._solved
    monkeypatch.setattr(curves, "_solved", lambda tasks, *rest: solves.append(len(tasks)) or solved(tasks, *rest))
    for whole in (12, 4):  # all layers, every third
        solves.clear()
        monkeypatch.setattr(curves, "WHOLE_CURVES", whole)
        report = iobs.prune(copy.deepcopy(model), data, 0.5, "one-shot", allocation="fisher")
        found.append(report.allocation)
    assert solves.count(5) == 4  # and one level of each other layer, besides the trials
    complete, shaped = found
    for place in (0, 4, 7, 11):
        assert complete[place].effects == shaped[place].effects

    def damage(division):
        """The damage of a division under the complete curves."""
        keeps = [[round((1 - zeros) * 576) for zeros in layer.sparsities] for layer in complete]
        measured = [Curve(points, layer.effects, 0.0) for points, layer in zip(keeps, complete, strict=True)]
        return sum(curve.at((1 - layer.chosen) * 576) for curve, layer in zip(measured, division, strict=True))

    assert shaped != complete
    assert damage(shaped) < 1.1 * damage(complete)


def test_layers_that_are_partly_sparse_have_the_points_within_their_own_entries():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(12)])
    with torch.no_grad():
        for place in (1, 5, 9):
            model[place][0].weight.mul_(torch.rand(24, 24) < 0.2)
    report = iobs.prune(model, [torch.randn(100, 24)], 0.5, "one-shot", allocation="fisher")
    for layer in report.allocation:
        assert sorted(layer.sparsities, reverse=True) == layer.sparsities


def test_roles_with_a_number_are_other_kinds():
    layers = [Layer(f"blocks.{block}.conv{role}", (4, 4)) for block in range(9) for role in (1, 2)]
    whole = curves.with_whole_curves(layers)
    assert {layer.name[-1] for layer in whole} == {"1", "2"}
    assert len(whole) == 16
    stack = [Layer(f"blocks.{block}.experts.{expert}", (4, 4)) for block in range(32) for expert in range(8)]
    assert len({layer.name[-1] for layer in curves.with_whole_curves(stack)}) > 3


def test_damages_get_the_missing_points_of_like_layers():
    like = [
        Damages([(1, 8.0), (2, 4.0), (3, 1.0)], 9, 20.0, True),
        Damages([(1, 2.0), (2, 1.0), (3, 0.0)], 9, 5.0, True),
    ]
    (first, second, third) = Damages([(2, 3.0)], 9, 10.0, True).shaped(like).points
    assert (first, second, third) == ((1, pytest.approx(6.0)), (2, pytest.approx(3.0)), (3, pytest.approx(0.375)))
    assert Damages([(2, 3.0)], 9, 10.0, True).shaped([]).points == [(2, 3.0)]


@pytest.mark.parametrize("rows", [1000, 4])
def test_curves_weigh_rows_as_the_run_does_also_if_some_rows_stand_for_all(rows, monkeypatch):
    weighed = []

    def solve(task, statistics):
        weighed.append(None if task.metric is None else len(task.metric.diagonal) == len(task.current))
        return solve_layer(task, statistics)

    monkeypatch.setattr(curves, "CURVE_ROWS", rows)
    monkeypatch.setattr(curves, "solve_layer", solve)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12))
    allocation = Allocation("fisher")
    iobs.prune(model, [torch.randn(40, 6)], 0.5, "one-shot", allocation=allocation, curvature="fisher")
    assert weighed
    assert all(weighed)


def test_allocation_spares_a_layer_that_overfits_calibration():
    """A head with more inputs than samples has no error on the calibration data and a large one elsewhere."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 400), nn.ReLU(), nn.Linear(400, 8))
    with torch.no_grad():
        for layer, gain in ((0, 1), (2, 1), (4, 3)):
            weight = model[layer].weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * gain * (2 / weight.shape[1]) ** 0.5)
            model[layer].bias.zero_()
    data = [torch.randn(60, 30, generator=generator) for _ in range(2)]
    others = torch.randn(2000, 30, generator=generator)
    dense = model(others).log_softmax(1).detach()
    found = {}
    for allocation in ("uniform", "fisher"):
        pruned = copy.deepcopy(model)
        report = iobs.prune(pruned, data, iobs.Unstructured(0.7), "one-shot", allocation=allocation)
        sparse = pruned(others).log_softmax(1).detach()
        found[allocation] = float((dense.exp() * (dense - sparse)).sum(1).mean())
    assert report.allocation[2].chosen < 0.7
    assert found["fisher"] < 0.9 * found["uniform"]


@pytest.mark.parametrize("pattern", [iobs.NM(2, 4), iobs.Unstructured(0.5, per="row")])
def test_allocation_refuses_patterns_that_fix_every_layer(network, pattern):
    model, data = network
    with pytest.raises(PatternError, match="nothing to allocate"):
        iobs.prune(model, data, pattern, "one-shot", allocation="fisher")
    report = iobs.prune(model, data, pattern, "one-shot", allocation="auto")
    assert not report.allocation


class WithUnusedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head, self.unused = nn.Linear(12, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, inputs):
        return self.head(self.body(inputs).relu())


@pytest.mark.parametrize("allocation", ["fisher", Allocation("search", generations=3)], ids=["fisher", "search"])
def test_allocation_leaves_out_layers_without_inputs(allocation):
    torch.manual_seed(0)
    model, data = WithUnusedHead(), [(torch.randn(40, 12), torch.zeros(40, dtype=torch.long)) for _ in range(3)]
    report = iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", ignore=[], allocation=allocation)
    assert "unused" in report.skipped
    assert report.sparsity == 0.5
    assert bool((model.unused.weight != 0).all())


@pytest.mark.parametrize("model", [nn.Linear(12, 3), nn.Sequential(nn.Linear(12, 1), nn.Linear(1, 1))])
def test_allocation_of_one_layer_and_of_one_weight(model):
    torch.manual_seed(0)
    data = [(torch.randn(40, 12), torch.zeros(40, dtype=torch.long)) for _ in range(3)]
    allocation = Allocation("search", generations=3)
    report = iobs.prune(
        nn.Sequential(model), data, iobs.Unstructured(0.5), "one-shot", allocation=allocation, ignore=[]
    )
    assert report.sparsity >= 0.45


@pytest.mark.parametrize("sparsity", [0.5, 0.7])
def test_allocation_ranges_of_equal_bounds_are_one_count(sparsity):
    layer = Layer("a", (9, 15))
    fewest, most = keep_ranges(Allocation("fisher", bounds={"a": (sparsity, sparsity)}), [layer], 0.9)[layer]
    assert fewest == most
    assert abs(fewest - 135 * (1 - sparsity)) < 1


class TwoHeads(nn.Module):
    """Two outputs; the loss measures only the first."""

    def __init__(self):
        super().__init__()
        self.body, self.classes, self.box = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, inputs):
        hidden = self.body(inputs).relu()
        return self.classes(hidden), self.box(hidden)


@pytest.mark.parametrize("criterion", ["fisher", "search"])
def test_allocation_prunes_a_head_without_loss_moderately(criterion):
    torch.manual_seed(0)
    data = [torch.randn(50, 16) for _ in range(6)]
    allocation = Allocation(criterion, generations=20)
    report = iobs.prune(TwoHeads(), data, 0.5, "one-shot", solver="sparsegpt", allocation=allocation)
    assert report.audit[2].name == "box"
    assert 0.3 < report.audit[2].sparsity < 0.7
    assert report.sparsity == 0.5


def test_allocation_without_a_gradient_is_by_relative_errors_with_a_note():
    class Idle(nn.Sequential):
        def forward(self, inputs):
            return inputs + 0 * super().forward(inputs)

    torch.manual_seed(0)
    model, data = Idle(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), [torch.randn(50, 16) for _ in range(2)]
    report = iobs.prune(model, data, 0.5, "one-shot", solver="sparsegpt", allocation="fisher")
    assert [note for note in report.notes if "compared by relative error" in note]
    assert all(row.effects == row.errors for row in report.allocation)


@pytest.mark.parametrize("criterion", ["fisher", "search"])
def test_allocation_prunes_a_layer_of_little_effect_most(criterion):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.idle, self.last = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, inputs):
            return self.last(torch.relu(self.first(inputs) + 1e-5 * self.idle(inputs)))

    torch.manual_seed(0)
    allocation = Allocation(criterion, generations=20)
    report = iobs.prune(Gated(), torch.randn(400, 16), 0.5, "one-shot", solver="sparsegpt", allocation=allocation)
    sparsity = {row.name: row.sparsity for row in report.audit}
    assert sparsity["idle"] > 0.85 > 0.4 > sparsity["first"]


def test_within_support_caps_counts_at_nonzero_entries():
    curves = {layer: Curve([1, full], [1.0, 0.0], 2.0) for layer, full in zip(LAYERS, (4, 6, 3), strict=True)}
    ranges = {LAYERS[0]: (1, 10), LAYERS[1]: (1, 5), LAYERS[2]: (4, 8)}
    assert [*within_support(curves, ranges, 9).values()] == [(1, 4), (1, 5), (4, 4)]
    assert within_support(curves, ranges, 14) == ranges  # 14 entries cannot be kept: only 13 are not zero


@pytest.mark.parametrize("keep_zeros", [True, False])
@pytest.mark.parametrize("criterion", ["fisher", "search"])
def test_allocation_of_a_sparse_network_keeps_the_exact_count(network, criterion, keep_zeros):
    model, data = network
    for allocation, sparsity in ((Allocation("uniform"), 0.8), (Allocation(criterion, generations=3), 0.85)):
        choices = {"allocation": allocation, "keep_zeros": keep_zeros and allocation.criterion != "uniform"}
        report = iobs.prune(model, data, iobs.Unstructured(sparsity), iobs.Recipe(), **choices)
        assert report.zeros == report.weights - round(report.weights * (1 - sparsity))
    assert all(0 <= effect < 1e6 for row in report.allocation for effect in row.effects)


class Sentences(nn.Module):
    """A model of text with one output for a sample, or for each position."""

    def __init__(self, pooled):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(20, 12), nn.Linear(12, 16), nn.Linear(16, 8)
        self.pooled = pooled

    def forward(self, input_ids):
        hidden = self.body(self.table(input_ids)).relu()
        return self.head(hidden.mean(1) if self.pooled else hidden)


@pytest.mark.parametrize("pooled", [True, False])
def test_text_with_one_output_for_a_sample_has_trials_and_weighs_rows(pooled, monkeypatch):
    """Errors at all positions come together in one output, which sums of squares miss; rows count as in other text."""
    torch.manual_seed(0)
    model, tried, weighed = Sentences(pooled), [], []
    data = [{"input_ids": torch.randint(0, 20, (40, 9))} for _ in range(4)]

    def of(values):
        tried.append(values["trial"] is not None)
        return damages(values)

    def task(*arguments, metric):
        weighed.append(metric is not None)
        return Task(*arguments, metric=metric)

    damages = Damages.of
    monkeypatch.setattr(Damages, "of", of)
    monkeypatch.setattr(curves, "Task", task)
    iobs.prune(model, data, 0.5, "one-shot", ignore=[])
    assert tried == [pooled] * 2
    assert weighed
    assert all(weighed)
