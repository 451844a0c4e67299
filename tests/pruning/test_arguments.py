"""Arguments of `iobs.prune` that are refused before any work, and that leave the network unchanged."""

import families
import pytest
import torch
from checks import state_of
from menagerie import STEP, build, perceptron_batches
from torch import nn

import iobs
from iobs.errors import CalibrationError, LayerSelectionError, ModelError, NonFiniteError, PatternError, ProblemError
from iobs.pruning import FineTune


def test_allocation_bounds_are_refused_if_nothing_is_allocated():
    network = nn.Sequential(nn.Linear(8, 4)).eval()
    for bounds in ({"bounds": {"0": (0.0, 0.1)}}, {"most": 0.2}, {"least": 0.6}):
        for pattern, criterion in ((iobs.NM(2, 4), "auto"), (iobs.Unstructured(0.5), "uniform")):
            with pytest.raises(ProblemError, match="Bounds"):
                iobs.prune(
                    network, [torch.randn(60, 8)], pattern, "one-shot", allocation=iobs.Allocation(criterion, **bounds)
                )


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        ({"solver": "adm"}, ProblemError),
        ({"refine": "polish"}, ProblemError),
        ({"budget": "slow"}, ProblemError),
        ({"damping": -1.0}, ProblemError),
        ({"pattern": iobs.NM(2, 4), "allocation": "fisher"}, PatternError),
        ({"allocation": iobs.Allocation("fisher", most=0.4)}, PatternError),
        ({"allocation": iobs.Allocation("fisher", bounds={"none": (0.0, 0.5)})}, LayerSelectionError),
    ],
)
def test_impossible_settings_raise_before_data_is_read(choice, error):
    def untouched():
        raise AssertionError("the data was read")
        yield

    with pytest.raises(error):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)), untouched(), **{"pattern": 0.5, "recipe": "one-shot", **choice})


@pytest.mark.parametrize(
    ("given", "pattern"), [(0.75, iobs.Unstructured(0.75)), ("75%", iobs.Unstructured(0.75)), ("2:4", iobs.NM(2, 4))]
)
def test_pattern_may_be_a_number_or_text(given, pattern):
    model, data = nn.Sequential(nn.Linear(8, 4)), [torch.randn(20, 8)]
    report = iobs.prune(model, data, given, "one-shot")
    assert report.settings["pattern"] == str(pattern)
    assert report.sparsity == pattern.sparsity


def test_pattern_refuses_other_text():
    with pytest.raises(PatternError, match="half"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)), [torch.randn(20, 8)], "half", "one-shot")


class Counts(iobs.Callback):
    layers = 0

    def on_layer(self, record, round_index):
        self.layers += 1


def test_impossible_finetuning_raises_before_any_layer():
    model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), [torch.randn(20, 8)]
    counts = Counts()
    with pytest.raises(CalibrationError, match="target"):
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", finetune=FineTune(steps=3), callbacks=[counts])
    detached = FineTune(steps=3, loss=lambda module, batch: module(batch).detach().square().mean())
    with pytest.raises(ProblemError, match="no gradient"):
        iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", finetune=detached, callbacks=[counts])
    assert counts.layers == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": nn.Linear}, ModelError, "got the class Linear"),
        ({"model": {"weight": torch.ones(2)}}, ModelError, "got an object of dict"),
        ({"data": None}, CalibrationError, "got NoneType"),
        ({"seed": "a"}, ProblemError, "seed must be a whole number, got 'a'"),
        ({"seed": 2**64}, ProblemError, "seed must lie between"),
        ({"damping": "big"}, ProblemError, "damping must be a number, got 'big'"),
        ({"holdout": "big"}, ProblemError, "holdout must be a number, got 'big'"),
        ({"rounds": 2.0}, ProblemError, "rounds must be a whole number of at least 1, got 2.0"),
    ],
)
def test_arguments_of_a_wrong_type_raise_one_error(change, error, message):
    given = {"model": nn.Linear(8, 8), "data": [torch.randn(8, 8)], "pattern": iobs.Unstructured(0.5), **change}
    with pytest.raises(error, match=message):
        iobs.prune(**given)


def nan_weight():
    model, data = build("perceptron")
    with torch.no_grad():
        model.fc2.weight[0, 0] = torch.nan
    return model, data, {}


def nan_input():
    model, data = build("perceptron")
    data[3][0][0, 0] = torch.nan
    return model, data, {}


def nan_activation():
    class Logarithm(nn.Module):
        def forward(self, x):
            return x.sum(1, keepdim=True).log() + x

    model = nn.Sequential(nn.Linear(4, 4), Logarithm(), nn.Linear(4, 2)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(4))
        model[0].bias.zero_()
    data = [torch.rand(4, 4) + 1 for _ in range(4)]
    data[3][0] = -1.0
    return model, data, {"holdout": 0}


def nan_pixel():
    class Logarithm(nn.Module):
        def forward(self, x):
            return x.log()

    model = nn.Sequential(Logarithm(), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(2048, 2)).eval()
    data = [torch.rand(2, 2, 32, 32) + 1 for _ in range(4)]
    data[3][0, 0, 0, 0] = -1.0  # one of 1,024 positions, of which 64 are drawn
    return model, data, {"holdout": 0}


def nan_text():
    model, data = families.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:] = torch.nan
    return model, data, {"recipe": "best"}


BAD = {
    "nan weight": (nan_weight, NonFiniteError, "fc2"),
    "nan input": (nan_input, NonFiniteError, "batch 3"),
    "nan activation": (nan_activation, NonFiniteError, r"layer '2'.*batch 3"),
    "nan pixel": (nan_pixel, NonFiniteError, r"layer '1'.*batch 3"),
    "nan likelihood": (lambda: (*nan_activation()[:2], {"curvature": "fisher"}), NonFiniteError, "layer '2'"),
    "nan text": (nan_text, NonFiniteError, r"layer 'model\.layers\.0.*q_proj'"),
    "no data": (lambda: (build("perceptron")[0], [], {}), CalibrationError, "no calibration data"),
    "empty batch": (lambda: (build("perceptron")[0], [torch.zeros(0, 12)], {}), CalibrationError, "batch 0 is empty"),
    "odd batch": (lambda: (build("perceptron")[0], ["text"], {}), CalibrationError, "is a str"),
    "unmatched": (lambda: (*build("perceptron"), {"include": "*.mlp"}), LayerSelectionError, "matches none"),
    "unmatched ignore": (lambda: (*build("perceptron"), {"ignore": "head"}), LayerSelectionError, "matches none"),
    "bad expression": (lambda: (*build("perceptron"), {"ignore": "re:("}), LayerSelectionError, "regular expression"),
    "nothing left": (lambda: (*build("perceptron"), {"ignore": "fc*"}), LayerSelectionError, "Nothing is left"),
    "solver": (lambda: (*build("perceptron"), {"solver": "adm"}), ProblemError, "no solver 'adm'"),
    "recipe": (lambda: (*build("perceptron"), {"recipe": "finest"}), ProblemError, "no recipe"),
    "rounds": (lambda: (*build("perceptron"), {"rounds": 0}), ProblemError, "at least 1"),
    "holdout": (lambda: (*build("perceptron"), {"holdout": 1.0}), ProblemError, "holdout"),
    "target": (lambda: (*build("perceptron"), {"target": "sparse"}), ProblemError, '"layer"'),
    "fresh": (
        lambda: (
            build("perceptron")[0],
            perceptron_batches(1, 3),
            {"rounds": iobs.Rounds(9, finetune=STEP, data="fresh")},
        ),
        CalibrationError,
        "needs a sample for each",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_raises_one_error_and_changes_nothing(case):
    make, error, message = BAD[case]
    model, data, options = make()
    before = state_of(model)
    with pytest.raises(error, match=message):
        iobs.prune(model, data, iobs.Unstructured(0.5), **{"recipe": "one-shot", **options})
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(9.0), before[name].nan_to_num(9.0))


@pytest.mark.parametrize("sparsity", [1.0, -0.1, float("nan")])
def test_unstructured_refuses_sparsity_outside_its_range(sparsity):
    with pytest.raises(PatternError, match=r"\[0, 1\)"):
        iobs.Unstructured(sparsity)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, data: iobs.prune(model, 0.5, data),
        lambda model, data: iobs.prune(model, data, 0.5, data),
        lambda model, data: iobs.prune(model, data, 0.5, include=data),
        lambda model, data: iobs.prune(model, data, 0.5, holdout=data),
        lambda model, data: iobs.prune(model, data, 0.5, callbacks=data),
        lambda model, data: iobs.prune(model, data, 0.5, solver=data),
        lambda model, data: iobs.prune(model, data, 0.5, within=data),
        lambda model, data: iobs.audit(model, data),
    ],
)
def test_swapped_arguments_do_not_print_the_data(call):
    with pytest.raises(iobs.errors.IOBSError, match=r"\.\.\. \(list\)") as caught:
        call(nn.Sequential(nn.Linear(64, 64)), [torch.randn(256, 64) for _ in range(4)])
    assert len(str(caught.value)) < 300
