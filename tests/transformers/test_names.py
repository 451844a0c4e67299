"""`iobs.transformers` and the library `transformers` are two modules, and neither hides the other."""

import subprocess
import sys

import iobs
from iobs.models import ensure_torchvision

CODE = """
import sys, iobs
assert "transformers" not in sys.modules
"""


def test_names_of_the_package_and_the_library_do_not_clash():
    ensure_torchvision()
    assert iobs.transformers.SparsityCallback
    import transformers

    assert transformers is not iobs.transformers
    assert issubclass(iobs.transformers.SparsityCallback, transformers.TrainerCallback)


def test_library_is_not_imported_with_the_package():
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
