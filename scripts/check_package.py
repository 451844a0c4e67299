"""Build the sdist and the wheel, look into them, and use the wheel in a fresh environment.

The fresh environment sees the core dependencies only: links to their packages in the environment that runs this script.
No extra (timm, pandas, pytest, ...) can be imported there, so what works there works after `pip install iobs`.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = (
    "timm",
    "torchvision",
    "pandas",
    "datasets",
    "lm_eval",
    "peft",
    "pytest",
    "hypothesis",
    "ruff",
    "mypy",
    "build",
)
IN_SDIST = ("README.md", "LICENSE", "CHANGELOG.md", "Makefile", "tests/checks.py", "docs/pruning.md", "examples")
SMOKE = """
import importlib.util, sys, time
started = time.perf_counter()
import iobs
print(f"import iobs: {time.perf_counter() - started:.2f} s")
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
report = iobs.prune(model, [torch.randn(64, 8)], 0.5)
assert report.zeros == 96 == sum(int((model[i].weight == 0).sum()) for i in (0, 2)), report
assert iobs.SparseRegressor(k=1).fit([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0], [4.0, 1.0]], [1.0, 2.0, 3.0, 4.0]).k_ == 1
assert not [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
print(iobs.__file__)
"""


def main() -> None:
    """Check everything; the exit code is 1 with a message at the first fault."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        wheel, sdist = built(folder / "dist")
        check_wheel(wheel)
        check_sdist(sdist)
        python = fresh(folder / "fresh", wheel)
        use(python, folder)
    print("The package is complete and works with the core dependencies alone.")


def built(target: Path) -> tuple[Path, Path]:
    """The wheel, built from the sdist, and the sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(ROOT)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    require(found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:])
    (wheel,), (sdist,) = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, sdist


def check_wheel(wheel: Path) -> None:
    """Compare the wheel with the sources, and validate its metadata."""
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        Metadata.from_email(opened.read(metadata), validate=True)
    source = ROOT / "src"
    expected = {
        file.relative_to(source).as_posix()
        for file in (source / "iobs").rglob("*")
        if file.is_file() and file.suffix not in (".pyc", ".nbi", ".nbc")
    }
    require(names == expected, f"The wheel differs from src in {sorted(names ^ expected)}.")
    require({"iobs/py.typed", "iobs/embedded/config.json"} <= names, "The wheel has no type marker or no model.")


def check_sdist(sdist: Path) -> None:
    """Check that the sdist holds what tests and docs need."""
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    missing = [name for name in IN_SDIST if name not in names]
    require(not missing, f"The sdist lacks {missing}.")
    require(not [name for name in names if name.endswith(".pyc")], "The sdist holds compiled files.")


def fresh(folder: Path, wheel: Path) -> Path:
    """The interpreter of a new environment with the wheel and links to the core dependencies."""
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    scripts = sysconfig.get_path("scripts", "venv", {"base": str(folder)})
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for entry in sorted({entry for one in core_dependencies() for entry in top_level(one)}):
        if not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    python = Path(scripts) / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel), cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    return python


def core_dependencies() -> list[Distribution]:
    """The distributions that `pip install iobs` installs, without iobs."""
    found: dict[str, Distribution] = {}
    waiting = [Requirement(text) for text in distribution("iobs").requires or []]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found[name] = distribution(name)
            waiting += [Requirement(text) for text in found[name].requires or []]
    return [*found.values()]


def top_level(package: Distribution) -> set[Path]:
    """Files and folders of a distribution in the folder of all packages."""
    place = Path(str(package.locate_file("")))
    names = {file.parts[0] for file in package.files or []}
    return {place / name for name in names if name not in ("..", "__pycache__") and (place / name).exists()}


def use(python: Path, folder: Path) -> None:
    """Use the installed package from Python and from the command line."""
    print(run(python, "-c", SMOKE, *EXTRAS, cwd=folder).strip())
    table = folder / "tiny.csv"
    table.write_text("a,b,y\n" + "".join(f"{i},{i * i % 7},{2 * i}\n" for i in range(20)), encoding="utf-8")
    command = python.parent / "iobs"
    run(command, "--version", cwd=folder)
    small = ("--recipe", "one-shot", "--samples", "8", "--seq-len", "32", "--include", "model.layers.0.mlp.up_proj")
    pruned = json.loads(run(command, "prune", *small, "--dry-run", "--json", cwd=folder))
    require(pruned["layers"][0]["zeros"] > 0, "iobs prune finds nothing to prune in the embedded model.")
    started = time.perf_counter()
    require("prune" in run(command, "--help", cwd=folder), "iobs --help does not name its commands.")
    print(f"iobs --help: {time.perf_counter() - started:.2f} s")
    solved = json.loads(run(command, "solve", str(table), "-k", "1", "--json", cwd=folder))
    require([row["name"] for row in solved["features"]] == ["a"], f"iobs solve chose {solved['features']}.")


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command in an environment without variables of Python."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=variables, check=False)
    require(found.returncode == 0, f"{' '.join(map(str, command[:3]))} fails:\n{found.stdout}{found.stderr}")
    return found.stdout


def require(condition: bool, message: str) -> None:
    """End with the message unless the condition holds."""
    if not condition:
        sys.exit(message)


if __name__ == "__main__":
    main()
