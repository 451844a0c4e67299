"""A rate for a whole network: its division among layers, recipes, and the file that keeps it."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import iobs
from iobs.core.integers import Integers, least_bits
from iobs.core.patterns import Rate, parse
from iobs.errors import AuditError, LayerSelectionError, PatternError, ProblemError
from iobs.models.packed_tensors import pack_tensor
from iobs.pruning.calibration.row_fisher import frequencies_of, row_fisher
from iobs.pruning.cost.prices import measure
from iobs.pruning.driver import requested, selected_for
from iobs.pruning.network.layers import embedding_layers, find_layers
from iobs.pruning.plan.counts import under_pattern
from iobs.pruning.plan.rates import divided, rate_of
from iobs.pruning.recipe import Allocation, as_recipe
from iobs.pruning.samples.batches import Samples
from iobs.pruning.store import Store
from iobs.pruning.workspace import Request

BITS = 4.0


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 32))


def batches():
    generator = torch.Generator().manual_seed(1)
    return list((torch.randn(256, 32, generator=generator) @ torch.randn(32, 32, generator=generator)).split(32))


def error(model, dense):
    inputs = torch.cat(batches())
    with torch.no_grad():
        return float((model(inputs) - dense(inputs)).norm() / dense(inputs).norm())


def test_division_has_one_error_for_all_layers_and_the_asked_average():
    shapes = {"small": (64, 256), "large": (512, 256)}
    octaves = {"small": torch.full((1, 256), 3.0), "large": torch.full((1, 256), 1.0)}
    bits = divided(Rate(3.0), shapes, octaves)
    average = sum(bits[name] * rows * columns for name, (rows, columns) in shapes.items()) / (576 * 256)
    assert average == pytest.approx(3.0, abs=1e-6)
    of_integers = {name: bits[name] - least_bits(shape) for name, shape in shapes.items()}
    assert of_integers["small"] - of_integers["large"] == pytest.approx(2.0, abs=0.05)  # two octaves are two bits


def test_division_names_the_least_rate():
    with pytest.raises(PatternError, match="alone need"):
        divided(Rate(0.5), {"narrow": (4, 256)}, {"narrow": torch.zeros(1, 256)})


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_recipes_keep_the_bits_and_the_file_has_them(recipe, tmp_path):
    model, dense = network(), network()
    report = iobs.prune(model, batches(), iobs.Rate(BITS), recipe)
    assert report.bits_per_weight <= 1.01 * BITS
    assert error(model, dense) < 0.1
    iobs.audit(model, iobs.Rate(BITS))
    with pytest.raises(AuditError, match="more than"):
        iobs.audit(model, iobs.Rate(BITS / 2))
    iobs.save_packed(model, tmp_path / "packed")
    vectors = sum(4 * value.numel() for name, value in model.named_parameters() if name.endswith("bias"))
    size = (tmp_path / "packed" / "model.safetensors").stat().st_size - vectors
    assert 8 * size <= 1.15 * BITS * sum(row.weights for row in report.audit)  # names and heads of small matrices count
    again = iobs.load_packed(tmp_path / "packed", into=network())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def test_bits_that_are_divided_beat_equal_bits():
    errors = {}
    for allocation in ("uniform", "auto"):
        model = network()
        iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot", allocation=allocation)
        errors[allocation] = error(model, network())
    assert errors["auto"] < errors["uniform"]


def test_convolutions_and_weights_of_16_bits(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 48, 3), nn.ReLU(), nn.Conv2d(48, 48, 3), nn.Flatten(), nn.Linear(768, 16))
    model = model.to(torch.bfloat16)
    images = torch.randn(64, 8, 8, 8).to(torch.bfloat16)
    report = iobs.prune(model, list(images.split(16)), iobs.Rate(BITS), "one-shot")
    assert report.bits_per_weight <= 1.01 * BITS
    iobs.audit(model, iobs.Rate(BITS))


@pytest.mark.parametrize(("groups", "pattern"), [(2, Rate(6.0)), (16, Rate(6.0)), (2, iobs.NM(2, 4) & Rate(3.5))])
def test_groups_of_a_convolution_share_the_steps_of_their_columns(groups, pattern):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(64, 96, 3, groups=groups))
    scales = torch.logspace(-1, 1, groups).repeat_interleave(64 // groups)[:, None, None]
    images = torch.randn(128, 64, 8, 8) * scales
    with torch.no_grad():
        model[0].weight /= torch.logspace(-1, 1, groups).repeat_interleave(96 // groups)[:, None, None, None]
    dense = model(images).detach()
    report = iobs.prune(model, list(images.split(16)), pattern, "one-shot")
    (row,) = report.audit
    assert row.bits <= 1.01 * pattern.bits * row.weights
    assert 8 * len(pack_tensor(model[0].weight)) < 1.05 * pattern.bits * row.weights
    error = (model(images).detach() - dense).square().mean((0, 2, 3)) / dense.square().mean((0, 2, 3))
    assert float(error.max()) < (0.002 if pattern.zeros is None else 0.4)  # also where inputs are small


def test_zeros_of_an_earlier_run_are_said_to_be_lost():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 96))
    iobs.prune(model, batches(), 0.5, "one-shot", solver="magnitude")
    notes = iobs.prune(model, batches(), iobs.Rate(6.0), "one-shot").notes
    assert any(note.endswith("hold values now. A rate keeps no zeros of an earlier run.") for note in notes)


def test_rates_as_text_and_in_rules():
    assert parse("rate:2.5") == Rate(2.5)
    assert parse(str(Rate(2.5))) == Rate(2.5)
    assert parse("50%+rate:2.5") == Rate(2.5, iobs.Unstructured(0.5))
    assert parse("2:4+rate:2.5") == iobs.NM(2, 4) & Rate(2.5)
    with pytest.raises(PatternError, match=r"rate:3\.0"):
        parse("rate:much")
    model = network()
    rules = [iobs.Rule("2", pattern="rate:6"), iobs.Rule("4", dense=True)]
    report = iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot", rules=rules)
    assert {row.name: round(row.bits / row.weights) for row in report.audit} == {"0": 4, "2": 6}


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
@pytest.mark.parametrize("zeros", [iobs.Unstructured(0.5), iobs.NM(2, 4)], ids=str)
def test_networks_have_zeros_and_bits(zeros, recipe, tmp_path):
    model, pattern = network(), zeros & Rate(BITS)
    report = iobs.prune(model, batches(), pattern, recipe)
    audit = iobs.audit(model, pattern, [row.name for row in report.audit])
    assert all(2 * row.zeros >= row.weights == 2 * row.asked for row in audit)
    weights = sum(row.weights for row in audit)
    assert sum(row.bits for row in audit) <= 1.003 * BITS * weights
    iobs.save_packed(model, tmp_path / "packed")
    size = sum(file.stat().st_size for file in (tmp_path / "packed").rglob("*.safetensors"))
    assert size < 1.15 * BITS / 8 * weights + 4 * 224 + 900  # biases in float32, the header, tables of small matrices
    with torch.no_grad():
        model[2].weight[0] += model[2].weight[model[2].weight != 0].abs().min()
    with pytest.raises(iobs.errors.AuditError, match="'2'"):
        iobs.audit(model, pattern, [row.name for row in report.audit])


def test_an_audit_passes_over_integers_without_a_mask():
    """Small dense matrices of 16 bits are integers by chance, and a rule gives one a rate alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 2)).bfloat16()
    data, pattern = [torch.randn(256, 32).bfloat16()], iobs.NM(2, 4) & Rate(BITS)
    iobs.prune(model, data, pattern, "one-shot", rules=[iobs.Rule("2", pattern="rate:3")], ignore=["4"])
    asked = {row.name: row.asked for row in iobs.audit(model, pattern)}
    assert asked == {"0": 16 * 96, "2": 0, "4": 0}


def test_zeros_and_bits_of_convolutions_lie_along_input_channels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1))
    pattern = iobs.NM(2, 4) & Rate(6.0)
    report = iobs.prune(model, [torch.randn(16, 8, 8, 8) for _ in range(4)], pattern, "one-shot")
    assert sum(row.bits for row in report.audit) <= 1.005 * 6.0 * (32 * 72 + 16 * 288)
    kept = (model[0].weight != 0).reshape(32, 2, 4, 3, 3).sum(2)
    assert int(kept.max()) == 2
    assert max(layer.error_calibration for layer in report.layers) < 0.3


def test_settings_that_no_rate_takes_are_refused_before_any_work():
    for changes in ({"solver": "sparsegpt"}, {"refine": "refit"}):
        model = network()
        with pytest.raises(ProblemError, match="successive rounding alone"):
            iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot", **changes)


def test_a_model_of_16_bits_that_is_computed_in_32_keeps_its_integers(tmp_path):
    from iobs import models

    loaded = models.load()  # stored in float16
    tokens = torch.randint(1, 500, (8, 64), generator=torch.Generator().manual_seed(0))
    iobs.prune(
        loaded.module,
        [{"input_ids": tokens}],
        iobs.Rate(BITS),
        "one-shot",
        include="model.layers.0.mlp.*",
        allocation="uniform",
    )
    weight = loaded.module.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    loaded.write(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight"], weight)


def test_layers_that_no_rate_fits_are_refused_before_any_work():
    narrow = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 1))
    with pytest.raises(PatternError, match='leave it dense by ignore="2", on the command line --ignore 2'):
        iobs.prune(narrow, batches(), iobs.Rate(BITS), "one-shot")
    with pytest.raises(PatternError, match="or give more"):
        iobs.prune(network(), batches(), iobs.Rate(0.5), "one-shot", allocation="uniform")


def test_inputs_that_are_always_zero_end_no_division():
    model = nn.Sequential(nn.Linear(32, 96), nn.Threshold(1e9, 0.0), nn.Linear(96, 96))
    report = iobs.prune(model, batches(), iobs.Rate(BITS), "one-shot")
    assert report.bits_per_weight <= 1.01 * BITS


class Reader(nn.Module):
    """Text in, scores of the next token out, with one table for both ends or two."""

    def __init__(self, tokens, tied):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(tokens, 48)
        self.body = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
        self.head = nn.Linear(48, tokens, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, input_ids):
        hidden = self.table(input_ids)
        return self.head(hidden + self.body(hidden))


def rare_and_frequent(tokens=256):
    generator = torch.Generator().manual_seed(2)
    return [(torch.rand(16, 32, generator=generator) ** 4 * tokens).long() for _ in range(6)]


@pytest.mark.parametrize("tied", [True, False])
def test_tables_of_embeddings_are_coded_by_the_frequencies_of_their_tokens(tied):
    model = Reader(256, tied).eval()
    data = [{"input_ids": ids} for ids in rare_and_frequent()]
    dense = model.table.weight.detach().clone()
    report = iobs.prune(model, data, iobs.Rate(BITS), "one-shot", include="*")
    names = {row.name for row in report.audit}
    assert names == {"body.0", "body.2", "head"} | (set() if tied else {"table"})
    assert report.bits_per_weight <= 1.01 * BITS
    errors = (model.table.weight.detach() - dense).square().mean(1)
    if not tied:
        assert float(errors[:8].mean()) < 0.5 * float(errors[128:].mean())  # the first tokens are frequent
    iobs.audit(model, iobs.Rate(BITS))


def test_metric_of_a_table_is_the_second_order_damage():
    model = Reader(64, False).eval()
    data = rare_and_frequent(64)
    (layer,) = embedding_layers(model, find_layers(model))
    found = row_fisher(model, [layer], [], Samples.of(data), seed=0, tables=[layer]).lookups[layer]
    change = 1e-2 * torch.randn(64, 48, dtype=torch.float64)
    foretold = 0.5 * float((found.prices[:, None] * (change @ found.metric) * change).sum())
    ids = torch.cat(data)
    with torch.no_grad():
        before = model(ids).double().log_softmax(-1)
        model.table.weight += change.float()
        after = model(ids).double().log_softmax(-1)
    divergence = float((before.exp() * (before - after)).sum(-1).mean())
    assert foretold == pytest.approx(divergence, rel=0.3)


@pytest.mark.parametrize(
    "product",
    [torch.nn.functional.linear, lambda x, table: x @ table.T, lambda x, table: torch.einsum("bti,vi->btv", x, table)],
    ids=["linear", "matmul", "einsum"],
)
def test_a_head_that_a_function_computes_is_priced_as_a_module_with_the_same_table(product):
    class Functional(Reader):
        def __init__(self):
            super().__init__(64, True)
            del self.head

        def forward(self, input_ids):
            hidden = self.table(input_ids)
            return product(hidden + self.body(hidden), self.table.weight)

    found = []
    for model in (Reader(64, True).eval(), Functional().eval()):
        layers = [layer for layer in find_layers(model) if layer.path == "head"] or embedding_layers(model, [])
        found += row_fisher(
            model, layers, [], Samples.of(rare_and_frequent(64)), seed=0, tables=layers
        ).lookups.values()
    module, functional = found
    assert torch.allclose(functional.metric, module.metric)
    assert torch.allclose(functional.prices, module.prices)


def test_forecasts_of_runs_with_tables_ask_only_products_for_gradients():
    model = Reader(64, False).eval()
    tables = embedding_layers(model, find_layers(model))
    layers = dict.fromkeys([*find_layers(model), *tables], Rate(BITS))
    request = Request(as_recipe("one-shot"), layers, Rate(BITS), 0.0, 0, None)
    work, _ = measure(Store(model), request, [], Samples.of(rare_and_frequent(64)), 0.0)
    assert work.priced


def test_tokens_of_all_calls_of_a_table_are_counted():
    class Twice(Reader):
        def forward(self, input_ids, others):
            return self.head(self.table(input_ids) + self.table(others))

    model, zeros = Twice(64, False).eval(), torch.zeros(4, 8, dtype=torch.long)
    (layer,) = embedding_layers(model, find_layers(model))
    data = [{"input_ids": zeros, "others": zeros + 5}]
    prices = row_fisher(model, [layer], [], Samples.of(data), seed=0, tables=[layer]).lookups[layer].prices
    assert prices[0] == prices[5] == prices.max()


class FromMask(nn.Embedding):
    """Positions from a mask, behind two rows, as in OPT."""

    def forward(self, mask):
        return 3 * super().forward(mask.cumsum(1) + 1)


class Sliced(nn.Embedding):
    """Positions by the shape of token ids that it does not look up, as in Whisper."""

    def forward(self, ids):
        return 3 * self.weight[2 : 2 + ids.shape[1]]


@pytest.mark.parametrize("kind", [FromMask, Sliced])
def test_tables_that_compute_their_rows_are_priced_by_the_rows_that_they_read(kind):
    class Placed(Reader):
        def __init__(self, places):
            super().__init__(64, False)
            self.places = places

        def forward(self, input_ids):
            read = self.places(torch.ones_like(input_ids) if kind is FromMask else input_ids)
            return self.head(self.table(input_ids) + read)

    torch.manual_seed(1)
    model = Placed(kind(80, 48)).eval()
    (layer,) = (each for each in embedding_layers(model, find_layers(model)) if each.path == "places")
    found = row_fisher(model, [layer], [], Samples.of(rare_and_frequent(64)), seed=0, tables=[layer]).lookups[layer]
    read = found.prices > found.prices.min()
    assert read.nonzero().flatten().tolist() == list(range(2, 34))  # 32 positions, not as many token ids
    assert bool(found.metric.any())


def test_frequencies_leave_a_part_for_tokens_that_were_never_seen():
    found = frequencies_of(torch.tensor([10.0, 5, 2, 1, 1, 0, 0, 0], dtype=torch.float64))
    assert float(found.sum()) == pytest.approx(1.0)
    assert bool((found > 0).all())
    assert bool((found.diff() <= 0).all())
    assert float(found[0]) < 10 / 19


def test_embeddings_are_coded_only_where_they_are_named():
    data = [{"input_ids": ids} for ids in rare_and_frequent()]
    assert {row.name for row in iobs.prune(Reader(256, True), data, iobs.Rate(BITS), "one-shot").audit} == {
        "body.0",
        "body.2",
    }
    report = iobs.prune(Reader(256, False), data, 0.5, "one-shot", include="*")
    assert "table" not in {row.name for row in report.audit}


def test_budget_is_the_size_of_the_file(tmp_path):
    model = Reader(2048, False).eval()
    data = [{"input_ids": ids} for ids in rare_and_frequent(2048)]
    parameters = sum(value.numel() for value in model.parameters())
    report = iobs.prune(model, data, iobs.Budget(megabytes=0.08), "one-shot")
    iobs.save_packed(model, tmp_path / "packed", dtype=torch.bfloat16)
    size = sum(path.stat().st_size for path in (tmp_path / "packed").glob("model*"))
    assert 0.98 * 80_000 <= size <= 1.03 * 80_000  # sides of small matrices
    assert any(note.startswith("0.08MB: ") for note in report.notes)
    assert str(report.settings["pattern"]).startswith("rate:")
    with pytest.raises(PatternError, match="The least for this network is"):
        iobs.prune(model, data, iobs.Budget(bits_per_weight=80_00 / parameters), "one-shot")


def asked(model, budget, **changes):
    """The rates of layers under a budget, by name."""
    recipe, store = as_recipe("one-shot").but(**changes), Store(model)
    selection = selected_for(store, budget, None, None, recipe.depthwise)
    return {
        layer.name: own for layer, own in requested(model, recipe, budget, selection, 0, 0, None)[1].patterns.items()
    }


def test_budget_of_a_small_network_of_many_tensors_is_the_size_of_the_file(tmp_path):
    """The names, sums and dtypes of its norms take a tenth of it."""
    torch.manual_seed(0)
    parts = [[nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()] for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 32, 1), *(part for block in parts for part in block))
    iobs.prune(model.eval(), [torch.randn(16, 3, 8, 8) for _ in range(4)], iobs.Budget(bits_per_weight=3), "one-shot")
    file = iobs.save_packed(model, tmp_path / "packed", dtype=torch.bfloat16) / "model.safetensors"
    asked = 3 / 8 * sum(one.numel() for one in model.parameters())
    assert 0.97 * asked < file.stat().st_size < 1.005 * asked


@pytest.mark.parametrize("allocation", ["auto", "uniform"])
@pytest.mark.filterwarnings("ignore::iobs.errors.CoverageWarning")
def test_matrices_that_no_sample_reaches_are_in_the_budget_as_they_are_stored(tmp_path, allocation):
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(96, 192), nn.Linear(96, 48)

        def forward(self, x):
            return self.used(x)

    model, data = Partly(), [torch.randn(64, 96) for _ in range(4)]
    iobs.prune(model, data, iobs.Budget(megabytes=0.018), "one-shot", allocation=allocation)
    file = iobs.save_packed(model, tmp_path / "packed", dtype=torch.bfloat16) / "model.safetensors"
    assert 0.98 * 18_000 < file.stat().st_size < 1.005 * 18_000
    with pytest.raises(PatternError, match="No calibration sample reaches unused, which stay dense and take"):
        iobs.prune(Partly(), data, iobs.Budget(megabytes=0.006), "one-shot", allocation=allocation)


@pytest.mark.parametrize("allocation", ["auto", "uniform"])
def test_budget_counts_matrices_that_only_late_samples_reach_as_coded(tmp_path, allocation):
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.usual, self.late = nn.Embedding(50, 128), nn.Linear(128, 128), nn.Linear(128, 128)

        def forward(self, input_ids):
            return {"logits": (self.late if input_ids[0, 0] == 0 else self.usual)(self.table(input_ids))}

    windows = torch.randint(1, 50, (24, 4, 256))
    windows[20:, :, 0] = 0  # behind the positions that bits are divided by
    data = [{"input_ids": tokens} for tokens in windows]
    model, budget = Branches(), iobs.Budget(megabytes=0.036)
    iobs.prune(model, data, budget, allocation=allocation, include=["usual", "late"], holdout=0.0)
    file = iobs.save_packed(model, tmp_path / "packed", dtype=torch.bfloat16) / "model.safetensors"
    assert 0.98 * 36_000 < file.stat().st_size < 1.01 * 36_000


@pytest.mark.parametrize("allocation", ["auto", "uniform"])
@pytest.mark.parametrize("pattern", [iobs.Budget(bits_per_weight=6.0), iobs.Rate(4.0)])
def test_bits_of_layers_that_no_sample_reaches_are_one_clear_error(pattern, allocation):
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.factors = nn.Linear(96, 160), nn.Parameter(torch.ones(96))

        def forward(self, x):
            return self.factors * x

    with pytest.raises(LayerSelectionError, match="no layer received an input"):
        iobs.prune(Unused(), [torch.randn(64, 96)], pattern, allocation=allocation)


def test_budget_counts_experts_as_transformers_writes_them(tmp_path):
    """One by one, gates and ups apart: steps, tables and the header take more than for one tensor."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model, budget = MixtralForCausalLM(MixtralConfig(**sizes, **heads)), iobs.Budget(megabytes=0.04)
    rate, selection = rate_of(budget, model, selected_for(Store(model), budget, None, None, False))
    with torch.no_grad():
        for parameter in model.parameters():
            if (parameter.ndim > 1 and len(parameter) != 4) or parameter.ndim == 3:  # all but the router
                parameter.copy_(
                    torch.randint(-6, 7, parameter.shape) * 2.0 ** torch.randint(-9, -6, parameter.shape[-1:])
                )
        coded = sum(Integers.of(layer.read(model)).bits() for layer in selection.layers)
    rest = 320_000 - rate.bits * sum(layer.weights for layer in selection.layers)
    packed = iobs.save_packed(model, tmp_path / "packed", dtype=torch.bfloat16)
    assert (packed / "model.safetensors").stat().st_size == pytest.approx((coded + rest) / 8, rel=0.04)


def test_budget_counts_what_rules_leave_and_what_the_file_holds():
    model, budget = Reader(2048, False), iobs.Budget(megabytes=0.2)
    usual = asked(model, budget)["head"].bits
    dense = asked(model, budget, rules=[iobs.Rule("table", dense=True)])
    in_file = 8 * len(pack_tensor(model.table.weight.detach().bfloat16())) / model.table.weight.numel()
    lost = (in_file - usual) * 2048 * 48 / (2048 * 48 + 2 * 48 * 96)
    assert 10 < in_file < 11
    assert dense["head"].bits == pytest.approx(usual - lost, abs=0.01)
    own = asked(model, budget, rules=[iobs.Rule("table", pattern="rate:6")])
    assert own["table"].bits == 6
    assert own["head"].bits > dense["head"].bits
    model.register_buffer("cache", torch.zeros(1000), persistent=False)
    assert asked(model, budget)["head"].bits == usual
    model.register_buffer("ids", torch.arange(1000))
    lost = (usual - asked(model, budget)["head"].bits) * (2 * 2048 * 48 + 2 * 48 * 96)
    assert 64_000 < lost < 64_000 + 8 * 100  # its name, shape, place and sum are in the header


def test_budget_counts_numbers_of_float16_as_they_are_stored():
    model, budget, rules = Reader(2048, False).half(), iobs.Budget(megabytes=0.3), [iobs.Rule("table", dense=True)]
    rest = len(pack_tensor(model.table.weight.detach()))
    usual, dense = asked(model, budget)["head"].bits, asked(model, budget, rules=rules)["head"].bits
    lost = (8 * rest - usual * 2048 * 48) / (2048 * 48 + 2 * 48 * 96)
    assert dense == pytest.approx(usual - lost, abs=0.01)


def test_budget_counts_tables_that_share_only_their_memory_once():
    model, other = Reader(2048, True), Reader(2048, True)
    other.head.weight = torch.nn.Parameter(other.table.weight.data)
    budget = iobs.Budget(megabytes=0.2)
    rates = [{own.bits for own in asked(each, budget).values()} for each in (model, other)]
    assert rates[0] == rates[1]


def test_rules_give_tables_a_rate_of_their_own_and_nothing_else():
    data = [{"input_ids": ids} for ids in rare_and_frequent()[:2]]
    rules = [iobs.Rule("head", pattern="rate:6")]
    report = iobs.prune(Reader(256, True), data, 0.5, "one-shot", include="*", rules=rules)
    assert [row.name for row in report.audit if row.bits] == ["head"]
    rules = [iobs.Rule("table", pattern="rate:6")]
    report = iobs.prune(Reader(256, False), data, iobs.Rate(5.0), "one-shot", include="*", rules=rules)
    (table,) = (row for row in report.audit if row.name == "table")
    assert 5.5 < table.bits / table.weights <= 6.1
    with pytest.raises(PatternError, match="'table' is the table of an embedding"):
        asked(Reader(256, False), iobs.Budget(8.0), rules=[iobs.Rule("table", pattern=0.5)])


def test_budget_needs_a_matrix_that_can_be_coded():
    with pytest.raises(PatternError, match="has no matrix to divide bits among"):
        asked(nn.Sequential(nn.Linear(8, 8)), iobs.Budget(megabytes=1))
    with pytest.raises(LayerSelectionError, match="0 weight matrices of supported layers"):
        asked(nn.Sequential(nn.LayerNorm(8)), iobs.Budget(megabytes=1))
    for division in (Allocation("fisher"), Allocation("fisher", generations=0), Allocation(generations=0)):
        assert under_pattern(division, iobs.Budget(3.0)).criterion == "fisher"


def test_budget_waits_for_matrices_that_an_observation_shows():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.matrix = nn.Parameter(torch.randn(96, 96) / 10)
            self.last = nn.Linear(96, 64)

        def forward(self, inputs):
            return self.last(torch.relu(inputs @ self.matrix))

    report = iobs.prune(Product(), [torch.randn(64, 96)], iobs.Budget(6.0), "one-shot")
    assert {row.name for row in report.audit} == {"matrix", "last"}


@pytest.mark.parametrize("wrong", [{}, {"megabytes": 0}, {"megabytes": 1, "bits_per_weight": 3}, {"megabytes": "60"}])
def test_budget_takes_one_positive_number(wrong):
    with pytest.raises(PatternError, match="A budget is one positive number"):
        iobs.Budget(**wrong)


def test_budgets_as_text_and_not_in_rules_or_audits():
    for budget in (iobs.Budget(megabytes=58.5), iobs.Budget(3.0)):
        assert parse(str(budget)) == budget
    with pytest.raises(PatternError, match="has a budget"):
        iobs.Rule("0", pattern="60MB")
    with pytest.raises(PatternError, match="is the size of a file"):
        iobs.audit(network(), "60MB")


def test_low_rates_are_kept_where_factors_of_rows_cannot_be_read_back():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 172, bias=False), torch.nn.ReLU(), torch.nn.Linear(172, 8))
    with torch.no_grad():
        model[0].weight.mul_(torch.exp(torch.randn(64)))
        model[2].weight.mul_(torch.exp(torch.randn(172)))  # so rows of the first layer have prices that differ
    dense = [iobs.Rule("2", dense=True)]
    data = [torch.randn(64, 64) for _ in range(4)]
    assert iobs.prune(model, data, iobs.Rate(0.6), "one-shot", curvature="fisher", rules=dense).bits_per_weight <= 0.6
