"""Coverage of a report: equal to a count of the pruned model's own parameters, with the true reasons."""

from dataclasses import replace

import coverage_models
import families
import pytest
import torch
from coverage_models import CASES, QUICK, build
from torch import nn

import iobs
from iobs.errors import CoverageWarning, LayerSelectionError
from iobs.models import load
from iobs.pruning.coverage import KINDS, Coverage, DenseWeight
from iobs.pruning.network.folding import folded
from iobs.pruning.network.selection import select
from iobs.pruning.samples import batches as data_batches

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def slices(name, parameter):
    """The parts of a parameter that are pruned on their own: experts, and projections of torch's attention."""
    if name.endswith("in_proj_weight"):
        return parameter.chunk(3)
    if parameter.ndim == 3 and "experts" in name:
        return [*parameter]
    return [parameter]


def owners(model):
    """The modules that hold each parameter, by the parameter's identity."""
    found = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found.setdefault(id(parameter), []).append(module)
    return found


def never_called(model, batches):
    """The modules that no batch reaches."""
    left = set(model.modules())
    handles = [module.register_forward_pre_hook(lambda one, _: left.discard(one)) for module in model.modules()]
    with torch.no_grad():
        for batch in batches:
            data_batches.forward(model, batch)
    for handle in handles:
        handle.remove()
    return left


def own_count(model):
    """Entries of all parameters, of matrices, of pruned matrices, and zeros, read from the pruned weights alone."""
    total = weights = pruned = zeros = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        for part in slices(name, parameter.detach()):
            found = int((part == 0).sum())
            zeros += found
            pruned += part.numel() if found else 0
            weights += part.numel() if found or parameter.squeeze().ndim >= 2 else 0
    return {"parameters": total, "weights": weights, "pruned": pruned, "zeros": zeros}


def own_kinds(model):
    """Dense entries of the kinds that the classes of modules tell."""
    kinds = dict.fromkeys(("embeddings", "recurrent", "depthwise", "output head"), 0)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for parameter in model.parameters():
        modules = owners(model)[id(parameter)]
        if parameter.squeeze().ndim < 2 or (parameter == 0).any():
            continue
        if any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in modules):
            kinds["embeddings"] += parameter.numel()
        elif any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in modules):
            kinds["recurrent"] += parameter.numel()
        elif head in modules:
            kinds["output head"] += parameter.numel()
        elif any(isinstance(one, CONVOLUTIONS) and 1 < one.groups == one.in_channels for one in modules):
            kinds["depthwise"] += parameter.numel()
    return kinds


def counted(coverage):
    return {name: getattr(coverage, name) for name in ("parameters", "weights", "pruned", "zeros")}


def check(name):
    model, batches = build(name)
    report = iobs.prune(model, batches, 0.5, iobs.Recipe(target="residual"), solver="magnitude", holdout=0.0)
    found = report.coverage
    with folded(model):
        assert counted(found) == own_count(model)
    by_kind = found.by_kind
    own = own_kinds(model)
    assert by_kind.get("embedding", 0) + by_kind.get("tied", 0) == own.pop("embeddings")
    assert {kind: by_kind.get(kind, 0) for kind in own} == own
    assert sum(by_kind.values()) == found.weights - found.pruned
    silent = never_called(model, batches)
    for one in found.dense:
        if one.kind == "unreached":
            assert model.get_submodule(one.name) in silent
    assert f"{found.share:.1%} of the {found.weights:,} weight entries" in str(report)
    assert f"{found.sparsity:.1%} of all {found.parameters:,} parameters are zero" in str(report)
    return report


@pytest.mark.parametrize("name", QUICK)
def test_coverage_equals_own_count(name):
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_coverage_equals_own_count_in_all_families(name):
    check(name)


def test_coverage_is_counted_in_at_least_40_families():
    assert len(CASES) >= 40


def test_coverage_names_the_true_reasons():
    names = ("einsum", "squared", "unfed", "tied")
    kinds = {name: {one.name: one.kind for one in check(name).coverage.dense} for name in names}
    assert kinds["einsum"] == {}
    assert kinds["squared"] == {"other": "not multiplied"}
    assert kinds["unfed"] == {"unused": "unreached"}
    assert kinds["tied"] == {"second": "shared", "head": "tied"}
    assert set(kinds["squared"].values()) <= set(KINDS)


def test_coverage_of_a_streamed_model_equals_the_resident_one(tmp_path):
    model = families.saved("gpt2", tmp_path / "model", torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[parameter == 0] = 0.01  # only pruned matrices have zeros
    model.save_pretrained(tmp_path / "model")
    data = families.language_batches()
    streamed = families.prune_directory(tmp_path / "model", tmp_path / "out", data, solver="magnitude")
    again = load(tmp_path / "out").module
    assert counted(streamed.coverage) == own_count(again)
    whole = load(tmp_path / "model").module
    resident = iobs.prune(whole, data, 0.5, iobs.Recipe(target="residual"), solver="magnitude", holdout=0.0)
    assert streamed.coverage == resident.coverage


def test_dense_share_of_20_percent_warns_once():
    model, batches = build("squared")
    with pytest.warns(CoverageWarning, match=r"Only \d+% of the weight entries.*can be observed .other.") as caught:
        report = iobs.prune(model, batches, 0.5, iobs.Recipe(target="residual"), solver="magnitude", holdout=0.0)
    assert len(caught) == 1
    assert str(caught[0].message) in report.notes


def test_warned_share_leaves_out_embeddings_and_heads():
    dense = (DenseWeight("embed", "embedding", "embedding", 500), DenseWeight("scale", "parameter", "no product", 110))
    assert "parameters in no matrix product" in Coverage(1000, 1000, 390, 195, dense).warning()
    assert Coverage(1000, 1000, 420, 210, (dense[0], replace(dense[1], entries=80))).warning() is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ignored", [None, "fc1"])
def test_embeddings_and_choices_of_the_user_warn_not(ignored):
    model, batches = build("tied") if ignored is None else build("perceptron")
    iobs.prune(model, batches, 0.5, iobs.Recipe(target="residual"), solver="magnitude", holdout=0.0, ignore=ignored)


def test_model_without_layers_is_refused_with_what_is_there():
    with pytest.raises(
        LayerSelectionError, match=r"0 weight matrices.*ConvTranspose2d \(584 entries\).*weight.*Replace"
    ):
        select(nn.ConvTranspose2d(8, 8, 3))
    model = coverage_models.transposed()
    with pytest.raises(LayerSelectionError, match=r"2 weight matrices and all are skipped.*ignored by name"):
        select(model, ignore="*")
