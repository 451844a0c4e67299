"""Trained networks of four kinds pruned by one call without information on their kind."""

import io
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

import iobs
from iobs.core.grids import by_channel
from iobs.pruning.network.layers import find_layers

# Layers that 2:4 and 4:8 do not divide: 27 columns (a 3 x 3 kernel on colours) and 20 columns (a classifier).
ODD = {"resnet20": ["conv1"], "vit": [], "mlpnet": ["fc3"], "mobilenet": ["stem.conv"]}
# Number of matrices pruned by default; depthwise convolutions stay dense.
MATRICES = {"resnet20": 22, "vit": 1 + 6 * 4 + 1, "mlpnet": 3, "mobilenet": 15}


def cifar(folder, network):
    mean, std = {"resnet20": (0.5, 0.5), "vit": (0.473, 0.201)}[network]
    with np.load(folder / "cifar10/train10k.npz") as archive:
        images, labels = archive["images"][:32], archive["labels"][:32].astype(np.int64)
    return (torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255 - mean) / std, torch.from_numpy(labels)


def digits(zoo, folder):
    images, labels = zoo.mnist("train")
    return images[:256], labels[:256]


def photographs(zoo, folder):
    with zipfile.ZipFile(folder / "imagenet_samples/samples600.zip") as archive:
        names = sorted(archive.namelist())[:6]
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(archive.read(name))))[::2, ::2] for name in names])
    labels = torch.tensor([int(name.split(".")[0]) for name in names])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1, labels


NETWORKS = {
    "resnet20": (lambda zoo: zoo.resnet20(), lambda zoo, folder: cifar(folder, "resnet20")),
    "vit": (lambda zoo: zoo.vit_cifar(), lambda zoo, folder: cifar(folder, "vit")),
    "mlpnet": (lambda zoo: zoo.mlpnet(), digits),
    "mobilenet": (lambda zoo: zoo.mobilenet_v1(), photographs),
}


def groups_of(layer, model, pattern):
    """Kept entries of each group, which of a convolution are input channels at one position."""
    matrix, order = layer.read(model), by_channel(pattern, layer.shape[1], layer.kernel)
    return ((matrix if order is None else matrix[:, order]).reshape(-1, pattern.of) != 0).sum(1)


# One pattern for a network of convolutions and for one of linear layers in the gate.
GATE = {"resnet20": "2:4", "mlpnet": "unstructured"}
CASES = [
    pytest.param(
        name,
        pattern,
        id=f"{name}-{pattern}",
        marks=() if str(pattern).startswith(GATE.get(name, "-")) else [pytest.mark.slow],
    )
    for name in NETWORKS
    for pattern in (iobs.Unstructured(0.5), iobs.NM(2, 4), iobs.NM(4, 8))
]


@pytest.mark.parametrize(("name", "pattern"), CASES)
def test_prune_of_a_trained_network_keeps_most_predictions(zoo, shared_data, name, pattern):
    make, load = NETWORKS[name]
    model, (inputs, labels) = make(zoo), load(zoo, shared_data)
    structured = isinstance(pattern, iobs.NM)
    with torch.no_grad():
        dense = model(inputs).argmax(1)

    report = iobs.prune(
        model,
        [(inputs, labels)],
        pattern,
        iobs.Recipe(target="residual"),
        solver=iobs.ADMM("fast"),
        holdout=0,
        ignore=ODD[name] if structured else None,
    )

    pruned = [layer for layer in find_layers(model) if layer.name in {row.name for row in report.audit}]
    assert len(pruned) == MATRICES[name] - (len(ODD[name]) if structured else 0)
    for layer in pruned:
        zeros = int((layer.read(model) == 0).sum())
        assert zeros >= layer.weights // 2
        if structured:
            assert int(groups_of(layer, model, pattern).max()) <= pattern.keep
    with torch.no_grad():
        agreement = float((model(inputs).argmax(1) == dense).float().mean())
    assert agreement > 0.6, f"after pruning half of the weights, only {agreement:.0%} of the predictions are unchanged"
