"""`iobs.export` and its command: names, errors before any work, and records."""

import importlib
import json

import pytest
import torch
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.errors import ModelError, NonFiniteError, OutputError
from iobs.exports import FORMATS, WRITERS, to_compressed_tensors
from iobs.exports.source import exact_codes, nearest_codes, source_of
from iobs.exports.to_onnx import inputs_of, single


def test_every_format_has_a_writer():
    assert FORMATS.keys() == WRITERS.keys()


def test_unknown_target_and_bits_are_refused(tmp_path):
    with pytest.raises(ModelError, match="no target"):
        iobs.export(torch.nn.Linear(2, 2), tmp_path / "out", "zip")
    with pytest.raises(ModelError, match="got int"):
        iobs.export(3, tmp_path / "out", "nemotron-nas")
    with pytest.raises(ModelError, match="bits, not 5"):
        iobs.export(torch.nn.Linear(2, 2), tmp_path / "out", "gguf", 5)
    assert not (tmp_path / "out").exists()


def test_missing_package_is_named_before_a_model_is_read(tmp_path, monkeypatch):
    def without(name, *rest):
        if name == "gguf":
            raise ImportError("no gguf", name="gguf")
        return found(name, *rest)

    found = importlib.import_module
    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(ModelError, match=r"pip install 'iobs\[export\]'"):
        iobs.export(tmp_path / "no model", tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_are_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, float("nan"))
    with pytest.raises(NonFiniteError, match="weight"):
        iobs.export(model, tmp_path / "out", "nemotron-nas")


def test_output_that_is_not_empty_is_refused(embedded, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "mine").touch()
    with pytest.raises(OutputError, match="not empty"):
        iobs.export(embedded, tmp_path, "gguf")


def test_codes_of_a_grid_are_found_and_others_are_the_nearest():
    codes = torch.randint(-7, 8, (5, 70), generator=torch.Generator().manual_seed(1)).float()
    scales = torch.rand(5, 3, generator=torch.Generator().manual_seed(2)).half().float() + 0.5
    weight = codes * scales.half().float().repeat_interleave(32, 1)[:, :70]
    found = exact_codes(weight, 4, 32)
    assert found is not None
    assert torch.equal(found.weight, weight)
    free = torch.randn(5, 70, generator=torch.Generator().manual_seed(3))
    free[:, ::2] = 0
    free[2] = 0
    assert exact_codes(free, 4, 32) is None
    for bits, levels in ((4, 7), (8, 127)):
        near = nearest_codes(free, bits, 32)
        assert int(near.codes.abs().max()) == levels
        assert bool((near.weight[free == 0] == 0).all())
        plain = free.abs()[:, :32].amax(1, keepdim=True).clamp(min=1e-9) / levels
        own = ((free[:, :32] / plain).round() * plain - free[:, :32]).square().sum()
        assert float((near.weight - free)[:, :32].square().sum()) <= 1.05 * float(own)  # scales are rounded to 16 bits


def test_command_writes_beside_the_model_and_says_so(embedded, tmp_path):
    pytest.importorskip("gguf")
    embedded.save(tmp_path / "model")
    result = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--to", "gguf", "--bits", "16", "--json"])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (tmp_path / "model.gguf" / "model.gguf").stat().st_size == said["bytes"]
    assert {one["form"] for one in said["matrices"]} <= {"F16", "BF16"}
    assert said["zeros"] == said["kept_zeros"]
    again = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--to", "gguf"])
    assert again.exit_code == 2
    wrong = CliRunner().invoke(app, ["export", str(tmp_path / "model"), "--to", "tar"])
    assert wrong.exit_code == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [((), "mistyped is no directory here"), (("--device", "cuda", "-o", "out"), "files are written from main memory")],
)
def test_command_names_what_is_wrong_before_any_work(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["export", "mistyped", "--to", "nemotron-nas", *options])
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("target", "weights"), [("onnx", "model.onnx"), ("openvino", "openvino_model.bin")])
def test_command_takes_the_shape_of_a_picture(tmp_path, target, weights):
    """A network of one's own does not say its inputs, and the command has no other example."""
    for package in ("onnx", "onnxscript", target):
        pytest.importorskip(package)
    (tmp_path / "net.py").write_text(
        "from torch import nn\ndef model(): return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))"
    )
    asked = ["export", f"{tmp_path / 'net.py'}:model", "--to", target, "-o", str(tmp_path / "out")]
    unknown = CliRunner().invoke(app, asked)
    assert unknown.exit_code == 2
    assert "--shape 3,224,224" in unknown.output.replace("\n", " ")
    wrong = CliRunner().invoke(app, [*asked, "--shape", "3x8x8"])
    assert "does not read C,H,W" in wrong.output
    assert not (tmp_path / "out").exists()
    other = CliRunner().invoke(app, [*asked, "--shape", "1,8,8"])
    assert "does not take the inputs input (2, 1, 8, 8): Given groups=1" in " ".join(other.output.split())
    done = CliRunner().invoke(app, [*asked, "--shape", "3,8,8"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "out" / weights).exists()


@pytest.mark.parametrize("target", ["onnx", "openvino"])
def test_module_without_known_inputs_is_told_to_give_an_example(tmp_path, target):
    for package in ("onnx", "onnxscript", "openvino"):
        pytest.importorskip(package)
    with pytest.raises(ModelError, match=r"iobs\.export\(model, directory, target, example=inputs\)"):
        iobs.export(torch.nn.Linear(4, 4), tmp_path / "out", target)
    assert not (tmp_path / "out").exists()


def test_configuration_that_tells_no_inputs_is_told_to_give_an_example():
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    with pytest.raises(ModelError, match="inputs of this model are unknown"):
        inputs_of(source_of(transformers.ResNetModel(config), None, None))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_example_follows_the_model_into_the_dtype_of_the_trace(dtype):
    model, example = torch.nn.Linear(4, 4).to(dtype), torch.randn(3, 4, dtype=dtype)
    found = inputs_of(source_of(model, None, {"input": example, "mask": torch.ones(3, dtype=torch.bool)})).tensors
    assert single(model)(found["input"]).shape == (3, 4)
    assert found["mask"].dtype == torch.bool


def test_projections_in_one_parameter_become_no_codes(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")

    class Pooled(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def __init__(self, config):
            super().__init__(config)
            self.attention = torch.nn.MultiheadAttention(8, 2)

    monkeypatch.setattr(to_compressed_tensors, "needed", lambda *_: None)
    source = source_of(Pooled(transformers.PretrainedConfig()), None, None)
    assert "attention.in_proj_weight" in [matrix.name for matrix in source.matrices()]
    with pytest.raises(ModelError, match="on a grid"):
        to_compressed_tensors.write_compressed_tensors(source, tmp_path)


def test_widths_that_the_configuration_does_not_have_are_refused(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=32))
    monkeypatch.setattr(to_compressed_tensors, "needed", lambda *_: None)
    with pytest.raises(ModelError, match="on a grid"):
        to_compressed_tensors.write_compressed_tensors(source_of(model, None, None), tmp_path)
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(16, 20, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(20, 16, bias=False)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.gate_proj\.weight is \(20, 16\).*uniform=True"):
        to_compressed_tensors.write_compressed_tensors(source_of(model, None, None), tmp_path)
