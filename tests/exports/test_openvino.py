"""Export to OpenVINO: its runtime computes the outputs of the weights that the file holds, and zeros stay zeros."""

import copy

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ModelError
from iobs.exports.source import choose_codes

openvino = pytest.importorskip("openvino")
pytest.importorskip("onnx")
pytest.importorskip("onnxscript")


def outputs(folder, *inputs):
    """Outputs of OpenVINO on the CPU in 32 bits; by default it rounds inputs of products with integers to 8 bits."""
    settings = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    model = openvino.Core().compile_model(folder / "openvino_model.xml", "CPU", settings)
    return torch.from_numpy(model([one.numpy() for one in inputs])[0].copy())


def constants(folder, kind):
    """Constants of a type in the file, as numbers."""
    nodes = openvino.Core().read_model(folder / "openvino_model.xml").get_ops()
    own = [one for one in nodes if one.get_type_name() == "Constant" and one.get_element_type().get_type_name() == kind]
    return [numbers(one, kind) for one in own]


def numbers(constant, kind):
    """The codes of a constant; two of 4 bits share a byte, the first one in its lower half."""
    data = torch.tensor(constant.get_data()).view(torch.uint8).flatten().int()
    codes = torch.stack([data & 15, data >> 4], 1).flatten() if kind == "i4" else data
    half = 8 if kind == "i4" else 128
    return ((codes + half) % (2 * half) - half)[: torch.Size(constant.get_output_shape(0)).numel()]


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("columns", [64, 71])
def test_convolutional_network_gives_the_outputs_of_its_rounded_weights(tmp_path, network, bits, columns):
    model, example = network(columns), torch.randn(2, 3, 8, 8)
    written = iobs.export(model, tmp_path / "out", "openvino", bits, example=example)
    assert {one.form for one in written.matrices} == {f"int{bits}" if bits else "float32"}
    assert written.zeros == written.kept_zeros > 0
    read = openvino.Core().read_model(tmp_path / "out" / "openvino_model.xml")
    assert len(read.inputs) == 1
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["openvino_model.bin", "openvino_model.xml"]
    if bits is not None:
        held = constants(tmp_path / "out", f"i{bits}")
        assert sum(map(torch.numel, held)) == sum(one.entries for one in written.matrices)
        assert sum(int((one == 0).sum()) for one in held) >= written.zeros
        assert max(int(one.abs().max()) for one in held) == 2 ** (bits - 1) - 1
    rounded = copy.deepcopy(model)
    for one in rounded:
        if bits is not None and isinstance(one, nn.Linear | nn.Conv2d):
            one.weight.data = choose_codes(one.weight.data.flatten(1), bits).weight.reshape(one.weight.shape)
    more = torch.randn(5, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(outputs(tmp_path / "out", more), rounded(more), atol=1e-4)


def test_llama_on_a_grid_of_four_bits_gives_the_same_logits(four_bits, tokens, tmp_path):
    written = iobs.export(four_bits, tmp_path / "out", "openvino")
    assert {one.form for one in written.matrices} == {"int4"}  # groups of 128 and of 44 columns in one matrix, too
    assert all(one.exact for one in written.matrices)
    assert written.zeros == written.kept_zeros > 100_000
    with torch.no_grad():
        assert torch.allclose(outputs(tmp_path / "out", tokens), four_bits.module(tokens).logits, atol=1e-3)
    assert (tmp_path / "out" / "config.json").exists()


def test_unknown_inputs_are_refused_by_openvino_too(tmp_path):
    with pytest.raises(ModelError, match="an example of one forward pass"):
        iobs.export(nn.Linear(4, 4), tmp_path / "out", "openvino")
    assert not (tmp_path / "out").exists()
