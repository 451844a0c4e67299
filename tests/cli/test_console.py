"""Help, console output and paths in options."""

import io
from pathlib import Path

import pytest
from checks import one_error
from rich.table import Table

import iobs
from iobs.cli import COMMANDS, app, console, running


def test_help_names_every_command(run):
    text = run("--help").output
    assert all(name in text for name in COMMANDS)
    for name in COMMANDS:
        assert "Usage" in run(name, "--help").output
    assert "*.mlp.*" in run("prune", "--help").output, "markdown takes lone stars away"
    for name in ("run", "export"):
        assert "first GPU" not in " ".join(run(name, "--help").output.split()), "they run on the CPU only"
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


@pytest.mark.parametrize(
    ("of", "name"),
    [
        *((of, "output") for of in ("prune", "compare", "demo", "pack", "solve")),
        ("solve", "plot"),
    ],
)
def test_options_of_files_expand_the_home_folder(of, name, tmp_path, monkeypatch):
    from typer.main import get_command

    monkeypatch.setenv("HOME", str(tmp_path))
    parsed = get_command(app).commands[of]
    (output,) = (option for option in parsed.params if option.name == name)
    context = parsed.context_class(parsed)
    assert output.process_value(context, "~/out") == tmp_path / "out"
    assert output.process_value(context, "out") == Path("out")
    assert output.process_value(context, "~nobody-here/out") == Path("~nobody-here/out")  # no such user: a file's name


def test_home_of_an_unknown_user_is_the_name_of_a_file(run, tmp_path, monkeypatch):
    output = ("-o", tmp_path / "out")
    assert "~nobody-here/net.py does not exist" in one_error(run("prune", "~nobody-here/net.py:net", *output, code=2))
    text = one_error(run("prune", "--data", "~nobody-here.txt", *output, code=2))
    assert "~nobody-here.txt is not a file" in text
    assert "There is no recipe ~nobody-here" in one_error(
        run("prune", "--recipe", "~nobody-here/recipe.yaml", *output, code=2)
    )
    monkeypatch.setattr("sys.argv", ["iobs", "prune", "--ignore", "~nobody-here*"])
    assert running.shown_command() == "iobs prune --ignore '~nobody-here*'"


def test_signs_that_the_encoding_of_stdout_lacks_are_escaped(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    console.output_console().print("✓ größer")
    stdout.flush()
    assert stdout.buffer.getvalue() == b"\\u2713 gr\\xf6\\xdfer\n"
