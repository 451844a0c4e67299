"""Five laws of `iobs.prune`, for every combination of pattern, target, allocation, rounds and model."""

import itertools

import menagerie
import pytest
import torch

import iobs
from iobs.core.patterns import keep_count
from iobs.pruning.audit import asked_zeros

MODELS = ("perceptron", "transformer", "two heads", "recurrent")
PATTERNS = (iobs.Unstructured(0.5), iobs.Unstructured(0.6, per="row"), iobs.NM(2, 4))
TARGETS = ("layer", "dense", "model")
ALLOCATIONS = ("uniform", "fisher")
STEP = iobs.FineTune(lr=1e-3, optimizer="adam", steps=2, loss="kl")
ROUNDS = (iobs.Rounds(), iobs.Rounds(2, finetune=STEP))


def possible(pattern, allocation):
    return allocation == "uniform" or pattern == PATTERNS[0]


EVERY = [
    case
    for case in itertools.product(MODELS, PATTERNS, TARGETS, ALLOCATIONS, ROUNDS)
    if possible(case[1], case[3]) and (case[1] != PATTERNS[2] or case[0] != "perceptron")
]
GATE = {0, 11, 22, 55, 66, 77, 88}  # with each value of each choice; all of them are in the long set
CASES = [
    pytest.param(*case, marks=() if number in GATE else pytest.mark.slow, id=" / ".join(map(str, (number, *case[:4]))))
    for number, case in enumerate(EVERY)
]


class Interrupt(iobs.Callback):
    def on_round(self, record):
        raise KeyboardInterrupt


def build(name):
    """A network of the menagerie and its data; a smaller transformer, since each case prunes it five times."""
    if name != "transformer":
        return menagerie.build(name)
    torch.manual_seed(0)
    return menagerie.SmallTransformer(width=8, depth=2).eval(), menagerie.token_batches(2, 6, 6)


def run(name, pattern, target, allocation, rounds, **options):
    model, data = build(name)
    untouched = [layer for layer, _ in model.named_modules() if layer.endswith("head")][:1]
    recipe = iobs.Recipe(target=target, allocation=allocation, rounds=rounds, damping=0.02)
    report = iobs.prune(model, data, pattern, recipe, ignore=untouched if name == "two heads" else None, **options)
    return model, report


def bits(model):
    return [value.clone() for value in model.state_dict().values()]


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    """Measure the divergence of a trial on few samples."""


@pytest.mark.parametrize(("name", "pattern", "target", "allocation", "rounds"), CASES)
def test_prune_obeys_the_laws(name, pattern, target, allocation, rounds, tmp_path):
    case = name, pattern, target, allocation, rounds
    dense = dict(build(name)[0].state_dict())
    model, report = run(*case)
    # 1. The counts are exact: in every layer, or over all layers where an allocation divides the zeros.
    if allocation == "uniform":
        assert all(row.zeros == asked_zeros(pattern, row.shape) for row in report.audit)
    else:
        assert report.weights - report.zeros == keep_count(report.weights, pattern.sparsity)
    # 2. What was not pruned has its bits: biases, norms, embeddings, and layers that were left dense.
    pruned = {f"{row.name}.weight" for row in report.audit}
    assert all(torch.equal(value, dense[key]) for key, value in model.state_dict().items() if key not in pruned)
    # 3. The same call gives the same bits, and so does a run from its own checkpoint.
    for options in ({"checkpoint": tmp_path}, {"checkpoint": tmp_path}):
        again, _ = run(*case, **options)
        assert all(torch.equal(a, b) for a, b in zip(bits(model), bits(again), strict=True))
    # 4. An interrupted run gives the dense weights back.
    fresh, data = build(name)
    recipe = iobs.Recipe(target=target, allocation=allocation, rounds=rounds)
    with pytest.raises(KeyboardInterrupt):
        iobs.prune(fresh, data, pattern, recipe, callbacks=[Interrupt()])
    assert all(torch.equal(value, dense[key]) for key, value in fresh.state_dict().items())
    # 5. Zeros are kept when a pruned model is pruned further.
    if isinstance(pattern, iobs.Unstructured):
        old = {key: value == 0 for key, value in model.state_dict().items() if key in pruned}
        further = iobs.Recipe(target=target, keep_zeros=True)
        iobs.prune(model, build(name)[1], iobs.Unstructured(0.75, per=pattern.per), further)
        assert all(bool((model.state_dict()[key][mask] == 0).all()) for key, mask in old.items())
