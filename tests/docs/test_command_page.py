"""docs/command-line.md is what docs/make_command_page.py writes from the commands."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_page_of_the_command_line_is_that_of_the_commands():
    spec = importlib.util.spec_from_file_location("make_command_page", DOCS / "make_command_page.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = (DOCS / "command-line.md").read_text(encoding="utf8")
    assert page == script.page(), "python docs/make_command_page.py writes it again"
