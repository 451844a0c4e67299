"""Every block of code in README.md and docs/ runs, or says why not; every command in them exists."""

import importlib
import re
import shutil
import warnings

import pytest
import torch
from code_blocks import PAGES, ROOT, TUTORIALS, blocks_of, commands_of, name_of

LANGUAGES = {"python", "console", "text", "yaml", ""}
BLOCKS = [block for page in PAGES for block in blocks_of(page.read_text(encoding="utf8"), name_of(page))]
RUN = [block for block in BLOCKS if block.language == "python" and block.reason is None]
# Blocks whose X is a tensor: the inputs of a layer.
OF_A_LAYER = re.compile(r"\bW\b|X\.T @ X|solve\(problem")
# Blocks of code that need a chain of decoder blocks, or leave the first of several dense.
OF_TWO_DECODER_BLOCKS = re.compile(r"model\.layers\.0|OffloadedStore")
# Pages that begin with a pruned model.
OF_A_PRUNED_MODEL = {"own-models.md"}
# Pages whose calls docs/pruning.md has too: a budget of bits takes seconds even on one decoder block.
SLOW = {"docs/howto/risk-scores.md", "docs/howto/zeros-or-bits.md"}


def test_blocks_name_a_known_language_or_a_directive():
    assert not [f"{block}: {block.language}" for block in BLOCKS if not known(block)]


def known(block):
    return block.language in LANGUAGES or block.language.startswith("{")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name_of(page), marks=[pytest.mark.slow] * (name_of(page) in SLOW))
        for page in PAGES
        if name_of(page) in {block.page for block in RUN}
    ],
)
def test_python_blocks_of_a_page_run_in_order(page, request, names, layer_names, files, tmp_path, monkeypatch, capsys):
    blocks = [block for block in RUN if block.page == name_of(page)]
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    space = dict(request.getfixturevalue("pruned_names") if page.name in OF_A_PRUNED_MODEL else names)
    for block in blocks:
        if OF_A_LAYER.search(block.text):
            space |= {name: layer_names[name] for name in ("W", "X", "b", "mean", "problem")}
        elif re.search(r"\bX\b", block.text):
            space |= {"X": names["X"]}
        usual = space["model"]
        if OF_TWO_DECODER_BLOCKS.search(block.text):
            space["model"] = names["network"](blocks=2)
        code = compile("\n" * block.line + block.text, page, "exec")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(code, space)  # the page's own code
        if OF_TWO_DECODER_BLOCKS.search(block.text):
            space["model"] = usual
        printed = capsys.readouterr().out
        assert printed or "except iobs.errors" not in block.text, f"{block} raises no error"
    torch.set_num_threads(1)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.reason is not None], ids=str)
def test_block_that_is_not_executed_says_why_and_parses(block):
    assert len(block.reason.split()) >= 3
    if block.language == "python":
        compile(block.text, str(block), "exec")


def notebook_blocks():
    import json

    for file in TUTORIALS:
        for cell in json.loads(file.read_text(encoding="utf8"))["cells"]:
            if cell["cell_type"] == "markdown":
                yield from blocks_of("".join(cell["source"]), name_of(file))


COMMANDS = [
    (str(block), words)
    for block in [*BLOCKS, *notebook_blocks()]
    if block.language in ("", "console")
    for words in commands_of(block)
]


def parsed(words):
    """Parse the words of an `iobs` command as the command line does, without running it."""
    import typer.main

    from iobs.cli import app

    root = typer.main.get_command(app)
    words = [word for word in words if word != "..."]
    words = [word.strip("[]") for word in words]  # optional parts
    if words[0].startswith("-"):
        with pytest.raises((SystemExit, Exception)) as ended:
            root.make_context("iobs", list(words))
        assert ended.type.__name__ in ("Exit", "SystemExit"), words
        return
    command = root.get_command(root.make_context("iobs", [words[0]], resilient_parsing=True), words[0])
    assert command is not None, f"iobs has no command {words[0]!r}"
    for parameter in command.params:  # files of a page are a reader's
        parameter.callback = None
    if "--help" not in words:
        command.make_context(words[0], list(words[1:]))


@pytest.mark.parametrize(("place", "words"), COMMANDS, ids=[f"{p}-{w[0]}-{i}" for i, (p, w) in enumerate(COMMANDS)])
def test_command_of_a_page_exists(place, words, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, *rest = words
    if program == "iobs":
        parsed(rest)
    elif program == "torchrun":
        parsed(rest[rest.index("iobs") + 1 :]) if "iobs" in rest else check_file(rest[-1])
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf8")
        assert all(re.search(rf"^{re.escape(goal)}:", makefile, re.MULTILINE) for goal in rest if "=" not in goal)
    elif program == "pip":
        check_extras(" ".join(rest))
    elif program == "python" and rest[0] == "-m":
        importlib.import_module(rest[1])
    elif program == "python":
        check_file(rest[0])


def check_file(name):
    assert (ROOT / name).is_file() or name.isupper() or name.startswith("YOUR"), f"{name} does not exist"


def check_extras(text):
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf8"))["project"]["optional-dependencies"]
    for group in re.findall(r"\[([\w,]+)\]", text):
        assert set(group.split(",")) <= set(extras)


def is_quick(words):
    """Check that a command takes a second and needs no file but PRUNED."""
    return words[0] == "iobs" and (words[-1] in ("--help", "--version") or words[1:] == ["inspect", "PRUNED"])


QUICK = sorted({tuple(words[1:]) for _, words in COMMANDS if is_quick(words)})


@pytest.mark.parametrize("words", QUICK, ids=" ".join)
def test_quick_command_of_a_page_runs(words, files, monkeypatch):
    from typer.testing import CliRunner

    from iobs.cli import app

    monkeypatch.chdir(files)
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
