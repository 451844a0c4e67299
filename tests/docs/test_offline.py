"""The check of the built site finds what a browser would load from another host."""

import sys

import pytest
from code_blocks import ROOT

sys.path.insert(0, str(ROOT / "docs"))
from check_offline import loaded_from_elsewhere


@pytest.mark.parametrize(
    "text",
    [
        '<script src="https://host.example/a.js"></script>',
        '<link rel="stylesheet" href="//host.example/a.css">',
        '<link href="https://host.example/a.css" rel="preload">',
        "<style>@import 'https://host.example/a.css'</style>",
        "<style>p { background: url(https://host.example/a.png) }</style>",
    ],
)
def test_foreign_files_are_found(text, tmp_path):
    (tmp_path / "index.html").write_text(f"<html>{text}</html>")
    assert len(loaded_from_elsewhere(tmp_path)) == 1


def test_own_files_and_plain_links_are_allowed(tmp_path):
    text = '<script src="_static/a.js"></script><a href="https://host.example/">paper</a><link rel="next" href="b">'
    (tmp_path / "index.html").write_text(text)
    assert not loaded_from_elsewhere(tmp_path)
