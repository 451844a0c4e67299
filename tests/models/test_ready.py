"""Packed files that are ready to run: outputs, tied weights, unpacking, commands, damaged and hostile files."""

import copy
import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, dynamic_module_utils
from typer.testing import CliRunner

import iobs
from iobs import models
from iobs.cli import app
from iobs.errors import IOBSError, ModelError, NonFiniteError, OutputError, ProblemError
from iobs.inference import FORMATS, StoredLinear, cpu, store
from iobs.inference.decoder import Decoder
from iobs.inference.formats import bytes_of, require_valid
from iobs.inference.modules import StoredEmbedding
from iobs.inference.storing import replace_layers, smallest_format, stored_matrices
from iobs.models import EMBEDDED
from iobs.models.packed import is_packed, open_packed
from iobs.models.packed_files import unpack

ERRORS = {"bf16": 5e-3, "int8": 3e-2, "int4": 0.25}


def network(sparsity=0.7):
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Conv2d(3, 96, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LayerNorm(864),
        nn.Linear(864, 130),
        nn.Linear(130, 3, bias=False),
    )
    for parameter in layers[4:].parameters():
        parameter.data[torch.rand_like(parameter) < sparsity] = 0
    return layers.eval()


def rewrite(file, change):
    """Write a packed file again with its tensors and metadata changed by `change(tensors, metadata)`."""
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - not a mapping
        metadata = opened.metadata()
    change(tensors, metadata)
    save_file(tensors, file, metadata)


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_ready_file_computes_within_the_error_of_its_precision(precision, tmp_path):
    model, given = network(), torch.randn(5, 3, 3, 3)
    iobs.save_packed(model, tmp_path / "packed", precision=precision)
    other = network(0)
    again = iobs.load_packed(tmp_path / "packed", into=other)
    assert again is other
    assert {type(again[4]), type(again[5])} == {StoredLinear}
    assert (again(given) - model(given)).norm() <= ERRORS[precision] * model(given).norm()
    assert torch.equal(again[3].weight, model[3].weight)
    if Path("/proc/self/maps").exists():
        assert str(tmp_path / "packed" / "model.packed") in Path("/proc/self/maps").read_text()


def test_dense_matrices_off_the_grid_are_not_rounded_to_four_bits():
    """An embedding in four bits costs a small Llama 4 % of perplexity, and no solver has adjusted the rest to it."""
    torch.manual_seed(0)
    weight = torch.randn(64, 256)
    assert smallest_format(weight, "int4") == "int8"
    assert smallest_format(weight * (torch.rand_like(weight) < 0.5), "int4") == "bitmask-int4"
    assert smallest_format((2 * weight).round().clamp(1, 7) * 0.125, "int4") == "bitmask-int4"


def test_an_output_head_in_sixteen_bits_is_stored_where_kernels_read_it():
    """With a dense head, no token of `generate` took the compiled step. An embedding alone gains nothing."""
    table, head = nn.Embedding(32, 64).bfloat16(), nn.Linear(64, 32, bias=False).bfloat16()
    assert [name for name, _ in stored_matrices(nn.Sequential(table, head), "bf16")] == ["1"]
    head.weight = table.weight
    assert [one.format for _, one in stored_matrices(nn.Sequential(table, head), "bf16")] == ["bf16", "bf16"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_entries_stay_dense(tmp_path):
    model = nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 96), nn.Linear(96, 64))
    assert [name for name, _ in stored_matrices(model, "int8")] == ["2"]
    assert iobs.save_packed(model, tmp_path / "packed", precision="int8").is_dir()


def test_formats_are_chosen_by_their_bytes():
    """The estimate leaves out fillers (at most 15 entries a row) and entries that round to zero."""
    weight = torch.randn(40, 256)
    for sparsity in (0.0, 0.5, 0.95):
        weight[torch.rand_like(weight) < sparsity] = 0
        for name in FORMATS:
            if name == "bf16" or name == "int8" or sparsity > 0:
                true = store(weight, name).bytes
                assert abs(true - bytes_of(name, 40, 256, int(weight.count_nonzero()))) <= 40 * 16 * 4 + 256
    model = network(0.95)
    replace_layers(model, dict(stored_matrices(model, "bf16")))
    assert type(model[0]) is nn.Conv2d  # rows of 3 columns are filled up to 64
    assert model[4].format == "index-bf16"


def test_language_model_runs_from_its_packed_file(tmp_path):
    dense = models.load(EMBEDDED)
    ids = torch.arange(3, 35).reshape(1, 32)
    for layer in dense.module.modules():
        if isinstance(layer, nn.Linear) and layer is not dense.module.lm_head:
            layer.weight.data[layer.weight.abs() < layer.weight.abs().median()] = 0
    iobs.save_packed(dense, tmp_path / "packed", precision="bf16")
    assert is_packed(tmp_path / "packed")
    packed = open_packed(tmp_path / "packed")
    with torch.no_grad():
        before, after = dense.module(ids).logits, packed.module(ids).logits
    assert (after - before).norm() <= 2e-2 * before.norm()
    assert packed.task == "causal-lm"
    assert packed.tokenizer is not None
    assert torch.equal(packed.module.model.embed_tokens.weight, dense.module.model.embed_tokens.weight)
    (tmp_path / "back").mkdir()
    unpack(tmp_path / "packed", tmp_path / "back")
    with torch.no_grad():
        rounded = models.load(tmp_path / "back").module(ids).logits
    assert (rounded - before).norm() <= 2e-2 * before.norm()
    with pytest.raises(ModelError, match="unpack it first"):
        packed.save(tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("own_code", [False, True])
def test_encoders_and_models_with_code_of_their_own_are_read(own_code, tmp_path, monkeypatch):
    """transformers looks for a folder where an automatic class gets weights alone."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    sizes = {"vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    dense = BertModel(BertConfig(**sizes, num_attention_heads=2)).eval()
    folder = tmp_path / "encoder"
    dense.save_pretrained(folder)
    if own_code:
        (folder / "own_code.py").write_text("from transformers import BertModel\n\nclass Mine(BertModel):\n    pass\n")
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["Mine"], "auto_map": {"AutoModel": "own_code.Mine"}}
        (folder / "config.json").write_text(json.dumps(config))
    else:
        (folder / "modules.json").write_text("[]")  # of sentence-transformers
    loaded = models.load(folder, trust_remote_code=own_code)
    iobs.save_packed(loaded, tmp_path / "packed", precision="int8")
    packed = open_packed(tmp_path / "packed", trust_remote_code=own_code).module
    assert type(packed).__name__ == ("Mine" if own_code else "BertModel")
    ids = torch.arange(3, 35)[None]
    with torch.no_grad():
        before, after = dense(ids).last_hidden_state, packed(ids).last_hidden_state
    assert (after - before).norm() <= 5e-2 * before.norm()


@pytest.mark.skipif(cpu.level() == "none", reason="the compiled step needs AVX-512 or AVX2")
@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_tokens_of_a_packed_language_model_take_the_compiled_step(precision, tmp_path, monkeypatch):
    positions, step = [], Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *given: positions.append(given[2]) or step(*given))
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.weight.data = 8 * layer.weight * (torch.rand_like(layer.weight) < 0.5)
    iobs.save_packed(model, tmp_path / "packed", precision=precision)
    found, module = [], open_packed(tmp_path / "packed").module
    settings = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    for _ in range(2):
        found.append(module.generate(torch.arange(3, 9)[None], **settings))
        vars(module).pop("forward", None)
    assert positions == [*range(6, 14)]
    assert torch.equal(found[0].sequences, found[1].sequences)
    torch.testing.assert_close(torch.stack(found[0].logits), torch.stack(found[1].logits), rtol=1e-3, atol=1e-3)


def test_an_embedding_and_the_output_head_share_one_stored_matrix(tmp_path):
    dense = models.load(EMBEDDED)
    iobs.save_packed(dense, tmp_path / "packed", precision="int8")
    packed = open_packed(tmp_path / "packed").module
    table, head = packed.model.embed_tokens, packed.lm_head
    assert isinstance(table, StoredEmbedding)
    assert table.matrix.tensors["values"].data_ptr() == head.matrix.tensors["values"].data_ptr()
    ids = torch.tensor([[5, 900, 5]])
    wanted = dense.module.model.embed_tokens(ids)
    assert torch.equal(table(ids), table.weight[ids])
    assert (table(ids) - wanted).norm() <= 1e-2 * wanted.norm()
    (tmp_path / "back").mkdir()
    unpack(tmp_path / "packed", tmp_path / "back")
    back = models.load(tmp_path / "back").module.model.embed_tokens.weight
    assert (back - table.weight).norm() <= 1e-3 * back.norm()  # the directory holds float16


def test_commands_run_and_evaluate_a_packed_directory(tmp_path):
    packed, text = tmp_path / "OUT.packed", tmp_path / "text.txt"
    text.write_text("Once upon a time there was a model. " * 200)
    run = CliRunner().invoke(app, ["pack", str(EMBEDDED), "-o", str(packed), "--precision", "int8", "--json"])
    assert run.exit_code == 0, run.output
    assert 0 < json.loads(run.stdout)["share_of_dense_bytes"] < 0.65  # of bfloat16; rows are filled up to 128 columns
    run = CliRunner().invoke(app, ["run", str(packed), "Once upon", "--tokens", "4", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["tokens"] == 4
    values = []
    for directory in (EMBEDDED, packed):
        run = CliRunner().invoke(app, ["evaluate", str(directory), "--data", str(text), "--limit", "2", "--json"])
        assert run.exit_code == 0, run.output
        values.append(json.loads(run.stdout)["perplexity"])
    assert values[1] == pytest.approx(values[0], rel=0.05)
    run = CliRunner().invoke(app, ["prune", str(packed), "-o", str(tmp_path / "OUT"), "--data", str(text)])
    assert run.exit_code != 0
    assert "--unpack" in run.output
    run = CliRunner().invoke(app, ["pack", str(EMBEDDED), "-o", str(tmp_path / "x"), "--precision", "int7"])
    assert "'int7' is not one of bf16, int8, int4" in " ".join(run.output.replace("\u2502", " ").split())


def test_refusals_come_before_anything_is_written(tmp_path):
    with pytest.raises(ProblemError, match="precision must be one of"):
        iobs.save_packed(network(), tmp_path / "packed", precision="fp4")
    model = network()
    model[4].weight.data[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="'4' holds NaN"):
        iobs.save_packed(model, tmp_path / "packed", precision="int8")
    with pytest.raises(ModelError, match="no layer"):
        iobs.save_packed(nn.Sequential(nn.LayerNorm(8)), tmp_path / "packed", precision="int8")
    assert not (tmp_path / "packed").exists()
    iobs.save_packed(network(), tmp_path / "packed", precision="int8")
    with pytest.raises(ModelError, match="does not fit"):
        iobs.load_packed(tmp_path / "packed", into=nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ModelError, match="what module"):
        iobs.load_packed(tmp_path / "packed")
    with pytest.raises(OutputError, match="not empty"):
        iobs.save_packed(network(), tmp_path / "packed", precision="int8")


def _row_beyond_the_values(tensors, metadata):
    tensors["4:starts"][3] = 1 << 40


def _descending_rows(tensors, metadata):
    tensors["4:starts"][3] = 0


def _more_bits_than_values(tensors, metadata):
    tensors["4:mask"][0, 0] = -1


def _fewer_values(tensors, metadata):
    tensors["4:values"] = tensors["4:values"][:-70].clone()


def _wider_layer(tensors, metadata):
    metadata["iobs_matrices"] = metadata["iobs_matrices"].replace("864", "8640")


def _missing_part(tensors, metadata):
    del tensors["4:scales"]


def _missing_layer(tensors, metadata):
    metadata["iobs_matrices"] = metadata["iobs_matrices"].replace('"4"', '"9"')


def _unknown_format(tensors, metadata):
    metadata["iobs_matrices"] = metadata["iobs_matrices"].replace("bitmask-int8", "bitmask-int2")


def _no_table(tensors, metadata):
    metadata["iobs_matrices"] = "[1, 2]"


def _tensors_of_no_layer(tensors, metadata):
    metadata["iobs_matrices"] = metadata["iobs_matrices"].replace('"tensors": "4"', '"tensors": "40"')


def _tensors_that_are_no_name(tensors, metadata):
    metadata["iobs_matrices"] = metadata["iobs_matrices"].replace('"tensors": "4"', '"tensors": ["4"]')


def _negative_shape(tensors, metadata):
    metadata["iobs_matrices"] = metadata["iobs_matrices"].replace("[130", "[-130")


@pytest.mark.parametrize("places", [(1 << 62, 1 << 62), (-32, 0), ((1 << 63) - 32, 32 - (1 << 63))])
def test_index_format_refuses_rows_outside_its_values(places):
    matrix = store(torch.eye(4, 128), "index-bf16")
    require_valid(matrix)
    matrix.tensors["starts"][1:3] = torch.tensor(places)
    with pytest.raises(ModelError, match="starts"):
        require_valid(matrix)
    with pytest.raises(ModelError, match="shape"):  # before memory is taken for its dense form
        require_valid(dataclasses.replace(store(torch.eye(4, 128), "index-bf16"), columns=1 << 31))


HOSTILE = [
    _row_beyond_the_values,
    _descending_rows,
    _more_bits_than_values,
    _fewer_values,
    _wider_layer,
    _missing_part,
    _missing_layer,
    _unknown_format,
    _no_table,
    _tensors_of_no_layer,
    _tensors_that_are_no_name,
    _negative_shape,
]


@pytest.mark.parametrize("change", HOSTILE, ids=lambda one: one.__name__.strip("_"))
def test_hostile_file_is_one_error(change, tmp_path):
    iobs.save_packed(network(), tmp_path / "packed", precision="int8")
    rewrite(tmp_path / "packed" / "model.packed", change)
    with pytest.raises(ModelError):
        iobs.load_packed(tmp_path / "packed", into=network())


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_changed_bytes_end_in_an_error_or_in_a_model_that_runs(precision, tmp_path):
    """100 files with random changes: each is refused, or its model computes without reading outside its tensors."""
    if cpu.level() == "none":
        pytest.skip("this CPU has no kernels")
    file = tmp_path / "packed" / "model.packed"
    iobs.save_packed(network(), file.parent, precision=precision)
    content, generator = file.read_bytes(), torch.Generator().manual_seed(0)
    header = 8 + int.from_bytes(content[:8], "little")
    dense, given, outcomes = network(), torch.randn(2, 3, 3, 3), []

    def drawn(bound):
        return int(torch.randint(bound, (1,), generator=generator))

    for trial in range(100):
        changed = bytearray(content)
        for _ in range(1 + drawn(8)):
            changed[drawn(header if trial % 2 else len(content))] = drawn(256)
        if trial % 10 == 0:
            del changed[drawn(len(changed)) :]
        file.unlink()  # the memory map of the model before keeps its own file
        file.write_bytes(changed)
        try:
            iobs.load_packed(file.parent, into=copy.deepcopy(dense))(given)
        except IOBSError:
            outcomes.append("refused")
        else:
            outcomes.append("runs")
    assert {"runs", "refused"} <= set(outcomes)
