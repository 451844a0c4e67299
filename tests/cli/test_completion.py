"""Shell completion, and the examples on the help pages."""

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from iobs.cli import COMMANDS, app, options
from iobs.core.patterns import parse
from iobs.data.text import CORPORA
from iobs.inference.choices import PRECISIONS
from iobs.pruning.recipe import NETWORK_SOLVERS, PRESETS
from iobs.solvers import SOLVERS
from iobs.solvers.families import GRID_SOLVERS, RATE_SOLVERS, UNIT_SOLVERS


def completed(line, shell):
    """The completions that a shell receives for a command line with the cursor at its end."""
    words = line.split(" ")
    environment = {
        "bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)},
        "zsh": {"_TYPER_COMPLETE_ARGS": line},
        "fish": {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    return (
        CliRunner().invoke(app, [], prog_name="iobs", env={**environment, "_IOBS_COMPLETE": f"complete_{shell}"}).output
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_names(shell):
    assert "evaluate" in completed("iobs ev", shell)
    assert "--recipe" in completed("iobs prune --rec", shell)
    assert "one-shot" in completed("iobs prune --recipe on", shell)
    assert "sparsegpt" in completed("iobs prune --solver sp", shell)
    assert "fast,magnitude" in completed("iobs compare --methods fast,mag", shell)
    assert "best" not in completed("iobs prune --recipe on", shell)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_show_completion_prints_a_script(shell):
    environment = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = CliRunner().invoke(app, ["--show-completion", shell], prog_name="iobs", env=environment)
    if script.exit_code:  # the shell is detected when the option is declared
        script = CliRunner().invoke(app, [], prog_name="iobs", env={"_IOBS_COMPLETE": f"source_{shell}"})
    assert script.exit_code == 0, script.output
    assert f"_IOBS_COMPLETE=complete_{shell}" in script.output


def test_completed_words_are_those_of_the_registries():
    assert {*options.RECIPES} == {*PRESETS}
    assert {*options.SOLVERS} == {*SOLVERS}
    assert {*options.VALUE_SOLVERS} == {*GRID_SOLVERS, *RATE_SOLVERS} - {*SOLVERS}
    assert {*options.NETWORK_SOLVERS} == {*NETWORK_SOLVERS}
    assert {*options.UNIT_SOLVERS} == {*UNIT_SOLVERS} - {*SOLVERS}
    assert {*options.CORPORA} == {*CORPORA}
    assert options.PRECISIONS == PRECISIONS
    for text in (*options.SHARES, *options.PATTERNS):
        parse(text)


def test_lists_are_completed_without_repetition():
    complete = options.complete(["fast", "magnitude", "obc"])
    assert complete("fast,") == ["fast,magnitude", "fast,obc"]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_valid_command_lines(name, monkeypatch):
    command = get_command(app).commands[name]
    for parameter in command.params:  # the files of the examples are not here
        monkeypatch.setattr(parameter, "callback", None)
    examples = re.findall(r"^- `(.+?)`", command.epilog or "", re.MULTILINE)
    assert examples
    for line in examples:
        program, called, *arguments = shlex.split(line)
        assert (program, called) == ("iobs", name)
        command.make_context(name, arguments)
