"""Core ML packages as coremltools writes and reads them. Only macOS runs them, so no output is computed here."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ModelError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    coremltools = pytest.importorskip("coremltools")


def network():
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 64, 10))
    model = nn.Sequential(*parts)
    for one in (model[0], model[4]):
        one.weight.data[torch.rand_like(one.weight) < 0.7] = 0
    return model


def size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize("bits", [16, 32])
def test_masks_of_the_file_are_those_of_the_weights(tmp_path, bits):
    model = network()
    found = iobs.export(model, tmp_path / "out", "coreml", bits, example=torch.randn(1, 3, 8, 8))
    assert {one.form for one in found.matrices} == {f"float{bits} with a bit mask"}
    assert found.zeros == found.kept_zeros > 0
    assert found.bytes == size(tmp_path / "out" / "model.mlpackage")
    assert model.training


def test_zeros_make_the_file_smaller(tmp_path):
    model, example = network(), torch.randn(1, 3, 8, 8)
    sparse = iobs.export(model, tmp_path / "sparse", "coreml", example=example)
    for one in (model[0], model[4]):
        nn.init.normal_(one.weight)
    dense = iobs.export(model, tmp_path / "dense", "coreml", example=example)
    assert {one.form for one in dense.matrices} == {"float32"}
    assert sparse.bytes < 0.7 * dense.bytes


def test_unknown_inputs_are_refused_by_coreml_too(tmp_path):
    with pytest.raises(ModelError, match="an example of one forward pass"):
        iobs.export(nn.Linear(4, 4), tmp_path / "out", "coreml")
    assert not (tmp_path / "out").exists()


def test_packages_are_imported_without_a_word():
    """coremltools names, one a line, the parts that only macOS has."""
    code = "from iobs.exports import require_packages; require_packages('coreml')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
