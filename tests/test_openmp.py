"""Threads of OpenMP sleep while they wait, unless the user chose otherwise."""

import os
import subprocess
import sys

import pytest
import torch

from iobs import openmp

# What a process of a user sees: none of the variables that the tests set.
PLAIN = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
PRUNE = "iobs.prune(torch.nn.Linear(4, 4), [torch.randn(8, 4)], 0.5, 'one-shot', solver='magnitude', holdout=0)"
NAMES = "import threading; print([one.name for one in threading.enumerate() if one.name.startswith('iobs')])"


def run(code, **variables):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=PLAIN | variables, capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("choice", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE"), ({"GOMP_SPINCOUNT": "9"}, None)],
    ids=["no choice", "policy", "spins"],
)
def test_policy_is_set_unless_the_user_chose_one(choice, policy):
    assert run("import iobs, os; print(os.environ.get('OMP_WAIT_POLICY'))", **choice).stdout.strip() == str(policy)


def test_policy_reaches_the_openmp_of_torch_and_needs_no_other_thread():
    code = f"import iobs, torch; torch.set_num_threads(2); {PRUNE}; {NAMES}"
    done = run(code, OMP_DISPLAY_ENV="true")
    assert "OMP_WAIT_POLICY='PASSIVE'" in done.stderr.replace(" = ", "=")
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_idle_team_stands_in_where_torch_was_loaded_first():
    one, two = (f"torch.set_num_threads({count}); {PRUNE}; {PRUNE}; {NAMES}" for count in (1, 2))
    done = run(f"import torch, iobs; {one}; {two}")
    assert done.stdout.split("\n") == ["[]", "['iobs-idle-openmp-team']", ""]


def test_idle_team_leaves_a_choice_of_the_user(monkeypatch):
    monkeypatch.setattr(openmp, "_too_late", True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(openmp, "_hold_idle_team", lambda: pytest.fail("a team was started"))
    monkeypatch.setattr(openmp, "_chosen_by_user", True)
    openmp.ensure_sleep()
