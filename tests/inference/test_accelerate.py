"""`iobs.accelerate` on modules and on a transformer: equal outputs to rounding, copies, state, refusals."""

import copy
import pickle

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ModelError, NonFiniteError, ProblemError
from iobs.inference import choices as module
from iobs.inference import cpu
from iobs.inference.formats import FORMATS, store
from iobs.inference.modules import StoredConv, StoredLinear, stored, table_with_matrix


@pytest.fixture
def fastest(monkeypatch):
    """Timings are replaced: the stored form with the fewest bytes is always the fastest."""
    if cpu.level() == "none":
        pytest.skip("this CPU has no kernels")

    def pretended(calls):
        return dict.fromkeys(calls, 0.5) | {key: 1.0 for key in calls if getattr(key, "format", "") == "dense"}

    monkeypatch.setattr(module, "_best_seconds", pretended)


def network():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 128, bias=False))
    for parameter in layers.parameters():
        parameter.data[torch.rand_like(parameter) < 0.7] = 0
    return layers.eval()


@pytest.mark.parametrize(("precision", "error"), [("bf16", 5e-3), ("int8", 3e-2), ("int4", 0.2)])
def test_outputs_stay_within_the_error_of_the_format(fastest, precision, error):
    model, given = network(), torch.randn(3, 5, 256)
    before = model(given)
    found = iobs.accelerate(model, precision=precision, threads=1)
    after = model(given)
    assert {type(model[0]), type(model[2])} == {StoredLinear}
    assert after.shape == before.shape
    assert (after - before).norm() <= error * before.norm()
    assert found.bytes_after < found.bytes_before / 2
    assert all(name in str(found) for name in ("512 x 256", "128 x 512"))


def test_convolutions_of_size_one_are_replaced_with_an_example(fastest):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(128, 256, 1, stride=2), nn.ReLU(), nn.Conv2d(256, 8, 3)).eval()
    model[0].weight.data[torch.rand_like(model[0].weight) < 0.8] = 0
    given = torch.randn(2, 128, 9, 9)
    before = model(given)
    assert not iobs.accelerate(copy.deepcopy(model)).choices
    iobs.accelerate(model, given, precision="bf16")
    assert isinstance(model[0], StoredConv)
    assert type(model[2]) is nn.Conv2d
    torch.testing.assert_close(model(given), before, rtol=2e-2, atol=2e-2)


def test_a_convolution_takes_one_sample_without_a_batch(fastest):
    torch.manual_seed(0)
    model, given = nn.Sequential(nn.Conv2d(128, 256, 1, stride=2)).eval(), torch.randn(128, 9, 7)
    before = model(given)
    found = iobs.accelerate(model, given, precision="bf16", threads=1)
    assert isinstance(model[0], StoredConv)
    assert found.choices[0].tokens == 20
    torch.testing.assert_close(model(given), before, rtol=2e-2, atol=2e-2)
    assert torch.equal(model(given[None])[0], model(given))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_of_a_convolution_lie_in_memory_as_those_of_the_dense_one(fastest, layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(128, 256, 1)).eval()
    given = torch.randn(2, 128, 4, 3).to(memory_format=layout)
    before = model(given)
    iobs.accelerate(model, given, precision="bf16")
    assert isinstance(model[0], StoredConv)
    assert model(given).stride() == before.stride()  # code that takes a view of the output goes on working


def test_convolutions_of_other_classes_stay_dense(fastest):
    class Standardised(nn.Conv2d):
        def forward(self, given):
            return nn.functional.conv2d(given, self.weight - self.weight.mean(), self.bias)

    model, given = nn.Sequential(Standardised(128, 256, 1)).eval(), torch.randn(1, 128, 3, 3)
    before = model(given)
    assert not iobs.accelerate(model, given).choices
    assert torch.equal(model(given), before)


@pytest.mark.parametrize("layer", [nn.Linear(6, 3), nn.Conv1d(6, 3, 1, stride=3), nn.Conv2d(6, 3, 1, stride=2)])
def test_timed_products_have_the_tokens_that_they_are_said_to_have(layer):
    assert layer(module._activations(layer, 8)).numel() == 8 * 3


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", ["bf16", "bitmask-int4"])
def test_tensors_that_are_loaded_after_a_product_are_multiplied(name, assign):
    torch.manual_seed(0)
    before, after = nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False)
    after.weight.data.pow_(3)
    form, other, given = stored(before, name), stored(after, name), torch.randn(1, 64)
    form(given)
    form.load_state_dict(other.state_dict(), assign=assign)
    assert torch.equal(form(given), other(given))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("name", "part", "given"),
    [("index-bf16", "indices", 64), ("bitmask-bf16", "mask", -1), ("bitmask-int4", "starts", 10**6)],
)
def test_damaged_tensors_are_not_loaded(name, part, given, assign):
    """Kernels would read beyond their ends."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 8, bias=False)
    layer.weight.data[:, ::2] = 0
    model = nn.Sequential(stored(layer, name))
    before, state = model[0].weight, {name: one.clone() for name, one in model.state_dict().items()}
    state[f"0.stored_{part}"].view(-1)[1] = given
    with pytest.raises(RuntimeError, match=r"0\.matrix: The stored matrix is damaged"):
        model.load_state_dict(state, assign=assign)
    assert torch.equal(model[0].weight, before)


def test_parts_of_two_stored_matrices_are_not_loaded_together():
    first, second = (nn.Linear(64, 8, bias=False) for _ in range(2))
    first.weight.data[:4], second.weight.data[4:] = 0, 0
    form, other = (stored(layer, "bitmask-bf16") for layer in (first, second))
    with pytest.raises(RuntimeError, match="the mask and the starts"):
        form.load_state_dict({"stored_mask": other.stored_mask}, strict=False)


def test_copies_pickles_and_state_dicts_compute_the_same(fastest):
    model, given = network(), torch.randn(2, 256)
    iobs.accelerate(model)
    wanted = model(given)
    assert torch.equal(copy.deepcopy(model)(given), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(model))(given), wanted)
    other = copy.deepcopy(model)
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(given), wanted)


def test_to_changes_the_bias_and_not_the_stored_weight(fastest):
    model, given = network(), torch.randn(2, 256)
    iobs.accelerate(model, precision="bf16")
    weight = model[0].weight
    model.to(torch.bfloat16)
    assert model[0].bias.dtype == model[0].weight.dtype == torch.bfloat16
    assert torch.equal(model[0].weight.float(), weight)
    assert model(given.bfloat16()).dtype == torch.bfloat16


def test_another_device_is_refused(fastest):
    model = network()
    iobs.accelerate(model)
    with pytest.raises(ProblemError, match="on the CPU only"):
        model.to("meta")


def test_generation_of_a_llama_gives_the_tokens_of_its_stored_weights(fastest):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, vocab_size=200
    )
    model = transformers.LlamaForCausalLM(config).eval()
    dense = copy.deepcopy(model)
    found = iobs.accelerate(model, precision="bf16", threads=1)
    for choice in found.choices:
        layer = dense.get_submodule(choice.name)
        layer.weight.data = model.get_submodule(choice.name).weight
    given = torch.randint(0, 200, (1, 6))
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(given, **settings), dense.generate(given, **settings))


def test_layers_where_dense_is_faster_stay_dense(monkeypatch):
    monkeypatch.setattr(module, "_best_seconds", lambda calls: {key: 1.0 + (key.format != "dense") for key in calls})
    model = network()
    found = iobs.accelerate(model)
    assert type(model[0]) is nn.Linear
    assert {choice.format for choice in found.choices} == {"dense"}
    assert found.bytes_after == found.bytes_before


@pytest.mark.parametrize(("faster", "most"), [(2, 1), (8, 4), (100, 1 << 30)])
def test_kernels_of_few_tokens_end_where_another_way_is_faster(monkeypatch, faster, most):
    """Pretended times: from `faster` tokens on, the other way takes less."""
    if cpu.level() == "none":
        pytest.skip("this CPU has no kernels")

    def pretended(calls):
        if len(calls) > 2:
            return {key: 1.0 + (key.format != "bitmask-int8") for key in calls}
        count = max(calls)
        return {count: 1.0, count - 1: 0.5 if count >= faster else 2.0}

    monkeypatch.setattr(module, "_best_seconds", pretended)
    model = network()
    iobs.accelerate(model, threads=1)
    assert model[0].most_tokens == most


def test_timings_of_the_machine_name_every_candidate(monkeypatch):
    monkeypatch.setattr(module, "_REPETITIONS", 1)
    found = iobs.accelerate(network(), threads=1)
    stored = {"bitmask-bf16", "bitmask-int8", "int8", "bf16"} if cpu.level() != "none" else set()
    assert set(found.choices[0].seconds) == {"dense"} | stored


def test_backward_through_stored_layers_is_one_error_that_says_what_to_do(fastest):
    """Before, the layers in front got wrong gradients, and a model of stored layers alone torch's own error."""
    first = nn.Linear(256, 256)
    model = nn.Sequential(nn.LayerNorm(256), first, *network())
    iobs.accelerate(model, threads=1)
    for given in (torch.ones(1, 256), torch.ones(1, 256, requires_grad=True)):
        for part in (model, model[2:]):
            with pytest.raises(ProblemError, match="Train the dense model"):
                part(given).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    table = stored_table(nn.Embedding(64, 64))
    with pytest.raises(ProblemError, match="has no gradient"):
        table(torch.arange(3)).sum().backward()


def test_frozen_layers_and_inference_record_nothing(fastest):
    model = network()
    with torch.no_grad():
        assert not iobs_model(model)(torch.ones(1, 256)).requires_grad
    frozen = iobs_model(network().requires_grad_(False))
    assert frozen(torch.ones(1, 256)).numpy().shape == (1, 128)
    with pytest.raises(ProblemError, match="has no gradient"):
        frozen(torch.ones(1, 256, requires_grad=True)).sum().backward()


def iobs_model(model):
    iobs.accelerate(model, threads=1)
    assert isinstance(model[0], StoredLinear)
    return model


def stored_table(module):
    return table_with_matrix(module, store(module.weight.detach(), "int8"))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's compiler looks at it
def test_compiled_models_compute_the_same(fastest):
    model, given = iobs_model(network()), torch.randn(3, 256)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(given), model(given))
    with pytest.raises(ProblemError, match="Train the dense model"):
        compiled(given).sum().backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
def test_traces_are_refused(fastest):
    with pytest.raises(ProblemError, match="cannot be traced"):
        torch.jit.trace(iobs_model(network()), torch.randn(3, 256))


@pytest.mark.parametrize("strict", [True, False])
def test_state_of_the_dense_model_is_refused_by_name(fastest, strict):
    dense, model = network(), iobs_model(network())
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"0\.weight is that of a dense layer[\s\S]*accelerate it afterwards"):
        model.load_state_dict(dense.state_dict(), strict=strict)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items() if "stored" in name)


def test_save_pretrained_of_an_accelerated_model_is_one_error(fastest, tmp_path):
    """It wrote a directory that `from_pretrained` filled with random weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=200)).eval()
    iobs.accelerate(model, threads=1)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.model):
        with pytest.raises(ModelError, match="Save the dense model before"):
            one.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_accelerated_model_is_not_packed_and_not_exported(fastest, tmp_path):
    """Its file would hold no weight that a reader knows."""
    model = iobs_model(network())
    for precision in (None, "int8"):
        with pytest.raises(ModelError, match="Pack the dense model"):
            iobs.save_packed(model, tmp_path / "out", precision=precision)
    with pytest.raises(ModelError, match="Export the dense model"):
        iobs.export(model, tmp_path / "out", "nemotron-nas")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("threads", [1, 2])
def test_number_of_threads_of_torch_may_change_between_calls(fastest, threads):
    model, given = network(), torch.randn(2, 256)
    found = iobs.accelerate(model, threads=threads)
    assert {one.threads for one in found.choices} == {model[0].threads} == {threads}
    before, outputs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outputs.append(model(given).detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"precision": "int2"}, "precision"), ({"threads": 0}, "threads"), ({"threads": True}, "threads")],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ProblemError, match=message):
        iobs.accelerate(network(), **arguments)


def test_a_model_on_another_device_or_of_another_kind_is_refused():
    with pytest.raises(ProblemError, match="move it"):
        iobs.accelerate(network().to("meta"))
    with pytest.raises(ProblemError, match="torch module"):
        iobs.accelerate("model")
    with pytest.raises(ProblemError, match="Sequential"):  # nothing inside could be replaced
        iobs.accelerate(torch.nn.Linear(256, 256))


def test_layers_with_hooks_stay_dense_and_keep_them(fastest):
    """A stored layer in their place would call no hook."""
    torch.manual_seed(0)
    model, calls = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).eval(), []
    model[0].register_forward_hook(lambda *_: calls.append("hook"))
    model[1].register_forward_pre_hook(lambda *_: calls.append("before"))
    model[2].forward = lambda given, layer=model[2]: calls.append("own") or nn.Linear.forward(layer, given)
    found = iobs.accelerate(model, threads=1)
    with torch.no_grad():
        model(torch.ones(1, 256))
    assert calls == ["hook", "before", "own"]
    assert [type(one) for one in model] == [*[nn.Linear] * 3, StoredLinear]
    assert "3 layers with a hook" in str(found)


@pytest.mark.parametrize("training", [True, False])
def test_stored_layers_have_the_mode_of_the_dense_ones(fastest, training):
    model = network().train(training)
    iobs.accelerate(model, threads=1)
    assert {one.training for one in model.modules()} == {training}


def test_layers_whose_weights_torch_reads_stay_dense(fastest):
    """The fast path of the encoder layer takes weights, and would unpack them at each call."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(256, 4, 512, batch_first=True)
    model = nn.Sequential(encoder, nn.Linear(256, 256)).eval()
    found = iobs.accelerate(model, threads=1)
    assert [type(one) for one in (encoder.linear1, encoder.linear2, model[1])] == [nn.Linear, nn.Linear, StoredLinear]
    assert "2 layers stay dense, since the model reads their weights" in str(found)


class Reading(nn.Module):
    """Two layers; the forward reads the weight of one, as T5 does to learn its dtype."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)

    def forward(self, given):
        return self.second(self.first(given.to(self.first.weight.dtype)))


def test_layers_whose_weights_the_example_reads_stay_dense(fastest):
    model, given = Reading().eval(), torch.ones(1, 256)
    found = iobs.accelerate(model, given, threads=1)
    assert type(model.first) is nn.Linear
    assert type(model.second) is StoredLinear
    assert [one.format == "dense" for one in found.choices] == [True, False]
    assert found.choices[0].bytes_after == found.choices[0].bytes_before
    assert "1 layers stay dense, since the model reads" in str(found)
    assert model.second.weight.shape == (256, 256)  # the property is itself again


def test_weights_that_are_not_finite_are_named_before_any_change(fastest):
    model = network()
    model[2].weight.data[3, 4] = float("nan")
    with pytest.raises(NonFiniteError, match="'2'"):
        iobs.accelerate(model, threads=1)
    assert type(model[0]) is nn.Linear


def test_an_example_changes_no_statistics(fastest):
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)).train()
    iobs.accelerate(model, torch.randn(4, 256), threads=1)
    assert not model[1].running_mean.any()
    assert int(model[1].num_batches_tracked) == 0
    assert model[1].training


@pytest.mark.parametrize("format", FORMATS)
def test_numbers_outside_of_an_embedding_are_an_error(format):
    table = table_with_matrix(nn.Embedding(64, 64), store(torch.eye(64), format))
    for number in (-1, 64):
        with pytest.raises(IndexError, match="outside"):
            table(torch.tensor([[3, number]]))
    assert torch.equal(table(torch.tensor([3])).detach().argmax(1), torch.tensor([3]))


def test_layers_that_are_too_small_are_named_in_a_note():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).eval()
    found = iobs.accelerate(model)
    assert not found.choices
    assert "2 layers of fewer than 16,384 weights stay dense" in str(found)


def test_an_accelerated_model_is_audited_and_says_why_it_cannot_be_pruned_again(fastest):
    model = network()
    zeros = {row.name: row.zeros for row in iobs.audit(model)}
    iobs.accelerate(model, precision="bf16", threads=1)
    assert any(isinstance(one, StoredLinear) for one in model.modules())
    assert {row.name: row.zeros for row in iobs.audit(model)} == zeros
    with pytest.raises(ModelError, match="accelerate it last"):
        iobs.prune(model, [torch.randn(4, 256)], 0.5, "one-shot")
    assert "stored already" in str(iobs.accelerate(model, threads=1))


def test_an_interrupted_run_leaves_the_dense_layers(fastest):
    model, calls = network(), []

    def interrupt(*_):
        calls.append(1)
        if len(calls) == 2:  # the first call shows the tokens, the second which weights are read
            raise KeyboardInterrupt

    model.register_forward_pre_hook(interrupt)
    dense = [*model]
    with pytest.raises(KeyboardInterrupt):
        iobs.accelerate(model, torch.ones(1, 256), threads=1)
    assert all(one is other for one, other in zip(model, dense, strict=True))


def test_layers_that_share_a_part_of_their_weight_have_stored_forms_of_their_own(fastest):
    model = nn.Sequential(nn.Linear(256, 256, bias=False), nn.Linear(256, 512, bias=False))
    model[0].weight = nn.Parameter(model[1].weight.data[:256])
    expected = model[1].weight.detach().clone()
    iobs.accelerate(model, precision="bf16", threads=1)
    torch.testing.assert_close(model[1].weight, expected, atol=0, rtol=1e-2)
