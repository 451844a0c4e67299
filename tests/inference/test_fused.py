"""`generate` after `iobs.accelerate`: each new token by one compiled call, with the logits of the modules."""

import copy
import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from test_decoder import model_of
from torch.nn.modules import module

import iobs
from iobs.cli.benching import Workload, repetition
from iobs.errors import ProblemError
from iobs.inference import cpu, fused
from iobs.inference.decodable import undecodable
from iobs.inference.decoder import Decoder, generated
from iobs.inference.formats import store
from iobs.inference.fused import FusedForward, can_fuse, fuse
from iobs.inference.modules import StoredLinear, can_store, matrix_of
from iobs.inference.storing import replace_layers
from iobs.models import LoadedModel

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


OTHER = ["padding", "attentions", "hook", "forward", "training", "gradient", "batch", "embeddings"]


@pytest.mark.parametrize("case", OTHER)
def test_other_forwards_are_those_of_the_model(steps, case):
    model, other = stored()
    results = []
    for one in (model, other):
        _, cache = continued(one, IDS, [5, 1])
        given = {"input_ids": IDS[:, 6:], "past_key_values": cache, "use_cache": True}
        calls = []
        if case == "padding":
            given["attention_mask"] = torch.tensor([[0, 0, 1, 1, 1, 1, 1]])
        elif case == "attentions":
            given["output_attentions"] = True
        elif case == "hook":
            one.model.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(1))
        elif case == "forward":
            mlp = one.model.layers[0].mlp
            mlp.forward = lambda given, mlp=mlp, calls=calls: calls.append(1) or 2 * type(mlp).forward(mlp, given)
        elif case == "training":
            one.train()
        elif case == "batch":
            given = {"input_ids": IDS.repeat(2, 1)}
        elif case == "embeddings":
            given |= {"input_ids": None, "inputs_embeds": one.model.embed_tokens(IDS[:, 6:]).detach()}
        with torch.set_grad_enabled(case == "gradient"):
            output = one(**given)
        assert (output.attentions is not None) is (case == "attentions")
        assert bool(calls) is (case in ("hook", "forward"))
        results.append(output.logits.detach())
    assert steps == [5]
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


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


def test_hooks_on_all_modules_are_heard(steps):
    model, other = stored()
    handles, calls, results = [], [], []
    for one in (model, other):
        _, cache = continued(one, IDS, [4, 1])
        handles.append(module.register_module_forward_hook(lambda layer, *_: calls.append(type(layer).__name__)))
        try:
            with torch.no_grad():
                output = one(input_ids=IDS[:, 5:6], past_key_values=cache, use_cache=True)
            assert undecodable(one) is not None
        finally:
            handles.pop().remove()
        assert calls.count("StoredLinear") == 15
        calls.clear()
        with torch.no_grad():
            results.append(one(input_ids=IDS[:, 6:], past_key_values=output.past_key_values).logits)
    assert steps == [4, 6]
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-3)


def test_layers_that_change_later_are_computed_as_they_are(steps):
    """A fused network whose layers take more threads, or become dense, goes through its modules."""
    model, other = stored()
    wanted, _ = continued(model, IDS, [3, 1, 1])
    head = other.lm_head
    other.lm_head = torch.nn.Linear(head.in_features, head.out_features, bias=False)
    other.lm_head.weight.data = head.weight
    torch.testing.assert_close(continued(other, IDS, [3, 1, 1])[0], wanted)
    other.lm_head = head
    for one in other.modules():
        if isinstance(one, StoredLinear):
            one.use_threads(2)
    torch.testing.assert_close(continued(other, IDS, [3, 1, 1])[0], wanted)
    assert steps == []


class Scaled(transformers.LlamaForCausalLM):
    """A model of another author, with the model_type of a Llama."""

    def forward(self, *args, **given):
        output = super().forward(*args, **given)
        output.logits = output.logits / 2
        return output


def test_classes_of_other_authors_are_not_fused():
    model, _ = stored()
    other = copy.copy(model)
    other.__class__ = Scaled
    assert "Scaled is not that of transformers" in undecodable(other)
    assert not can_fuse(other)

    class Doubled(type(model.model.layers[1].mlp)):
        def forward(self, given):
            return 2 * super().forward(given)

    model.model.layers[1].mlp.__class__ = Doubled
    assert "layers.1.mlp" in undecodable(model)
    assert not can_fuse(model)


def test_a_sliding_window_ends_the_compiled_step(steps):
    """The configuration of Mistral has a window by default: its cache keeps the last tokens alone."""
    assert transformers.MistralConfig().sliding_window
    model, other = stored("mistral", sliding_window=12)
    ids = torch.randint(0, 100, (1, 20), generator=torch.Generator().manual_seed(7))
    parts = [4] + [1] * 16
    (wanted, kept), (found, cache) = continued(model, ids, parts), continued(other, ids, parts)
    assert type(cache.layers[0]).__name__ == "DynamicSlidingWindowLayer"
    assert steps == [*range(4, 11)]
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(cache.layers[1].keys, kept.layers[1].keys, rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == kept.get_seq_length() == 20
    prompt, settings = ids[:, :5], {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **settings), other.generate(prompt, **settings))


def test_texts_longer_than_the_window_go_through_the_modules(steps):
    model, _ = stored("mistral", sliding_window=12)
    found = list(generated(model, IDS, 8, form="bf16"))
    assert not steps
    assert found == list(generated(model, IDS, 8))


def test_positional_arguments_are_read(steps):
    """The model itself got keys in float32 beside queries in bfloat16."""
    model, other = (one.bfloat16() for one in stored())
    results = []
    for one in (model, other):
        _, cache = continued(one, IDS, [3, 1])
        with torch.no_grad():
            results.append(one(IDS[:, 4:6], None, None, cache).logits)
            assert cache.layers[0].keys.dtype == torch.bfloat16
            one(IDS[:, 6:], None, None, cache)
    assert steps == [3, 6]
    assert (results[1] - results[0]).norm() < 0.05 * results[0].norm()


def test_keys_that_are_kept_elsewhere_do_not_change(steps):
    _, other = stored()
    _, cache = continued(other, IDS, [3, 1, 1])
    held = cache.layers[0].keys
    before = held.clone()
    cache.crop(-1)
    with torch.no_grad():
        other(input_ids=IDS[:, 6:], past_key_values=cache, use_cache=True)
    assert steps == [3, 4, 4]
    assert not torch.equal(cache.layers[0].keys, before)
    assert torch.equal(held, before)


def test_values_that_are_replaced_in_a_cache_are_read(steps):
    found = []
    for model in stored():
        _, cache = continued(model, IDS, [3, 1, 1])
        cache.layers[0].values = torch.zeros_like(cache.layers[0].values)
        with torch.no_grad():
            found.append(model(input_ids=IDS[:, 5:6], past_key_values=cache, use_cache=True).logits)
    assert steps == [3, 4, 5]
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


def test_memory_of_a_text_goes_with_its_cache():
    _, other = stored()
    _, cache = continued(other, IDS, [3, 1])
    keys = weakref.ref(other.forward._session.keys)
    assert keys().shape[2] == 32  # the system clears every page before the first token
    assert keys() is not None
    del cache
    assert other.forward._session is None
    assert keys() is None


def test_own_bytes_count_float32_copies_of_biases():
    """The step reads biases in float32: those of the model itself, or copies of narrower ones."""
    _, other = stored()
    first = Decoder(other, 16, compiled=False).own_bytes
    biases = sum(one.bias.numel() for one in other.modules() if isinstance(one, StoredLinear) and one.bias is not None)
    assert biases > 0
    assert Decoder(other.bfloat16(), 16, compiled=False).own_bytes == first + 4 * biases


def test_bench_counts_the_step_of_a_text_that_is_longer_than_the_window(monkeypatch):
    _, other = stored("mistral", sliding_window=12)
    loaded = LoadedModel(other, None, "x", "causal-lm", 64, lambda *_: None)
    work = Workload("x", tokens=8, prompt=7, shape=None, precision="bf16", threads=1)
    begun, begin = [], FusedForward._begin
    monkeypatch.setattr(FusedForward, "_begin", lambda *given: begun.append(begin(*given)) or begun[-1])
    measured = repetition(loaded, work, stored=True)
    measured.run()
    assert [one.decoder.own_bytes for one in begun] == [measured.own_bytes]
    assert repetition(loaded, replace(work, prompt=12), stored=True).own_bytes == 0


@pytest.mark.parametrize(("token", "position"), [(5, 16), (5, -1), (-1, 3), (100, 3)])
def test_steps_outside_of_the_text_or_the_vocabulary_are_refused(token, position):
    """The compiled step checks no bounds."""
    model, _ = stored()
    decoder = Decoder(model, longest=16)
    keys = np.zeros((2, 2, 64, 32), np.float32)
    with pytest.raises(ProblemError, match="is outside of the vocabulary or of 16 places"):
        decoder.step(token, position, keys, keys.copy())
