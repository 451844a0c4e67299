"""Each script of `examples` runs with small settings; its own assertions check the zeros."""

import importlib.util
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from iobs.models import ensure_torchvision

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


def test_every_example_is_run_here():
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*SMALL, *ELSEWHERE}


DEAR = {"lora.py", "accelerate_loop.py"}  # huggingface_trainer.py trains with the same libraries


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in DEAR else []) for name in SMALL]
)
def test_example_runs(name, tmp_path, monkeypatch):
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    ensure_torchvision()  # one that does not fit its torch stops every import of transformers
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", SMALL)
def test_example_is_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf8").splitlines()) < 60
