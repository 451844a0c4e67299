"""Prices of rows from one backward pass: against gradients by hand, along blocks, for layers of every kind."""

import copy
from dataclasses import replace
from itertools import combinations

import families
import menagerie
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

import iobs
from iobs import Unstructured
from iobs.data.text import calibration_windows, embedded_text
from iobs.errors import ProblemError
from iobs.pruning.calibration import row_fisher as module
from iobs.pruning.calibration.chains import exact_chain
from iobs.pruning.calibration.gram import Gram, Statistics
from iobs.pruning.calibration.row_fisher import RowFisher, row_fisher
from iobs.pruning.layerwise import problem
from iobs.pruning.layerwise.problem import Task, solve_layer, solve_together
from iobs.pruning.network.layers import find_layers
from iobs.pruning.network.modes import evaluating
from iobs.pruning.recipe import LayerSettings
from iobs.pruning.runtime.ranks import Ranks
from iobs.pruning.samples.batches import Samples
from iobs.solvers.row_metric import RowMetric


def network(convolution=False):
    torch.manual_seed(0)
    first = nn.Conv2d(3, 8, 3, padding=1) if convolution else nn.Linear(6, 8)
    last = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 if convolution else 8, 4))
    return nn.Sequential(first, last).eval()


def data(convolution=False):
    shape = (12, 3, 4, 4) if convolution else (12, 6)
    return list(torch.randn(3, *shape, generator=torch.Generator().manual_seed(1)))


def gradients_of(scores, generator):
    """Random gradients at scores (rows, classes), by the square root of their Fisher information as a matrix."""
    signs = 2.0 * torch.randint(0, 2, scores.shape, generator=generator, dtype=torch.int8) - 1
    roots = scores.detach().softmax(-1).sqrt()
    matrices = torch.diag_embed(roots) - roots.square()[:, :, None] * roots[:, None, :]
    return (matrices @ signs[:, :, None])[..., 0]


def test_gradients_at_scores_have_the_fisher_information_as_their_second_moment(monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 7)
    scores = torch.tensor([[1.0, 0.0, -2.0, 3.0], [0.0, 0.0, 0.0, 0.0], [60.0, 0.0, -60.0, 0.0]])
    found = module.score_gradients(scores.repeat(20_000, 1), torch.Generator().manual_seed(0)).view(-1, 3, 4)
    chances = scores.softmax(-1)
    expected = torch.diag_embed(chances) - chances[:, :, None] * chances[:, None, :]
    torch.testing.assert_close(torch.einsum("nri,nrj->rij", found, found) / len(found), expected, rtol=0, atol=0.01)


def test_classes_that_are_rarely_drawn_have_prices_too():
    """A number of an embedding has a row of the last layer to itself: labels drawn for a few samples miss most rows."""
    torch.manual_seed(0)
    model, batches = nn.Sequential(nn.Linear(6, 400)), data()
    (layer,) = find_layers(model)
    found = row_fisher(model, [layer], [], Samples.of(batches), seed=0).outputs[layer]
    chances = model(torch.cat(batches)).softmax(-1).detach().double()
    torch.testing.assert_close(found, (chances * (1 - chances)).mean(0), rtol=0.15, atol=0)


def test_gradients_at_scores_of_a_gpu_that_must_be_deterministic_are_those_of_the_processor(gpu):
    scores = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    expected = module.score_gradients(scores, torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(True)
    try:
        found = module.score_gradients(scores.to("cuda"), torch.Generator().manual_seed(0))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("convolution", [False, True])
def test_prices_are_squared_gradients_at_outputs(convolution, frozen):
    model, batches = network(convolution).requires_grad_(not frozen), data(convolution)
    layer = find_layers(model)[0]
    found = row_fisher(model, [layer], [], Samples.of(batches), seed=3)
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())
    total = 0.0
    for place, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(3 + place)
        hidden = model[0](batch).detach().requires_grad_()
        scores = model[1](hidden)
        (gradient,) = torch.autograd.grad(scores, hidden, gradients_of(scores, generator))
        total = total + gradient.double().square().movedim(1, -1).flatten(0, -2).sum(0)
    torch.testing.assert_close(found.outputs[layer], total / 36, rtol=1e-5, atol=0)


def text_classifier_by_position():
    torch.manual_seed(0)
    return menagerie.SmallTransformer(width=8, depth=2).eval(), menagerie.token_batches(2, 6, 6)


def test_prices_of_text_are_squared_gradients_at_outputs():
    model, batches = text_classifier_by_position()
    layers = find_layers(model)
    found = row_fisher(model, layers, [], Samples.of(batches), seed=3)
    for layer in layers[-2:]:
        total, count = 0.0, 0
        for place, batch in enumerate(batches):
            generator, outputs = torch.Generator().manual_seed(3 + place), []
            hook = model.get_submodule(layer.path).register_forward_hook(lambda m, a, out, to=outputs: to.append(out))
            tokens = batch["input_ids"] if isinstance(batch, dict) else batch
            tokens = tokens[0] if isinstance(tokens, (tuple, list)) else tokens
            scores = model(tokens)
            scores = getattr(scores, "logits", scores)
            scores = scores.flatten(0, -2)
            hook.remove()
            (gradient,) = torch.autograd.grad(scores, outputs, gradients_of(scores, generator))
            total, count = total + gradient.double().flatten(0, -2).square().sum(0), count + len(scores)
        torch.testing.assert_close(found.outputs[layer], total / count, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_prices_along_the_blocks_are_those_of_the_whole_model(name):
    model, batches = families.LANGUAGE_MODELS[name][0]().eval(), families.language_batches()
    layers = find_layers(model)
    with evaluating(model):
        chain = exact_chain(model, batches, layers)
        assert len(chain) > 1
        whole, along = (row_fisher(model, layers, blocks, Samples.of(batches), seed=1) for blocks in ([], chain))
    assert whole.outputs.keys() == along.outputs.keys()
    assert whole.products.keys() == along.products.keys()
    assert whole.outputs.keys() | whole.products.keys() == {*layers}
    for layer in layers:
        torch.testing.assert_close(whole.relative(layer), along.relative(layer), rtol=1e-3, atol=1e-6)


def gram_of(layer, inputs):
    gram = Gram.empty(layer, torch.device("cpu"), False)
    gram.add(inputs[None])
    gram.finish()
    return gram


def test_price_of_a_linear_classifier_is_the_trace_of_its_fisher_information():
    """The Fisher information at the logits is diag(p) - p p^T; to second order the price gives the KL divergence."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(6, 3)), torch.randn(300, 6)
    (layer,) = find_layers(model)
    chances = model(inputs).softmax(-1).detach()
    expected = 0.5 * (chances * (1 - chances)).mean(0)
    price = row_fisher(model, [layer], [], Samples.of([inputs]), seed=0).price(layer, gram_of(layer, inputs))
    torch.testing.assert_close(price.float(), expected, rtol=0.25, atol=0)  # 300 draws
    change = 0.05 * torch.randn(3, 6)
    with torch.no_grad():
        model[0].weight.add_(change)
        divergence = float((chances * (chances.log() - model(inputs).log_softmax(-1))).sum(1).mean())
    damage = gram_of(layer, inputs).energies(change * price.sqrt()[:, None].float()).sum()
    assert 0.5 < damage / divergence < 2  # the diagonal leaves out covariances of outputs


def test_prices_have_names_for_a_checkpoint():
    model = network()
    layers = find_layers(model)
    found = row_fisher(model, layers, [], Samples.of(data()), seed=0)
    again = RowFisher.of(found.tensors(), layers)
    for layer in layers:
        assert torch.equal(found.relative(layer), again.relative(layer))
        assert float(found.relative(layer).mean()) == pytest.approx(1.0)


def test_recurrent_matrices_have_prices_and_unreached_layers_have_none():
    torch.manual_seed(0)

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.cells, self.head, self.unused = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 3), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.cells(x)[0][:, -1])

    model = Last().eval()
    layers = find_layers(model)
    found = row_fisher(model, layers, [], Samples.of([torch.randn(5, 12, 6)]), seed=0)
    unpriced = [layer.name for layer in layers if found.relative(layer) is None]
    assert unpriced == ["unused"]


class Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x).relu()).detach()


def test_a_model_without_gradients_is_refused_by_name_but_not_by_auto():
    torch.manual_seed(0)
    with pytest.raises(ProblemError, match=r"no gradient.*torch\.no_grad"):
        iobs.prune(Detached(), data(), 0.5, "one-shot", allocation="fisher")
    report = iobs.prune(Detached(), data(), 0.5, "one-shot", allocation="auto", curvature="fisher")
    assert not report.allocation
    assert any("no gradient" in note for note in report.notes)


def enumerated(weight, hessian, rows, keep):
    """The least weighted error over all masks of a layer, each with exact weights."""
    least = torch.inf
    for mask in combinations(range(weight.numel()), keep):
        kept, error = torch.zeros(weight.numel(), dtype=torch.bool), 0.0
        kept[list(mask)] = True
        for row, dense, own in zip(rows, weight, kept.view(weight.shape), strict=True):
            rest = dense * ~own
            if own.any():  # the best change of the kept entries, given that the others become zero
                rest = rest.clone()
                rest[own] = -torch.linalg.solve(hessian[own][:, own], hessian[own][:, ~own] @ dense[~own])
            error += float(row * (rest @ hessian @ rest))
        least = min(least, error)
    return least


@pytest.mark.parametrize("seed", range(3))
def test_the_weighted_error_of_the_rows_is_least(seed):
    torch.manual_seed(seed)
    inputs, weight = torch.randn(200, 3, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    layer = find_layers(nn.Linear(3, 3))[0]
    gram = Gram.empty(layer, torch.device("cpu"), False)
    gram.add(inputs[None])
    gram.finish()
    rows = torch.tensor([0.1, 1.0, 1.9], dtype=torch.float64)
    task = Task(layer, Unstructured(keep=4), weight, None, LayerSettings("exact", damping=0.0), metric=RowMetric(rows))
    least = enumerated(weight, gram.own[0], rows, 4)
    for solutions in (solve_layer(task, Statistics(gram)), solve_together([task], Statistics(gram))):
        change = solutions[0].weight - weight
        assert int(solutions[0].mask.sum()) == 4
        assert bool((solutions[0].weight[~solutions[0].mask] == 0).all())
        assert float((rows * ((change @ gram.own[0]) * change).sum(1)).sum()) == pytest.approx(least, rel=1e-9)
    equal = solve_layer(replace(task, pattern=Unstructured(keep=1, per="row")), Statistics(gram))[0]
    plain = solve_layer(replace(task, pattern=Unstructured(keep=1, per="row"), metric=None), Statistics(gram))[0]
    assert torch.equal(equal.weight, plain.weight)  # rows that do not compete


@pytest.mark.parametrize("solver", ["sparsegpt", "obr"])
def test_rows_that_matter_more_keep_more_entries_on_a_grid(solver):
    torch.manual_seed(0)
    inputs, weight = torch.randn(200, 16, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64)
    layer = find_layers(nn.Linear(16, 4))[0]
    gram = Gram.empty(layer, torch.device("cpu"), False)
    gram.add(inputs[None])
    gram.finish()
    rows = torch.tensor([0.01, 0.01, 1.99, 1.99], dtype=torch.float64)
    pattern = Unstructured(0.5) & iobs.Grid(4, 8)
    task = Task(layer, pattern, weight, None, LayerSettings(solver), metric=RowMetric(rows))
    for (found,) in (solve_layer(task, Statistics(gram)), solve_together([task], Statistics(gram))):
        kept = found.mask.sum(1)
        assert int(kept.sum()) == 32
        assert int(kept[:2].max()) < int(kept[2:].min())
        codes = found.weight / found.stats["scales"].repeat_interleave(8, 1)
        torch.testing.assert_close(codes, codes.round())
        assert float(codes.abs().max()) <= 7.01
        assert not codes[~found.mask].any()


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
@pytest.mark.parametrize("convolution", [False, True])
def test_zeros_are_exact_and_the_curvature_changes_the_result(convolution, recipe):
    found = []
    for curvature in ("layer", "fisher"):
        model = network(convolution)
        report = iobs.prune(model, data(convolution), 0.5, recipe, curvature=curvature)
        assert report.zeros == sum(int((one.weight == 0).sum()) for one in (model[0], model[1][2]))
        assert report.zeros == round(0.5 * report.weights)
        found.append(model[0].weight.clone())
    assert not torch.equal(*found)


def test_a_language_model_with_padding_is_pruned():
    model, batches = families.LANGUAGE_MODELS["llama"][0]().eval(), families.language_batches()
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -2:] = 0
    report = iobs.prune(model, batches, "2:4", "one-shot", curvature="fisher")
    assert report.zeros == report.weights // 2


class Vectors(nn.Module):
    """Calls a layer on one vector, and another one inside `torch.vmap`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.single, self.mapped, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.vmap(self.mapped)(x) + self.single(x.mean(0)))


def test_a_layer_of_single_vectors_has_a_price_and_a_mapped_one_has_none():
    model = Vectors().eval()
    found = row_fisher(model, find_layers(model), [], Samples.of(list(torch.randn(3, 8, 6))), seed=0)
    single, mapped, head = (found.relative(layer) for layer in find_layers(model))
    assert mapped is None
    assert single is not None
    assert head is not None
    assert iobs.prune(model, list(torch.randn(3, 8, 6)), 0.5, "one-shot").zeros == 45


def test_a_rank_without_samples_fails_as_the_others_do():
    """Otherwise it would wait for a sum that they never reach."""

    class Second(Ranks):
        def sum(self, tensor):
            tensor += 1.0  # what the first rank has

    model = network(False)
    with pytest.raises(ProblemError, match="no gradient on another rank"):
        row_fisher(model, find_layers(model), [], Samples.of(data(False)[:1]), seed=0, ranks=Second(1, 2))


@pytest.mark.parametrize("along", [False, True])
def test_second_moments_of_gradients_are_those_of_all_positions(along, monkeypatch):
    model, batches = text_classifier_by_position()
    layers = find_layers(model)
    chain = exact_chain(model, batches, layers) if along else []
    assert bool(chain) is along
    found = row_fisher(model, layers, chain, Samples.of(batches), seed=3, coupled=layers)
    for layer in layers:
        moment, metric = found.moments[layer].double(), found.metric(layer)
        assert float(torch.linalg.eigvalsh(moment).min()) > -1e-5 * float(moment.trace())
        torch.testing.assert_close(float(metric.diagonal.mean()), 1.0)
        torch.testing.assert_close(metric.matrix(moment.device, moment.dtype).diagonal(), metric.diagonal)
        # The part that rows share is less than the whole: the metric is definite.
        assert bool((metric.scale * metric.moment.diagonal() < metric.diagonal).all())
    whole = row_fisher(model, layers, [], Samples.of(batches), seed=3, coupled=layers).moments
    for layer, moment in whole.items():
        torch.testing.assert_close(found.moments[layer], moment, rtol=1e-3, atol=1e-5 * float(moment.trace()))
    assert not row_fisher(model, layers, chain, Samples.of(batches), seed=3).moments


def test_a_position_with_a_large_gradient_counts_by_its_norm_and_not_by_the_square():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4)).eval()
    layers = find_layers(model)
    inputs = torch.randn(50, 5)
    found = row_fisher(model, layers, [], Samples.of([inputs]), seed=3, coupled=layers)
    with torch.no_grad():
        vectors = gradients_of(model(inputs), torch.Generator().manual_seed(3)) @ model[1].weight
    vectors = vectors.double()
    norms = vectors.norm(dim=1)
    expected = (vectors / norms[:, None]).T @ vectors
    moment = found.moments[layers[0]].double()
    torch.testing.assert_close(moment.diagonal(), expected.diagonal(), rtol=1e-5, atol=1e-6)
    beyond = expected - torch.diag(expected.diagonal())
    kept = 1 - norms.square().sum() / beyond.square().sum()
    torch.testing.assert_close(moment - torch.diag(moment.diagonal()), kept * beyond, rtol=1e-4, atol=1e-5)


def test_what_rows_share_is_believed_by_the_number_of_positions():
    """Of independent rows nothing stays; of rows that are alike nearly everything."""
    torch.manual_seed(0)
    for mixing, least, most in ((0.0, 0.0, 0.1), (1.0, 0.9, 1.1)):
        model = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 400)).eval()
        with torch.no_grad():
            weight, _ = torch.linalg.qr(torch.randn(400, 40))
            model[1].weight.copy_(weight + mixing * torch.randn(400, 1))
        layers = find_layers(model)
        moment = row_fisher(model, layers, [], Samples.of([torch.randn(300, 5)]), seed=3, coupled=layers).moments
        kept = moment[layers[0]] - torch.diag(moment[layers[0]].diagonal())
        share = float(kept.abs().max() / moment[layers[0]].diagonal().mean())
        assert least <= share <= most, (mixing, share)


@pytest.mark.parametrize("pattern", [0.5, "2:4"])
def test_rows_solved_together_lower_the_divergence_of_a_language_model(pattern, embedded, monkeypatch):
    batches = calibration_windows(embedded.tokenizer, embedded_text("calibration"), 64, 128, 0, labels=False)
    coupled, losses = problem._coupled, []
    for solved in (lambda task, solution, *_: solution, coupled):
        monkeypatch.setattr(problem, "_coupled", solved)
        model = copy.deepcopy(embedded.module)
        losses.append(iobs.prune(model, batches, pattern, "one-shot", holdout=0.25).best.loss_heldout)
    assert losses[1] < 0.98 * losses[0], losses


class Pooled(nn.Module):
    """One embedding for a text: the mean of the states of an encoder."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids):
        return self.encoder(input_ids=input_ids).last_hidden_state.mean(1)


@pytest.mark.parametrize("pooled", [False, True])
def test_integers_carry_errors_from_row_to_row_where_each_position_has_an_output(pooled, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    encoder = BertModel(BertConfig(vocab_size=50, **sizes), add_pooling_layer=False).eval()
    model = Pooled(encoder).eval() if pooled else encoder
    texts = [{"input_ids": torch.randint(0, 50, (8, 16))} for _ in range(4)]
    rounding, shared = problem.SuccessiveRounding, []
    monkeypatch.setattr(
        problem, "SuccessiveRounding", lambda *arguments: shared.append(arguments) or rounding(*arguments)
    )
    iobs.prune(model, texts, iobs.Rate(6.0), "one-shot", curvature="fisher", include="*encoder.layer.*")
    assert bool(shared) is not pooled


def test_errors_carried_from_row_to_row_lower_the_divergence_at_equal_bits(embedded, monkeypatch):
    batches = calibration_windows(embedded.tokenizer, embedded_text("calibration"), 64, 128, 0, labels=False)
    metric, losses = RowFisher.metric, []
    for of_rows in (lambda fisher, layer: RowMetric(metric(fisher, layer).diagonal), metric):
        monkeypatch.setattr(RowFisher, "metric", of_rows)
        model = copy.deepcopy(embedded.module)
        report = iobs.prune(model, batches, iobs.Rate(3.0), "one-shot", holdout=0.25)
        losses.append(report.best.loss_heldout)
    assert losses[1] < 0.97 * losses[0], losses


def test_ranks_add_up_moments_in_the_order_of_layers_not_of_calls():
    """A rank without samples calls nothing."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.first = nn.Linear(7, 3), nn.Linear(8, 7)

        def forward(self, inputs):
            return self.last(self.first(inputs).relu())

    class Recording(Ranks):
        def sum(self, tensor):
            shapes.append(tuple(tensor.shape))

    shapes, model = [], Backwards()
    layers = find_layers(model)
    for part in (Samples.of([torch.randn(5, 8)]), Samples()):
        row_fisher(model, layers, [], part, seed=0, coupled=layers, ranks=Recording(0, 1))
    squares = [shape for shape in shapes if len(shape) == 2]
    assert squares == [(3, 3), (7, 7)] * 2
