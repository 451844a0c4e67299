"""Golden bits: a change of structure must not change a weight. Run by `make golden`.

Floating-point results depend on the torch version and on the processor, so hashes are stored for each pair of them.
`PYTHONPATH=tests python tests/golden/test_golden.py` stores the hashes of this machine. A commit that changes hashes
says which, and why. A change of results makes the hashes of other machines wrong: `--only-this-machine` removes them.
"""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import pytest
import torch
from golden_cases import cases, digest

STORED = Path(__file__).with_name("hashes.json")


def machine() -> dict[str, str]:
    """The torch version and the processor, which the bits of a result depend on besides the code."""
    model = next(
        (line.split(":")[1].strip() for line in _cpu_lines() if line.startswith("model name")), platform.processor()
    )
    return {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "processor": model}


def _cpu_lines() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.is_file() else []


def stored() -> list[dict[str, dict[str, str]]]:
    """One record for each machine: `machine` and `hashes`."""
    return json.loads(STORED.read_text())


@pytest.mark.golden
@pytest.mark.parametrize("name", cases())
def test_golden_bits(name):
    known = {tuple(record["machine"].values()): record["hashes"] for record in stored()}
    here = tuple(machine().values())
    if here not in known:
        pytest.skip(f"no hashes are stored for {here}, only for {list(known)}")
    assert digest(cases()[name]) == known[here][name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    others = [] if "--only-this-machine" in sys.argv else [one for one in stored() if one["machine"] != machine()]
    found = {"machine": machine(), "hashes": {name: digest(run) for name, run in cases().items()}}
    STORED.write_text(json.dumps([*others, found], indent=1) + "\n")
