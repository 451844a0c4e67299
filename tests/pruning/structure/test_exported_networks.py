"""Vision networks of timm after a removal, and narrower networks exported to ONNX."""

import io
import warnings

import pytest
import torch
from families import build
from test_sites import outputs, without_units
from traced_sites import find_sites

from iobs.pruning.structure.units import remove

# name -> kinds of units; small networks keep the test fast
TIMM = {
    "resnet10t": {"channels"},
    "resnext26ts": {"channels"},
    "mobilenetv2_035": {"channels"},
    "mobilenetv3_small_050": {"channels"},
    "test_vit": {"neurons", "heads"},
    "test_convnext": {"neurons"},
    "test_efficientnet": {"channels"},
}


def thinned(model, batch):
    """The narrower model, its outputs and the expected ones."""
    sites = find_sites(model, batch)
    kept = {site.name: range(0, site.count, 2) for site in sites}
    expected = outputs(without_units(model, sites, kept), batch)
    remove(model, sites, kept)
    return sites, outputs(model, batch), expected


def in_onnx_runtime(model, batch):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own successor
        torch.onnx.export(model, (batch,), file, dynamo=False, input_names=["x"])
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"x": batch.numpy()})[0])


@pytest.mark.parametrize("name", ["timm_vit", "timm_convnext", "timm_swin", "timm_resnet"])
def test_timm_families_keep_their_outputs(name):
    pytest.importorskip("timm")
    model, data = build(name)
    _, found, expected = thinned(model, data[0])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", TIMM)
def test_timm_networks_are_exported_after_a_removal(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, pretrained=False, num_classes=5).eval()
    for value in model.parameters():
        value.data.add_(0.02 * torch.randn_like(value))
    batch = torch.randn(2, 3, 160 if name == "test_vit" else 64, 160 if name == "test_vit" else 64)
    sites, found, expected = thinned(model, batch)
    assert {site.kind for site in sites} == TIMM[name]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(in_onnx_runtime(model, batch), found, atol=1e-4, rtol=1e-3)


def test_pretrained_network_is_exported_after_a_removal(zoo):
    model = zoo.resnet20()
    batch = zoo.cifar10("train10k", "resnet20")[0][:8]
    sites, found, expected = thinned(model, batch)
    assert [site.count for site in sites] == [16] * 3 + [32] * 3 + [64] * 3
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(in_onnx_runtime(model, batch), found, atol=1e-4, rtol=1e-3)
