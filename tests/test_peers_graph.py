"""The graph that the benchmark beside other runtimes gives them is the network of transformers."""

from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch):
    """The folder of the benchmarks on the import path."""
    monkeypatch.syspath_prepend(str(FOLDER))


def llama(groups):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=groups, vocab_size=50)).eval()


@torch.no_grad()
@pytest.mark.parametrize("groups", [4, 2])
def test_graph_of_the_peers_gives_the_logits_of_transformers_in_pieces(scripts, groups):
    import peers_forms

    model, ids = llama(groups), torch.arange(3, 12)[None]
    step, width = peers_forms.Step(model), 32 // 4
    past = [torch.zeros(1, groups, 0, width) for _ in range(4)]
    wanted = model(ids).logits[0]
    for first, last in ((0, 5), (5, 6), (6, 9)):
        logits, *past = step(ids[:, first:last], torch.arange(first, last), *past)
        torch.testing.assert_close(logits[0, -1], wanted[last - 1], rtol=1e-4, atol=1e-5)


def test_form_of_torch_continues_a_text_in_pieces(scripts):
    import peers_forms

    form = peers_forms.Torch(llama(2))
    whole = form.feed(range(3, 12))
    form.reset()
    form.feed(range(3, 10))
    form.feed([10])
    torch.testing.assert_close(torch.tensor(form.feed([11])), torch.tensor(whole), rtol=1e-4, atol=1e-5)


def test_verdicts_compare_each_peer_with_forms_that_are_at_least_as_accurate(scripts):
    import peers

    def row(name, accuracy, ratio, size):
        return {"name": name, "sparsity": 0.5, "recipe": "fast", "accuracy": accuracy, "decode_ratio": ratio} | {
            "bytes": size
        }

    rows = [row("ours int8", 1.1, 1.0, 300), row("ours bf16", 1.0, 0.5, 500), row("Q8_0", 1.05, 0.25, 400)]
    assert "| Q8_0 | ours bf16, 50% zeros by fast | 2.00 | ours bf16, 50% zeros by fast | 1.25 |" in peers.verdicts(
        rows
    )
