"""N:M of convolutions lies along input channels, as sparse tensor cores read it, in solvers, audits and files."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import iobs
from iobs.errors import AuditError, PatternError

CONVOLUTIONS = {
    "one": (lambda: nn.Conv1d(8, 6, 3, padding=1), (16, 8, 9)),
    "two": (lambda: nn.Conv2d(8, 6, 3, padding=1), (16, 8, 5, 5)),
    "three": (lambda: nn.Conv3d(8, 6, 2), (4, 8, 3, 3, 3)),
    "groups": (lambda: nn.Conv2d(16, 6, (3, 1), groups=2), (16, 16, 5, 5)),
    "points": (lambda: nn.Conv2d(8, 6, 1), (16, 8, 5, 5)),
}


def most_of_four_channels(weight):
    return int((weight.movedim(1, -1).reshape(-1, 4) != 0).sum(1).max())


@pytest.mark.parametrize("solver", ["magnitude", "sparsegpt", "admm", "wanda"])
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_two_of_four_input_channels_stay(kind, solver, tmp_path):
    make, shape = CONVOLUTIONS[kind]
    model = nn.Sequential(make())
    report = iobs.prune(model, [torch.randn(shape)], "2:4", "one-shot", solver=solver)
    assert most_of_four_channels(model[0].weight) == 2
    assert report.audit[0].zeros == model[0].weight.numel() // 2
    assert iobs.audit(model, "2:4")[0].asked == model[0].weight.numel() // 2
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    iobs.audit(tmp_path, "2:4")


def test_other_layouts_are_refused_by_the_audit():
    model = nn.Sequential(nn.Conv2d(8, 6, 3))
    with torch.no_grad():
        flat = model[0].weight.view(-1, 4)
        flat[torch.rand(flat.shape).argsort(1) >= 2] = 0
    with pytest.raises(AuditError, match=r"keeps [34] of a group of 4"):
        iobs.audit(model, "2:4")


def test_the_solution_is_that_of_the_layer_with_channels_last():
    """The convolution as a linear layer on its unfolded inputs, channels fastest, has the same weights."""
    conv = nn.Conv2d(8, 6, 3, bias=False)
    x = torch.randn(32, 8, 5, 5)
    order = torch.arange(72).view(8, 9).T.flatten()
    windows = nn.functional.unfold(x, 3).transpose(1, 2).flatten(0, 1)[:, order]
    linear = nn.Linear(72, 6, bias=False)
    linear.weight = nn.Parameter(conv.weight.detach().flatten(1)[:, order].clone())
    iobs.prune(nn.Sequential(conv), [x], "2:4", "one-shot", holdout=0)
    iobs.prune(nn.Sequential(linear), [windows], "2:4", "one-shot", holdout=0)
    torch.testing.assert_close(conv.weight.flatten(1)[:, order], linear.weight, rtol=1e-3, atol=1e-4)


def test_zeros_are_kept_and_steps_hold_the_groups():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))
    data = [torch.randn(32, 8, 6, 6)]
    iobs.prune(model, data, "3:4", "one-shot")
    before = copy.deepcopy(model)
    iobs.prune(model, data, "2:4", "fast", keep_zeros=True, blocks=None)
    for old, new in zip(before[::2], model[::2], strict=True):
        assert most_of_four_channels(new.weight) == 2
        assert (new.weight[old.weight == 0] == 0).all()
    iobs.prune(before, data, "2:4", "fast")
    assert most_of_four_channels(before[0].weight) == 2


def test_channels_that_groups_do_not_divide():
    patches = nn.Sequential(nn.Conv2d(3, 6, 4, stride=4))  # 48 columns, as a linear layer of patches has them
    iobs.prune(patches, [torch.randn(16, 3, 8, 8)], "2:4", "one-shot")
    assert int((patches[0].weight.reshape(-1, 4) != 0).sum(1).max()) == 2
    assert iobs.audit(patches, "2:4")[0].asked
    with pytest.raises(PatternError, match=r"divisible by 4, got 27; .* 0 \(6 x 27\)"):
        iobs.prune(nn.Sequential(nn.Conv2d(3, 6, 3)), [torch.randn(8, 3, 6, 6)], "2:4", "one-shot")


def test_with_a_grid():
    for channels in (8, 16):  # 72 columns share one scale; of 144 columns a group of the grid has 128
        model = nn.Sequential(nn.Conv2d(channels, 6, 3))
        pattern = iobs.NM(2, 4) & iobs.Grid(4)
        iobs.prune(model, [torch.randn(32, channels, 5, 5)], pattern, "one-shot")
        iobs.audit(model, pattern)
