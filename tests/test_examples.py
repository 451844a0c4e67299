"""Each script of `examples` runs in a process of its own with small settings; its own assertions check the zeros."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = {
    "prune_your_own.py": [],
    "save_and_load.py": ["--steps", "40", "--folder", "saved"],
    "train_on.py": ["--steps", "40"],
    "huggingface_trainer.py": ["--steps", "4", "--folder", "trained"],
    "accelerate_loop.py": ["--steps", "4", "--folder", "trained"],
    "lora.py": ["--steps", "4"],
}
NEEDS = {"huggingface_trainer.py": "accelerate", "accelerate_loop.py": "accelerate", "lora.py": "peft"}
ELSEWHERE = ("digits.py", "explain_a_table.py")  # imported by the others; run by tests/optimize/test_example.py
# A torchvision that does not fit its torch stops every import of transformers; declare its operators first.
RUN = """
import runpy, sys
from iobs.models import ensure_torchvision
ensure_torchvision()
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_every_example_is_run_here():
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*SMALL, *ELSEWHERE}


@pytest.mark.parametrize("name", SMALL)
def test_example_runs(name, tmp_path):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    command = [sys.executable, "-c", RUN, (EXAMPLES / name).as_posix(), *SMALL[name]]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


@pytest.mark.parametrize("name", SMALL)
def test_example_is_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf8").splitlines()) < 60
