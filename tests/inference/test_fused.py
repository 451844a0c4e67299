"""`generate` after `iobs.accelerate`: each new token by one compiled call, with the logits of the modules."""

import copy
import pickle

import pytest
import torch
from test_decoder import model_of

import iobs
from iobs.inference import cpu, fused
from iobs.inference.decoder import Decoder
from iobs.inference.formats import store
from iobs.inference.fused import FusedForward, can_fuse, fuse
from iobs.inference.modules import can_store, matrix_of
from iobs.inference.storing import replace_layers

pytestmark = pytest.mark.skipif(cpu.level() == "none", reason="the compiled step needs AVX-512 or AVX2")
IDS = torch.randint(0, 100, (1, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def steps(monkeypatch):
    """The positions of the tokens that the compiled step computes."""
    found, step = [], Decoder.step

    def counted(decoder, token, position, keys, values):
        found.append(position)
        return step(decoder, token, position, keys, values)

    monkeypatch.setattr(Decoder, "step", counted)
    return found


def stored(family="llama", **changes):
    """A network whose matrices are stored, without and with the compiled step."""
    model = model_of(family, **changes)
    layers = {name: one for name, one in model.named_modules() if can_store(one)}
    replace_layers(model, {name: store(matrix_of(one), "bitmask-bf16") for name, one in layers.items()})
    other = copy.deepcopy(model)
    assert can_fuse(other)
    fuse(other)
    return model, other


@torch.no_grad()
def continued(model, ids, parts):
    """Logits of the last token of each part of a text, and the cache."""
    cache, found, start = None, [], 0
    for size in parts:
        output = model(input_ids=ids[:, start : start + size], past_key_values=cache, use_cache=True)
        cache, start = output.past_key_values, start + size
        found.append(output.logits[0, -1].float())
    return torch.stack(found), cache


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tokens_and_logits_of_generate_are_those_of_the_modules(steps, family):
    model, other = stored(family)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    wanted, found = (one.generate(IDS, **settings) for one in (model, other))
    assert steps == [*range(7, 18)]
    assert torch.equal(wanted.sequences, found.sequences)
    for expected, logits in zip(wanted.logits, found.logits, strict=True):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


def test_prompts_tokens_and_cropped_caches_follow_each_other(steps):
    model, other = stored()
    ids = torch.randint(0, 100, (1, 20), generator=torch.Generator().manual_seed(4))
    parts = [5, 1, 1, 3, 1, 1]
    (wanted, cache), (found, given) = continued(model, ids, parts), continued(other, ids, parts)
    assert steps == [5, 6, 10, 11]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    for one, past in ((model, cache), (other, given)):
        past.crop(-4)
        with torch.no_grad():
            output = one(input_ids=ids[:, 15:16], past_key_values=past, use_cache=True)
        found = output.logits if one is other else found
        wanted = output.logits if one is model else wanted
    assert steps[-1] == 8
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_two_texts_in_turns_have_their_own_keys_and_values(steps):
    model, other = stored()
    ids = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(5))
    wanted = torch.stack([continued(model, row[None], [4, 1, 1, 1, 1, 1])[0] for row in ids])
    caches, found = [None, None], [[], []]
    with torch.no_grad():
        for start, end in ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
            for text in (0, 1):
                output = other(input_ids=ids[text : text + 1, start:end], past_key_values=caches[text], use_cache=True)
                caches[text] = output.past_key_values
                found[text].append(output.logits[0, -1])
    assert len(steps) == 10
    torch.testing.assert_close(torch.stack([torch.stack(one) for one in found]), wanted, rtol=1e-3, atol=1e-3)


def test_memory_grows_with_the_text(steps, monkeypatch):
    monkeypatch.setattr(fused, "_ROOM", 2)
    monkeypatch.setattr(fused, "LONGEST", 12)
    model, other = stored()
    ids = torch.randint(0, 100, (1, 40), generator=torch.Generator().manual_seed(6))
    parts = [1] * 40
    torch.testing.assert_close(continued(other, ids, parts)[0], continued(model, ids, parts)[0], rtol=1e-3, atol=1e-3)
    assert steps == [*range(1, 40)]


def test_a_model_in_half_precision_keeps_its_dtype(steps):
    model, other = stored()
    model, other = model.bfloat16(), other.bfloat16()
    (wanted, _), (found, cache) = continued(model, IDS, [3, 1, 1, 2]), continued(other, IDS, [3, 1, 1, 2])
    assert len(steps) == 2
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert (found - wanted).norm() < 0.05 * wanted.norm()
    with torch.no_grad():
        output = other(input_ids=IDS[:, :1], past_key_values=cache, use_cache=True)
        assert output.logits.dtype == torch.bfloat16
        continued(other, IDS, [3, 1])  # another text
        other(input_ids=IDS[:, :2], past_key_values=cache, use_cache=True)
    assert cache.layers[0].keys.dtype == torch.bfloat16


@pytest.mark.parametrize("case", ["padding", "attentions", "hook", "gradient", "batch", "embeddings"])
def test_other_forwards_are_those_of_the_model(steps, case):
    model, other = stored()
    results = []
    for one in (model, other):
        _, cache = continued(one, IDS, [6])
        given = {"input_ids": IDS[:, 6:], "past_key_values": cache, "use_cache": True}
        calls = []
        if case == "padding":
            given["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
        elif case == "attentions":
            given["output_attentions"] = True
        elif case == "hook":
            one.model.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        elif case == "batch":
            given = {"input_ids": IDS.repeat(2, 1)}
        elif case == "embeddings":
            given |= {"input_ids": None, "inputs_embeds": one.model.embed_tokens(IDS[:, 6:]).detach()}
        with torch.set_grad_enabled(case == "gradient"):
            output = one(**given)
        assert (output.attentions is not None) is (case == "attentions")
        assert bool(calls) is (case == "hook")
        results.append(output.logits.detach())
    assert not steps
    torch.testing.assert_close(results[1], results[0])


def test_changed_weights_count_from_the_next_text_on(steps):
    model, other = stored()
    for one in (model, other):
        continued(one, IDS, [3, 1])
        one.model.norm.weight.data *= 2
    torch.testing.assert_close(continued(other, IDS, [3, 1, 1])[0], continued(model, IDS, [3, 1, 1])[0])
    assert len(steps) == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_with_their_own_weights(steps, copied):
    _, other = stored()
    wanted, _ = continued(other, IDS, [3, 1, 1])
    twin = copied(other)
    assert twin.forward.model is twin
    twin.model.norm.weight.data.zero_()
    assert not continued(twin, IDS, [3, 1, 1])[0].any()
    torch.testing.assert_close(continued(other, IDS, [3, 1, 1])[0], wanted)


def test_accelerate_fuses_a_network_whose_matrices_are_all_stored(monkeypatch):
    from iobs.inference import choices

    seconds = {"dense": 2.0}
    monkeypatch.setattr(
        choices, "_best_seconds", lambda calls: {key: seconds.get(getattr(key, "format", ""), 1.0) for key in calls}
    )
    monkeypatch.setattr(choices, "_SMALLEST", 1)
    model = model_of("llama")
    found = iobs.accelerate(model, threads=1)
    assert isinstance(model.forward, FusedForward)
    assert "one call of compiled code" in str(found)
    assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())
    assert "forward" not in vars(model_of("qwen2"))
    two = model_of("llama")
    iobs.accelerate(two, threads=2)
    assert not isinstance(two.forward, FusedForward)
