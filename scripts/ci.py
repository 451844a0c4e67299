"""Everything that is checked before a change enters main: `bash .ci/run`, or `CI_MINUTES=30 bash .ci/run`.

The first part has to run whole: lint and types, the gate of tests, the package, the documentation, the vision tests. If
a step fails, or the time ends before it did, the run fails. The long set of tests follows, and gets what is left of an
hour; it begins at another place for each commit.

It needs nothing but Python: `make` sets up the environment.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TALLIES = ROOT / "build" / "ci"
# A machine that is four times slower than a usual one still ends the first part, which takes about 20 minutes.
MINUTES = float(os.environ.get("CI_MINUTES", "80"))
LONG_SET_ENDS = 60.0
# Seconds after which pytest is ended although it should have stopped by itself. It needs them to collect the tests, and
# lets those finish that run when the time ends.
GRACE, LONG_SET_GRACE = 180.0, 1200.0

STARTED = time.monotonic()


@dataclass
class TestRun:
    """Outcomes of one run of pytest, as tests/tally.py wrote them."""

    collected: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    skips: Counter[str] = field(default_factory=Counter)

    @property
    def ran(self) -> int:
        return self.outcomes.total()

    @classmethod
    def read(cls, file: Path) -> TestRun:
        """Read the file, of which the last line is cut off where pytest was killed."""
        tally = cls()
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                break
            if "collected" in record:
                tally.collected = record["collected"]
            else:
                tally.outcomes[record["outcome"]] += 1
                if record["outcome"] == "skipped":
                    tally.skips[record["reason"]] += 1
        return tally

    def __add__(self, other: TestRun) -> TestRun:
        return TestRun(self.collected + other.collected, self.outcomes + other.outcomes, self.skips + other.skips)


def seconds_left(minutes: float) -> float:
    """Seconds until so many minutes after the start of this run."""
    return max(60 * minutes - (time.monotonic() - STARTED), 0.0)


def run(command: list[str], seconds: float) -> int | None:
    """Return the exit code of a command, or None if it was ended because its time was over."""
    print(f"\n== {' '.join(command)}  ({(time.monotonic() - STARTED) / 60:.1f} min)", flush=True)
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def run_tests(target: str, limit: float, grace: float, *options: str) -> tuple[int | None, TestRun]:
    """Run a make target that calls pytest; tests that do not start before `limit` minutes are left out and counted."""
    file = TALLIES / f"{target}.jsonl"
    file.unlink(missing_ok=True)
    left = seconds_left(limit)
    arguments = [f"--minutes={left / 60:.2f}", f"--tally={file}", *options]
    code = run(["make", target, f"PYTEST_OPTIONS={' '.join(arguments)}"], left + grace)
    return code, TestRun.read(file)


def commits() -> int:
    """Count the commits of this history."""
    asked = ["git", "rev-list", "--count", "HEAD"]
    return int(subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Return the exit code: 0 if the first part ran whole and no test failed."""
    TALLIES.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    cut: list[str] = []  # steps for which the time did not suffice
    total = gate = TestRun()

    for target in ("lint", "test", "package", "docs", "test-vision"):
        if target.startswith("test"):
            code, tally = run_tests(target, MINUTES, GRACE)
            total += tally
            gate = tally if target == "test" else gate
            if tally.ran < tally.collected:
                code = None
            elif tally.ran == 0:
                code = code or 1
        else:
            left = seconds_left(MINUTES)
            code = run(["make", target], left) if left else None
        if code is None:
            cut.append(target)
        elif code != 0:
            failed.append(target)

    long = TestRun()
    if not failed and not cut:
        code, long = run_tests("test-long", min(LONG_SET_ENDS, MINUTES), LONG_SET_GRACE, f"--rotate={commits()}")
        total += long
        if code != 0:
            failed.append("test-long")

    print(f"\n{(time.monotonic() - STARTED) / 60:.0f} minutes in all.")
    for reason, count in total.skips.most_common():
        print(f"  skipped {count:5d}  {reason}")
    if failed:
        print(f"failed: make {', make '.join(failed)}")
    if cut:
        print(f"incomplete: {gate.ran} of {gate.collected} tests ran; not finished in time: make {', make '.join(cut)}")
    elif not failed or long.collected:
        print(f"{long.collected - long.ran} of {long.collected} tests of the long set were not reached.")
    counts = total.outcomes
    print(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return 1 if failed or cut else 0


if __name__ == "__main__":
    sys.exit(main())
