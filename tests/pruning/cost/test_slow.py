"""The warning before solves that take days."""

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import iobs
from iobs.cli import app
from iobs.models import EMBEDDED
from iobs.pruning.cost import slow
from iobs.pruning.cost.slow import slow_seconds, warning_of


def layers(count, rows, columns):
    return [SimpleNamespace(name=f"layers.{index}", shape=(rows, columns)) for index in range(count)]


@pytest.mark.parametrize(
    ("recipe", "warned"),
    [
        (iobs.Recipe(solver="obc"), True),
        (iobs.Recipe(solver=iobs.solvers.OBC()), True),
        (iobs.Recipe(refine="swap"), True),
        (iobs.Recipe(rules=[iobs.Rule("layers.*", solver="obc")]), True),
        (iobs.Recipe(), False),
        (iobs.Recipe(solver="sparsegpt"), False),
    ],
)
def test_solvers_of_cubic_work_in_each_row_are_named_before_days_of_work(recipe, warned):
    large = layers(32, 4096, 14336)
    assert bool(warning_of(large, recipe)) == warned
    assert warning_of(layers(12, 768, 3072), recipe) is None


def test_operations_are_those_of_the_documentation():
    """OBC takes d^3 / 12 operations a row."""
    assert slow_seconds(layers(1, 6, 10), iobs.Recipe(solver="obc")) == pytest.approx(6 * 1000 / 12 / 5e10)


@pytest.mark.parametrize("options", [["--low-memory"], []])
def test_command_line_warns_before_the_work(options, monkeypatch):
    monkeypatch.setattr(slow, "_LONG", 1e-9)
    options = ["--solver", "obc", "--recipe", "one-shot", "--dry-run", "--device", "cpu", *options]
    run = CliRunner().invoke(app, ["prune", str(EMBEDDED), *options, "--samples", "4", "--seq-len", "16"])
    assert run.exit_code == 0, run.output
    assert "the solves take rows x columns^3 operations" in " ".join(run.stderr.split())
