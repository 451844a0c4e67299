"""Importing is quick."""

import subprocess
import sys


def run(code, *arguments, folder=None):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_help_of_the_command_line_imports_no_torch():
    code = (
        "import sys; sys.argv = ['iobs', '--help']\nfrom iobs.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    found = run(code + "print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert found.stdout.rstrip().endswith("False False"), found.stdout + found.stderr


def test_rooms_that_pages_name_need_no_import_of_their_own():
    found = run("import iobs; print(iobs.solvers.solve_many.__name__, iobs.models.load.__name__)")
    assert found.stdout.split() == ["solve_many", "load"], found.stderr


def test_a_table_is_explained_without_torch_and_scikit_learn(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,b,y\n" + "".join(f"{j},{j % 3},{2 * j + j % 2}\n" for j in range(12)))
    code = (
        "import sys; sys.argv = ['iobs', 'solve', sys.argv[1], '-k', '1', '--quiet']\nfrom iobs.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules, 'sklearn' in sys.modules)"
    )
    found = run(code, file)
    assert found.stdout.rstrip().endswith("False False"), found.stdout + found.stderr


REFUSALS = """
import sys
from iobs.cli import main

for line in sys.argv[1:]:
    sys.argv = ["iobs", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, line
print("torch" in sys.modules, "numpy" in sys.modules)
"""
WRONG_PATHS = """
prune ./none -o out; prune none.py:f -o out; prune --data none.txt -o out; prune --eval-data none -o out
prune --recipe none.yaml -o out; prune --recipe none -o out; evaluate ./none; compare --data none; inspect none
pack none; export ./none --to gguf; run ./none text; bench ./none; solve none.csv; predict none.json none.csv
evaluate --questions none.jsonl
"""
# `full` holds files, `empty` none, and `full/none` does not exist.
OUTPUTS = """
prune -o full; prune -o full --overwrite; prune; demo -o full; pack full -o full/; pack full -o full/ --unpack
compare -o full; compare --methods none; export full --to gguf -o full/; export full --to zip
solve full/t.csv -o full/none/m.json; predict full/t.csv full/t.csv -o full/none/p.csv
bench full --plot full/none/p.svg; bench full --beside ./none; bench full --precision dense
evaluate --shots 3; evaluate --dtype f8; run full text --precision f8; inspect empty; evaluate empty; pack empty
"""
WRONG_TEXTS = """
prune -o out --sparsity abc; prune -o out --sparsity 150%; prune -o out --pattern 2:4+60MB; prune -o out --pattern 3:x
prune -o out --bits 9; prune -o out --bits 4 --pattern int4; prune -o out --solver none; prune -o out --within soon
prune -o out --device none; evaluate --device cuda:first; compare --patterns 2:4,abc; inspect full --pattern abc
demo -o out --sparsity abc; prune -o out --sparsity 50% --pattern 2:4; prune -o out --bits-per-weight 99
"""


def commands(text):
    """The command lines of a text."""
    return [line.strip() for line in text.strip().replace("\n", ";").split(";")]


def test_wrong_paths_are_answered_before_torch_is_imported():
    found = run(REFUSALS, *commands(WRONG_PATHS))
    assert found.stdout.strip() == "False False", found.stdout + found.stderr
    assert found.stderr.count("none") == found.stderr.count("Error: ") + 1, found.stderr  # one of them is named twice


def test_outputs_that_cannot_be_written_are_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "t.csv").write_text("a,y\n1,2\n")
    (tmp_path / "empty").mkdir()
    for name in ("comparison.json", "config.json", "model.safetensors"):
        (tmp_path / "full" / name).write_text("{}")
    found = run(REFUSALS, *commands(OUTPUTS), folder=tmp_path)
    assert found.stdout.strip() == "False False", found.stdout + found.stderr
    assert "Traceback" not in found.stderr


def test_texts_that_say_nothing_are_refused_before_torch_is_imported(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.json").write_text("{}")
    (tmp_path / "full" / "model.safetensors").write_text("{}")
    found = run(REFUSALS, *commands(WRONG_TEXTS), folder=tmp_path)
    assert found.stdout.strip() == "False False", found.stdout + found.stderr
    assert "Traceback" not in found.stderr
