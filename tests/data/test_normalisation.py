"""Normalisation, channel order and dtype of images, as the network states them."""

import json
import zipfile

import numpy as np
import pytest
import torch

from iobs import data, models
from iobs.data.images import IMAGENET_MEAN, IMAGENET_STD
from iobs.errors import DataError
from iobs.evaluate import evaluate


def test_images_use_the_transform_of_a_timm_network(tmp_path):
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
    with pytest.raises(DataError, match=r"p\.png is not an image"):
        evaluate(loaded, source)


def test_arrays_use_the_normalisation_of_a_timm_network(tmp_path):
    module = torch.nn.Linear(2, 2)
    module.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.25, 0.5)}
    loaded = models.LoadedModel(module, None, "mine", "other", None, lambda *_: None)
    np.savez(tmp_path / "a.npz", images=np.array([0, 255] * 6, np.uint8).reshape(1, 2, 2, 3).repeat(2, 0))
    seen = data.open_source([str(tmp_path / "a.npz")], "calibration", loaded).inputs
    assert [seen[:, channel].abs().unique().tolist() for channel in range(3)] == [[1.0], [2.0], [1.0]]


def test_images_use_the_preprocessor_config(make_set, tmp_path):
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
def test_channel_dimension_of_arrays_is_inferred(tmp_path, embedded, shape, seen):
    np.savez(tmp_path / "a.npz", images=np.zeros(shape, np.float32))
    assert data.open_source([str(tmp_path / "a.npz")], "calibration", embedded).inputs.shape == seen


def test_inputs_take_the_dtype_of_the_network(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((5, 2, 4, 4), np.float32), labels=np.arange(5))
    model = models.LoadedModel(torch.nn.Linear(4, 2).bfloat16(), None, "own", "other", None, lambda *_: None)
    source = data.open_source([str(tmp_path / "a.npz")], "calibration", model)
    batches = data.calibration_batches(source, model, samples=4, length=1, seed=0)
    assert {inputs.dtype for inputs, _ in batches} == {torch.bfloat16}
