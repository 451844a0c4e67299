"""Sources of data: functions of the user, text without a tokenizer."""

import pytest

from iobs import data, models
from iobs.errors import CalibrationError, DataError, ModelError
from iobs.evaluate import evaluate


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return []", "no batch"),
        ("return 3", "must return a list"),
        ("import torch; return torch.ones(3)", "must return a list"),
        ("return ['text']", "batch 1 is str"),
        ("raise RuntimeError('mine')", "mine"),
        ("yield 1 / 0", "batches fails when it is called: ZeroDivisionError"),
        ("import torch; return [({'a': 'text'}, torch.ones(3))]", "batch 1 is tuple"),
    ],
)
def test_unusable_functions_are_refused(tmp_path, embedded, body, message):
    (tmp_path / "mine.py").write_text(f"def batches():\n    {body}\n")
    with pytest.raises((CalibrationError, ModelError), match=message):
        data.open_source([f"{tmp_path / 'mine.py'}:batches"], "calibration", embedded)


def test_batches_of_a_function_are_used_unchanged(tmp_path, embedded):
    (tmp_path / "mine.py").write_text("import torch\n\ndef batches():\n    yield [torch.ones(2, 3), torch.zeros(2)]\n")
    source = data.open_source([f"{tmp_path / 'mine.py'}:batches"], "calibration", embedded)
    ((inputs, targets),) = data.calibration_batches(source, embedded, samples=9, length=9, seed=0)
    assert inputs.shape == (2, 3)
    assert targets.shape == (2,)


def test_function_may_import_a_file_beside_its_own(tmp_path, embedded):
    (tmp_path / "beside_the_batches.py").write_text("import torch\n\nmade = torch.ones(2, 3)\n")
    (tmp_path / "mine.py").write_text("def batches():\n    from beside_the_batches import made\n    yield made\n")
    source = data.open_source([f"{tmp_path / 'mine.py'}:batches"], "calibration", embedded)
    assert source.batches[0].shape == (2, 3)


def test_keyword_inputs_may_have_targets(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n"
        "    def forward(self, values):\n        return super().forward(values)\n\n\n"
        "def net():\n    return Net(3, 2)\n\n\n"
        "def batches():\n    return [({'values': torch.ones(4, 3)}, torch.zeros(4, dtype=torch.int64))]\n"
    )
    loaded = models.load(f"{tmp_path / 'mine.py'}:net")
    source = data.open_source([f"{tmp_path / 'mine.py'}:batches"], "evaluation", loaded)
    assert evaluate(loaded, source)["samples"] == 4


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.py"], "a.py:FUNCTION"),
        (["A.PNG"], "a folder or zip of images"),
        (["a.npz", "b.npz"], "a.npz is one of 2 sources"),
        (["a.npz"], "is not an .npz file, or is damaged"),
        (["a.npy"], "numpy.savez"),
        ([""], "a variable of the shell may be unset"),
    ],
)
def test_files_that_are_no_text_are_named_for_what_they_are(tmp_path, embedded, monkeypatch, names, message):
    monkeypatch.chdir(tmp_path)
    for name in filter(None, names):
        (tmp_path / name).write_bytes(b"no text")
    with pytest.raises(DataError, match=message):
        data.open_source(names, "calibration", embedded)
    with pytest.raises(ModelError, match="empty text"):
        models.load("")


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "net.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(2, 2)\n")
    loaded = models.load(f"{tmp_path / 'net.py'}:build")
    (tmp_path / "a.txt").write_text("some text")
    source = data.open_source([str(tmp_path / "a.txt")], "calibration", loaded)
    with pytest.raises(ModelError, match=r"no tokenizer.* A network for images takes"):
        data.calibration_batches(source, loaded, samples=3, length=8, seed=0)
    with pytest.raises(DataError, match="needs --data"):
        data.open_source([], "calibration", loaded)
