"""The example of sparse regression, and the two commands that its first lines name."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from iobs.cli import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "explain_a_table.py"


def test_example_and_its_commands_run(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("explain_a_table", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.main(tmp_path)
    shown = capsys.readouterr().out
    assert "too small" in shown
    assert "a global minimiser" in shown
    assert {"bmi", "s5"} <= set(model.get_feature_names_out(module.load_diabetes().feature_names))
    assert (tmp_path / "path.png").stat().st_size > 10_000
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    iobs (.*)$", module.__doc__, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["solve", "predict"]
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.output
    assert result.stdout.startswith("progression\n")
