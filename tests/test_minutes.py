"""The option `--minutes` of the tests, by which a slow machine ends in time."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def test_tests_after_the_limit_of_time_are_skipped_with_the_reason():
    arguments = ["-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--minutes", "0", "test_words.py"]
    done = subprocess.run([sys.executable, *arguments], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the 0 minutes of this run are over" in done.stdout
    assert " passed" not in done.stdout
