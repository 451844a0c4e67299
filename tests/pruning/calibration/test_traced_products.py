"""Layers found by their use in products: pruned as the Linear that they are equal to."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from use_models import PLAIN, Direct, Equal, data, zeros

import iobs
from iobs.errors import CalibrationError
from iobs.pruning.calibration.hooks import captured_inputs
from iobs.pruning.network.layers import Layer, find_layers
from iobs.pruning.widths.costs import counting_kernels


@pytest.mark.parametrize("name", PLAIN)
def test_parameter_in_a_product_is_pruned_as_the_equal_linear(name):
    shape, use, matrix, bias = PLAIN[name]
    direct = Direct(shape, use)
    equal = Equal(direct, matrix, bias)
    recipe = iobs.Recipe(target="dense", solver="sparsegpt")
    report = iobs.prune(direct, data(), 0.5, recipe)
    expected = iobs.prune(equal, data(), 0.5, recipe)
    assert sorted(row.name for row in report.audit) == ["head", "w"]
    assert report.coverage.share == 1
    assert zeros(direct.w) == report.zeros - zeros(direct.head.weight) == expected.zeros - zeros(direct.head.weight)
    torch.testing.assert_close(matrix(direct.w.detach()), equal.w.weight.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(direct.head.weight, equal.head.weight, atol=1e-5, rtol=1e-4)
    assert {row.name: row.zeros for row in iobs.audit(direct)} == {row.name: row.zeros for row in report.audit}


@pytest.mark.parametrize(
    "use",
    [
        lambda x, w: torch.einsum("bi,oi->bo", x, w),
        lambda x, w: torch.addmm(x.new_zeros(10), x, w.t()),
        lambda x, w: torch.bmm(x[None], w.t()[None])[0],
        lambda x, w: functional.linear(x, torch.cat([w[:3], w[3:]])),
        lambda x, w: functional.linear(x, torch.stack([*w])),
    ],
    ids=["einsum", "addmm", "bmm", "cat", "stack"],
)
def test_weight_of_a_linear_is_pruned_in_any_product(use):
    class Used(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w, self.head = nn.Linear(12, 10, bias=False), nn.Linear(10, 4)

        def forward(self, x):
            return self.head(use(x, self.w.weight))

    model, plain = Used(), nn.Sequential(nn.Linear(12, 10, bias=False), nn.Linear(10, 4))
    plain.load_state_dict(dict(zip(plain.state_dict(), model.state_dict().values(), strict=True)))
    report = iobs.prune(model, data(), 0.5, iobs.Recipe(target="residual"), target="dense")
    iobs.prune(plain, data(), 0.5, iobs.Recipe(target="residual"), target="dense")
    assert report.coverage.share == 1
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_rounds_with_fine_tuning_keep_the_zeros_of_a_layer_found_by_use():
    shape, use, *_ = PLAIN["einsum with heads"]
    direct = Direct(shape, use)
    short = replace(iobs.Recipe.preset("best").finetune, steps=12, most_steps=None)
    report = iobs.prune(direct, data(), 0.6, "best", rounds=2, finetune=short)
    assert report.zeros == round(0.6 * report.weights)
    assert zeros(direct.w) + zeros(direct.head.weight) == report.zeros


class Transposed(nn.Module):
    """A raw kernel in a transposed convolution, and the plain convolution that it is equal to."""

    def __init__(self, groups, transposed):
        super().__init__()
        torch.manual_seed(0)
        kernel = torch.randn(6, 4 // groups, 3, 3) / 4
        self.groups, self.transposed = groups, transposed
        if not transposed:
            parts = [part.transpose(0, 1).flip(2, 3) for part in kernel.chunk(groups)]
            kernel = torch.cat(parts)
        self.kernel = nn.Parameter(kernel.contiguous())
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        if self.transposed:
            return self.head(functional.conv_transpose2d(x, self.kernel, None, 2, 1, 1, self.groups))
        spread = x.new_zeros(*x.shape[:2], 2 * x.shape[2] - 1, 2 * x.shape[3] - 1)
        spread[:, :, ::2, ::2] = x
        return self.head(functional.conv2d(functional.pad(spread, (1, 2, 1, 2)), self.kernel, groups=self.groups))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_is_pruned_as_the_equal_convolution(groups):
    one, other = Transposed(groups, True), Transposed(groups, False)
    pictures = data(3, 6, 5, 5)
    torch.testing.assert_close(one(pictures[0]), other(pictures[0]), atol=1e-5, rtol=1e-4)
    for model in (one, other):
        report = iobs.prune(model, pictures, 0.5, iobs.Recipe(target="residual"))
        assert zeros(model.kernel) == model.kernel.numel() // 2
        assert len(report.audit) == groups + 1
    parts = [part.transpose(0, 1).flip(2, 3) for part in one.kernel.detach().chunk(groups)]
    torch.testing.assert_close(torch.cat(parts), other.kernel.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_modules_of_transposed_convolutions_are_pruned(size):
    layer = getattr(nn, f"ConvTranspose{size}d")(4, 6, 3, stride=2)
    model = nn.Sequential(getattr(nn, f"Conv{size}d")(4, 4, 1), layer)
    report = iobs.prune(model, data(2, 4, *[5] * size), 0.5, iobs.Recipe(target="residual"))
    assert {row.name: row.sparsity for row in report.audit} == {"0": 0.5, "1": 0.5}
    assert report.coverage.share == 1


def test_bilinear_is_pruned_as_a_linear_on_the_products_of_its_inputs():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.both = nn.Bilinear(4, 3, 5)

        def forward(self, x):
            return self.both(x[:, :4], x[:, 4:])

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            both = nn.Bilinear(4, 3, 5)
            self.both = nn.Linear(12, 5)
            self.both.weight.data, self.both.bias.data = both.weight.data.flatten(1).clone(), both.bias.data.clone()

        def forward(self, x):
            return self.both((x[:, :4, None] * x[:, None, 4:]).flatten(1))

    pairs, flat = Pairs(), Flat()
    for model in (pairs, flat):
        iobs.prune(model, data(60, 7), 0.5, iobs.Recipe())
    torch.testing.assert_close(pairs.both.weight.flatten(1), flat.both.weight, atol=1e-5, rtol=1e-4)


def test_a_weight_among_three_factors_is_pruned_as_a_linear_on_the_products_of_the_others():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(5, 3, 4))

        def forward(self, x):
            return torch.einsum("be,bi,oei->bo", x[:, :3].softmax(1), x[:, 3:], self.w)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Linear(12, 5, bias=False)
            self.w.weight.data = Mixture().w.data.flatten(1).clone()

        def forward(self, x):
            return self.w((x[:, :3, None].softmax(1) * x[:, None, 3:]).flatten(1))

    mixture, flat = Mixture(), Flat()
    for model in (mixture, flat):
        assert iobs.prune(model, data(60, 7), 0.5, iobs.Recipe(target="residual")).zeros == 30
    torch.testing.assert_close(mixture.w.flatten(1), flat.w.weight, atol=1e-5, rtol=1e-4)


def test_a_quotient_by_a_weight_is_no_scaled_weight():
    class Quotient(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.head = nn.Parameter(torch.rand(12, 12) + 1), nn.Linear(12, 4)

        def forward(self, x):
            return self.head(x @ (torch.div(2.0, self.w) + torch.div(self.w, 2.0, rounding_mode="floor")))

    assert [row.name for row in iobs.prune(Quotient(), data(), 0.5, iobs.Recipe(target="residual")).audit] == ["head"]


class Fused(nn.Module):
    """Four experts in one parameter, in several layouts; the sign of two inputs routes a sample."""

    def __init__(self, layout):
        super().__init__()
        torch.manual_seed(0)
        matrices = torch.randn(4, 10, 12) / 4
        stored = {"rows": matrices.flatten(0, 1), "stack": matrices, "bmm": matrices.mT.contiguous(), "list": matrices}
        if layout == "list":
            self.experts = nn.ModuleList(nn.Linear(12, 10, bias=False) for _ in range(4))
            for expert, matrix in zip(self.experts, matrices, strict=True):
                expert.weight.data = matrix.clone()
        else:
            self.experts = nn.Parameter(stored[layout].contiguous())
        self.layout = layout

    def matrices(self):
        if self.layout == "list":
            return torch.stack([one.weight.detach() for one in self.experts])
        found = self.experts.detach()
        return found.mT if self.layout == "bmm" else found.view(4, 10, 12)

    def forward(self, x):
        route = 2 * (x[:, 0] > 0) + (x[:, 1] > 0)
        if self.layout == "bmm":
            given = torch.stack([x * (route == number)[:, None] for number in range(4)])
            return torch.bmm(given, self.experts).sum(0)
        out = x.new_zeros(len(x), 10)
        for number in range(4):
            if (chosen := route == number).any():
                if self.layout == "list":
                    out[chosen] = self.experts[number](x[chosen])
                elif self.layout == "stack":
                    out[chosen] = torch.einsum("ti,oi->to", x[chosen], self.experts[number])
                else:
                    out[chosen] = x[chosen].matmul(self.experts.view(4, 10, 12)[number].t())
        return out


@pytest.mark.parametrize("layout", ["rows", "stack", "bmm"])
def test_fused_experts_of_any_layout_are_pruned_as_a_list_of_linear(layout):
    fused, plain = Fused(layout), Fused("list")
    report = iobs.prune(fused, data(80, 12), 0.5, iobs.Recipe(target="residual"), holdout=0.0)
    iobs.prune(plain, data(80, 12), 0.5, iobs.Recipe(target="residual"), holdout=0.0)
    assert [row.name for row in report.audit] == [f"experts.{number}" for number in range(4)]
    assert [row.zeros for row in report.audit] == [60] * 4
    torch.testing.assert_close(fused.matrices(), plain.matrices(), atol=1e-5, rtol=1e-4)


def test_weights_that_are_joined_before_the_product_are_layers_of_their_own():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k, self.v = nn.Linear(12, 8), nn.Linear(12, 4), nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            both = functional.linear(x, torch.cat([self.q.weight, self.k.weight]))
            wide = torch.cat([self.v, self.v.new_zeros(6, 6)], 1)
            return torch.cat([both, functional.linear(x, wide)], 1)

    model = Joined()
    report = iobs.prune(model, data(), 0.5, iobs.Recipe(target="residual"))
    assert sorted((row.name, row.shape, row.zeros) for row in report.audit) == [
        ("k", (4, 12), 24),
        ("q", (8, 12), 48),
        ("v", (6, 6), 18),
    ]


def test_block_diagonal_product_has_a_matrix_for_each_block():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4, 4))

        def forward(self, x):
            return torch.baddbmm(x.new_zeros(3, 1, 4), x.view(-1, 3, 4).transpose(0, 1), self.w)

    report = iobs.prune(Blocks(), data(), "2:4", iobs.Recipe(target="residual"))
    assert [(row.name, row.zeros) for row in report.audit] == [(f"w.{number}", 8) for number in range(3)]


def test_parameters_that_no_product_multiplies_stay_dense_with_this_reason():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.place, self.both = nn.Parameter(torch.randn(1, 4, 12)), nn.Parameter(torch.randn(12, 12))
            self.head = nn.Linear(12, 4)

        def forward(self, x):
            return self.head((x[:, None] + self.place) @ self.both.sin())

    report = iobs.prune(Positions(), data(), 0.5, iobs.Recipe(target="residual"))
    assert [row.name for row in report.audit] == ["head"]
    why = "it is not used, is changed before it multiplies, or multiplies in several forms"
    assert report.skipped == {
        "place": f"parameter of Positions, in no matrix product that was observed: {why}",
        "both": "parameter of Positions, which sin changes before it multiplies",
    }


def test_overlapping_parts_of_a_parameter_stay_dense():
    class Overlapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.head = nn.Parameter(torch.randn(12, 12)), nn.Linear(16, 4)

        def forward(self, x):
            return self.head(torch.cat([functional.linear(x, self.w[:8]), functional.linear(x, self.w[4:])], 1))

    assert [row.name for row in iobs.prune(Overlapping(), data(), 0.5, iobs.Recipe(target="residual")).audit] == [
        "head"
    ]


def test_names_rules_and_checkpoints_take_layers_found_by_use(tmp_path):
    shape, use, *_ = PLAIN["matmul"]
    rules = (iobs.Rule("w", pattern="2:4"), iobs.Rule("head", dense=True))
    report = iobs.prune(
        Direct(shape, use), data(), 0.5, iobs.Recipe(target="residual"), rules=rules, checkpoint=tmp_path
    )
    again = iobs.prune(
        Direct(shape, use), data(), 0.5, iobs.Recipe(target="residual"), rules=rules, checkpoint=tmp_path
    )
    assert [row.name for row in report.audit] == [row.name for row in again.audit] == ["w"]
    assert iobs.prune(Direct(shape, use), data(), 0.5, iobs.Recipe(target="residual"), include="w").audit[0].zeros == 60


def test_a_batch_that_only_raw_parameters_could_take_is_refused_as_such():
    class Only(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(12, 4))

        def forward(self, x):
            return x @ self.w

    with pytest.raises(CalibrationError, match="cannot take"):
        iobs.prune(Only(), data(3, 5), 0.5)
    model = Only()
    iobs.prune(model, data(), 0.5)
    assert [layer.name for layer in find_layers(model)] == ["w"]


def test_padded_input_of_a_convolution_is_seen_where_it_is_multiplied():
    class Same(nn.Conv2d):
        def forward(self, x):
            return functional.conv2d(functional.pad(x, (0, 1, 0, 1)), self.weight, self.bias)

    class Explicit(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(2, 4, 2))

        def forward(self, x):
            return self.conv(x)

    torch.manual_seed(0)
    same, explicit = Same(2, 4, 2), Explicit()
    model = nn.Sequential(same)
    for one in (model, explicit):
        assert iobs.prune(one, data(4, 2, 6, 6), 0.5, iobs.Recipe()).coverage.share == 1
    torch.testing.assert_close(same.weight, explicit.conv[1].weight, atol=1e-5, rtol=1e-4)


def test_arguments_of_products_may_be_given_by_name_in_any_order():
    class Used(nn.Linear):
        def forward(self, x):
            once = functional.linear(weight=self.weight, input=x)
            return (
                once
                + functional.linear(2 * x, bias=self.bias, weight=self.weight)
                + torch.mm(mat2=self.weight.T, input=3 * x)
            )

    model, x, found, used = nn.ModuleList([Used(4, 4)]), torch.randn(5, 4), [], {}
    (layer,) = find_layers(model)
    with captured_inputs(model, [layer], lambda layer, module, value: found.append(value), used):
        model[0].forward(x)  # not as a module, whose hook would capture the input
    assert used == {layer: True}
    for number, value in enumerate(found, 1):
        torch.testing.assert_close(value, number * x)
    assert len(found) == 3


def test_convolutions_whose_arguments_have_names_are_counted():
    kernel, layer, counts = torch.randn(6, 3, 3, 3), Layer("w", (6, 27)), {}
    with counting_kernels({id(kernel): layer}, counts):
        functional.conv2d(weight=kernel, input=torch.randn(2, 3, 8, 8), bias=torch.zeros(6))
    assert counts == {layer: 2 * 36}
