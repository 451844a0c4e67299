"""Ctrl-C during a run says what is saved and how to continue."""

import iobs


def interrupted(*_, **__):
    raise KeyboardInterrupt


def interrupted_later(*_, checkpoint, **__):
    checkpoint.mkdir()
    (checkpoint / "layer.safetensors").write_bytes(b"")
    raise KeyboardInterrupt


def test_interrupted_prune_names_the_checkpoint_and_the_command(run, classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(iobs, "prune", interrupted_later)
    monkeypatch.setattr("sys.argv", ["iobs", "prune", "a b", "--resume"])
    arguments = (f"{classifier}:net", "--data", f"{classifier}:batches", "-o", tmp_path / "out", "--resume")
    message = run("prune", *arguments, code=130).stderr
    assert f"saved in {tmp_path / 'out.checkpoint'}" in message
    assert "iobs prune 'a b' --resume" in message


def test_interrupted_prune_without_resume_says_that_nothing_is_saved(run, classifier, tmp_path, monkeypatch):
    monkeypatch.setattr(iobs, "prune", interrupted)
    arguments = (f"{classifier}:net", "--data", f"{classifier}:batches", "-o", tmp_path / "out")
    assert "with --resume a stopped run can be continued" in run("prune", *arguments, code=130).stderr
    assert not (tmp_path / "out").exists()
