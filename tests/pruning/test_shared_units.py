"""Units that several layers read, or that share a reader: the joint choice, and networks that become narrower."""

import copy
import io
import warnings
from itertools import combinations

import pytest
import torch
from torch import nn
from traced_sites import find_sites

import iobs
from iobs.core.quadratic import Quadratic
from iobs.pruning.network.layers import Layer
from iobs.pruning.structure.units import SitesOfLayers
from iobs.pruning.widths.readers import ReaderProblem, ReaderShare, joint_quadratic


def block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    """Two levels; one transposed convolution whose windows overlap, and one whose windows do not."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.middle = block(3, 6), block(6, 8), block(8, 12)
        self.up2 = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, bias=False)
        self.join2, self.join1, self.last = block(16, 8), block(12, 6), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        fine = self.down1(x)
        coarse = self.down2(nn.functional.max_pool2d(fine, 2))
        up = self.up2(self.middle(nn.functional.max_pool2d(coarse, 2)))
        up = self.up1(self.join2(torch.cat([coarse, up], 1)))
        return self.last(self.join1(torch.cat([fine, up], 1)))


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.boxes, self.classes = nn.Linear(12, 40), nn.Linear(40, 4), nn.Linear(40, 6)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return torch.cat([self.boxes(hidden), self.classes(hidden)], 1)


class Gated(nn.Module):
    """A block with channel attention: the gate reads averages of the channels."""

    def __init__(self):
        super().__init__()
        self.stem, self.expand, self.project = block(3, 6), block(6, 16), nn.Conv2d(16, 6, 1)
        self.squeeze, self.excite, self.last = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1), nn.Linear(6, 3)

    def forward(self, x):
        x = self.stem(x)
        inner = self.expand(x)
        gate = self.excite(torch.relu(self.squeeze(inner.mean((2, 3), keepdim=True)))).sigmoid()
        return self.last((x + self.project(inner * gate)).mean((2, 3)))


def trained(build, data):
    torch.manual_seed(5)
    model = build()
    with torch.no_grad():
        for part in data:  # running statistics
            model(part)
    return model.eval()


def pictures(count=40):
    return list(torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0)).split(10))


def vectors(count=200):
    return list(torch.randn(count, 12, generator=torch.Generator().manual_seed(1)).split(50))


def random_reader(path, rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(60, columns, generator=generator, dtype=torch.float64)
    inputs = inputs @ torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    problem = Quadratic.at(weight, inputs.T @ inputs / len(inputs))
    return ReaderProblem(Layer(path, (rows, columns)), problem, torch.ones(rows, 1), None)


@pytest.mark.parametrize("keep", [2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_joint_choice_is_the_best_for_the_sum_of_all_readers(keep, seed):
    """Seven units: one column of the first reader, which has two columns more, and two columns of the second."""
    first, second = random_reader("a", 3, 9, seed), random_reader("b", 5, 14, seed + 100)
    columns = tuple((unit,) for unit in range(7)), tuple((2 * unit, 2 * unit + 1) for unit in range(7))
    present = torch.ones(9, dtype=torch.bool)
    present[8] = False  # a column that another site lost
    parts = ReaderShare(first, columns[0], present), ReaderShare(second, columns[1], torch.ones(14, dtype=torch.bool))
    problem, labels = joint_quadratic(parts)
    found = iobs.solve(problem, iobs.Groups(tuple(labels.tolist()), keep=keep), "exact")
    chosen = {int(label) for label in labels[found.mask.any(0)]}

    def cost(kept):
        total = 0.0
        for part in parts:
            mask = part.present.clone()
            for unit in set(range(7)) - set(kept):
                mask[list(part.columns[unit])] = False
            support, hessian = mask.nonzero().flatten(), part.reader.problem.matrix
            centre = part.reader.problem.centre()
            weight = torch.zeros_like(centre)
            weight[:, support] = torch.linalg.solve(hessian[support][:, support], (centre @ hessian)[:, support].T).T
            gap = weight - centre
            total += float(((gap @ hessian) * gap).sum())
        return total

    costs = {kept: cost(kept) for kept in combinations(range(7), keep)}
    assert found.stats["proved"]
    assert cost(tuple(sorted(chosen))) == pytest.approx(min(costs.values()), rel=1e-9)


@pytest.mark.parametrize("recipe", ["one-shot", "fast"])
def test_two_heads_lose_the_same_units(recipe):
    dense = trained(TwoHeads, vectors())
    model = copy.deepcopy(dense)
    report = iobs.prune(model, vectors(), iobs.Structured(0.3), recipe)
    assert model.body.out_features == model.boxes.in_features == model.classes.in_features == 28
    assert [(one.before, one.after) for one in report.widths] == [(40, 28)]
    fresh = torch.randn(300, 12, generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        wanted = dense(fresh)
        error = (model(fresh) - wanted).square().sum(0) / (wanted - wanted.mean(0)).square().sum(0)
    assert float(error.max()) < 0.5  # both heads are repaired: the least that random units would leave is about 0.3


def test_joint_choice_is_better_for_both_heads_than_that_of_one():
    dense = trained(TwoHeads, vectors())
    with torch.no_grad():  # the first head alone would remove every unit that only the second reads
        dense.boxes.weight[:, 20:] *= 1e-3
    joint = copy.deepcopy(dense)
    iobs.prune(joint, vectors(), iobs.Structured(0.5), "one-shot")
    alone = nn.Sequential(dense.body, nn.ReLU(), dense.boxes)
    alone = copy.deepcopy(alone)
    iobs.prune(alone, vectors(), iobs.Structured(0.5), "one-shot")
    rows = [(dense.body.weight == row).all(1).nonzero().item() for row in alone[0].weight]
    wanted, inputs = dense.classes.weight.detach(), torch.cat(vectors())
    hidden = torch.relu(dense.body(inputs)).detach()
    refit = torch.linalg.lstsq(torch.cat([hidden[:, rows], torch.ones(len(hidden), 1)], 1), hidden @ wanted.T)
    left = hidden @ wanted.T - torch.cat([hidden[:, rows], torch.ones(len(hidden), 1)], 1) @ refit.solution
    ours = (joint(inputs)[:, 4:] - dense(inputs)[:, 4:]).detach()
    assert float(ours.square().sum()) < 0.8 * float(left.square().sum())


@pytest.mark.parametrize("recipe", ["one-shot", pytest.param("fast", marks=pytest.mark.slow)])
def test_u_net_becomes_narrower(recipe):
    model = trained(UNet, pictures())
    report = iobs.prune(model, pictures(), iobs.Structured(0.4), recipe)
    after = {one.name: one.after for one in report.widths}
    assert len(after) == 7
    assert report.costs[0].share <= 0.6 + 1e-9
    assert model.up2.in_channels == model.middle[0].out_channels == after["up2"]
    assert model.up1.out_channels == len(model.up1.weight[0]) == after["join1.0:up1"]
    assert model.join1[0].in_channels == model.down1[0].out_channels + model.up1.out_channels
    assert model.join2[0].in_channels == model.down2[0].out_channels + model.up2.out_channels
    assert model(pictures()[0]).shape == (10, 2, 16, 16)


def test_narrower_u_net_gives_the_same_outputs_in_onnx_runtime():
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model = trained(UNet, pictures())
    iobs.prune(model, pictures(), iobs.Structured(0.4), "one-shot")
    file, batch = io.BytesIO(), pictures()[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own successor
        torch.onnx.export(model, (batch,), file, dynamo=False, input_names=["x"])
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    found = torch.from_numpy(session.run(None, {"x": batch.numpy()})[0])
    torch.testing.assert_close(found, model(batch), atol=1e-4, rtol=1e-3)


def test_bias_of_a_transposed_convolution_is_refitted():
    """Nothing is removed from the transposed convolution's output; its bias takes the mean of the removed inputs."""
    model = nn.Sequential(nn.Conv2d(3, 10, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(10, 2, 2, stride=2)).eval()
    dense = copy.deepcopy(model)
    iobs.prune(model, pictures(), iobs.Structured(0.5), "one-shot")
    assert model[2].in_channels == model[0].out_channels == 5
    every = torch.cat(pictures())
    with torch.no_grad():
        gap = model(every) - dense(every)
        spread = dense(every).std()
    assert float(gap.mean((0, 2, 3)).abs().max()) < 0.02 * float(spread)


def test_channels_with_channel_attention_are_removed():
    model = trained(Gated, pictures())
    report = iobs.prune(model, pictures(), iobs.Structured(0.4), "fast")
    kept = next(one.after for one in report.widths if one.before == 16)
    assert kept < 16
    assert model.squeeze.in_channels == model.project.in_channels == model.excite.out_channels == kept


class Residual(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.first, self.norm = block(width, inner), nn.BatchNorm2d(width)
        self.second = nn.Conv2d(inner, width, 3, padding=1, bias=False)

    def forward(self, x):
        return torch.relu(x + self.norm(self.second(self.first(x))))


def residual():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    return nn.Sequential(block(3, 12), Residual(12, 10), Residual(12, 14), head)


@pytest.mark.parametrize("recipe", ["one-shot", pytest.param("fast", marks=pytest.mark.slow)])
def test_stream_of_a_residual_network_becomes_narrower(recipe):
    """Two blocks and a classifier read the channels that the stem and both blocks write."""
    dense = trained(residual, pictures())
    inner = copy.deepcopy(dense)
    iobs.prune(inner, pictures(), iobs.Structured(0.4), recipe)
    assert inner[0][0].out_channels == 12
    model = copy.deepcopy(dense)
    report = iobs.prune(model, pictures(), "structured:40%,units=stream", recipe)
    width = next(one.after for one in report.widths if one.before == 12)
    assert width < 12 or recipe == "fast"  # an allocation may spare the stream
    assert model[3][2].in_features == model[0][0].out_channels == width
    assert all(model[at].norm.num_features == model[at].second.out_channels == width for at in (1, 2))
    assert all(model[at].first[0].in_channels == width for at in (1, 2))
    fresh = torch.randn(100, 3, 16, 16, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        wanted = dense(fresh)
        error = (model(fresh) - wanted).square().mean() / (wanted - wanted.mean(0)).square().mean()
    assert float(error) < 0.7


def test_cost_of_a_transposed_convolution_counts_every_input_once():
    from iobs.pruning.widths.costs import Products

    model, batch = trained(UNet, pictures()), pictures()[0]
    products = Products.count(model, batch, find_sites(model, batch))
    macs = {one.path: one.positions * one.entries({}) for one in products.products}
    assert macs["up2"] == 16 * 12 * 8 * 4  # 4 x 4 positions, 4 entries of the kernel
    assert macs["up1"] == 64 * 8 * 6 * 9


def test_groups_of_a_shared_reader_hold_the_units_of_all_its_sites():
    model, batch = trained(UNet, pictures()), pictures()[0]
    sites = [site for site in find_sites(model, batch) if site.name.startswith("join1.0:")]
    reader = Layer("join1.0", (6, 12 * 9))
    others = {"down2.0": Layer("down2.0", (8, 54))}
    found = SitesOfLayers(tuple(sites), {"join1.0": reader, **others})
    kept = {sites[0].name: [0, 2], sites[1].name: [1]}
    pattern = found.chosen(reader, kept)
    columns = pattern.mask(108).nonzero().flatten().div(9, rounding_mode="floor").unique().tolist()
    assert columns == sorted([sites[0].columns[0][0] // 9, sites[0].columns[2][0] // 9, sites[1].columns[1][0] // 9])
    assert pattern.zeros((6, 108)) == 6 * 9 * 9
