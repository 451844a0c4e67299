"""Execute the tutorials and store their outputs: `make notebooks`, or this file with the names of some notebooks.

A hash of the sources is stored with the outputs, so a test sees a cell that was changed and not executed again.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).parent / "tutorials"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TERM": "dumb", "COLUMNS": "100"}


def source_hash(cells: list[Any]) -> str:
    """Hash of the code cells of a notebook, in order; a cell's source is a text or a list of lines."""
    code = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def execute(file: Path) -> None:
    """Run one notebook in a fresh kernel and write it back with its outputs, without times and machine names."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(file.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "iobs": {"source": source_hash(notebook.cells)},
    }
    nbformat.write(notebook, file)


def main(names: list[str]) -> None:
    """Execute the named notebooks, or all."""
    os.environ.update(ENVIRONMENT)
    for file in [TUTORIALS / name for name in names] or sorted(TUTORIALS.glob("*.ipynb")):
        started = time.perf_counter()
        execute(file)
        sys.stdout.write(f"{file.name}: {time.perf_counter() - started:.0f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
