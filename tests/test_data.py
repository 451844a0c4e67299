"""Documents, windows and sources."""

import gzip
import itertools
import json
import sys
import types
import zipfile
import zlib

import numpy as np
import pytest
import torch

from iobs import data, models
from iobs.data import documents
from iobs.data.images import IMAGENET_MEAN, IMAGENET_STD
from iobs.data.topics import percentile
from iobs.errors import CalibrationError, DataError, ModelError
from iobs.evaluate import evaluate


class Characters:
    """A tokenizer of code points that puts 1 before each document, and counts what it is given."""

    def __init__(self):
        self.documents = 0

    def __call__(self, text, *, verbose):
        self.documents += len(text)
        return {"input_ids": [[1, *map(ord, document)] for document in text]}


@pytest.fixture(scope="module")
def embedded():
    return models.load()


# ---- the embedded text
def test_embedded_splits_share_no_paragraph():
    parts = {split: data.embedded_text(split) for split in ("heldout", "calibration", "train")}
    paragraphs = {
        split: {" ".join(p.split()) for document in texts for p in document.split("\n\n") if len(p) >= 60}
        for split, texts in parts.items()
    }
    for first, second in itertools.combinations(paragraphs.values(), 2):
        assert not {p for p in first & second if len(p) >= 40}
    assert all(sum(map(len, texts)) > 40_000 for texts in parts.values())


def test_embedded_split_goes_by_the_hash_of_the_name():
    assert (percentile("assert"), percentile("string-methods")) == (46, 10)
    with pytest.raises(DataError, match="no split 'test'"):
        data.embedded_text("test")


def test_embedded_text_needs_the_help_topics(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    with pytest.raises(DataError, match="pydoc_data"):
        data.embedded_text("train")


# ---- windows
@pytest.mark.parametrize("length", [2, 3, 7])
def test_windows_are_the_concatenated_documents_cut_without_overlap(length):
    texts = ["abc", "d", "efghijk"]
    stream = [token for text in texts for token in [1, *map(ord, text)]]
    windows = data.token_windows(Characters(), texts, length)
    count = len(stream) // length
    assert windows.tolist() == [stream[i * length : (i + 1) * length] for i in range(count)]


def test_windows_stop_reading_at_the_limit():
    tokenizer = Characters()
    windows = data.token_windows(tokenizer, ("x" * 9 for _ in itertools.count()), 10, limit=5)
    assert windows.shape == (5, 10)
    assert tokenizer.documents <= 64


def test_text_shorter_than_a_window_is_an_error():
    with pytest.raises(DataError, match="4 tokens, less than one window of 5"):
        data.token_windows(Characters(), ["abc"], 5)
    with pytest.raises(CalibrationError, match="less than one window"):
        data.calibration_windows(Characters(), ["abc"], 1, 5, seed=0)
    with pytest.raises(CalibrationError, match="0 calibration samples"):
        data.calibration_windows(Characters(), ["abc"], 0, 2, seed=0)


def test_calibration_draws_by_seed_without_repetition_from_a_bounded_part_of_the_text():
    def draw(seed):
        tokenizer = Characters()
        endless = (chr(100 + i % 1000) * 9 for i in itertools.count())
        batches = data.calibration_windows(tokenizer, endless, 20, 10, seed, batch=8)
        assert tokenizer.documents <= 8 * 20 + 64
        assert [len(batch["input_ids"]) for batch in batches] == [8, 8, 4]
        assert all(batch["labels"] is batch["input_ids"] for batch in batches)
        return torch.cat([batch["input_ids"] for batch in batches])

    first = draw(0)
    assert torch.equal(first, draw(0))
    assert not torch.equal(first, draw(1))
    assert len(first.unique(dim=0)) == 20


def test_calibration_gives_all_windows_of_a_short_text():
    batches = data.calibration_windows(Characters(), ["abcdefghi"], 128, 5, seed=0, labels=False)
    assert [*batches[0]] == ["input_ids"]
    assert batches[0]["input_ids"].shape == (2, 5)


# ---- files
def test_text_files_are_split_at_separators(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one\nmore\n<|endoftext|>\n\n<|endoftext|>\ntwo\n", encoding="utf8")
    assert [*data.read_documents(file)] == ["one\nmore", "two\n"]
    with gzip.open(tmp_path / "a.txt.gz", "wt", encoding="utf8") as compressed:
        compressed.write(file.read_text())
    assert [*data.read_documents(tmp_path / "a.txt.gz")] == ["one\nmore", "two\n"]


def test_separators_give_the_documents_of_a_plain_split(shared_data):
    file = shared_data / "tinystories" / "validation.txt"
    assert [*data.read_documents(file)] == file.read_text(encoding="utf8").split("\n<|endoftext|>\n")


def test_a_huge_document_comes_in_pieces(tmp_path):
    file = tmp_path / "a.txt"
    text = "".join(f"line {i}\n" for i in range(1000)) + "x" * 500
    file.write_text(text)
    pieces = [*data.read_documents(file, piece=100)]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 200


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "A.JSONL", "a.ndjson", "a.json", "c4-train.00000-of-01024.json.gz", "A.JSON.GZ"]
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_json_lines(tmp_path, name, mark):
    file = tmp_path / name
    content = '{"text": "one"}\n\n{"text": "two", "other": 1}\n{"text": " "}\n'
    content = mark + content
    file.write_bytes(gzip.compress(content.encode()) if name.lower().endswith("gz") else content.encode())
    assert [*data.read_documents(file)] == ["one", "two"]


@pytest.mark.parametrize("line", ["not json", '{"body": "x"}', '{"text": 3}', "[1]"])
def test_a_bad_json_line_is_named(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        [*data.read_documents(file)]


@pytest.mark.parametrize("content", ['[{"text": "one"}]', '[\n {"text": "one"}\n]', '{\n "text": "one"\n}'])
def test_json_that_is_no_lines_says_how_to_make_them(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"line 1: not a JSON object .* becomes that by"):
        [*data.read_documents(tmp_path / "a.json")]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone", encoding="utf8")
    assert [*data.read_documents(tmp_path / "a.txt")] == ["one"]


def test_a_damaged_compressed_file_is_named(tmp_path):
    content = bytearray(gzip.compress("".join(f'{{"text": "{i * i}"}}\n' for i in range(5000)).encode()))
    content[2000:2050] = bytes(byte ^ 0xFF for byte in content[2000:2050])
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(content)
    with pytest.raises(zlib.error), gzip.open(file) as opened:
        opened.read()
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        [*data.read_documents(file)]
    with pytest.raises(DataError, match=r"a\.jsonl\.gz holds no questions"):
        data.read_questions(file)


def test_binary_truncated_and_missing_files(tmp_path, embedded):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"not UTF-8 text \(invalid start byte\)"):
        [*data.read_documents(tmp_path / "a.txt")]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"text" * 1000)[:20])
    with pytest.raises(DataError, match="cannot be read"):
        [*data.read_documents(tmp_path / "b.txt.gz")]
    with pytest.raises(DataError, match="is not a file"):
        data.open_source([str(tmp_path / "none.txt")], "calibration", embedded)


# ---- corpora
def test_corpora_without_the_library_or_the_network_say_what_to_give_instead(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install .*c4.txt"):
        next(documents.corpus_documents("c4", "calibration"))

    def offline(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=offline))
    for name in data.CORPORA:
        with pytest.raises(DataError, match=f"{name} is neither cached nor within reach"):
            next(documents.corpus_documents(name, "evaluation"))


def test_corpora_are_read_by_their_conventions(monkeypatch):
    asked = []

    def load(*arguments, **options):
        asked.append((arguments, options))
        return ({"text": f"line {i}"} for i in range(3000))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load))
    (whole,) = documents.corpus_documents("wikitext2", "evaluation")
    assert whole.startswith("line 0\n\nline 1\n\n")
    assert asked[-1] == (("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test", "streaming": False})
    assert len([*documents.corpus_documents("c4", "evaluation")]) == 1100
    assert len([*documents.corpus_documents("c4", "calibration")]) == 3000


# ---- arrays and pictures
def test_arrays(tmp_path, embedded):
    images = np.random.default_rng(0).integers(0, 256, (5, 4, 4, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.arange(5, dtype=np.uint8))
    source = data.open_source([str(tmp_path / "a.npz")], "calibration", embedded)
    expected = (images / 255 - np.array(IMAGENET_MEAN)) / np.array(IMAGENET_STD)
    torch.testing.assert_close(source.inputs, torch.tensor(expected).permute(0, 3, 1, 2).float())
    assert source.targets.tolist() == [0, 1, 2, 3, 4]
    batches = data.calibration_batches(source, embedded, samples=3, length=9, seed=0, batch=2)
    assert [len(inputs) for inputs, _ in batches] == [2, 1]
    for inputs, targets in batches:
        assert torch.equal(inputs, source.inputs[targets])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"pixels": np.zeros(3)}, "no array 'images'"),
        ({"images": np.zeros((3, 2, 2)), "labels": np.zeros(2)}, "3 images and 2 labels"),
        ({"images": np.zeros((0, 2, 2))}, "no images"),
        ({"images": np.zeros((3, 2, 2), np.int64)}, r"type int64; save bytes, 0 to 255, as images.astype\(numpy.uint8"),
        ({"images": np.array([["a"]])}, "images are of type <U1"),
    ],
)
def test_unusable_arrays(tmp_path, embedded, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        data.open_source([str(tmp_path / "a.npz")], "calibration", embedded)


@pytest.mark.parametrize(
    ("labels", "kind", "expected"),
    [
        ([0.25, 0.75, -1.5], torch.float32, [0.25, 0.75, -1.5]),
        ([0.0, 2.0, 1.0], torch.int64, [0, 2, 1]),
        ([True, False, True], torch.int64, [1, 0, 1]),
    ],
)
def test_labels_are_classes_or_real_numbers(tmp_path, embedded, labels, kind, expected):
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 6), np.float32), labels=np.array(labels))
    (tmp_path / "a.npz").rename(tmp_path / "A.NPZ")
    targets = data.open_source([str(tmp_path / "A.NPZ")], "calibration", embedded).targets
    assert targets.dtype == kind
    assert targets.tolist() == expected


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["cat", "dog", "cat"], "no numbers"),
        ([1j, 2j, 3j], "no numbers"),
        ([0.5, float("nan"), 1.0], "NaN"),
        (np.array([1, None, 2], dtype=object), "both arrays of numbers"),
    ],
)
def test_labels_that_are_no_numbers(tmp_path, embedded, labels, message):
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 6)), labels=np.array(labels))
    with pytest.raises(DataError, match=message):
        data.open_source([str(tmp_path / "a.npz")], "calibration", embedded)


def test_grey_of_16_bits_is_scaled_to_8(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    grey = np.array([[0, 257, 32896], [65535, 514, 1000]], np.uint16)
    (tmp_path / "pictures").mkdir()
    image.fromarray(grey).save(tmp_path / "pictures" / "a.png")
    source = data.open_source([str(tmp_path / "pictures")], "calibration", embedded)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    seen = (source.inputs[0] * std + mean) * 255
    torch.testing.assert_close(seen, torch.tensor([[0.0, 1, 128], [255, 2, 4]]).expand(3, 2, 3), atol=1e-3, rtol=0)


def test_pictures_in_a_folder_and_in_a_zip(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "pictures"
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for index in range(2):
            image.new("RGB", (6, 5), (index * 90, 10, 20)).save(folder / label / f"p{index}.png")
    source = data.open_source([str(folder)], "calibration", embedded)
    assert source.inputs.shape == (4, 3, 5, 6)
    assert source.targets.tolist() == [0, 0, 1, 1]
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for index, file in enumerate(sorted(folder.rglob("*.png"))):
            archive.write(file, f"{7 + index}.png")
    zipped = data.open_source([str(tmp_path / "p.zip")], "calibration", embedded)
    assert torch.equal(zipped.inputs, source.inputs[torch.tensor([3, 0, 1, 2])])  # 10.png sorts before 7.png
    assert zipped.targets.tolist() == [10, 7, 8, 9]
    image.new("RGB", (9, 9)).save(folder / "cat" / "large.png")
    with pytest.raises(DataError, match="differ in size"):
        data.open_source([str(folder)], "calibration", embedded)


def test_folders_whose_names_are_numbers_are_those_classes(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    for label in ("2", "10"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        image.new("RGB", (6, 5)).save(tmp_path / "pictures" / label / "a.png")
    source = data.open_source([str(tmp_path / "pictures")], "calibration", embedded)
    assert source.targets.tolist() == [10, 2]  # files are read by name, and 10 sorts before 2


def test_pictures_through_a_networks_own_transform(tmp_path):
    image = pytest.importorskip("PIL.Image")
    models.ensure_torchvision()
    timm = pytest.importorskip("timm")
    for label in ("n01", "n02"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        image.new("RGB", (300 if label == "n01" else 260, 280), (200, 10, 20)).save(
            tmp_path / "pictures" / label / "p.png"
        )
    module = timm.create_model("resnet18", pretrained=False, num_classes=2)
    loaded = models.LoadedModel(module.eval(), None, "timm:resnet18", "image-classification", None, lambda *_: None)
    source = data.open_source([str(tmp_path / "pictures")], "evaluation", loaded)
    assert len(source.inputs) == 2
    assert source.targets.tolist() == [0, 1]
    expected = timm.data.create_transform(**timm.data.resolve_data_config({}, model=module), is_training=False)
    with image.open(tmp_path / "pictures" / "n02" / "p.png") as opened:
        assert torch.equal(source.inputs[torch.tensor([1])][0], expected(opened.convert("RGB")))
    (batch,) = data.calibration_batches(source, loaded, samples=2, length=0, seed=0)
    assert batch[0].shape == (2, 3, 224, 224)
    assert evaluate(loaded, source)["samples"] == 2
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        for label in ("n01", "n02"):
            archive.write(tmp_path / "pictures" / label / "p.png", f"{label}/p.png")
    zipped = data.open_source([str(tmp_path / "p.zip")], "evaluation", loaded)
    assert torch.equal(zipped.inputs[torch.arange(2)], source.inputs[torch.arange(2)])
    (tmp_path / "pictures" / "n01" / "p.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"p\.png is not a picture"):
        evaluate(loaded, source)


def test_arrays_are_normalised_as_a_timm_network_says(tmp_path):
    module = torch.nn.Linear(2, 2)
    module.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.25, 0.5)}
    loaded = models.LoadedModel(module, None, "mine", "other", None, lambda *_: None)
    np.savez(tmp_path / "a.npz", images=np.array([0, 255] * 6, np.uint8).reshape(1, 2, 2, 3).repeat(2, 0))
    seen = data.open_source([str(tmp_path / "a.npz")], "calibration", loaded).inputs
    assert [seen[:, channel].abs().unique().tolist() for channel in range(3)] == [[1.0], [2.0], [1.0]]


def test_pictures_are_normalised_as_the_file_beside_the_weights_says(make_set, tmp_path):
    transformers = pytest.importorskip("transformers")
    models.ensure_torchvision()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    network = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=4, patch_size=2, **sizes))
    network.save_pretrained(tmp_path / "network")
    file = tmp_path / "network" / "preprocessor_config.json"
    np.savez(tmp_path / "a.npz", images=np.zeros((2, 4, 4, 3), np.uint8))  # black, as the pictures are
    kinds = [*make_set("1.png", "2.png"), tmp_path / "a.npz"]
    halves = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    imagenet = [-mean / std for mean, std in zip(IMAGENET_MEAN, IMAGENET_STD, strict=True)]
    for stated, expected in (
        (None, imagenet),
        ({"do_resize": True}, imagenet),
        (halves, [-1.0] * 3),
        ({**halves, "do_normalize": False}, [0.0] * 3),
    ):
        if stated is not None:
            file.write_text(json.dumps(stated))
        loaded = models.load(tmp_path / "network")
        for kind in kinds:
            seen = data.open_source([str(kind)], "calibration", loaded).inputs
            torch.testing.assert_close(seen, torch.tensor(expected).view(1, 3, 1, 1).expand(2, 3, 4, 4))
    for wrong, message in (("{", "cannot be read"), (json.dumps({**halves, "image_std": [0.5]}), "do not go together")):
        file.write_text(wrong)
        with pytest.raises(DataError, match=f"preprocessor_config.json .*{message}"):
            data.open_source([str(tmp_path / "a.npz")], "calibration", loaded)


def test_damaged_zip_and_empty_folder(tmp_path, embedded):
    pytest.importorskip("PIL")
    (tmp_path / "a.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="not a zip"):
        data.open_source([str(tmp_path / "a.zip")], "calibration", embedded)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no pictures"):
        data.open_source([str(tmp_path / "empty")], "calibration", embedded)


# ---- functions of the user's
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
def test_unusable_functions(tmp_path, embedded, body, message):
    (tmp_path / "mine.py").write_text(f"def batches():\n    {body}\n")
    with pytest.raises((CalibrationError, ModelError), match=message):
        data.open_source([f"{tmp_path / 'mine.py'}:batches"], "calibration", embedded)


def test_batches_of_a_function_are_taken_as_they_are(tmp_path, embedded):
    (tmp_path / "mine.py").write_text("import torch\n\ndef batches():\n    yield [torch.ones(2, 3), torch.zeros(2)]\n")
    source = data.open_source([f"{tmp_path / 'mine.py'}:batches"], "calibration", embedded)
    ((inputs, targets),) = data.calibration_batches(source, embedded, samples=9, length=9, seed=0)
    assert inputs.shape == (2, 3)
    assert targets.shape == (2,)


def test_a_generator_may_import_what_lies_beside_it(tmp_path, embedded):
    (tmp_path / "beside_the_batches.py").write_text("import torch\n\nmade = torch.ones(2, 3)\n")
    (tmp_path / "mine.py").write_text("def batches():\n    from beside_the_batches import made\n    yield made\n")
    source = data.open_source([f"{tmp_path / 'mine.py'}:batches"], "calibration", embedded)
    assert source.batches[0].shape == (2, 3)


def test_named_inputs_may_have_targets(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Linear):\n"
        "    def forward(self, values):\n        return super().forward(values)\n\n\n"
        "def net():\n    return Net(3, 2)\n\n\n"
        "def batches():\n    return [({'values': torch.ones(4, 3)}, torch.zeros(4, dtype=torch.int64))]\n"
    )
    loaded = models.load(f"{tmp_path / 'mine.py'}:net")
    source = data.open_source([f"{tmp_path / 'mine.py'}:batches"], "evaluation", loaded)
    assert evaluate(loaded, source)["samples"] == 4


def test_windows_never_exceed_the_context(embedded):
    source = data.open_source([], "calibration", embedded)
    batches = data.calibration_batches(source, embedded, samples=3, length=2048, seed=0)
    assert batches[0]["input_ids"].shape == (3, 256)


def test_text_needs_a_tokenizer(tmp_path):
    (tmp_path / "net.py").write_text("import torch\n\ndef build():\n    return torch.nn.Linear(2, 2)\n")
    loaded = models.load(f"{tmp_path / 'net.py'}:build")
    (tmp_path / "a.txt").write_text("some text")
    source = data.open_source([str(tmp_path / "a.txt")], "calibration", loaded)
    with pytest.raises(ModelError, match="no tokenizer"):
        data.calibration_batches(source, loaded, samples=3, length=8, seed=0)
    with pytest.raises(DataError, match="needs --data"):
        data.open_source([], "calibration", loaded)


def test_json_of_the_shared_sample(shared_data):
    texts = [*data.read_documents(shared_data / "c4" / "c4_sample.jsonl.gz")]
    assert len(texts) == 1480
    with gzip.open(shared_data / "c4" / "c4_sample.jsonl.gz", "rt", encoding="utf8") as lines:
        assert texts[0] == json.loads(next(lines))["text"]


def test_class_folders_of_numbered_pictures(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for index in range(2):
            image.new("RGB", (6, 5)).save(tmp_path / "pictures" / label / f"000{index}.png")
    source = data.open_source([str(tmp_path / "pictures")], "calibration", embedded)
    assert source.targets.tolist() == [0, 0, 1, 1]


def test_hidden_pictures_are_no_class_and_stray_ones_are_named(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    names = ("a/1.png", "b/2.png", "b/.ipynb_checkpoints/2-checkpoint.png", "__MACOSX/b/._2.png")
    for name in names:
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (4, 4)).save(tmp_path / "set" / name)
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for name in names:
            archive.write(tmp_path / "set" / name, name)
    for source in ("set", "set.zip"):
        assert data.open_source([str(tmp_path / source)], "calibration", embedded).targets.tolist() == [0, 1]
    image.new("RGB", (4, 4)).save(tmp_path / "set" / "logo.png")
    with pytest.raises(DataError, match=r"logo\.png lies beside folders of pictures"):
        data.open_source([str(tmp_path / "set")], "calibration", embedded)


@pytest.fixture
def make_set(tmp_path):
    """Makes a folder of small pictures (and of empty folders, whose names end with "/") and a zip file of it."""
    image = pytest.importorskip("PIL.Image")

    def make(*names):
        with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
            for name in names:
                file = tmp_path / "set" / name
                (file if name.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
                if not name.endswith("/"):
                    image.new("RGB", (4, 4)).save(tmp_path / "a.png")
                    file.write_bytes((tmp_path / "a.png").read_bytes())
                archive.write(file, name)
        return [tmp_path / "set", tmp_path / "set.zip"]

    return make


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("n1/images/a.png", "n1/boxes.txt", "n2/images/a.png", "n2/images/b.png"), [0, 1, 1]),  # as Tiny-ImageNet
        (("whole/read.me", "whole/cat/a.png", "whole/dog/a.png"), [0, 1]),
        (("one/1.png", "one/5.png"), [1, 5]),
        (("1.png", "5.png", "notes/a.txt"), [1, 5]),
        (("cat/a.png", "dog/a.png", ".ipynb_checkpoints/", "dog/.thumbs/a.png"), [0, 1]),
    ],
)
def test_which_folder_is_the_class(make_set, embedded, names, labels):
    for source in make_set(*names):
        assert data.open_source([str(source)], "calibration", embedded).targets.tolist() == labels


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("cat/a.png", "dog/a.tiff", "eel/a.png"), r"dog has no pictures \(.png"),
        (("cat/a.png", "dog/", "eel/a.png"), r"dog has no pictures"),
        (("train/cat/a.png", "train/dog/a.png", "val/cat/a.png"), "train and val, which are no classes: give only one"),
        (("Test/1.png", "train/2.png"), "Test and train, which are no classes"),
        (("cat/a.png", "dog/large/a.png"), "pictures lie in cat and in dog/large"),
        (("animals/cat/a.png", "animals/dog/a.png", "cars/old/a.png"), "lie in animals/cat and in animals/dog"),
    ],
)
def test_folders_that_are_no_clear_classes(make_set, embedded, names, message):
    for source in make_set(*names):
        with pytest.raises(DataError, match=message):
            data.open_source([str(source)], "calibration", embedded)


def test_class_folders_may_be_links_but_lead_somewhere(make_set, tmp_path, embedded):
    folder, _ = make_set("cat/a.png", "eel/a.png")
    (folder / "cat").rename(tmp_path / "elsewhere")
    (folder / "cat").symlink_to(tmp_path / "elsewhere")
    (folder / "eel" / "back").symlink_to(folder)  # round in a circle
    assert data.open_source([str(folder)], "calibration", embedded).targets.tolist() == [0, 1]
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    with pytest.raises(DataError, match="cat is a link that leads nowhere"):
        data.open_source([str(folder)], "calibration", embedded)


@pytest.mark.parametrize(
    ("shape", "seen"),
    [
        ((5, 4, 8, 8), (5, 4, 8, 8)),
        ((5, 64, 7, 7), (5, 64, 7, 7)),
        ((5, 4, 6, 8), (5, 4, 6, 8)),
        ((5, 8, 8, 4), (5, 4, 8, 8)),
        ((5, 6, 8, 3), (5, 3, 6, 8)),
        ((5, 6, 8), (5, 1, 6, 8)),
    ],
)
def test_which_dimension_of_arrays_is_the_channels(tmp_path, embedded, shape, seen):
    np.savez(tmp_path / "a.npz", images=np.zeros(shape, np.float32))
    assert data.open_source([str(tmp_path / "a.npz")], "calibration", embedded).inputs.shape == seen


def test_inputs_take_the_dtype_of_the_network(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((5, 2, 4, 4), np.float32), labels=np.arange(5))
    model = models.LoadedModel(torch.nn.Linear(4, 2).bfloat16(), None, "own", "other", None, lambda *_: None)
    source = data.open_source([str(tmp_path / "a.npz")], "calibration", model)
    batches = data.calibration_batches(source, model, samples=4, length=1, seed=0)
    assert {inputs.dtype for inputs, _ in batches} == {torch.bfloat16}
