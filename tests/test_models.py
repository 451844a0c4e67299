"""Every MODEL loads, every damaged one gives one clear error, and outputs appear whole or not at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import iobs
from iobs import load_packed, models, save_packed
from iobs.data import embedded_text, token_windows
from iobs.errors import ModelError, OutputError
from iobs.evaluate import perplexity
from iobs.models.companions import REPORTS, copy_companions, with_licence
from iobs.models.loaded import LoadedModel
from iobs.models.vision_shim import ensure_torchvision
from iobs.prune.audit import audit

ensure_torchvision()

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A small random language model with the embedded tokenizer's files."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama") / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.EMBEDDED / name, folder)
    return folder


@pytest.fixture
def directory(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "model")


@pytest.fixture
def factory(tmp_path):
    """A file with a network whose two layers share their weight, and functions that go wrong."""
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def build():\n"
        "    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))\n"
        "    net[2].weight = net[0].weight\n"
        "    return net.train()\n\n"
        "def number():\n    return 3\n\n"
        "def broken():\n    raise RuntimeError('mine')\n"
    )
    return file


def same_weights(first: nn.Module, second: nn.Module) -> bool:
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---- loading
def test_the_embedded_model_is_what_its_recipe_says():
    loaded = models.load()
    recipe = json.loads((models.EMBEDDED / "recipe.json").read_text())
    assert (loaded.task, loaded.context, loaded.module.dtype) == ("causal-lm", 256, torch.float32)
    assert models.parameter_count(loaded.module) == recipe["parameters"]
    windows = token_windows(loaded.tokenizer, embedded_text("heldout"), 256, limit=8)
    assert perplexity(loaded.module, windows) < recipe["heldout_perplexity_bigram"]
    assert recipe["heldout_perplexity"] < recipe["heldout_perplexity_bigram"] / 2
    assert sum(file.stat().st_size for file in models.EMBEDDED.iterdir()) < 5e6


def test_a_directory_loads_in_eval_mode_and_round_trips(directory, tmp_path):
    loaded = models.load(directory)
    assert not loaded.module.training
    assert loaded.window_length(2048) == 64
    loaded.save(tmp_path / "copy")
    again = models.load(tmp_path / "copy")
    assert same_weights(loaded.module, again.module)
    assert again.tokenizer is not None
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()

    from transformers import AutoModelForCausalLM

    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "copy"), loaded.module)


def test_dtypes(directory):
    assert models.load(directory, dtype=torch.bfloat16).module.dtype == torch.bfloat16
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    assert models.load(directory).module.dtype == torch.float32


def test_image_classifiers_take_their_own_class(tmp_path):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    loaded = models.load(tmp_path / "vit")
    assert type(loaded.module).__name__ == "ViTForImageClassification"
    assert loaded.task == "image-classification"
    assert loaded.tokenizer is None


def test_functions(factory, tmp_path):
    loaded = models.load(f"{factory}:build")
    assert not loaded.module.training
    with torch.no_grad():
        loaded.module[0].weight.fill_(0.25)
    loaded.save(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.safetensors", "iobs.json"}
    again = models.load(tmp_path / "out")
    assert same_weights(loaded.module, again.module)
    assert again.module[0].weight is again.module[2].weight
    again.save(tmp_path / "out2")
    assert same_weights(models.load(tmp_path / "out2").module, loaded.module)


@pytest.mark.parametrize(
    ("stored", "computed"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_functions_keep_the_dtype_that_they_are_saved_in(stored, computed, factory, tmp_path):
    models.load(f"{factory}:build", dtype=stored).save(tmp_path / "out")
    again = models.load(tmp_path / "out")
    assert again.module[0].weight.dtype == computed
    assert again.module[0].weight is again.module[2].weight
    again.save(tmp_path / "out2")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "out2"))
    assert first.keys() == second.keys()
    assert all(second[name].dtype == stored and torch.equal(second[name], first[name]) for name in first)
    assert models.load(tmp_path / "out", dtype=torch.float64).module[0].weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("function", "message"),
    [("number", "returned int"), ("broken", "RuntimeError: mine"), ("absent", "no function 'absent'")],
)
def test_functions_that_go_wrong(factory, function, message):
    with pytest.raises(ModelError, match=message):
        models.load(f"{factory}:{function}")


def test_files_that_go_wrong(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        models.load(f"{tmp_path / 'none.py'}:build")
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        models.load(f"{tmp_path / 'bad.py'}:build")
    (tmp_path / "script.py").write_text("import sys\ndef build():\n    pass\nsys.exit(0)\n")
    with pytest.raises(ModelError, match="SystemExit"):
        models.load(f"{tmp_path / 'script.py'}:build")


def test_a_factory_that_changed_is_noticed(factory, tmp_path):
    models.load(f"{factory}:build").save(tmp_path / "out")
    factory.write_text("from torch import nn\n\ndef build():\n    return nn.Linear(3, 3)\n")
    with pytest.raises(ModelError, match="does not fit"):
        models.load(tmp_path / "out")
    factory.unlink()
    with pytest.raises(ModelError, match="does not exist"):
        models.load(tmp_path / "out")


def test_a_factory_that_comes_with_a_directory_is_not_run_unasked(factory, tmp_path, monkeypatch):
    out = tmp_path / "out"
    models.load(f"{factory}:build").save(out)
    (out / "net.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n{factory.read_text()}")
    monkeypatch.chdir(out)
    for file in ("net.py", out / "net.py", tmp_path / "else" / ".." / "out" / "net.py"):
        (out / "iobs.json").write_text(json.dumps({"factory": f"{file}:build"}))
        with pytest.raises(ModelError, match="--trust-remote-code"):
            models.load(out)
        assert not (tmp_path / "ran").exists()
    assert models.load(out, trust_remote_code=True).module[0].in_features == 4


def test_timm(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, pretrained=False))
    loaded = models.load("timm:mobilenetv3_small_050")
    loaded.save(tmp_path / "out")
    assert same_weights(models.load(tmp_path / "out").module, loaded.module)
    with pytest.raises(ModelError, match="no model 'resnet_of_mine'"):
        models.load("timm:resnet_of_mine")


# ---- damage
def test_missing_and_damaged_files(directory, tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        models.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        models.load(tmp_path / "empty")
    with pytest.raises(ModelError, match="is a file"):
        models.load(directory / "config.json")
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="damaged or cut short"):
        models.load(directory)
    weights.unlink()
    with pytest.raises(ModelError, match="no weights"):
        models.load(directory)
    torch.save({}, directory / "pytorch_model.bin")
    with pytest.raises(ModelError, match="can run any code"):
        models.load(directory)


def test_pickled_weights_are_read_where_that_is_allowed(directory):
    expected = models.load(directory).module
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    assert same_weights(models.load(directory, allow_pickle=True).module, expected)


def test_a_missing_shard_is_named(directory):
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        models.load(directory)
    (directory / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="is damaged"):
        models.load(directory)


def test_files_that_are_not_the_weights_are_not_read(directory, tmp_path):
    """One whole file comes before an index; beside an index, what it does not name is of an earlier run."""
    expected = models.load(directory).module
    (directory / "model.safetensors.index.json").write_text("{")
    assert same_weights(models.load(directory).module, expected)
    shards = shutil.copytree(directory, tmp_path / "shards")
    (shards / "model.safetensors").unlink()
    expected.save_pretrained(shards, max_shard_size="5KB")
    (shards / "model-00009-of-00009.safetensors").write_bytes(b"of an earlier run")
    (shards / "consolidated.safetensors").write_bytes(b"in another format")
    assert same_weights(models.load(shards).module, expected)
    assert {row.name for row in audit(shards)} == {row.name for row in audit(directory)}
    save_packed(shards, tmp_path / "packed")
    assert same_weights(load_packed(tmp_path / "packed"), expected)
    with pytest.raises(ModelError, match="iobs pack --unpack"):
        models.load(tmp_path / "packed")


def test_weights_keep_the_dtype_of_the_files_whatever_the_configuration_states(directory, tmp_path):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    loaded = models.load(directory)
    assert loaded.module.dtype == torch.float32
    loaded.save(tmp_path / "out")
    assert same_weights(models.load(tmp_path / "out").module, loaded.module)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


def test_float16_is_computed_in_float32_and_written_as_it_was(directory, tmp_path):
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(directory, dtype=torch.float16).save_pretrained(directory)
    loaded = models.load(directory)
    assert loaded.module.dtype == torch.float32
    loaded.save(tmp_path / "out")
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert loaded.module.dtype == torch.float32
    assert same_weights(models.load(tmp_path / "out").module, loaded.module)


def test_float16_buffers_are_written_as_they_were_and_counted_so(tmp_path, monkeypatch):
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])
    ResNetForImageClassification(config).half().save_pretrained(tmp_path / "model")
    before = load_file(tmp_path / "model" / "model.safetensors")
    loaded = models.load(tmp_path / "model")
    assert loaded.module.resnet.embedder.embedder.normalization.running_var.dtype == torch.float32
    assert models.size_in_bytes(loaded.module) == sum(tensor.nbytes for tensor in before.values())
    loaded.save(tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: one.dtype for name, one in before.items()}
    assert loaded.module.resnet.embedder.embedder.normalization.running_var.dtype == torch.float32
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=1_100_000))
    with pytest.raises(OutputError, match=r"needs about 2 MB .* has 1 MB left"):
        models.check_output(tmp_path / "other", needed_bytes=1_200_000)


def test_all_that_lies_beside_the_weights_goes_along(directory, tmp_path):
    kept = [
        "LICENSE", "modeling_x.py", "preprocessor_config.json", "sentencepiece.bpe.model", "chat_templates/tool.jinja"
    ]  # fmt: skip
    left = [
        "pytorch_model.bin", "pytorch_model.bin.index.json", ".git/HEAD", "onnx/model.onnx", "onnx/config.json",
        "model-2.safetensors",
    ]  # fmt: skip
    for name in kept + left:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(name)
    loaded = models.load(directory)
    loaded.save(directory / "folder" / "out")  # inside what is copied
    loaded.save(tmp_path / "out")
    for out in (directory / "folder" / "out", tmp_path / "out"):
        assert all((out / name).read_text() == name for name in kept)
        assert not any((out / name).exists() for name in left)
        assert not (out / "folder").exists()


def test_a_licence_outlives_the_model_card(tmp_path):
    card = "---\ntags:\n- sparse\n---\n\n# Sparse\n"
    assert with_licence(card, tmp_path / "README.md") == card
    (tmp_path / "README.md").write_text(
        "---\nlanguage: en\nlicense:\n- mit\nlicense_link: LICENSE\ntags: []\n---\nBig."
    )
    assert with_licence(card, tmp_path / "README.md").startswith(
        "---\nlicense:\n- mit\nlicense_link: LICENSE\ntags:\n- sparse\n---\n\n# Sparse"
    )


def test_tensors_that_the_network_has_no_place_for_are_named(directory):
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "draft.weight": torch.ones(2)}, directory / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match=r"1 tensors .* draft\.weight"):
        models.load(directory)


def test_hub_names_take_along_what_the_cache_holds(directory, tmp_path, monkeypatch):
    (directory / "preprocessor_config.json").write_text("{}")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    folder = tmp_path / "hub" / "models--someone--small"
    shutil.copytree(directory, folder / "snapshots" / "abc")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    script = (
        "import sys\nfrom iobs import models\n"
        "loaded = models.load('someone/small')\nprint(loaded.module.dtype)\nloaded.save(sys.argv[1])\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "torch.float32", done.stderr
    assert {"preprocessor_config.json", "tokenizer.json"} <= {file.name for file in (tmp_path / "out").iterdir()}


def test_code_that_comes_with_weights_is_asked_for_by_its_own_automatic_class(tmp_path, monkeypatch):
    from transformers import ViTConfig, ViTForImageClassification, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    config = ViTConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    folder = tmp_path / "vit"
    ViTForImageClassification(config).save_pretrained(folder)
    (folder / "own_code.py").write_text(
        "from transformers import ViTConfig, ViTForImageClassification, ViTModel\n\n"
        "class Mine(ViTForImageClassification):\n    config_class = ViTConfig\n\n"
        "class Bare(ViTModel):\n    config_class = ViTConfig\n"
    )
    written = json.loads((folder / "config.json").read_text())
    written["architectures"] = ["Mine"]
    written["auto_map"] = {"AutoModel": "own_code.Bare", "AutoModelForImageClassification": "own_code.Mine"}
    (folder / "config.json").write_text(json.dumps(written))
    loaded = models.load(folder, trust_remote_code=True)
    assert (type(loaded.module).__name__, loaded.task) == ("Mine", "image-classification")


def test_weights_that_are_not_there_are_not_made_up(directory):
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks 1 of the weights .* model\.layers\.0\.mlp\.up_proj\.weight"):
        models.load(directory)


def test_unknown_classes_and_types(directory):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["NoSuchModel"]}))
    with pytest.raises(ModelError, match="no model class 'NoSuchModel'"):
        models.load(directory)
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "nonsense"}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        models.load(directory)


def test_a_directory_without_tokenizer_loads_and_says_so_when_text_comes(directory):
    (directory / "tokenizer.json").unlink()
    loaded = models.load(directory)
    with pytest.raises(ModelError, match=r"no tokenizer.*tokenizer\.json"):
        loaded.require_tokenizer()


def test_a_damaged_tokenizer(directory):
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"):
        models.load(directory)


# ---- output
def test_existing_output_is_never_touched(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(OutputError, match="not empty"), models.output_directory(tmp_path / "out"):
        pytest.fail("the body must not run")
    assert (tmp_path / "out" / "mine").read_text() == "x"
    with pytest.raises(OutputError, match="is a file"):
        models.check_output(tmp_path / "out" / "mine")
    with pytest.raises(OutputError, match="MB left"):
        models.check_output(tmp_path / "new", needed_bytes=1 << 60)
    models.check_output(tmp_path / "out", replaceable=("mine",))


@pytest.mark.parametrize("existing", [False, True])
def test_output_appears_whole(tmp_path, existing):
    target = tmp_path / "deep" / "out"
    if existing:
        target.mkdir(parents=True)
    with models.output_directory(target) as temporary:
        (temporary / "file").write_text("x")
        assert not (target / "file").exists()
    assert (target / "file").read_text() == "x"
    assert [entry.name for entry in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, OSError(errno.ENOSPC, "No space left on device")])
def test_a_failure_leaves_nothing_behind(tmp_path, failure):
    expected = OutputError if isinstance(failure, OSError) else failure

    def write():
        with models.output_directory(tmp_path / "out") as temporary:
            (temporary / "file").write_text("x")
            raise failure

    with pytest.raises(expected):
        write()
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files by a Linux resource limit")
def test_a_full_disk_while_weights_are_written(directory, tmp_path):
    script = (
        "import resource, signal, sys\n"
        "from iobs import models\n"
        "from iobs.errors import OutputError\n"
        "loaded = models.load(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n    loaded.save(sys.argv[2])\n"
        "except OutputError as error:\n    print(error)\n"
    )
    out = tmp_path / "folder" / "out"
    done = subprocess.run(
        [sys.executable, "-c", script, str(directory), str(out)], capture_output=True, text=True, timeout=200
    )
    assert "could not be written" in done.stdout, done.stderr
    assert not [*out.parent.iterdir()]


def test_a_home_folder_is_found_by_every_door(directory, tmp_path, monkeypatch):
    from iobs.models.streaming import prune_directory

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models.beside(Path("~/out"), "packed") == tmp_path / "out.packed"
    models.load("~/model").save("~/saved")
    assert save_packed("~/saved", "~/packed") == tmp_path / "packed"
    load_packed("~/packed")
    batches = [{"input_ids": torch.arange(3, 19).reshape(2, 8)}]
    options = {"solver": "magnitude", "checkpoint": "~/checkpoint"}
    prune_directory("~/model", "~/pruned", batches, iobs.Unstructured(0.5), **options)
    names = {"work", "model", "saved", "packed", "pruned", "checkpoint"}
    assert {entry.name for entry in tmp_path.iterdir()} == names
    assert not list((tmp_path / "work").iterdir())
    with pytest.raises(OutputError, match="not empty"):
        models.check_output(Path("~/saved"))


def test_replaced_output_is_the_new_one(tmp_path):
    for content in ("old", "new"):
        with models.output_directory(tmp_path / "out", replaceable=("file",)) as temporary:
            (temporary / "file").write_text(content)
    assert (tmp_path / "out" / "file").read_text() == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_link_to_a_directory_stays_and_is_filled(tmp_path):
    (tmp_path / "disk").mkdir()
    for name in ("disk", "disk/new"):  # one that is there, and one that is not yet
        link = tmp_path / "link"
        link.symlink_to(tmp_path / name)
        with models.output_directory(link) as temporary:
            (temporary / "file").write_text("x")
            assert temporary.is_relative_to(tmp_path / "disk")  # nothing is moved from disk to disk at the end
        assert link.is_symlink()
        assert [entry.name for entry in (tmp_path / name).iterdir()] == ["file"]
        link.unlink()
        (tmp_path / name / "file").unlink()
    link.symlink_to(link)
    with pytest.raises(OutputError, match="is a file"):
        models.check_output(link)


def test_the_current_directory_and_mount_points_are_filled_from_within(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    monkeypatch.chdir(target)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == target)
    asked = []
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: asked.append(place) or usage(place))
    (target / "lost+found").mkdir()
    before = target.stat().st_ino
    for content in ("old", "new"):
        with models.output_directory(Path("."), replaceable=("file", "folder")) as temporary:
            (temporary / "file").write_text(content)
            (temporary / "folder").mkdir()
    assert target.stat().st_ino == before
    assert {entry.name for entry in target.iterdir()} == {"file", "folder", "lost+found"}
    assert (target / "file").read_text() == "new"
    assert {*asked} == {target}


def test_two_outputs_into_one_directory_do_not_mix(tmp_path):
    def write():
        with models.output_directory(tmp_path) as slow:
            (slow / "file").write_text("slow")
            with models.output_directory(tmp_path) as quick:
                (quick / "file").write_text("quick")

    with pytest.raises(OutputError, match="not empty"):
        write()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "quick"


def test_what_was_moved_up_goes_back_where_the_rest_cannot_follow(tmp_path, monkeypatch):
    (tmp_path / "old").write_text("old")
    rename = Path.rename

    def fails(path, target):
        if path.name == "second":
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)

    def write():
        with models.output_directory(tmp_path, replaceable=("old",)) as temporary:
            for name in ("first", "second"):
                (temporary / name).write_text("new")

    with pytest.raises(OutputError, match="Input/output"):
        write()
    assert [entry.name for entry in tmp_path.iterdir()] == ["old"]


def test_loaded_model_knows_its_size():
    module = nn.Linear(3, 2)
    loaded = LoadedModel(module, None, "here", "other", None, lambda model, directory: None)
    assert (models.parameter_count(loaded.module), models.size_in_bytes(module)) == (8, 32)
    assert loaded.window_length(77) == 77


def test_what_lies_beside_the_weights_never_costs_the_result(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "notes").mkdir(parents=True)
    target.mkdir()
    (source / "notes" / "plain.txt").write_text("kept")
    (source / "notes" / "round").symlink_to("..")
    (source / "notes" / "linked.txt").symlink_to("plain.txt")
    os.mkfifo(source / "notes" / "pipe")
    os.mkfifo(source / "pipe")
    (source / "report.json").write_text("{}")
    (source / "LICENSE").write_text("mine")
    copy_companions(source, target, leave=REPORTS)
    assert {entry.name for entry in target.iterdir()} == {"notes", "LICENSE"}
    assert {entry.name for entry in (target / "notes").iterdir()} == {"plain.txt", "linked.txt"}
    assert (target / "notes" / "linked.txt").read_text() == "kept"


def test_a_file_that_cannot_be_read_is_named_and_the_others_go_along(directory, tmp_path, monkeypatch):
    for name in ("private.json", "public.json"):
        (directory / name).write_text("{}")
    loaded, copyfile = models.load(directory), shutil.copyfile

    def copied(source, target, **options):
        if source.name == "private.json":  # of another user; nothing is private to the superuser
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        return copyfile(source, target, **options)

    monkeypatch.setattr(shutil, "copyfile", copied)
    with pytest.warns(UserWarning, match=r"private\.json could not be copied.*Permission denied"):
        loaded.save(tmp_path / "out")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"public.json", "model.safetensors", "tokenizer.json"} <= names
    assert "private.json" not in names


ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.q.weight.data, self.k.weight.data, self.v.weight.data = torch.randn(18, 6).chunk(3)
        self.part, self.again = nn.Parameter(torch.randn(10, 6)[:4]), nn.Linear(6, 6, bias=False)
        self.again.weight = self.q.weight
        self.mode = {"version": 1}

    def forward(self, x):
        return self.again(self.q(x) * self.k(x) + self.v(x)) @ self.part.T

    def get_extra_state(self):
        return self.mode

    def set_extra_state(self, state):
        self.mode = state

def build():
    return Odd()
"""


def test_weights_that_share_memory_and_state_that_is_no_tensor(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    loaded = models.load(f"{tmp_path / 'odd.py'}:build")
    iobs.prune(loaded.module, [torch.randn(20, 6)], iobs.Unstructured(0.5))
    with pytest.warns(UserWarning, match="_extra_state"):
        loaded.save(tmp_path / "out")
    assert "again.weight" not in load_file(tmp_path / "out" / "model.safetensors"), "written once"
    again = models.load(tmp_path / "out").module
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), loaded.module.parameters(), strict=True))
    assert again.mode == {"version": 1}
    with pytest.warns(UserWarning, match="_extra_state"):
        save_packed(loaded.module, tmp_path / "packed")
    other = models.load(f"{tmp_path / 'odd.py'}:build").module
    load_packed(tmp_path / "packed", into=other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), loaded.module.parameters(), strict=True))


def test_a_function_may_import_what_lies_beside_its_file_when_it_is_called(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 7\n")
    (tmp_path / "late.py").write_text(
        "def build():\n    from beside import WIDTH\n    from torch import nn\n    return nn.Linear(WIDTH, 2)\n"
    )
    assert models.load(f"{tmp_path / 'late.py'}:build").module.in_features == 7


def test_weights_in_a_wider_type_than_the_others_are_named(directory):
    file = directory / "model.safetensors"
    tensors = {name: value if "norm" in name else value.bfloat16() for name, value in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    with pytest.warns(UserWarning, match=r"3 tensors in a wider type.*norm.*--dtype float32"):
        models.load(directory)
