"""Golden bits: a change of structure must not change a weight. Run by `make golden`.

Floating-point results depend on the torch version and on the processor, so the stored hashes hold for one of each.
`python tests/golden/test_golden.py` stores them anew; the commit that does so says which results changed, and why.
"""

from __future__ import annotations

import json
import platform
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


def stored() -> dict[str, dict[str, str]]:
    return json.loads(STORED.read_text())


@pytest.mark.golden
@pytest.mark.parametrize("name", cases())
def test_golden_bits(name):
    known = stored()
    if known["machine"] != machine():
        pytest.skip(f"the stored hashes are of {known['machine']}, this is {machine()}")
    assert digest(cases()[name]) == known["hashes"][name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: digest(run) for name, run in cases().items()}
    STORED.write_text(json.dumps({"machine": machine(), "hashes": found}, indent=1) + "\n")
