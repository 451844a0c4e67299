"""The command line of this process: as it was typed, and as the report shows it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from iobs.core.files import expanded

# An option in one word with its value, as in --data=FILE and -oDIR.
_OPTION = re.compile(r"--[\w-]+=|-\w(?=.)")


def typed(processes: int = 1) -> str:
    """The command that started this process, ready to be typed again.

    Args:
        processes: number of processes that torchrun started.
    """
    start = ["iobs"] if processes == 1 else ["torchrun", f"--nproc-per-node={processes}", "-m", "iobs"]
    return _joined([*start, *sys.argv[1:]])


def shown() -> str:
    """The command of this process without the folders of this machine, for the report.

    An absolute path below the current folder becomes relative; of any other absolute path only the name remains.
    """
    return _joined(["iobs", *map(_without_folders, sys.argv[1:])])


def _without_folders(argument: str) -> str:
    option = _OPTION.match(argument)
    start = option.end() if option is not None else 0
    path = expanded(argument[start:])
    if not path.is_absolute():
        return argument
    here = Path.cwd()
    return argument[:start] + (str(path.relative_to(here)) if path.is_relative_to(here) else path.name)


def _joined(words: Sequence[str]) -> str:
    """The words as one line, quoted for the shell of this system."""
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
