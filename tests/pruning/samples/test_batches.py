"""Batches: accepted forms, clear errors for the others, the class axis of outputs, held-out samples."""

import families
import pytest
import torch
from menagerie import perceptron_batches
from torch import nn

import iobs
from iobs.errors import CalibrationError
from iobs.pruning.samples import batches, outputs
from iobs.pruning.samples import batches as data_batches
from iobs.pruning.samples.batches import Samples, split


def test_batch_that_the_network_refuses_raises_calibration_error():
    with pytest.raises(CalibrationError, match=r"cannot take calibration batch 0.*\(20, 9\)"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)).eval(), [torch.randn(20, 9)], iobs.Unstructured(0.5), "one-shot")


def test_batches_refuse_a_bare_pair_of_inputs_and_targets():
    pair = torch.randn(20, 8), torch.randint(4, (20,))
    with pytest.raises(CalibrationError, match="goes into a list"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)).eval(), pair, iobs.Unstructured(0.5), "one-shot")
    pieces = torch.randn(20, 8).split(5)  # a tuple of tensors too, and a list of batches
    iobs.prune(nn.Sequential(nn.Linear(8, 4)).eval(), pieces, iobs.Unstructured(0.5), "one-shot")


def test_class_axis_follows_integer_targets():
    scores = torch.randn(4, 3, 7)
    assert outputs.class_axis(scores, (torch.randn(4, 2, 7), torch.zeros(4, 7, dtype=torch.int64))) == 1
    assert outputs.class_axis(scores, (torch.randn(4, 2, 7), torch.zeros(4, 3, dtype=torch.int64))) == 2
    assert outputs.class_axis(scores, {"input_ids": torch.zeros(4, 3, dtype=torch.int64)}) == 2
    pixels = torch.randn(2, 8, 9, 5)
    assert outputs.class_axis(pixels, (torch.randn(2, 8, 9, 3), torch.zeros(2, 8, 9, dtype=torch.int64))) == 3
    assert outputs.class_axis(pixels, torch.randn(2, 3, 9, 5)) == 1
    assert outputs.class_axis(torch.randn(4, 9), torch.randn(4, 9)) is None  # a reconstruction
    assert outputs.class_axis(torch.randn(4, 1), (torch.randn(4, 9), torch.zeros(4, dtype=torch.int64))) is None


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (torch.ones(4, 7, dtype=torch.int64), 7),
        (torch.ones(4, 7, dtype=torch.bool), 1),
        (torch.ones(4, 7), 1),
        ((torch.ones(4, 3, 8, 8), torch.ones(4, 7, dtype=torch.int64)), 1),
        ({"tokens": torch.ones(4, 7, dtype=torch.int64), "weight": torch.ones(4, 7)}, 7),
        ({"inputs_embeds": torch.ones(4, 7, 8), "attention_mask": torch.ones(4, 7, dtype=torch.bool)}, 7),
        ({"input_ids": torch.ones(4, 5, dtype=torch.int64), "labels": torch.ones(4, 7, dtype=torch.int64)}, 7),
        ({"pixel_values": torch.ones(4, 3, 8, 8), "input_ids": torch.ones(4, 7, dtype=torch.int64)}, 7),
        ({"pixel_values": torch.ones(4, 3, 8, 8), "labels": torch.full((4, 7), 9)}, 7),  # captions
        ({"pixel_values": torch.ones(4, 3, 8, 8), "labels": torch.ones(4, 7, dtype=torch.int64)}, 1),  # classes
        ({"pixel_values": torch.ones(4, 3, 8, 8), "bool_masked_pos": torch.ones(4, 7, dtype=torch.bool)}, 1),
        ({"pixel_values": torch.ones(4, 3, 8, 8), "boxes": torch.full((4, 7), 9)}, 1),
    ],
)
def test_positions_are_those_of_text(batch, expected):
    assert batches.positions(batch) == expected


def test_logits_are_no_loss():
    loss, scores = torch.tensor(1.0), torch.randn(4, 3)
    assert outputs.logits((loss, scores)) is scores
    assert outputs.logits({"loss": loss, "scores": scores}) is scores
    assert outputs.logits((loss,)) is loss


def test_batches_refuse_nested_tuples():
    data = [((torch.randn(4, 8), torch.randn(4, 8)), torch.zeros(4))]
    with pytest.raises(CalibrationError, match="tuple within a tuple"):
        iobs.prune(nn.Sequential(nn.Linear(8, 4)), data, iobs.Unstructured(0.5), "one-shot")


class Squeezes(nn.Module):
    """A regression with one output a sample; for one sample the output is a scalar."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))

    def forward(self, x):
        return self.layers(x).squeeze()


@pytest.mark.parametrize("recipe", ["fast", "best"])
def test_outputs_may_squeeze_a_single_sample(recipe):
    torch.manual_seed(0)
    network, data = Squeezes(), [(torch.randn(8, 6), torch.randn(8)) for _ in range(4)]
    report = iobs.prune(network, data, iobs.Unstructured(0.5), recipe, finetune=None)
    assert report.sparsity == pytest.approx(0.5, abs=0.02)


class Asserts(nn.Linear):
    def forward(self, x):
        assert x.shape[1] == 8, "the width is wrong"
        return super().forward(x.of_images if x.ndim > 2 else x)


@pytest.mark.parametrize(("shape", "cause"), [((40, 9), AssertionError), ((40, 8, 2), AttributeError)])
def test_assertions_of_the_network_raise_calibration_error(shape, cause):
    with pytest.raises(CalibrationError, match=r"batch 0.*(the width is wrong|of_images)") as found:
        iobs.prune(nn.Sequential(Asserts(8, 4)), [torch.randn(shape)], iobs.Unstructured(0.5), "one-shot")
    assert isinstance(found.value.__cause__, cause)


@pytest.mark.parametrize("odd", [torch.randn(10, 9), torch.randn(10, 8).double()])
def test_require_all_accepted_names_the_batch_that_does_not_fit(odd):
    network = nn.Sequential(nn.Linear(8, 4))
    calls = []
    network.register_forward_pre_hook(lambda *_: calls.append(1))
    good = [torch.randn(10, 8) for _ in range(3)]
    with pytest.raises(CalibrationError, match=r"batch 3\b"):
        batches.require_all_accepted(network, batches.collect([*good, odd]))
    assert len(calls) <= 2, "one of a kind is enough"


@pytest.mark.parametrize("number", [-1, 48])
def test_tokens_that_the_model_does_not_know_are_refused_before_it_is_called(number):
    """On a GPU the call would end in an error that no tensor of the process outlives."""
    network, data = families.build("llama")
    data[1]["input_ids"][-1, -1] = number
    network.register_forward_pre_hook(lambda *_: pytest.fail("the model is called"))
    with pytest.raises(CalibrationError, match=rf"batch 1 holds the token id {number}, .*ids 0 to 47\..*resize_token"):
        iobs.prune(network, data, 0.5, "one-shot")
    of_pictures = [{**batch, "pixel_values": torch.zeros(len(batch["input_ids"]), 1)} for batch in data]
    batches.require_known_tokens(network, of_pictures)  # a model replaces the ids of pictures
    batches.require_known_tokens(nn.Embedding(4, 2), data)


def test_split_separates_heldout_samples():
    fit, heldout = split(Samples.of(data_batches.collect(perceptron_batches())), 0.25, 3)
    assert (fit.samples, heldout.samples) == (48, 16)
    rows = torch.cat([batch[0] for batch in fit.batches + heldout.batches])
    assert len(rows.unique(dim=0)) == 64


class OnGraphs(nn.Module):
    """Node features and edges: tensors whose first dimensions count different things."""

    def __init__(self):
        super().__init__()
        self.mix, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, *, nodes, edges):
        gathered = torch.zeros(len(nodes), 6).index_add(0, edges[0], self.mix(nodes)[edges[1]])
        return self.head(torch.relu(gathered))


def graph(seed, nodes):
    generator = torch.Generator().manual_seed(seed)
    return {
        "nodes": torch.randn(nodes, 4, generator=generator),
        "edges": torch.randint(nodes, (2, 9), generator=generator),
    }


@pytest.mark.parametrize("recipe", ["one-shot", "fast", pytest.param("best", marks=pytest.mark.slow)])
def test_batches_that_cannot_be_split_count_as_one_sample(recipe):
    torch.manual_seed(0)
    data = [graph(seed, 5 + seed % 2) for seed in range(6)]
    report = iobs.prune(OnGraphs(), data, 0.5, recipe, holdout=0.2)
    assert [row.sparsity for row in report.audit]
    assert report.zeros == 21


class OnLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, *, pictures):
        assert isinstance(pictures, list)
        return torch.stack([self.layer(picture).mean(0) for picture in pictures])


def test_tensors_in_a_list_reach_the_model_as_a_list():
    data = [{"pictures": [torch.randn(5, 4), torch.randn(7, 4)]} for _ in range(4)]
    report = iobs.prune(OnLists(), data, 0.5)
    assert report.zeros == 6


def test_labels_that_do_not_fit_the_inputs_are_refused():
    with pytest.raises(CalibrationError, match="differ in their number of samples"):
        batches.collect([(torch.randn(8, 4), torch.zeros(7))])


def language_model(name):
    torch.manual_seed(0)
    return families.LANGUAGE_MODELS[name][0]().eval()


def losses_of(model):
    """Labels that reach the model's own loss, in a list that grows with every call."""
    seen = []
    model.loss_function = lambda logits, labels, **_: seen.append(labels) or logits.sum()
    return seen


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_causal_language_models_compute_a_loss_only_where_it_is_used(name):
    model = language_model(name)
    tokens = families.language_batches()[0]["input_ids"]
    seen, batch = losses_of(model), {"input_ids": tokens, "labels": tokens}
    plain = batches.forward(model, batch)
    assert not seen
    assert batches.forward(model, batch, with_loss=True).loss is not None
    assert len(seen) == 1
    assert torch.equal(plain.logits, model(input_ids=tokens).logits)
    assert "labels" in batch


def test_encoder_decoders_make_their_inputs_from_labels():
    import transformers

    config = transformers.T5Config(
        vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    tokens = families.language_batches()[0]["input_ids"]
    assert batches.forward(model, {"input_ids": tokens, "labels": tokens[:, :5]}).logits.shape == (4, 5, 48)
    assert batches.forward(model, {"input_ids": tokens, "labels": tokens}).logits.shape == (4, 16, 48)


def test_forwards_of_users_receive_the_labels():
    import transformers

    tokens = families.language_batches()[0]["input_ids"]

    class Conditioned(transformers.LlamaForCausalLM):
        def forward(self, input_ids, labels):
            return super().forward(input_ids=input_ids * (labels > 9))

    config = language_model("llama").config
    assert batches.forward(Conditioned(config), {"input_ids": tokens, "labels": tokens}).logits is not None
    replaced = language_model("llama")
    own, seen = replaced.forward, []
    replaced.forward = lambda input_ids, labels: seen.append(labels) or own(input_ids=input_ids)
    batches.forward(replaced, {"input_ids": tokens, "labels": tokens})
    assert torch.equal(seen[0], tokens)
