"""Help, console output and paths in options."""

from pathlib import Path

import pytest
from checks import one_error
from rich.table import Table

import iobs
from iobs.cli import COMMANDS, app, console


def test_help_names_every_command(run):
    text = run("--help").output
    assert all(command in text for command in COMMANDS)
    for command in COMMANDS:
        assert "Usage" in run(command, "--help").output
    assert "*.mlp.*" in run("prune", "--help").output, "markdown takes lone stars away"
    assert run("--version").output.strip() == f"iobs {iobs.__version__}"


def test_console_prints_names_verbatim(run, tmp_path, capsys):
    names = ["speed [m/s]", "rate [/s]", "[bold]", ":smile:", "a.very.long.name." * 20]
    table = Table(title="title [/t]")
    table.add_column("name [/n]")
    table.add_column("other")
    for name in names:
        table.add_row(name, "x" * 50)
    console.output_console().print(table)
    console.output_console().print("line [/x]")
    console.say("said [/x]")
    shown = capsys.readouterr()
    assert all(name in shown.out for name in [*names, "title [/t]", "name [/n]", "line [/x]"])
    assert shown.err == "said [/x]\n"
    (tmp_path / "o [/v1]").mkdir(parents=True)
    file = tmp_path / "o [/v1]" / "a.csv"
    file.write_text("rate [/s],mass [kg],y\n" + "".join(f"{i},{i * i % 7},{2 * i}\n" for i in range(20)))
    assert "rate [/s]" in run("solve", file, "-k", 1).output
    assert str(tmp_path / "o [/v1]") in one_error(run("inspect", tmp_path / "o [/v1]", code=2))


@pytest.mark.parametrize("command", ["prune", "compare", "demo", "pack", "reproduce", "solve"])
def test_output_option_expands_the_home_folder(command, tmp_path, monkeypatch):
    from typer.main import get_command

    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = get_command(app).commands[command]
    (output,) = (option for option in parsed.params if option.name == "output")
    context = parsed.context_class(parsed)
    assert output.process_value(context, "~/out") == tmp_path / "out"
    assert output.process_value(context, "out") == Path("out")
