"""Half of the short windows of text are joined up to the context of a causal model, and of no other."""

import pytest
import torch
from torch.testing import assert_close

import iobs
from iobs.pruning.recipe import BlockFit, Recipe
from iobs.pruning.samples.batches import Samples, packed

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50}


def decoder(context=32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=context)
    return transformers.LlamaForCausalLM(config).eval()


def text(samples, length=8, **more):
    ids = torch.randint(0, 50, (samples, length), generator=torch.Generator().manual_seed(samples))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **more}


def test_every_second_group_of_windows_is_joined_over_batches():
    part = Samples.of([text(3), text(8), text(8)])
    ids = torch.cat([batch["input_ids"] for batch in part.batches])
    found = packed(decoder(), part, 1024)
    joined, kept = (batch["input_ids"] for batch in found.batches)
    assert torch.equal(joined, torch.stack([ids[:4].flatten(), ids[8:12].flatten()]))
    assert torch.equal(kept, torch.cat([ids[4:8], ids[12:]]))
    assert found.numbers == [0, 2]
    assert [tuple(batch["attention_mask"].shape) for batch in found.batches] == [(2, 32), (11, 8)]


def test_limit_of_tokens_holds_below_the_context():
    found = packed(decoder(), Samples.of([text(7)]), 16)
    assert [tuple(batch["input_ids"].shape) for batch in found.batches] == [(2, 16), (3, 8)]


@torch.no_grad()
def test_joined_text_changes_nothing_for_the_first_window():
    model, given = decoder(), text(4)
    (joined,) = packed(model, Samples.of([given]), 1024).batches
    assert_close(model(**joined).logits[:, :8], model(**given).logits[:1])


@pytest.mark.parametrize(
    "part",
    [
        Samples.of([text(4, labels=torch.zeros(4, dtype=torch.int64))]),
        Samples.of([text(4), text(4, length=6)]),
        Samples.of([{**text(4), "attention_mask": torch.tensor([[1] * 7 + [0]] * 4)}]),
        Samples.of([text(4, length=32)]),
        Samples.of([text(3)]),
        Samples.of([text(4)["input_ids"]]),
        Samples(),
    ],
    ids=["labels", "lengths", "padding", "full context", "too few", "tensor", "empty"],
)
def test_other_samples_are_unchanged(part):
    assert packed(decoder(), part, 1024) is part


def test_samples_of_an_encoder_and_of_a_model_without_context_are_unchanged():
    part = Samples.of([text(4)])
    encoder = transformers.BertModel(transformers.BertConfig(**SIZES, max_position_embeddings=32))
    assert packed(encoder, part, 1024) is part
    assert packed(torch.nn.Linear(2, 2), part, 1024) is part


@pytest.mark.parametrize(("batch_size", "lengths"), [("auto", {8, 32}), (2, {8})])
def test_steps_of_blocks_see_the_whole_context(batch_size, lengths):
    model, seen = decoder(), set()

    def hook(_, args, output):
        if output.requires_grad:
            seen.add(output.shape[1])

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(hook)
    fit = BlockFit(masks=1, steps=4, lr=1e-3, batch_size=batch_size, network_steps=3, network_lr=1e-3)
    report = iobs.prune(model, [text(8), text(8)], 0.5, Recipe(target="residual", blocks=fit), holdout=0.25)
    assert seen == lengths
    assert report.zeros == report.weights // 2
