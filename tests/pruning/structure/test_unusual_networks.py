"""Networks with unusual code: their units are removed, or kept with a reason before any work."""

import re
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from traced_sites import find_sites

import iobs
from iobs.errors import CalibrationError, LayerSelectionError, ModelError, PatternError
from iobs.pruning.recipe import Recipe
from iobs.pruning.store import Store
from iobs.pruning.structure.trace import shortened, traced_batches
from iobs.pruning.structured import plan_structured
from iobs.pruning.structured_report import StructuredRequest

ROWS = torch.linspace(-1, 1, 12 * 8).view(12, 8).sin()


class Body(nn.Module):
    """Two hidden layers and two heads; a function of the model, the hidden state and the input gives the outputs."""

    def __init__(self, out=None):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 10)
        self.last, self.other = nn.Linear(10, 3), nn.Linear(10, 2)
        self.out = out or (lambda model, hidden, x: model.last(hidden))

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu()).relu()

    def forward(self, x):
        return self.out(self, self.hidden(x), x)


def plan(model, data=(ROWS,)):
    request = StructuredRequest(iobs.Structured(0.3), Recipe.preset("one-shot"))
    result = plan_structured(Store(model.eval()), list(data), request)
    return [(units.name, units.layers, units.count) for units in result.units], result.notes


def names(model):
    return [name for name, _, _ in plan(model)[0]]


def pruned(model, data=(ROWS,)):
    return iobs.prune(model.eval(), list(data), iobs.Structured(0.3), "one-shot", solver="magnitude", holdout=0.0)


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        (lambda model, hidden, x: model.last(hidden.unflatten(1, (2, 5)).flatten(1)), "unflatten"),
        (
            lambda model, hidden, x: model.last(hidden) * (30 // (hidden.shape[1] // 10)),
            "integer division or modulo by zero",
        ),
    ],
)
def test_units_that_code_counts_are_kept_with_a_reason(out, reason):
    units, notes = plan(Body(out))
    assert [name for name, _, _ in units] == ["second"]
    assert len(notes) == 1
    assert notes[0].startswith(f"last: all units are kept, since the narrower Body fails ({reason}")


def test_networks_whose_norms_mix_all_units_are_told_what_is_left():
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))
    with pytest.raises(LayerSelectionError, match=r"where no norm, softmax or shuffle mixes them.*Unstructured"):
        plan(model)


class Computed(Body):
    def __init__(self):
        super().__init__()
        for layer in (self.first, self.second, self.last):
            weight_norm(layer)


def test_computed_weights_are_named_with_the_way_out():
    model = Computed()
    with pytest.raises(LayerSelectionError, match=r"first.*\. iobs\.fold\(model, batch\) makes plain weights"):
        plan(model)
    iobs.fold(model, ROWS)
    assert len(plan(model)[0]) == 2


class TwoInOne(nn.Module):
    """A module with two matrices, one of them named `weight`."""

    def __init__(self):
        super().__init__()
        self.weight, self.back = nn.Parameter(torch.randn(12, 8)), nn.Parameter(torch.randn(8, 12))

    def forward(self, x):
        return nn.functional.linear(nn.functional.linear(x, self.weight).relu(), self.back)


def test_readers_that_no_solver_takes_are_named():
    with pytest.raises(LayerSelectionError, match=r"1\.back, which reads them, is no weight that a solver takes"):
        plan(nn.Sequential(nn.Flatten(), TwoInOne()))


def test_layers_that_pass_no_gradient_read_units():
    model = Body(lambda model, h, x: (model.last(h), model.other(h.detach()), model.other(h.data)))
    assert plan(model)[0] == [("second", ("second",), 12), ("other", ("other", "last"), 10)]


def numbers(model, hidden, x):
    return model.last(hidden) * hidden.mean().item()


def largest(model, hidden, x):
    """A condition, which has no gradient, compares all units with the first."""
    return model.last(hidden * (hidden > hidden.amax(1, keepdim=True) / 5))


@pytest.mark.parametrize("out", [numbers, largest])
def test_units_that_others_depend_on_are_kept(out):
    model = Body(out)
    model.second.bias.data[0] = 9
    assert names(model) == ["second"]


@dataclass
class Answer:
    scores: torch.Tensor
    features: torch.Tensor


def test_units_in_a_dataclass_are_kept():
    model = Body(lambda model, hidden, x: Answer(model.last(hidden), hidden))
    report = pruned(model)
    assert [(width.name, width.before) for width in report.widths] == [("second", 12)]
    assert model(ROWS).features.shape == (12, 10)


class Box:
    def __init__(self, value):
        self.value = value


def test_outputs_that_cannot_be_read_are_refused():
    with pytest.raises(CalibrationError, match="returned a Box without a tensor in it"):
        plan(Body(lambda model, hidden, x: Box(model.last(hidden))))


def test_layers_of_one_vector_have_units():
    vector = nn.Parameter(torch.ones(8))
    model = Body(lambda model, hidden, x: x[:, :3] + model.last(model.hidden(model.start)))
    model.start = vector
    assert [site.name for site in find_sites(model.eval(), ROWS)] == ["second", "last"]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.h, self.qkv, self.out = 4, nn.Linear(8, 24), nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.h, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


def test_numbers_of_heads_have_any_name():
    (site,) = find_sites(Attention().eval(), ROWS.view(3, 4, 8))
    assert (site.kind, site.count, site.attributes[0].name) == ("heads", 4, "h")


class Short(Body):
    """Code that needs the dtype of its weights."""

    def __init__(self):
        super().__init__(lambda model, hidden, x: model.last(hidden.float()))
        self.first.bfloat16()
        self.second.bfloat16()

    def hidden(self, x):
        return super().hidden(x.bfloat16())


@pytest.mark.parametrize(
    "build", [Short, lambda: Body(lambda model, hidden, x: model.last(hidden) + torch.randn_like(x[:, :3]))]
)
def test_networks_that_need_their_own_dtypes_or_draw_numbers_become_narrower(build):
    model = build()
    pruned(model)
    assert model.second.in_features < 12
    assert model.last.in_features < 10


def test_networks_that_cannot_be_copied_are_refused():
    model = Body()
    model.lock = threading.Lock()
    with pytest.raises(LayerSelectionError, match="a copy of the Body fails: cannot pickle"):
        plan(model)


def branching(model, hidden, x):
    return model.last(hidden)[:, :2] if x.mean() > 0 else model.other(hidden)


@pytest.mark.parametrize("sign", [1, -1])
def test_layers_that_other_batches_call_read_units(sign):
    model, data = Body(branching), [sign * (ROWS + 2), sign * (ROWS - 2)]
    assert {name: len(layers) for name, layers, _ in plan(model, data)[0]} == {"second": 1, "last": 2}
    pruned(model, data)
    assert model.last.in_features == model.other.in_features < 10
    assert [model(batch).shape for batch in data] == [(12, 2), (12, 2)]


def test_layers_of_units_that_no_sample_reaches_are_named():
    _, notes = plan(Body(branching), [ROWS + 2])
    assert notes == (
        "No calibration sample reaches other. If they read units that are removed, a forward pass that calls them "
        "fails: give data that reach them.",
    )


def test_branches_that_cannot_become_narrower_are_refused():
    """A branch for other batches takes a number of units that is written into the code."""
    model = Body(lambda model, hidden, x: branching(model, hidden if x.mean() > 0 else hidden.view(-1, 10), x))
    with pytest.raises(ModelError, match="Body calls other layers for other batches"):
        plan(model, [ROWS + 2, ROWS - 2])


class Tables(Body):
    """Tables by batch size, made from a buffer at the first call."""

    def __init__(self):
        super().__init__()
        self.tables = {}
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        if len(x) not in self.tables:
            self.tables[len(x)] = self.scale * len(x)
        return self.last(self.hidden(x)) * self.tables[len(x)]


def test_a_trace_leaves_no_tables_of_noise():
    model = Tables().eval()
    find_sites(model, ROWS)
    assert all(torch.equal(table, torch.full((3,), float(size))) for size, table in model.tables.items())


class Flat(Body):
    """Activations with flat parts, with a slope of every unit."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.slope = kind, nn.PReLU(12)

    def hidden(self, x):
        h = self.slope(self.first(x))
        zero = torch.zeros(())
        kinds = {
            "where": torch.where(h > 0, h, zero), "maximum": torch.maximum(h, zero), "max": torch.max(h, zero),
            "mask": h * (h > 0), "filled": h.masked_fill(h < 0, 0),
        }  # fmt: skip
        return self.second(kinds[self.kind])


@pytest.mark.parametrize("kind", ["where", "maximum", "max", "mask", "filled"])
def test_units_are_found_behind_flat_functions(kind):
    sites = find_sites(Flat(kind).eval(), -ROWS.abs())
    assert [(site.name, site.count) for site in sites] == [("second", 12), ("last", 10)]
    assert "slope" in {one.path for one in sites[0].writers}


class OneKey(nn.Module):
    """Attention over one position, whose only key has all the weight."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused
        self.queries, self.keys, self.values = nn.Linear(8, 32), nn.Linear(8, 16), nn.Linear(8, 16)
        self.out = nn.Linear(32, 8)

    def forward(self, x):
        q, k, v = (layer(x).view(1, len(x), -1, 4).transpose(0, 1).transpose(1, 2)
                   for layer in (self.queries, self.keys, self.values))  # fmt: skip
        if self.fused:
            h = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            h = (q @ k.mT + torch.finfo(q.dtype).min * torch.zeros(())).softmax(-1) @ v
        return self.out(h.transpose(1, 2).flatten(1))


@pytest.mark.parametrize("fused", [False, True])
def test_heads_are_found_in_attention_over_one_position(fused):
    (site,) = find_sites(OneKey(fused).eval(), ROWS)
    assert (site.name, site.kind, site.count) == ("out", "heads", 4)
    assert {one.path for one in site.writers} == {"queries", "keys", "values"}


class OtherBiases(nn.Module):
    """Layers whose biases are computed, or are parameters of the model itself."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 48, bias=False), nn.Linear(16, 8)
        self.queries, self.values = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.register_buffer("keys", torch.zeros(16))
        self.enter, self.leave = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(12, 8))
        self.shift = nn.Parameter(torch.randn(12))
        self.first, self.last = nn.Conv1d(1, 6, 3, bias=False), nn.Conv1d(6, 2, 3)
        self.level = nn.Parameter(torch.randn(6))

    def forward(self, x):
        bias = torch.cat((self.queries, self.keys, self.values))
        q, k, v = nn.functional.linear(x, self.qkv.weight, bias).view(len(x), 3, -1, 4).permute(1, 2, 0, 3)
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        x = x + torch.addmm(self.shift, x, self.enter).relu() @ self.leave
        h = nn.functional.conv1d(x[:, None], self.first.weight, self.level)
        return self.last(h.relu())


def test_units_with_biases_of_other_modules_lose_them():
    model = OtherBiases().eval()
    units, notes = plan(model)
    assert [(name, count) for name, _, count in units] == [("out", 4), ("last", 6)]
    assert "leave, which reads them, is no weight" in " ".join(notes)
    pruned(model)
    heads = model.qkv.weight.shape[0] // 12
    assert 1 <= heads < 4
    assert len(model.queries) == len(model.keys) == len(model.values) == 4 * heads
    assert len(model.level) == len(model.first.weight) < 6


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(8, 12), nn.Linear(12, 3)]

    def forward(self, x):
        return self.layers[1](self.layers[0](x).relu())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Unregistered, "has no parameters. Modules in a plain list"),
        (lambda: nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.Linear(12, 3)), "'0.weight' has no shape yet"),
        (
            lambda: nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(8, 3)))),
            "0 is a RecursiveScriptModule: torch.jit hides the layers inside. Prune the Python modules",
        ),
    ],
)
def test_networks_without_visible_parameters_are_refused(build, message):
    with pytest.raises((LayerSelectionError, ModelError), match=message):
        plan(build())


class OfTorch(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.body = nn.MultiheadAttention(8, 2, batch_first=True), Body()
        del self.body.other  # no batch calls it
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.body(self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0])


def test_attention_of_torch_keeps_its_heads_with_a_note():
    units, notes = plan(OfTorch())
    assert [name for name, _, _ in units] == ["body.second", "body.last"]
    assert [note.split(",")[0] for note in notes] == ["nn.MultiheadAttention keeps its heads"]


def test_data_are_not_searched_for_layers_that_modules_of_torch_read_themselves():
    model = OfTorch().eval()
    assert len(traced_batches(model, [ROWS] * 9)) == 1
    assert model.calls == 1


def rounded(model, hidden, x):
    """Activations on a grid, with the gradients of the values before rounding."""
    return model.last(hidden + ((4 * hidden).round() / 4 - hidden).detach())


def gated(model, hidden, x):
    return model.last(hidden * model.gate.clamp(0, 1))


def masked(model, hidden, x):
    """Entries are masked in place, as in attention within windows; no gradient needs their values."""
    hidden = model.second(model.first(x).relu()) + 0.0
    for row in (0, 1):
        rows = slice(row, row + 1)
        hidden[rows] = torch.full_like(hidden[rows], -1.0).where(x[rows, :1] > 100, hidden[rows])
    return model.last(hidden * 1.0)


def banned(model, hidden, x):
    """Some outputs are not allowed; equal infinite outputs are no difference."""
    return model.last(hidden).masked_fill(torch.tensor([False, True, False]), -torch.inf)


@pytest.mark.parametrize("out", [rounded, gated, masked, banned])
def test_units_are_found_behind_rounding_clamped_scales_and_masks(out):
    model = Body(out)
    if out is gated:
        model.gate = nn.Parameter(torch.linspace(0.5, 1.5, 10))
    units, _ = plan(model)
    assert [(name, count) for name, _, count in units] == [("second", 12), ("last", 10)]


class Counting(Body):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(10))
        self.seen = []

    def forward(self, x):
        hidden = self.hidden(x)
        self.steps += 1
        self.average.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
        self.seen.append(hidden)
        return self.last(hidden)


def test_finding_units_changes_no_counters_and_leaves_no_noise_in_lists():
    model = Counting()
    plan(model)
    assert (int(model.steps), bool(model.average.any())) == (0, False)
    assert not any(one.requires_grad for one in model.seen)


def test_a_shorter_batch_still_calls_the_layers_of_the_whole_one():
    """The second way needs one large entry, which a later sample has."""
    model = Body(lambda model, hidden, x: (model.other if bool((x > 5).any()) else model.last)(hidden))
    rows = ROWS.repeat(4, 1)
    rows[40, 3] = 9.0
    units, notes = plan(model, [ROWS, rows])
    assert [(name, layers) for name, layers, _ in units] == [("second", ("second",)), ("other", ("other", "last"))]
    assert not notes


def test_text_that_is_padded_on_the_left_keeps_its_end():
    ids = torch.arange(40).view(2, 20)
    mask = (torch.arange(20) >= torch.tensor([[10], [12]])).long()
    short = shortened({"input_ids": ids, "attention_mask": mask})
    assert torch.equal(short["input_ids"], ids[:, -8:])
    assert torch.equal(shortened({"input_ids": ids, "attention_mask": mask.flip(1)})["input_ids"], ids[:, :8])


class Table(nn.Module):
    """An embedding for each of twelve columns of categories."""

    def __init__(self):
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(5, 2) for _ in range(12))
        self.first, self.last = nn.Linear(24, 10), nn.Linear(10, 3)

    def forward(self, x):
        values = [column(x[:, place]) for place, column in enumerate(self.columns)]
        return self.last(self.first(torch.cat(values, 1)).relu())


def test_networks_that_take_no_fewer_columns_are_traced_with_all_of_them():
    rows = torch.randint(0, 5, (12, 12), generator=torch.Generator().manual_seed(0))
    assert [one.shape for one in traced_batches(Table().eval(), [rows])] == [(2, 12)]
    units, notes = plan(Table(), [rows])
    assert len(units) == 13  # of every embedding, and the neurons
    assert not notes


class Switched(nn.Module):
    """A layer whose attribute `bias` says if it has one."""

    def __init__(self, columns, rows):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(rows, columns) / columns**0.5), False

    def forward(self, x):
        return nn.functional.linear(x, self.weight)


def test_an_attribute_that_says_if_there_is_a_bias_is_no_bias():
    torch.manual_seed(0)
    model = nn.Sequential(Switched(8, 12), nn.ReLU(), Switched(12, 3))
    report = pruned(model)
    assert [(one.name, one.before) for one in report.widths] == [("2", 12)]
    assert model[2].weight.shape == (3, report.widths[0].after)


class TwoMatrices(nn.Module):
    """A module whose second matrix, `weight`, reads what the first one writes."""

    def __init__(self):
        super().__init__()
        self.up, self.weight = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(3, 12))

    def forward(self, x):
        return nn.functional.linear(nn.functional.linear(x, self.up).relu(), self.weight)


def test_other_matrices_of_a_module_that_reads_units_keep_their_columns():
    torch.manual_seed(0)
    model = TwoMatrices()
    before = model.up.detach().clone()
    report = pruned(nn.Sequential(model), [torch.randn(40, 16)])
    kept = [row for row in range(12) if bool((before[row] == model.up).all(1).any())]
    assert len(kept) == len(model.up) == report.widths[0].after < 12
    assert torch.equal(model.up, before[kept])
    assert [(one.name, one.before, one.after) for one in report.costs[:2]] == [
        ("macs", 12 * 19, len(kept) * 19),
        ("parameters", 12 * 19, len(kept) * 19),
    ]


class Viewing(nn.Module):
    """Two hidden layers; the width of the first is a number in the code."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 12), nn.Linear(12, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        hidden = hidden.view(-1, 12)
        return self.last(torch.relu(self.second(hidden)))


def test_report_names_the_line_of_code_that_lets_units_stay():
    torch.manual_seed(0)
    data = [torch.randn(40, 4)]
    report = iobs.prune(Viewing().eval(), data, iobs.Structured(0.3), "one-shot", solver="magnitude", holdout=0.0)
    line = r"second: all units are kept, .* \(test_unusual_networks.py, line \d+: hidden = hidden.view\(-1, 12\)\)"
    assert re.search(line, str(report).replace("\n", " "))
    with pytest.raises(PatternError, match=rf"ask for less.* {line}"):
        iobs.prune(Viewing().eval(), data, iobs.Structured(0.95), "one-shot", solver="magnitude", holdout=0.0)
