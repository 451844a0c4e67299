"""Importing is quick."""

import subprocess
import sys


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_help_of_the_command_line_imports_no_torch():
    code = (
        "import sys; sys.argv = ['iobs', '--help']\nfrom iobs.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    found = run(code + "print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert found.stdout.rstrip().endswith("False False"), found.stdout + found.stderr


def test_rooms_that_pages_name_need_no_import_of_their_own():
    found = run("import iobs; print(iobs.solvers.solve_many.__name__, iobs.models.load.__name__)")
    assert found.stdout.split() == ["solve_many", "load"], found.stderr


def test_a_table_is_explained_without_torch(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("a,b,y\n" + "".join(f"{j},{j % 3},{2 * j + j % 2}\n" for j in range(12)))
    code = (
        "import sys; sys.argv = ['iobs', 'solve', sys.argv[1], '-k', '1', '--quiet']\nfrom iobs.cli import main\n"
        "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    found = run(code, file)
    assert found.stdout.rstrip().endswith("False"), found.stdout + found.stderr


def test_wrong_paths_are_answered_before_torch_is_imported():
    code = """
import sys
from iobs.cli import main

for line in (
    "prune ./none -o out", "prune none.py:f -o out", "prune --data none.txt -o out", "prune --eval-data none -o out",
    "prune --recipe none.yaml -o out", "evaluate ./none", "compare --data none", "inspect none", "pack none",
    "export ./none --to gguf", "run ./none text", "bench ./none", "solve none.csv", "predict none.json none.csv",
):
    sys.argv = ["iobs", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code == 2, line
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    found = run(code)
    assert found.stdout.strip() == "False False", found.stdout + found.stderr
    assert found.stderr.count("none") == found.stderr.count("Error: ") + 1, found.stderr  # one of them is named twice
