"""The paper's synthetic figures on a few short trials: their numbers and their files."""

from __future__ import annotations

import numpy as np
import pytest
from paper_tables import Request, figure_gaussian, figure_mnist, find

from iobs.errors import DataError


def _rows(results):
    return {(row.setting, row.method): row.measured for row in results.rows}


def test_figure_gaussian_shows_one_newton_step(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_gaussian, "TRIALS", 2)
    monkeypatch.setattr(figure_gaussian, "STEPS", 120)
    said = []
    results = find("figure-gaussian").run(Request(False, 0, tmp_path, said.append))
    rows = _rows(results)
    assert rows["step 1", "Top-k-I-OBS"] < 1e-12
    assert rows["steps to 1e-12 (mean)", "Top-k-I-OBS"] == 1
    assert rows["step 100", "k-IHT"] > 1e-6
    assert rows["step 120", "factors mixed, as printed"] > 1
    assert len(said) == 2
    assert "factor" in results.notes[0]
    table = np.genfromtxt(tmp_path / "figure_gaussian.csv", delimiter=",", names=True)
    assert len(table) == 121
    assert (tmp_path / "figure_gaussian.png").stat().st_size > 5000


def test_figure_mnist_shows_one_newton_step(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_mnist, "TRIALS", 2)
    monkeypatch.setattr(figure_mnist, "SHOWN", 2)
    monkeypatch.setattr(figure_mnist, "STEPS", 20)
    monkeypatch.setattr(figure_mnist, "CHECKED", (1, 10, 20))
    monkeypatch.delenv("IOBS_MNIST", raising=False)
    rows = _rows(find("figure-mnist").run(Request(True, 0, tmp_path, str)))
    assert rows["step 1", "Top-k-I-OBS"] < 1e-12
    assert 1e-4 < rows["step 20", "k-IHT"] < rows["step 10", "k-IHT"] < rows["step 1", "k-IHT"]
    assert (tmp_path / "figure_mnist.csv").exists()
    assert (tmp_path / "figure_mnist.png").stat().st_size > 5000


def test_figure_mnist_reads_files_or_says_what_to_do(tmp_path, monkeypatch):
    pictures = np.arange(2 * 784, dtype=np.uint8).reshape(2, 28, 28)
    np.savez(tmp_path / "m.npz", x_train=pictures)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(b"\x00\x00\x08\x03" + bytes(12) + pictures.tobytes())
    (tmp_path / "bad").write_bytes(b"nothing")
    for name in ("m.npz", "train-images-idx3-ubyte"):
        monkeypatch.setenv("IOBS_MNIST", str(tmp_path / name))
        read, source = figure_mnist._images(False)
        np.testing.assert_array_equal(read, pictures.reshape(2, 784))
        assert name in source
    monkeypatch.setenv("IOBS_MNIST", str(tmp_path / "bad"))
    with pytest.raises(DataError, match="Cannot read MNIST"):
        figure_mnist._images(False)
    monkeypatch.delenv("IOBS_MNIST")
    with pytest.raises(DataError, match=r"set IOBS_MNIST .* or run with --stand-in"):
        figure_mnist._images(False)
