"""Whole networks on grids: stored values are exact, recipes keep the grid or refuse before any work."""

import copy
from dataclasses import replace

import families
import pytest
import torch
from families import prune_directory
from menagerie import SmallConvolutional, three_layers
from safetensors.torch import load_file

import iobs
from iobs.core.grids import codes_and_scales, grid_of, over_columns, stored_bits
from iobs.errors import AuditError, PatternError, ProblemError
from iobs.models import load
from iobs.pruning.audit import audit
from iobs.pruning.network.layers import find_layers
from iobs.pruning.recipe import Recipe

SPARSE = iobs.Unstructured(0.5) & iobs.Grid(4, 8)
POLISH = iobs.FineTune(lr=1e-3, optimizer="adam", steps=20, loss="kl", parameters="all")
KEEPING = {
    "one-shot": Recipe(),
    "residual target": Recipe(target="residual"),
    "joint pass": Recipe(solver="sparsegpt"),
    "budget": Recipe(solver=iobs.ADMM("fast")),
    "fine-tuning": Recipe(target="dense", finetune=POLISH),
    "rounds": Recipe(solver="sparsegpt", rounds=iobs.Rounds(3, "cubic", finetune=replace(POLISH, steps=4))),
}


def require_on_grids(model, grid, report):
    """Check every pruned weight of a model; returns the number of zeros."""
    names = {row.name for row in report.audit}
    for layer in find_layers(model):
        if layer.name in names:
            weight = layer.read(model)
            codes, scales = codes_and_scales(weight, grid)
            assert torch.equal(codes * over_columns(scales, grid, weight.shape[1]), weight)


@pytest.mark.parametrize("pattern", [iobs.Grid(4, 8), SPARSE, iobs.NM(2, 4) & iobs.Grid(3, 8)], ids=str)
@pytest.mark.parametrize("recipe", KEEPING)
def test_recipes_keep_the_grid(recipe, pattern):
    model, data = three_layers()
    report = iobs.prune(model, data, pattern, KEEPING[recipe])
    require_on_grids(model, grid_of(pattern), report)
    weights = [stored_bits(pattern, row.shape) for row in report.audit]
    assert [row.bits for row in report.audit] == weights
    assert report.bits_per_weight == pytest.approx(sum(weights) / report.weights)
    assert f"{report.bits_per_weight:.3f} bits a weight" in str(report)
    audit(model, pattern, [row.name for row in report.audit])
    assert iobs.Report.from_dict(report.as_dict()) == report


def test_fine_tuning_moves_weights_along_the_grid():
    model, data = three_layers()
    before = iobs.prune(copy.deepcopy(model), data, SPARSE, KEEPING["one-shot"].but(target="dense"))
    report = iobs.prune(model, data, SPARSE, KEEPING["fine-tuning"])
    assert [record.kind for record in report.rounds] == ["projection", "finetune"]
    assert report.best_round == 1
    assert report.best.loss_heldout < before.best.loss_heldout


def test_fine_tuning_moves_zero_codes_of_a_dense_grid():
    model, data = three_layers()
    grid, before = iobs.Grid(3, 16), copy.deepcopy(model)
    iobs.prune(before, data, grid, Recipe(solver="magnitude"))
    report = iobs.prune(model, data, grid, Recipe(solver="magnitude", finetune=replace(POLISH, steps=60, lr=5e-3)))
    assert report.best_round == 1
    assert ((before[0].weight == 0) & (model[0].weight != 0)).any()


def test_allocation_moves_zeros_between_layers_on_the_grid():
    model, data = three_layers()
    report = iobs.prune(model, data, SPARSE, "fast")
    require_on_grids(model, SPARSE.grid, report)
    assert report.zeros >= report.weights // 2
    assert len({round(row.asked / row.weights, 3) for row in report.audit}) > 1


def test_grouped_convolutions_keep_the_grid():
    torch.manual_seed(0)
    model, data = SmallConvolutional(), list(torch.randn(24, 3, 8, 8).split(8))
    report = iobs.prune(model, data, SPARSE, "one-shot", include=["stem", "stages.1.*", "head"])
    require_on_grids(model, SPARSE.grid, report)
    assert report.sparsity >= 0.5


def test_solvers_of_dense_weights_round_grouped_convolutions():
    torch.manual_seed(0)
    model, data = SmallConvolutional(), list(torch.randn(24, 3, 8, 8).split(8))
    report = iobs.prune(model, data, iobs.Grid(4), Recipe(solver="gptq"))
    require_on_grids(model, iobs.Grid(4), report)


def test_rounds_of_growing_sparsity_keep_a_grid_without_zeros():
    model, data = three_layers()
    rounds = iobs.Rounds(3, "cubic")
    require_on_grids(model, iobs.Grid(4), iobs.prune(model, data, iobs.Grid(4), Recipe(solver="gptq", rounds=rounds)))


def test_a_solver_that_only_grids_have_takes_an_allocation():
    model, data = three_layers()
    report = iobs.prune(model, data, SPARSE, Recipe(solver="obr", allocation="fisher"))
    require_on_grids(model, SPARSE.grid, report)
    assert len({round(row.asked / row.weights, 3) for row in report.audit}) > 1


def test_rules_give_single_layers_a_grid():
    model, data = three_layers()
    rules = (iobs.Rule("0", pattern="int8"), iobs.Rule("2", pattern="2:4"))
    report = iobs.prune(model, data, SPARSE, Recipe(rules=rules))
    bits = {row.name: row.bits for row in report.audit}
    assert bits["2"] is None
    assert bits["0"] == stored_bits(iobs.Grid(8), (24, 16))
    assert report.bits_per_weight is None


REFUSED = [
    ({"refine": "swap"}, "refine: cannot keep weights on a grid"),
    ({"keep_zeros": True}, "keep_zeros: cannot keep"),
    ({"solver": "obc"}, "'obc' cannot put weights on the grid"),
    ({"solver": iobs.SparseGPT()}, "cannot put weights on the grid"),
    ({"solver": "gptq"}, "GPTQ rounds dense weights"),
    ({"solver": "global-magnitude"}, "one count over all layers"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_recipes_that_lose_the_grid_are_refused_before_any_work(changes, message):
    model, _ = three_layers()
    with pytest.raises((ProblemError, PatternError), match=message):
        iobs.prune(model, _never(), SPARSE, Recipe(**changes))


def _never():
    raise AssertionError("the calibration data were read")
    yield


def test_solvers_of_grids_need_a_grid():
    model, data = three_layers()
    with pytest.raises(ProblemError, match=r"the pattern .* has none; give a pattern & iobs.Grid"):
        iobs.prune(model, data, 0.5, "one-shot", solver="gptq")
    report = iobs.prune(model, data, iobs.Grid(4), "one-shot", solver="gptq")
    require_on_grids(model, iobs.Grid(4), report)


def test_audit_finds_a_weight_off_the_grid():
    model, data = three_layers()
    report = iobs.prune(model, data, SPARSE, Recipe(target="residual"))
    names = [row.name for row in report.audit]
    with torch.no_grad():
        weight = model[0].weight
        weight[weight != 0] *= 1 + 1e-3 * torch.rand(int((weight != 0).sum()))
    with pytest.raises(AuditError, match=r"Layer '0': The weights of row .* are not on the grid int4/8"):
        audit(model, SPARSE, names)
    audit(model, iobs.Unstructured(0.5), names)


def test_audit_of_a_grid_without_zeros_checks_the_layers_on_it():
    model, data = three_layers()
    with pytest.raises(AuditError, match="No layer lies on the grid int4/8"):
        audit(model, iobs.Grid(4, 8))
    iobs.prune(model, data, iobs.Grid(4, 8), Recipe(solver="magnitude", rules=(iobs.Rule("4", dense=True),)))
    assert [row.bits is not None for row in audit(model, iobs.Grid(4, 8))] == [True, True, False]
    with pytest.raises(AuditError, match="Layer '4'"):
        audit(model, iobs.Grid(4, 8), ["2", "4"])


def test_low_memory_gives_the_weights_of_a_run_in_memory(tmp_path):
    families.saved("llama", tmp_path / "model")
    model, data = load(tmp_path / "model", dtype=torch.bfloat16).module, families.language_batches()
    report = prune_directory(
        tmp_path / "model", tmp_path / "out", data, SPARSE, solver="sparsegpt", arithmetic=torch.bfloat16
    )
    whole = iobs.prune(model, data, SPARSE, Recipe(target="residual"), holdout=0.0, solver="sparsegpt")
    model.save_pretrained(tmp_path / "whole")
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert report.bits_per_weight == whole.bits_per_weight
    audit(tmp_path / "out", SPARSE, [row.name for row in report.audit])


def test_a_network_widened_in_memory_stores_grid_values(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)  # no instructions for bfloat16
    families.saved("llama", tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.module.dtype == torch.float32
    recipe = Recipe(target="residual", solver="sparsegpt")
    report = iobs.prune(loaded.module, families.language_batches(), SPARSE, recipe)
    loaded.save(tmp_path / "out")
    audit(tmp_path / "out", SPARSE, [row.name for row in report.audit])


def test_low_memory_in_wide_arithmetic_stores_grid_values(tmp_path):
    families.saved("llama", tmp_path / "model")
    report = prune_directory(
        tmp_path / "model",
        tmp_path / "out",
        families.language_batches(),
        SPARSE,
        solver="sparsegpt",
        arithmetic=torch.float32,
    )
    audit(tmp_path / "out", SPARSE, [row.name for row in report.audit])
