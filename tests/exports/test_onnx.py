"""Export to ONNX: ONNX Runtime computes the same outputs as torch, and zeros stay zeros."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ModelError
from iobs.exports import to_onnx

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def outputs(folder, **inputs):
    """Outputs of ONNX Runtime for named tensors; by default it rounds inputs of products with integers to 8 bits."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: one.numpy() for name, one in inputs.items()})[0])


def rounded(model, folder, bits):
    """The model with the weights that the exported file holds."""
    found = copy.deepcopy(model)
    graph = onnx.load(folder / "model.onnx").graph
    held = {one.name: torch.from_numpy(onnx.numpy_helper.to_array(one).astype("float32")) for one in graph.initializer}
    for name, one in found.named_parameters():
        codes = held.get(f"model.{name}.codes")
        if codes is None:
            continue
        scales = held[f"model.{name}.scales"]
        wide = scales[:, None] if scales.ndim == 1 else scales.repeat_interleave(32, 1)[:, : codes.shape[1]]
        assert int(codes.abs().max()) <= 2 ** (bits - 1) - 1
        one.data = (codes * wide).reshape(one.shape)
    return found


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("columns", [64, 70])
def test_convolutional_network_gives_the_outputs_of_its_rounded_weights(tmp_path, network, bits, columns):
    model, example = network(columns), torch.randn(2, 3, 8, 8)
    written = iobs.export(model, tmp_path / "out", "onnx", bits, example=example)
    assert {one.form for one in written.matrices} == {f"int{bits}" if bits else "float32"}
    assert written.zeros == written.kept_zeros > 0
    assert written.bytes == (tmp_path / "out" / "model.onnx").stat().st_size
    assert all(one.exact for one in written.matrices) == (bits is None)
    more = torch.randn(5, 3, 8, 8)
    expected = rounded(model, tmp_path / "out", bits or 8)(more)
    assert torch.allclose(outputs(tmp_path / "out", input=more), expected, atol=1e-5)


def test_llama_gives_the_same_logits_for_any_length(half_sparse, tokens, tmp_path):
    written = iobs.export(half_sparse, tmp_path / "out", "onnx")
    assert written.zeros == written.kept_zeros > 100_000
    found = outputs(tmp_path / "out", input_ids=tokens)
    assert torch.allclose(found, half_sparse.module(tokens).logits, atol=1e-3)
    assert (tmp_path / "out" / "config.json").exists()


def test_rounded_llama_gives_the_logits_of_its_rounded_weights(half_sparse, tokens, tmp_path):
    written = iobs.export(half_sparse, tmp_path / "out", "onnx", 8)
    assert {one.form for one in written.matrices} == {"int8"}
    expected = rounded(half_sparse.module, tmp_path / "out", 8)
    with torch.no_grad():
        assert torch.allclose(outputs(tmp_path / "out", input_ids=tokens), expected(tokens).logits, atol=1e-3)
    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    assert not any(node.metadata_props or node.doc_string for node in graph.node)  # they hold paths of this machine


def test_grid_of_four_bits_is_written_as_it_is(four_bits, tokens, tmp_path):
    written = iobs.export(four_bits, tmp_path / "out", "onnx")
    assert {one.form for one in written.matrices} == {"int4"}
    assert all(one.exact for one in written.matrices)
    assert written.zeros == written.kept_zeros
    found = outputs(tmp_path / "out", input_ids=tokens)
    assert torch.allclose(found, four_bits.module(tokens).logits, atol=1e-3)


def test_unknown_inputs_are_refused(tmp_path):
    with pytest.raises(ModelError, match="an example of one forward pass"):
        iobs.export(nn.Linear(4, 4), tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


def test_batch_of_one_and_half_precision_give_a_graph_of_any_batch(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)).to(torch.bfloat16).train()
    iobs.export(model, tmp_path / "out", "onnx", example=torch.randn(1, 6))
    assert model.training
    assert model[1].training
    assert model[0].weight.dtype == torch.bfloat16
    sample = torch.randn(5, 6)
    expected = copy.deepcopy(model).eval().float()(sample)
    assert torch.allclose(outputs(tmp_path / "out", input=sample), expected, atol=1e-5)


def test_length_of_the_inputs_leaves_the_batch_free(tmp_path):
    class Pooled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.start = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 1, 6))

        def forward(self, sample):
            return self.layer(torch.cat((self.start.expand(len(sample), -1, -1), sample), 1))[:, 0]

    model, sample = Pooled(), torch.randn(5, 4, 6)
    iobs.export(model, tmp_path / "out", "onnx", example=sample[:1])
    with torch.no_grad():
        assert torch.allclose(outputs(tmp_path / "out", input=sample), model(sample), atol=1e-5)


def test_size_that_the_tracer_fixes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(to_onnx, "_captured", lambda graph, given, shapes: torch.export.export(graph, given))
    with pytest.warns(UserWarning, match=r"input: batch = 2"):
        iobs.export(nn.Sequential(nn.Linear(4, 3)), tmp_path / "out", "onnx", example=torch.randn(1, 4))


def test_encoder_is_traced_without_a_word(tmp_path):
    """Its table of positions limits the length, which one of torch's tracers reports with a traceback."""
    from transformers import BertConfig, BertModel

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50, "max_position_embeddings": 32}
    BertModel(BertConfig(hidden_size=32, intermediate_size=64, **sizes)).save_pretrained(tmp_path / "model")
    command = [sys.executable, "-m", "iobs", "export", str(tmp_path / "model"), "--to", "onnx", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [line for line in done.stderr.splitlines() if not line.startswith("writing onnx: ")]  # on a slow machine
    assert said == ["Writing onnx. For a large model this takes minutes."]


class WithLoss(nn.Module):
    """A classifier that returns its loss before its logits if there are labels."""

    def __init__(self, named):
        super().__init__()
        self.layer, self.named = nn.Linear(4, 3), named

    def forward(self, sample, labels=None):
        found = self.layer(sample)
        loss = nn.functional.cross_entropy(found, labels)
        return {"loss": loss, "logits": found} if self.named else (loss, found)


@pytest.mark.parametrize("named", [True, False])
def test_logits_are_written_where_labels_give_a_loss(tmp_path, named):
    model, sample, labels = WithLoss(named), torch.randn(3, 4), torch.tensor([0, 2, 1])
    iobs.export(model, tmp_path / "out", "onnx", example={"sample": sample, "labels": labels})
    found = outputs(tmp_path / "out", sample=sample, labels=labels)
    assert torch.allclose(found, model.layer(sample), atol=1e-5)


def test_outputs_inside_an_output_are_opened(tmp_path):
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return ((self.layer(x), x),)

    model, x = Nested(), torch.randn(3, 4)
    iobs.export(model, tmp_path / "out", "onnx", example=x)
    assert torch.allclose(outputs(tmp_path / "out", input=x), model.layer(x), atol=1e-5)


def test_several_inputs_by_name_or_position(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(3, 4)

        def forward(self, left, right):
            return self.first(left) + self.second(right)

    model, left, right = Both(), torch.randn(3, 4), torch.randn(3, 3)
    iobs.export(model, tmp_path / "named", "onnx", example={"left": left, "right": right})
    iobs.export(model, tmp_path / "placed", "onnx", example=(left, right))
    with torch.no_grad():
        assert torch.allclose(outputs(tmp_path / "named", left=left, right=right), model(left, right), atol=1e-5)
        assert torch.allclose(outputs(tmp_path / "placed", input_0=left, input_1=right), model(left, right), atol=1e-5)


def test_model_that_torch_cannot_trace_is_refused_with_the_reason(tmp_path):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, sample):
            return self.layer(sample) if sample.sum() > 0 else sample

    with pytest.raises(ModelError, match="cannot trace"):
        iobs.export(Branch(), tmp_path / "out", "onnx", example=torch.ones(2, 4))
    assert not (tmp_path / "out").exists()
