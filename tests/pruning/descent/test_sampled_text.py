"""Text sampled from the dense model, for fine-tuning on few windows."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import iobs
from iobs.errors import ProblemError
from iobs.pruning import descent
from iobs.pruning.descent.augment import (
    SampledText,
    copies_to_sample,
    sampled_text,
    windows_to_sample,
    with_sampled_text,
)
from iobs.pruning.recipe import BlockFit
from iobs.pruning.samples.batches import Samples


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # far from uniform
    return model


def text(windows=6, length=32, **more):
    tokens = torch.randint(40, (windows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, **more}


def reference(model, starts, length, seed, windows):
    """Slow: every token from a pass of the whole window."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(len(starts), (windows,), generator=generator)
    tokens = starts[rows][:, : length // 16]
    while tokens.shape[1] < length:
        chances = model(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
    return tokens


@torch.no_grad()
def test_sampled_windows_equal_those_of_passes_of_whole_windows(model):
    part = Samples.of([text()])
    found = sampled_text(model, part, 9, 5)
    assert torch.equal(found.windows, reference(model, text()["input_ids"], 32, 5, 9))


def test_half_of_a_batch_is_replaced_and_draws_repeat():
    change, batch = SampledText(torch.full((4, 32), 39)), text(5, labels=torch.arange(5))
    first, again = (change(batch, torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(first["input_ids"], again["input_ids"])
    sampled = (first["input_ids"] == 39).all(1)
    assert int(sampled.sum()) == 2
    assert torch.equal(first["input_ids"][~sampled], batch["input_ids"][~sampled])
    assert torch.equal(first["labels"], batch["labels"])
    generator = torch.Generator().manual_seed(0)
    replaced = [bool((change(text(1), generator)["input_ids"] == 39).all()) for _ in range(40)]
    assert 8 < sum(replaced) < 32


def test_only_causal_text_without_padding_is_suited(model):
    part = Samples.of([text()])
    assert windows_to_sample(model, part, 31) == 16
    assert windows_to_sample(model, part, 10_000) == 48
    padded = torch.ones(6, 32, dtype=torch.int64)
    assert windows_to_sample(model, Samples.of([text(attention_mask=padded)]), 31) == 16
    padded[0, 0] = 0
    assert windows_to_sample(model, Samples.of([text(attention_mask=padded)]), 31) == 0
    assert windows_to_sample(model, Samples.of([text(), text(length=40)]), 31) == 0
    assert windows_to_sample(model, Samples.of([text(length=12)]), 31) == 0
    assert windows_to_sample(model, Samples.of([text(pixel_values=torch.zeros(6, 3, 8, 8))]), 31) == 0
    assert windows_to_sample(nn.Embedding(40, 4), part, 31) == 0


def test_plain_text_of_few_tokens_gets_sampled_windows(model):
    assert copies_to_sample(model, Samples.of([text(4096, 32)])) == 2
    assert copies_to_sample(model, Samples.of([text(4096, 32), text(1, 32)])) == 0
    assert copies_to_sample(nn.Embedding(40, 4), Samples.of([text()])) == 0


def test_an_encoder_gives_no_text():
    config = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    encoder, part = BertModel(config).eval(), Samples.of([text()])
    assert sampled_text(encoder, part, 4, 0) is None
    assert windows_to_sample(encoder, part, 31) == 0  # although its class takes keys and values
    assert copies_to_sample(encoder, part) == 0


def test_best_prunes_an_encoder_without_sampled_text():
    config = BertConfig(vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    best = iobs.Recipe.preset("best")
    short = best.but(blocks=replace(best.blocks, masks=1, steps=2, network_steps=2), solver="sparsegpt")
    short = short.but(allocation=iobs.Allocation("auto", generations=2))
    report = iobs.prune(BertModel(config).eval(), [text(12), text(12)], 0.5, short)
    assert report.zeros == report.weights // 2
    assert not any("sampled" in note for note in report.notes)


@torch.no_grad()
def test_calibration_samples_get_sampled_windows_in_equal_batches(model):
    part = Samples.of([text(4, attention_mask=torch.ones(4, 32, dtype=torch.int64)), text(2)])
    found = with_sampled_text(model, Samples.of(part.batches[:1]), 2, 5)
    assert found.numbers == [0, 1, 2]
    assert found.batches[0] is part.batches[0]
    tokens = torch.cat([batch["input_ids"] for batch in found.batches[1:]])
    assert torch.equal(tokens, reference(model, text(4)["input_ids"], 32, 5, 8))
    assert all(bool((batch["attention_mask"] == 1).all()) for batch in found.batches)
    with pytest.raises(ProblemError, match=r"blocks\.sampled: .* leave it at 0"):
        with_sampled_text(model, part, 2, 5)


def test_blocks_are_fitted_on_sampled_text_too(model):
    fit = BlockFit(masks=1, steps=2, lr=1e-3, sampled=2)
    counts, some = {}, ["*.q_proj", "*.down_proj"]
    recipe = iobs.Recipe.preset("one-shot").but(solver="magnitude")
    for copies in (0, 2):
        pruned, seen = LlamaForCausalLM(model.config).eval(), []
        pruned.load_state_dict(model.state_dict())
        pruned.model.layers[0].self_attn.q_proj.register_forward_hook(lambda _, args, out, seen=seen: seen.append(out))
        report = iobs.prune(pruned, [text(20)], 0.5, recipe, blocks=replace(fit, sampled=copies), include=some)
        assert report.zeros == report.weights // 2
        counts[copies] = sum(len(one) for one in seen)
    assert counts[2] > 1.5 * counts[0]
    with pytest.raises(ProblemError, match=r"blocks\.sampled"):
        iobs.prune(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), 0.5, recipe, blocks=fit)
    auto = iobs.prune(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), 0.5, recipe, blocks=BlockFit(sampled="auto"))
    assert not any("sampled" in note for note in auto.notes)
    pruned.load_state_dict(model.state_dict())
    auto = iobs.prune(pruned, [text(20)], 0.5, recipe, blocks=replace(fit, sampled="auto"), include=some)
    assert any("2 windows sampled from the dense model" in note for note in auto.notes)
    with pytest.raises(ProblemError, match="sampled of blocks must be a whole number"):
        BlockFit(sampled=-1)


def test_interrupted_run_goes_on_with_the_text_that_it_sampled(model, tmp_path, monkeypatch):
    """Another machine may sample other text from the same model."""
    fit, stopping = BlockFit(masks=1, steps=2, lr=1e-3, sampled=2), iobs.Callback()

    def pruned(**options):
        network = copy.deepcopy(model)
        some = ["*.q_proj", "*.down_proj"]
        iobs.prune(network, [text(20)], 0.5, "one-shot", solver="magnitude", blocks=fit, include=some, **options)
        return [*network.parameters()]

    def stop(entry, index):
        raise KeyboardInterrupt

    stopping.on_layer = stop
    expected, run = pruned(), {"checkpoint": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        pruned(callbacks=[stopping], **run)
    monkeypatch.setattr(descent.augment, "sampled_text", lambda *_: SampledText(torch.zeros(36, 32).long()))
    assert all(torch.equal(one, other) for one, other in zip(pruned(**run), expected, strict=True))


def test_fewer_units_are_tuned_on_sampled_text(model):
    steps = iobs.FineTune(1e-3, "adam", 3, most_steps=6, loss="kl", parameters="all", support="fixed", augment="auto")
    pruned = LlamaForCausalLM(model.config).eval()
    pruned.load_state_dict(model.state_dict())
    report = iobs.prune(pruned, [text(20)], iobs.Structured(0.25, of="parameters"), "one-shot", finetune=steps)
    assert any("windows of text sampled from the dense model" in note for note in report.notes)
    assert [len(record.step_losses) for record in report.rounds] == [0, 6]


def test_windows_of_all_batches_are_kept_equally_often():
    part = Samples.of([{"input_ids": torch.full((1, 4), number)} for number in range(8)])
    change, generator, kept = SampledText(torch.full((3, 4), 39)), torch.Generator().manual_seed(0), torch.zeros(40)
    for _ in range(200):
        batch = part.pick(torch.randperm(8, generator=generator)[:4])
        kept[change(batch, generator)["input_ids"][:, 0]] += 1
    assert int(kept[:8].min()) > 30  # of 50 on average
    assert int(kept[:8].max()) < 70
