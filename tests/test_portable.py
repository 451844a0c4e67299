"""Differences between systems: text encodings, file names, and modules that Windows lacks."""

import ast
import subprocess
import sys

import pytest
from source_files import source_files


def is_binary(call):
    """Check for a mode such as "rb", and for methods named open of archives, models and URLs."""
    modes = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    return any("b" in mode and len(mode) <= 3 for mode in modes)


def opens_text(call):
    if isinstance(call.func, ast.Name):
        return call.func.id == "open"
    owner = call.func.value
    return not (isinstance(owner, ast.Name) and (owner.id in ("os", "Image") or owner.id[0].isupper()))


def test_text_files_name_their_encoding():
    calls = [
        (f"{one.name}:{call.lineno}", {keyword.arg for keyword in call.keywords})
        for one in source_files()
        for call in one.text_calls
        if opens_text(call) and not is_binary(call)
    ]
    assert calls
    assert [place for place, keywords in calls if "encoding" not in keywords] == []


# Windows has none of these modules and functions. Its platform name is pretended once the libraries are imported.
WINDOWS = """
import os, sys, threading, importlib, pathlib, pkgutil
import torch, numpy, numba, scipy, safetensors.torch, rich.console, rich.progress, typer, typer.testing, yaml, sklearn
import threadpoolctl, scipy.optimize, scipy.linalg, scipy.sparse, scipy.special, matplotlib.pyplot
import sklearn.linear_model, sklearn.model_selection, multiprocessing.synchronize, torch.utils.data
from transformers import TrainerCallback
for name in ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix"):
    sys.modules[name] = None
MISSING = ("sysconf", "posix_fallocate", "getuid", "geteuid", "sched_getaffinity", "sched_setaffinity", "fork")
for name in MISSING:
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "win32"
folder = sys.argv[1]
def read_text(self, *arguments, _real=pathlib.Path.read_text, **others):
    if str(self).startswith("/proc"):
        raise FileNotFoundError(2, "no such file", str(self))
    return _real(self, *arguments, **others)
def exists(self, _real=pathlib.Path.exists):
    return not str(self).startswith("/proc") and _real(self)
def is_mount(self):
    raise NotImplementedError("Path.is_mount() is unsupported on this system")
pathlib.Path.read_text, pathlib.Path.exists, pathlib.Path.is_mount = read_text, exists, is_mount
"""
IMPORT_ALL = """
import iobs
for module in pkgutil.walk_packages(iobs.__path__, "iobs."):
    if module.name not in ("iobs.__main__", "iobs.inference.offsets_triton"):  # triton is not on Windows
        importlib.import_module(module.name)
print("imported")
"""
WORK = """
import iobs
from iobs.cli import app
from typer.testing import CliRunner
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
print(iobs.prune(model, [torch.randn(40, 8)], 0.5, "one-shot", checkpoint=f"{folder}/checkpoint").zeros)
def call(*words):
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == 0, (words, result.output, result.exception)
    return result
source = (f"{folder}/mine.py:net", "--data", f"{folder}/mine.py:batches", "--recipe", "one-shot", "-o", f"{folder}/out")
call("prune", *source, "--resume")
call("prune", *source, "--overwrite")
call("evaluate", f"{folder}/out", "--data", f"{folder}/mine.py:batches", "--json")
call("inspect", f"{folder}/out")
call("pack", f"{folder}/out")
call("solve", f"{folder}/a.csv", "-k", "1")
print("worked")
"""

NETWORK = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))

def batches():
    return [(torch.randn(40, 8), torch.arange(40) % 2)]
"""


def run(code, folder):
    return subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """Output of one process that works and then imports every other module, without what Windows lacks.

    Its own imports take most of its time, so the two do not each have a process.
    """
    folder = tmp_path_factory.mktemp("windows")
    (folder / "mine.py").write_text(NETWORK, encoding="utf-8")
    rows = "".join(f"{i},{i * i % 7},{2 * i}\n" for i in range(20))
    (folder / "a.csv").write_text(f"a,b,y\n{rows}", encoding="utf-8")
    work = f"import traceback\ntry:\n    exec({WORK!r})\nexcept BaseException:\n    traceback.print_exc()\n"
    return run(WINDOWS + work + IMPORT_ALL, folder)


def test_every_module_imports_without_the_modules_that_windows_lacks(without):
    assert without.stdout.split()[-1:] == ["imported"], without.stderr


def test_commands_work_without_the_modules_that_windows_lacks(without):
    assert without.stdout.split()[:2] == ["40", "worked"], without.stderr


def test_file_names_of_outputs_fit_windows(tmp_path, monkeypatch):
    """Windows allows none of these characters, which names of layers may hold."""
    import torch

    import iobs

    model = torch.nn.ModuleDict({"a:b*?": torch.nn.Linear(8, 8)})
    model.forward = lambda x: model["a:b*?"](x)
    iobs.prune(model, [torch.randn(20, 8)], 0.5, "one-shot", checkpoint=tmp_path / "checkpoint")
    iobs.save_packed(model, tmp_path / "packed")
    written = [entry.name for entry in tmp_path.rglob("*")]
    assert len(written) > 3
    assert not [name for name in written if set(name) & set('<>:"|?*\\')]
