"""Budgets of bits: division against brute force, exact totals, whole networks, refusals."""

import itertools
import math

import pytest
import torch
from menagerie import three_layers

import iobs
from iobs.core.grids import grid_of, stored_bits
from iobs.errors import AuditError, PatternError, ProblemError
from iobs.pruning.audit import audit
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.plan.bits import _choices, divided, uniform_plans
from iobs.pruning.plan.counts import Curve
from iobs.pruning.recipe import Recipe
from iobs.pruning.recipe.text import parse_pattern, plain_pattern
from iobs.pruning.widths.knapsack import best_choices


@pytest.mark.parametrize("seed", range(20))
def test_choices_equal_brute_force(seed):
    generator = torch.Generator().manual_seed(seed)
    costs = torch.randint(1, 40, (4, 6), generator=generator).tolist()
    effects = torch.rand(4, 6, generator=generator).tolist()
    total = 60 + 5 * seed
    found = best_choices(costs, effects, total)
    every = [
        (sum(effects[layer][one] for layer, one in enumerate(choice)), choice)
        for choice in itertools.product(range(6), repeat=4)
        if sum(costs[layer][one] for layer, one in enumerate(choice)) <= total
    ]
    assert sum(effects[layer][one] for layer, one in enumerate(found)) == pytest.approx(min(every)[0])


def test_large_totals_are_never_exceeded():
    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(1000, 10**6, (9, 7), generator=generator).tolist()
    effects = torch.rand(9, 7, generator=generator).tolist()
    for total in (10**6, 3_141_592, 5 * 10**6):
        found = best_choices(costs, effects, total)
        spent = sum(own[one] for own, one in zip(costs, found, strict=True))
        assert spent <= total or found == [own.index(min(own)) for own in costs]


def curves(shape, weight):
    """Effects that fall by a factor of 4 with each bit, and with the share of kept entries."""
    entries = math.prod(shape)
    keeps = [round(share * entries) for share in (0.1, 0.5, 1.0)]
    rounding = {2: 1.0, 3: 0.2, 4: 0.05, 8: 2e-4}
    return {
        bits: Curve(keeps, [weight * (own + lost) for lost in (3.0, 0.4, 0.0)], 5 * weight)
        for bits, own in rounding.items()
    }


@pytest.mark.parametrize("bits", [2.6, 3.1, 5.0])
def test_division_is_at_least_as_good_as_brute_force_and_spends_the_budget(bits):
    budget, shapes = iobs.Budget(bits, group=32), {"a": (4, 32), "b": (2, 32), "c": (2, 64)}
    effects = {name: curves(shape, weight) for (name, shape), weight in zip(shapes.items(), (1, 20, 0.1), strict=True)}
    found = divided(budget, shapes, effects)
    total = math.floor(bits * sum(map(math.prod, shapes.values())))

    def cost(chosen):
        return sum(budget.cost(*choice, shapes[name]) for name, choice in chosen.items())

    def effect(chosen):
        return sum(effects[name][choice[0]].at(choice[1]) for name, choice in chosen.items())

    priced = [
        [(budget.cost(*one, shape), effects[name][one[0]].at(one[1])) for one in _choices(shape)]
        for name, shape in shapes.items()
    ]
    best = min(
        sum(one[1] for one in chosen)
        for chosen in itertools.product(*priced)
        if chosen[0][0] + chosen[1][0] + chosen[2][0] <= total
    )
    assert cost(found) <= total
    assert effect(found) <= best + 1e-9
    sparse = [choice for name, choice in found.items() if choice[1] < math.prod(shapes[name])]
    assert not sparse or cost(found) > total - max(choice[0] for choice in sparse)


@pytest.mark.parametrize("bits", [3.0, 4.5])
def test_network_spends_its_budget(bits):
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.Budget(bits, group=16), "fast", solver="sparsegpt")
    assert bits - 0.1 <= report.bits_per_weight <= bits
    assert any("by damages" in note for note in report.notes)
    assert len(report.allocation) == len(report.audit)
    for row in report.audit:
        layer = dict(model.named_modules())[row.name]
        assert any(_lies_on(layer.weight, own) for own in (2, 3, 4, 8))


def _lies_on(weight, bits):
    try:
        audit(torch.nn.ModuleDict({"one": _linear(weight)}), iobs.Grid(bits, 16), ["one"])
    except iobs.errors.AuditError:
        return False
    return True


def _linear(weight):
    layer = torch.nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight = weight
    return layer


def test_layers_of_few_columns_are_tried_although_their_scales_exceed_the_budget():
    torch.manual_seed(0)
    layers = torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    model, inputs = torch.nn.Sequential(*layers), torch.randn(120, 2)
    data = [(part, model(part).argmax(1).detach()) for part in inputs.split(40)]
    report = iobs.prune(model, data, iobs.Budget(4.0, group=16), Recipe(solver="magnitude", allocation="fisher"))
    assert report.bits_per_weight <= 4
    assert all(max(row.effects) > 0 for row in report.allocation)


@pytest.mark.parametrize("bits", [1.9, 2.6, 3.2, 4.0, 9.0])
def test_uniform_plans_spend_the_budget_with_the_same_share_in_every_layer(bits):
    budget, shapes = iobs.Budget(bits, group=32), {"a": (40, 32), "b": (20, 64), "c": (30, 96)}
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    total = bits * sum(sizes.values())
    plans = uniform_plans(budget, shapes, dict.fromkeys((2, 3, 4, 8), 0.9))
    fits = [own for own in (2, 3, 4, 8) if own + 0.5 <= bits]  # scales take half a bit
    assert [name for name in plans if "zeros" not in name] == [f"{own} bits" for own in fits[-1:]]
    for name, plan in plans.items():
        cost = sum(budget.cost(*plan[layer], shape) for layer, shape in shapes.items())
        (own,) = {one for one, _ in plan.values()}
        shares = [keep / sizes[layer] for layer, (_, keep) in plan.items()]
        assert cost <= total
        assert max(shares) - min(shares) < 0.001
        assert "zeros" not in name or cost > total - own * len(shapes) - 1
    assert any("zeros" in name for name in plans) == (bits < 8)


@pytest.mark.parametrize("target", ["layer", "dense"])
def test_two_uniform_plans_with_zeros_are_tried_with_the_target_of_the_run(target, monkeypatch):
    references = []

    class Noted(Sweep):
        def streams(self):
            references.append(self.reference)
            return super().streams()

    monkeypatch.setattr("iobs.pruning.plan.bits.Sweep", Noted)
    model, data = three_layers()
    report = iobs.prune(
        model, data, iobs.Budget(3.6, group=16), Recipe(solver="sparsegpt", allocation="fisher", target=target)
    )
    note = next(one for one in report.notes if one.startswith("Divergence"))
    assert note.count("zeros and") == 2
    assert len(references) == 4
    assert all((reference is None) == (target == "layer") for reference in references)


@pytest.mark.parametrize("bits", [3.0, 2.6])
def test_a_uniform_plan_of_less_divergence_replaces_a_bad_division(bits, monkeypatch):
    def bad(budget, shapes, effects):  # all bits for one small layer
        return {layer: (8 if layer.name == "4" else 2, math.prod(shape)) for layer, shape in shapes.items()}

    monkeypatch.setattr("iobs.pruning.plan.bits.divided", bad)
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.Budget(bits + 1, group=16), Recipe(solver="sparsegpt", allocation="fisher"))
    note = next(one for one in report.notes if one.startswith("Divergence"))
    assert "by damages" in note
    assert "by damages" not in note.split(",")[0]
    last = next(row for row in report.audit if row.name == "4")
    assert last.bits < 8 * last.weights
    assert report.bits_per_weight <= bits + 1


def test_a_plan_that_is_tried_leaves_no_trace_in_the_result():
    model, data = three_layers()
    recipe = Recipe(solver="sparsegpt")
    report = iobs.prune(
        model, data, iobs.Budget(9.5, group=16), recipe.but(allocation="fisher")
    )  # room for 8 bits everywhere
    plain, data = three_layers()
    expected = iobs.prune(plain, data, iobs.Grid(8, 16), recipe)
    assert report.bits_per_weight == expected.bits_per_weight
    assert any("8 bits" in note for note in report.notes if note.startswith("Divergence"))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_audit_of_a_budget_counts_bits_and_finds_changes():
    model, data = three_layers()
    report = iobs.prune(model, data, iobs.Budget(3.0, group=16), Recipe(solver="magnitude", allocation="fisher"))
    rows = {row.name: row for row in audit(model, iobs.Budget(3.0, group=16))}
    assert all(rows[row.name].bits <= row.bits for row in report.audit)
    with pytest.raises(AuditError, match="bits a weight, more than 2 bits a weight"):
        audit(model, iobs.Budget(2.0, group=16))
    with torch.no_grad():
        model[0].weight.mul_(1 + 1e-3 * torch.rand_like(model[0].weight))
    with pytest.raises(AuditError, match="layer '0' lie on no grid of 2, 3, 4, 8 bits"):
        audit(model, iobs.Budget(3.0, group=16), ["0"])
    assert next(row for row in audit(model, iobs.Budget(8.0, group=16)) if row.name == "0").bits is None
    with pytest.raises(AuditError, match="lie on no grid"):
        audit(three_layers()[0], iobs.Budget(3.0, group=16))


def test_a_resumed_run_does_not_measure_again(tmp_path):
    model, data = three_layers()
    recipe = Recipe.preset("fast").but(solver="sparsegpt")
    first = iobs.prune(model, data, iobs.Budget(3.0, group=16), recipe, checkpoint=tmp_path)
    other, data = three_layers()
    measured = []

    class Listens(iobs.Callback):
        def on_measure(self, task, done, total):
            measured.append(task)

    second = iobs.prune(other, data, iobs.Budget(3.0, group=16), recipe, checkpoint=tmp_path, callbacks=[Listens()])
    assert not [task for task in measured if "curves" in task]
    assert [row.bits for row in first.audit] == [row.bits for row in second.audit]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_rules_are_outside_the_budget():
    model, data = three_layers()
    report = iobs.prune(
        model, data, iobs.Budget(2.9, group=16), Recipe(allocation="fisher", rules=(iobs.Rule("0", pattern="int8/16"),))
    )
    bits = {row.name: row.bits for row in report.audit}
    assert bits["0"] == stored_bits(iobs.Grid(8, 16), (24, 16))
    rest = sum(row.weights for row in report.audit if row.name != "0")
    assert sum(own for name, own in bits.items() if name != "0") <= 2.9 * rest


@pytest.mark.parametrize(
    ("budget", "recipe", "message"),
    [
        (iobs.Budget(3.0), Recipe(), "divided by the damage of each layer"),
        (iobs.Budget(1.0), "fast", "need at least"),
        (iobs.Budget(3.0), Recipe(allocation=iobs.Allocation("fisher", most=0.8)), "without bounds"),
        (iobs.Budget(3.0), Recipe(solver="obc", allocation="fisher"), "cannot put weights on the grid"),
        (iobs.Budget(3.0), Recipe(solver="global-magnitude"), "one count over all layers"),
        (iobs.Budget(3.0), Recipe(allocation="fisher", rules=(iobs.Rule("*", pattern="int8"),)), "no layer is left"),
    ],
)
def test_budgets_that_cannot_be_kept_are_refused_first(budget, recipe, message):
    model, data = three_layers()
    with pytest.raises((PatternError, ProblemError), match=message):
        iobs.prune(model, data, budget, recipe)


class Unused(torch.nn.Module):
    """Two layers with small inputs, whose scales take many bits, and a large one that receives no input."""

    def __init__(self):
        super().__init__()
        self.used = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        self.unused = torch.nn.Linear(512, 64)

    def forward(self, inputs):
        return self.used(inputs)


def test_bits_of_a_layer_without_input_are_not_given_to_the_others():
    recipe = Recipe(solver="magnitude", allocation="fisher")
    with pytest.raises(PatternError, match=r"These layers need at least .* the budget is 2\.9"):
        iobs.prune(Unused(), torch.randn(40, 2), iobs.Budget(2.9, group=16), recipe)


def test_a_rule_takes_no_budget():
    """It was found after the calibration, by the solver of the layer."""
    with pytest.raises(PatternError, match="divided among layers"):
        iobs.Rule("0", pattern=iobs.Budget(3.0))


def test_budget_is_checked_and_has_a_text_form():
    with pytest.raises(PatternError, match="positive number"):
        iobs.Budget(0)
    with pytest.raises(PatternError, match="more than weights of 16 bits have"):
        iobs.Budget(40)
    with pytest.raises(PatternError, match="whole number"):
        iobs.Budget(3, group=0)
    with pytest.raises(PatternError, match="among the layers of a network"):
        iobs.solve(iobs.Quadratic.at(torch.ones(2, 2), torch.eye(2)), iobs.Budget(3.0))
    for pattern in (iobs.Budget(2.5, 64), iobs.Unstructured(keep=3) & iobs.Grid(3), iobs.NM(2, 4) & iobs.Grid(4, 32)):
        assert parse_pattern(plain_pattern(pattern)) == pattern
    with pytest.raises(ProblemError, match="A pattern on a grid is"):
        parse_pattern({"grid": "0.5", "entries": 0.5})
    assert grid_of(iobs.Budget(3.0)) is None
