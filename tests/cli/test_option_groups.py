"""Groups of options: a dataclass parameter of a command stands for one option per field."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from iobs.cli.options import command as as_command


@dataclass(frozen=True)
class Size:
    width: Annotated[int, typer.Option("--width", "-w", min=1)] = 3
    tall: Annotated[bool, typer.Option("--tall")] = False


def command(seen):
    @as_command
    def draw(
        name: Annotated[str, typer.Argument()],
        size: Size = Size(),
        colour: Annotated[str, typer.Option()] = "red",
    ) -> None:
        """Draw a thing."""
        seen.append((name, size, colour))

    return draw


def run(line, seen):
    app = typer.Typer()
    app.command()(command(seen))
    return CliRunner().invoke(app, line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["box"], ("box", Size(3, False), "red")),
        (["box", "-w", "7", "--colour", "blue"], ("box", Size(7, False), "blue")),
        (["--tall", "box", "--width", "1"], ("box", Size(1, True), "red")),
    ],
)
def test_with_groups_fills_the_dataclass(line, expected):
    seen = []
    result = run(line, seen)
    assert result.exit_code == 0, result.output
    assert seen == [expected]


def test_with_groups_keeps_limits_of_an_option():
    seen = []
    assert run(["box", "--width", "0"], seen).exit_code == 2
    assert seen == []


def test_with_groups_keeps_order_name_and_docstring():
    draw = command([])
    assert [*inspect.signature(draw).parameters] == ["name", "width", "tall", "colour"]
    assert (draw.__name__, draw.__doc__) == ("draw", "Draw a thing.")
