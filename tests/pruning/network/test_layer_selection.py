"""Selection of layers: what is pruned by default, what stays dense and why."""

import pytest
import torch
from checks import zeros_of
from menagerie import Unfed, build
from torch import nn

import iobs
from iobs.errors import LayerSelectionError
from iobs.pruning.network.selection import select

QUICK = iobs.Recipe(solver="magnitude")


def test_layers_without_inputs_are_skipped_with_a_note():
    report = iobs.prune(Unfed(), [torch.randn(20, 8)], iobs.Unstructured(0.5), "one-shot")
    assert [row.name for row in report.audit] == ["used"]
    assert any("unused" in note for note in report.notes)
    assert "fed it nothing" in report.skipped["unused"]
    with pytest.raises(LayerSelectionError, match=r"Nothing was pruned.*unused"):
        iobs.prune(Unfed(), [torch.randn(20, 8)], iobs.Unstructured(0.5), "one-shot", include="unused")


def test_include_refuses_patterns_of_another_type():
    for given in (5, [5]):
        with pytest.raises(LayerSelectionError, match="include takes a name pattern or a list of them"):
            iobs.prune(Unfed(), [torch.randn(20, 8)], iobs.Unstructured(0.5), "one-shot", include=given)


def test_parametrised_attention_projections_are_pruned():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.attention = nn.utils.parametrizations.weight_norm(attention, "in_proj_weight")
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0])

    model = Attention()
    report = iobs.prune(model, [torch.randn(20, 5, 8)], iobs.Unstructured(0.5), iobs.Recipe())
    projections = [f"attention.in_proj_weight.{name}" for name in "qkv"]
    assert {row.name for row in report.audit} == {*projections, "attention.out_proj", "head"}
    assert int((model.attention.in_proj_weight == 0).sum()) == 3 * 32


def test_layers_without_entries_are_skipped():
    with pytest.warns(UserWarning, match="zero-element"):
        network = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 4), nn.Linear(4, 4))
    report = iobs.prune(network, [torch.randn(20, 8)], iobs.Unstructured(0.5), "one-shot", damping=0.01)
    assert [row.name for row in report.audit] == ["2"]
    assert report.skipped["0"] == report.skipped["1"] == "without entries"


def test_depthwise_and_tied_layers_stay_dense_by_default():
    model, data = build("convolutional")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), QUICK)
    assert report.skipped == {"depthwise": "depthwise convolution"}
    model, data = build("transformer")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), QUICK)
    assert report.skipped["head"] == "tied to an embedding"


def test_include_skip_and_depthwise_select_layers():
    model, data = build("convolutional")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), QUICK, depthwise=True)
    assert not report.skipped
    assert zeros_of(model)["depthwise"] == 36
    model, data = build("convolutional")
    report = iobs.prune(model, data, iobs.Unstructured(0.5), QUICK, include=["stages.*", "re:head"], ignore="*.short")
    assert {row.name.split(".")[-1] for row in report.audit} == {"conv1", "conv2", "head"}
    assert report.skipped["stem"] == "not among the included names"
    assert report.skipped["stages.0.0.short"] == "ignored by name"


def test_lazy_layers_that_were_never_called_are_refused_until_they_are():
    model, batch = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4)), torch.randn(8, 6)
    with pytest.raises(LayerSelectionError, match=r"'0\.weight' has no shape yet; call the model"):
        iobs.prune(model, [batch], 0.5)
    model(batch)
    assert iobs.prune(model, [batch], 0.5).coverage.share == 1


def test_messages_name_the_cause():
    depthwise = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4))
    with pytest.raises(LayerSelectionError, match=r"1 weight matrix and it is skipped: 0 .* depthwise=True prunes"):
        select(depthwise)
    phases = nn.Sequential(nn.Linear(4, 4))
    phases[0].phase = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat))
    assert select(phases).skipped["0.phase"].kind == "complex"


@pytest.mark.parametrize(
    ("change", "function"),
    [(lambda w: (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True), "sub"), (torch.tanh, "tanh")],
    ids=["standardised", "tanh"],
)
def test_a_weight_that_changes_before_it_multiplies_names_the_function(change, function):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(6, 8), nn.Parameter(torch.randn(3, 8))

        def forward(self, x):
            return self.first(x) @ change(self.weight).T

    report = iobs.prune(Head(), [torch.randn(16, 6)], 0.5, "one-shot")
    assert f"which {function} changes before it multiplies" in report.skipped["weight"]
