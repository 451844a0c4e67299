"""Store the golden results of this machine in tests/golden/results.json: `make golden-store`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "golden"))

import environment  # noqa: F401 - before torch is loaded

# isort: split
from golden_cases import cases
from golden_results import STORED, Result, Stored, machine, tolerance


def main() -> None:
    """Run all cases; hashes of other machines are kept where this machine's results are those that are stored."""
    old = Stored.read() if STORED.exists() else Stored({}, {})
    here, known = tuple(machine().values()), old.here()
    new = {name: Result.of(run) for name, run in cases().items()}
    changed = {
        name
        for name, result in new.items()
        if name not in old.results
        or (known[name] != result.hash if name in known else result.distance(old.results[name]) > tolerance(name))
    }
    hashes = {
        place: {name: value for name, value in values.items() if name in new and name not in changed}
        for place, values in old.hashes.items()
        if place != here
    }
    hashes[here] = {name: result.hash for name, result in new.items()}
    Stored({name: result if name in changed else old.results[name] for name, result in new.items()}, hashes).write()
    print(f"{len(new)} results stored; new or changed: {len(changed)}")
    for name in sorted(changed & old.results.keys()):
        print(f"  {name}: relative distance {new[name].distance(old.results[name]):.2g}")


if __name__ == "__main__":
    main()
