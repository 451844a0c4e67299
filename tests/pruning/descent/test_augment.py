"""Augmentation and mixing of calibration samples."""

import pytest
import torch
from torch import nn

from iobs.pruning.descent.augment import FlipShift, Pairs, copies, label_preserving, suited
from iobs.pruning.samples.batches import Samples


def pictures(count=6):
    return torch.arange(count * 3 * 8 * 8, dtype=torch.float32).reshape(count, 3, 8, 8)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, torch.arange(6)), lambda x: {"pixel_values": x}])
def test_flip_shift_without_changes_is_the_identity(wrap):
    batch = wrap(pictures())
    found = FlipShift(False, 0)(batch, torch.Generator().manual_seed(0))
    value = found if isinstance(found, torch.Tensor) else found["pixel_values"] if isinstance(found, dict) else found[0]
    assert torch.equal(value, pictures())


@pytest.mark.parametrize("shape", [(6, 3, 8, 10), (6, 8, 10)])
def test_flip_shift_moves_each_sample_as_a_whole(shape):
    batch = torch.randn(shape)
    changed = FlipShift(True, 2)(batch, torch.Generator().manual_seed(1))
    assert changed.shape == batch.shape
    padded = nn.functional.pad(batch if batch.ndim == 4 else batch[:, None], (2, 2, 2, 2), mode="replicate")
    for index in range(6):
        candidates = [
            window.flip(-1) if mirrored else window
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
            for window in [padded[index, :, down : down + 8, right : right + 10]]
        ]
        assert any(torch.equal(changed[index].reshape(one.shape), one) for one in candidates)


def test_flip_shift_is_repeatable_and_varies_with_the_seed():
    batch = pictures(40)
    first, again = (FlipShift(True, 2)(batch, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, FlipShift(True, 2)(batch, torch.Generator().manual_seed(4)))


class Brightness(nn.Module):
    """Classifies by mean brightness, which mirroring keeps; with `left`, by that of the left half only."""

    def __init__(self, left: bool) -> None:
        super().__init__()
        self.head, self.left = nn.Linear(1, 2), left
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
            self.head.bias.zero_()

    def forward(self, x):
        return self.head((x[..., : x.shape[-1] // 2] if self.left else x).mean((1, 2, 3))[:, None])


def test_label_preserving_keeps_changes_with_equal_predictions():
    part = Samples([torch.randn(100, 1, 16, 16)], [0])
    assert label_preserving(Brightness(left=False), part, 0).flip
    # Four of five pictures are equally bright on both sides: enough to allow shifts, too few to allow mirroring.
    odd = torch.cat([torch.ones(20, 1, 16, 8), -torch.ones(20, 1, 16, 8)], -1)
    mostly = Samples([torch.cat([torch.ones(40, 1, 16, 16), -torch.ones(40, 1, 16, 16), odd])], [0])
    assert label_preserving(Brightness(left=True), mostly, 0) == FlipShift(False, 2)
    found = label_preserving(Brightness(left=True), part, 0)
    assert found is None or not found.flip
    assert label_preserving(nn.Linear(4, 2), Samples([torch.randn(10, 4)], [0]), 0) is None
    assert label_preserving(nn.Embedding(9, 4), Samples([torch.randint(9, (10, 12))], [0]), 0) is None


def test_pairs_blends_two_feature_vectors_each():
    values, targets = torch.eye(40), torch.arange(40)
    mixed, kept = Pairs()((values, targets), torch.Generator().manual_seed(0))
    assert torch.equal(kept, targets)
    assert torch.allclose(mixed.sum(1), torch.ones(40))
    assert int((mixed > 0).sum(1).max()) == 2
    assert 5 < int((mixed.diagonal() > 0.5).sum()) < 35  # shares are uniform


def test_pairs_blends_images_or_pastes_a_square():
    numbers = torch.arange(1.0, 61.0)[:, None, None, None].expand(60, 3, 16, 16)
    mixed = Pairs()(numbers.clone(), torch.Generator().manual_seed(0))
    assert torch.equal(mixed[:, 0], mixed[:, 2])  # all channels alike
    pasted = 0
    for number, picture in enumerate(mixed[:, 0], 1):
        values = picture.unique()
        assert len(values) <= 2
        if len(values) == 2:
            pasted += 1
            other = picture != number
            assert other.any(1).sum() * other.any(0).sum() == other.sum()
            assert other.any(1).sum() == other.any(0).sum()
    assert 15 < pasted < 45
    assert bool((mixed.frac() != 0).any())  # the others are blends


def test_suited_mixes_only_if_the_dense_model_gives_targets():
    part = Samples([(torch.randn(50, 1, 16, 16), torch.zeros(50))], [0])
    assert isinstance(suited(Brightness(left=False), part, 0, mix=True), Pairs)
    assert isinstance(suited(Brightness(left=False), part, 0, mix=False), FlipShift)
    assert suited(nn.Linear(4, 2), Samples([torch.randn(10, 4)], [0]), 0, mix=True) == Pairs(None)
    assert suited(nn.Linear(4, 2), Samples([torch.randn(10, 4)], [0]), 0, mix=False) is None
    assert suited(nn.Embedding(9, 4), Samples([torch.randint(9, (10, 12))], [0]), 0, mix=True) is None


@pytest.mark.parametrize(("mixes", "gentle", "expected"), [(True, True, 8), (False, True, 4), (True, False, 2)])
def test_copies_hold_originals_and_equally_many_mixed_samples(mixes, gentle, expected):
    change = FlipShift(True, 1) if gentle else None
    part = Samples([(torch.rand(size, 3, 8, 8), torch.arange(size)) for size in (1, 2, 5)], [4, 5, 6])
    found = copies(Pairs(change) if mixes else change, part, seed=0)
    assert found.samples == 8 * expected
    assert torch.equal(found.batches[0][0], torch.cat([pictures for pictures, _ in part.batches]))
    assert [labels.tolist() for _, labels in found.batches] == [[0, 0, 1, 0, 1, 2, 3, 4]] * expected
    again = copies(Pairs(change) if mixes else change, part, seed=0)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found.batches, again.batches, strict=True))


def test_suited_leaves_images_in_a_list_alone():
    batch = {"pixel_values": [torch.randn(5, 12), torch.randn(7, 12)]}  # patches of two images of different sizes
    assert suited(nn.Identity(), Samples([batch], [0]), 0, mix=True) is None


def test_changed_images_have_the_layout_of_the_images():
    for layout in (torch.contiguous_format, torch.channels_last):
        images = torch.randn(4, 3, 6, 6).to(memory_format=layout)
        assert FlipShift(True, 1)(images, torch.Generator()).stride() == images.stride()
