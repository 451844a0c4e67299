"""Importing is quick, and works where modules of Unix are missing."""

import subprocess
import sys

# Windows has none of these modules; its own platform name is pretended once the libraries are imported.
WINDOWS = """
import sys, torch, numpy, numba, scipy, safetensors.torch, rich.console, rich.progress, typer, yaml, threadpoolctl
import scipy.optimize, scipy.linalg, scipy.sparse, safetensors
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None
sys.platform = "win32"
import iobs
from iobs.pruning.runtime.checkpoint import DiskCheckpoint
from iobs.pruning.runtime.memory import resident
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
report = iobs.prune(model, [torch.randn(40, 8)], 0.5, "one-shot", checkpoint=sys.argv[1])
print(report.zeros, isinstance(resident(), int))
"""


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )


def test_prune_runs_without_the_modules_that_windows_lacks(tmp_path):
    found = run(WINDOWS, tmp_path / "checkpoint")
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["40", "True"]


def test_help_of_the_command_line_imports_no_torch():
    code = (
        "import sys; sys.argv = ['iobs', '--help']\nfrom iobs.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    found = run(code + "print('torch' in sys.modules, 'numpy' in sys.modules)")
    assert found.stdout.rstrip().endswith("False False"), found.stdout + found.stderr
