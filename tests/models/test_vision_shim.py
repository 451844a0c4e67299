"""A torchvision that does not fit torch is repaired where only operators are missing, and otherwise an error."""

import subprocess
import sys

import pytest

from iobs.errors import ModelError
from iobs.models import ensure_torchvision

MISSING_OPERATOR = """
import torch

@torch.library.register_fake("torchvision::nms")
def shape(dets, scores, threshold):
    return dets
"""
REPAIRED = """
import sys
sys.path.insert(0, sys.argv[1])
from iobs.models.vision_shim import ensure_torchvision
print(ensure_torchvision(), ensure_torchvision())
import torchvision
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Puts a torchvision with the given source before the installed one."""

    def write(source):
        (tmp_path / "torchvision").mkdir()
        (tmp_path / "torchvision" / "__init__.py").write_text(source, encoding="utf-8")
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    return write


def test_missing_torchvision_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert ensure_torchvision() == "absent"


@pytest.mark.slow
def test_missing_operators_are_declared(install):
    found = subprocess.run(
        [sys.executable, "-c", REPAIRED, str(install(MISSING_OPERATOR))], capture_output=True, text=True, check=False
    )
    assert found.stdout.split() == ["shimmed", "shimmed"], found.stderr


@pytest.mark.parametrize(
    "source",
    [
        "from torch import of_another_release",
        "raise RuntimeError('PyTorch and torchvision were compiled with different CUDA major versions')",
        "raise OSError('libtorch.so: undefined symbol')",
    ],
)
def test_misfit_is_an_error_that_names_both(install, source):
    install(source)
    with pytest.raises(ModelError, match=r"torchvision .* does not fit torch .*uninstall torchvision"):
        ensure_torchvision()
