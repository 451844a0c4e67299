import json


def test_dry_run_without_weights_shows_memory_and_time_on_gpus(run, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 48, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = "prune", tmp_path, "--low-memory", "--dry-run"
    shown = run(*arguments).stdout
    assert "8 x 24 GB" in shown
    assert "(fits)" in shown
    found = json.loads(run(*arguments, "--json").stdout)
    assert len(found) == 6
    assert all(one["fits"] and one["phases"]["solves"] > 0 for one in found)
