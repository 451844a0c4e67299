"""Options of a command come from its signature and its docstring; a dataclass stands for one option per field."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

from iobs.cli.options import Talk
from iobs.cli.options import command as as_command


@dataclass(frozen=True)
class Size:
    """The size of a thing.

    Attributes:
        width (CM): How wide it is; the
            text goes on in a second line.
    """

    panel: ClassVar = "Measures"
    width: Annotated[int, typer.Option("--width", "-w", min=1)] = 3
    tall: bool = False


@dataclass(frozen=True)
class Box(Size):
    """The size of a box.

    Attributes:
        tall: Twice as high.
    """

    lid: Path | None = None


@pytest.fixture
def seen():
    """The arguments of every call of the command `draw`."""
    return []


@pytest.fixture
def draw(seen):
    @as_command
    def draw(name: str, *, size: Box, colour: str = "red", talk: Talk) -> None:
        """Draw a thing.

        Args:
            name (NAME): What it is called.
            colour: Its colour.

        Examples:
            draw box  # a red box
            draw box --tall
        """
        seen.append((name, size, colour))

    return draw


def run(draw, line):
    app = typer.Typer()
    app.command()(draw)
    return CliRunner().invoke(app, line, env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["box"], ("box", Box(3, False), "red")),
        (["box", "-w", "7", "--colour", "blue"], ("box", Box(7, False), "blue")),
        (["--tall", "box", "--width", "1", "--lid", "a"], ("box", Box(1, True, Path("a")), "red")),
    ],
)
def test_command_fills_the_dataclass(draw, seen, line, expected):
    result = run(draw, line)
    assert result.exit_code == 0, result.output
    assert seen == [expected]


def test_command_keeps_limits_and_flags(draw, seen):
    assert run(draw, ["box", "--width", "0"]).exit_code == 2
    assert run(draw, ["box", "--no-tall"]).exit_code == 2
    assert seen == []


def test_command_keeps_order_and_name(draw):
    assert [*inspect.signature(draw).parameters] == ["name", "width", "tall", "lid", "colour", "quiet", "as_json"]
    assert (draw.__name__, draw.__doc__) == ("draw", "Draw a thing.")


def test_help_is_that_of_the_docstrings(draw):
    app = typer.Typer()
    app.command()(draw)
    options = {option.name: option for option in get_command(app).params}
    assert (options["width"].metavar, options["width"].help) == (
        "CM", "How wide it is; the text goes on in a second line."
    )  # fmt: skip
    assert options["tall"].help == "Twice as high."  # of the derived class
    assert options["width"].rich_help_panel == options["lid"].rich_help_panel == "Measures"
    assert (options["name"].metavar, options["name"].help) == ("NAME", "What it is called.")
    assert options["as_json"].opts == ["--json"]
    assert draw.epilog == "Examples:\n\n- `draw box`: a red box\n\n- `draw box --tall`"
