"""Images in arrays, folders and archives, and their labels."""

import zipfile

import numpy as np
import pytest
import torch

from iobs import data
from iobs.data.images import IMAGENET_MEAN, IMAGENET_STD
from iobs.errors import DataError


def test_arrays_of_images_are_normalised_and_batched(tmp_path, embedded):
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
        ({"images": np.zeros(3, np.uint8)}, r"the shape \(3,\)"),
        ({"images": np.uint8(3)}, r"the shape \(\)"),
        ({"images": np.zeros((3, 2, 2)), "labels": 3}, "a single number"),
    ],
)
def test_unusable_arrays_are_refused(tmp_path, embedded, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        data.open_source([str(tmp_path / "a.npz")], "calibration", embedded)


@pytest.mark.parametrize("dtype", [">f4", ">f8", "f2", np.longdouble])
def test_floating_images_of_any_dtype_are_read(tmp_path, embedded, dtype):
    images = np.arange(24).reshape(2, 3, 2, 2) / 8
    np.savez(tmp_path / "a.npz", images=images.astype(dtype))
    found = data.open_source([str(tmp_path / "a.npz")], "calibration", embedded).inputs
    assert torch.equal(found, torch.from_numpy(images).float())


def test_bytes_that_are_no_images_are_not_normalised(tmp_path, embedded):
    np.savez(tmp_path / "a.npz", images=np.full((2, 3), 51, np.uint8))
    found = data.open_source([str(tmp_path / "a.npz")], "calibration", embedded).inputs
    assert torch.equal(found, torch.full((2, 3), 0.2))


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
def test_labels_that_are_not_numbers_are_refused(tmp_path, embedded, labels, message):
    np.savez(tmp_path / "a.npz", images=np.zeros((3, 6)), labels=np.array(labels))
    with pytest.raises(DataError, match=message):
        data.open_source([str(tmp_path / "a.npz")], "calibration", embedded)


def test_grey_images_of_16_bits_are_scaled_to_8(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    grey = np.array([[0, 257, 32896], [65535, 514, 1000]], np.uint16)
    (tmp_path / "pictures").mkdir()
    image.fromarray(grey).save(tmp_path / "pictures" / "a.png")
    source = data.open_source([str(tmp_path / "pictures")], "calibration", embedded)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    seen = (source.inputs[0] * std + mean) * 255
    torch.testing.assert_close(seen, torch.tensor([[0.0, 1, 128], [255, 2, 4]]).expand(3, 2, 3), atol=1e-3, rtol=0)


def test_images_of_a_folder_and_a_zip_are_equal(tmp_path, embedded):
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


def test_numbered_folders_are_the_class_numbers(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    for label in ("2", "10"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        image.new("RGB", (6, 5)).save(tmp_path / "pictures" / label / "a.png")
    source = data.open_source([str(tmp_path / "pictures")], "calibration", embedded)
    assert source.targets.tolist() == [10, 2]  # files are read by name, and 10 sorts before 2


def test_damaged_zip_and_empty_folder_are_refused(tmp_path, embedded):
    pytest.importorskip("PIL")
    (tmp_path / "a.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match="not a zip"):
        data.open_source([str(tmp_path / "a.zip")], "calibration", embedded)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no images"):
        data.open_source([str(tmp_path / "empty")], "calibration", embedded)


def test_class_folders_take_precedence_over_numbered_files(tmp_path, embedded):
    image = pytest.importorskip("PIL.Image")
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for index in range(2):
            image.new("RGB", (6, 5)).save(tmp_path / "pictures" / label / f"000{index}.png")
    source = data.open_source([str(tmp_path / "pictures")], "calibration", embedded)
    assert source.targets.tolist() == [0, 0, 1, 1]


def test_hidden_folders_are_ignored_and_stray_images_refused(tmp_path, embedded):
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
    with pytest.raises(DataError, match=r"logo\.png lies beside folders of images"):
        data.open_source([str(tmp_path / "set")], "calibration", embedded)


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("n1/images/a.png", "n1/boxes.txt", "n2/images/a.png", "n2/images/b.png"), [0, 1, 1]),  # as Tiny-ImageNet
        (("whole/read.me", "whole/cat/a.png", "whole/dog/a.png"), [0, 1]),
        (("one/1.png", "one/5.png"), [1, 5]),
        (("²/a.png", "³/a.png"), [0, 1]),
        (("20260131235959123456/a.png", "20260131235959123457/a.png"), [0, 1]),
        (("1.png", "5.png", "notes/a.txt"), [1, 5]),
        (("cat/a.png", "dog/a.png", ".ipynb_checkpoints/", "dog/.thumbs/a.png"), [0, 1]),
    ],
)
def test_class_is_the_name_of_the_deciding_folder(make_set, embedded, names, labels):
    for source in make_set(*names):
        assert data.open_source([str(source)], "calibration", embedded).targets.tolist() == labels


def test_numbers_that_int64_does_not_hold_are_no_labels(make_set, embedded):
    for source in make_set("20260131235959123456.png", "20260131235959123457.png"):
        assert data.open_source([str(source)], "calibration", embedded).targets is None


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("cat/a.png", "dog/a.tiff", "eel/a.png"), r"dog has no images \(.png"),
        (("cat/a.png", "dog/", "eel/a.png"), r"dog has no images"),
        (
            ("train/cat/a.png", "train/dog/a.png", "val/cat/a.png"),
            "train and val, which are splits of a data set",
        ),
        (("Test/1.png", "train/2.png"), "Test and train, which are splits"),
        (("cat/a.png", "dog/large/a.png"), "images lie in cat and in dog/large"),
        (("animals/cat/a.png", "animals/dog/a.png", "cars/old/a.png"), "lie in animals/cat and in animals/dog"),
    ],
)
def test_ambiguous_class_folders_are_refused(make_set, embedded, names, message):
    for source in make_set(*names):
        with pytest.raises(DataError, match=message):
            data.open_source([str(source)], "calibration", embedded)


def test_class_folders_may_be_links_but_not_broken(make_set, tmp_path, embedded):
    folder, _ = make_set("cat/a.png", "eel/a.png")
    (folder / "cat").rename(tmp_path / "elsewhere")
    (folder / "cat").symlink_to(tmp_path / "elsewhere")
    (folder / "eel" / "back").symlink_to(folder)  # round in a circle
    assert data.open_source([str(folder)], "calibration", embedded).targets.tolist() == [0, 1]
    (tmp_path / "elsewhere").rename(tmp_path / "gone")
    with pytest.raises(DataError, match="cat is a broken link"):
        data.open_source([str(folder)], "calibration", embedded)
