import json

import families
import pytest
from checks import one_error

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 48, **SIZES}


def test_dry_run_without_weights_shows_memory_and_time_on_gpus(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arguments = "prune", tmp_path, "--low-memory", "--dry-run"
    shown = run(*arguments).stdout
    assert "8 x 24 GB" in shown
    assert "(fits)" in shown
    found = json.loads(run(*arguments, "--json").stdout)
    assert len(found["machines"]) == 6
    assert all(one["fits"] and one["phases"]["solves"] > 0 for one in found["machines"])
    assert found["weights"] > 0


def test_dry_runs_say_why_no_time_is_looked_at(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shown = run("prune", tmp_path, "--low-memory", "--dry-run", "--within", "1h").stderr
    assert "--within 1h is left out of account: without weights" in " ".join(shown.split())
    file = tmp_path / "own.py"
    file.write_text("import torch\n\ndef make():\n    return torch.nn.Linear(4, 4)\n")
    shown = run("prune", f"{file}:make", "--dry-run", "--within", "1h").stderr
    assert "Give --data" in shown


def test_dry_run_without_weights_follows_the_settings_of_the_run(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "dtype": "bfloat16"}))

    def fitting(*options):
        shown = run("prune", tmp_path, "--low-memory", "--dry-run", "--json", *options).stdout
        found = json.loads(shown)["machines"][0]
        return found["peak_bytes"]["steps of blocks"], found["phases"]["steps of blocks"]

    usual = fitting()
    assert fitting("--dtype", "float32") > usual
    assert fitting("--set", "blocks.batch_size=4") > usual


@pytest.mark.parametrize(("place", "shown"), [("auto", "in files"), ("disk", "in files"), ("memory", "in main memory")])
def test_streams_option_places_the_hidden_states(run, small_embedded, place, shown):
    options = "--low-memory", "--dry-run", "--streams", place, "--samples", "4", "--seq-len", "16"
    assert shown in " ".join(run("prune", small_embedded, *options).output.split())


def test_streams_option_is_checked_before_the_model_is_read(run, tmp_path):
    (tmp_path / "config.json").write_text("no configuration", encoding="utf8")
    refused = run("prune", tmp_path, "-o", tmp_path / "out", "--streams", "disk", "--device", "cpu", code=2)
    told = " ".join(refused.output.replace("│", " ").split())
    assert "only with --low-memory, or on a GPU that is too small" in told
    assert "Add --low-memory" in told
    refused = run("prune", tmp_path, "--low-memory", "--dry-run", "--streams", "tape", code=2)
    assert '"device", "memory" or "disk"' in refused.output


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_blocks_that_run_in_cycles_are_refused_by_the_run_and_its_dry_run(run, embedded, tmp_path, dry):
    embedded.save(tmp_path / "base")  # for its tokenizer
    sizes = {**families.DECODER, "vocab_size": embedded.module.config.vocab_size}
    config = families.hf.HrmTextConfig(**sizes, head_dim=8, H_cycles=2, L_cycles=2)
    families.hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 50)
    sizes = "--data", tmp_path / "a.txt", "--samples", "4", "--seq-len", "16"
    options = "--low-memory", *sizes, "-o", tmp_path / "out", *dry
    assert "more than once in a forward pass" in one_error(run("prune", tmp_path / "base", *options, code=2))
    assert not (tmp_path / "out").exists()
