"""Augmentation, batches, learning rates and supports of the gradient steps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from iobs.errors import NonFiniteError, ProblemError
from iobs.prune import GradientStep
from iobs.prune.augment import FlipShift, Pairs, copies, label_preserving, suited
from iobs.prune.batches import size
from iobs.prune.choices import boldest, try_rates
from iobs.prune.estimate import affordable
from iobs.prune.layers import find_layers
from iobs.prune.losses import kl_to
from iobs.prune.parts import Part, rebatched
from iobs.prune.steps import Trainer


def pictures(count=6):
    return torch.arange(count * 3 * 8 * 8, dtype=torch.float32).reshape(count, 3, 8, 8)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, torch.arange(6)), lambda x: {"pixel_values": x}])
def test_nothing_to_change_changes_nothing(wrap):
    batch = wrap(pictures())
    found = FlipShift(False, 0)(batch, torch.Generator().manual_seed(0))
    value = found if isinstance(found, torch.Tensor) else found["pixel_values"] if isinstance(found, dict) else found[0]
    assert torch.equal(value, pictures())


@pytest.mark.parametrize("shape", [(6, 3, 8, 10), (6, 8, 10)])
def test_every_sample_is_mirrored_or_moved_as_one(shape):
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


def test_augmentation_is_repeatable_and_varies():
    batch = pictures(40)
    first, again = (FlipShift(True, 2)(batch, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, FlipShift(True, 2)(batch, torch.Generator().manual_seed(4)))


class Brightness(nn.Module):
    """Judges by the mean, which mirroring keeps; `left` looks at one half only, which mirroring changes."""

    def __init__(self, left: bool) -> None:
        super().__init__()
        self.head, self.left = nn.Linear(1, 2), left
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
            self.head.bias.zero_()

    def forward(self, x):
        return self.head((x[..., : x.shape[-1] // 2] if self.left else x).mean((1, 2, 3))[:, None])


def test_the_dense_network_decides_what_is_suited():
    part = Part([torch.randn(100, 1, 16, 16)], [0])
    assert label_preserving(Brightness(left=False), part, 0).flip
    # Four in five pictures are as bright on either side: enough to be moved, too few to be mirrored.
    odd = torch.cat([torch.ones(20, 1, 16, 8), -torch.ones(20, 1, 16, 8)], -1)
    mostly = Part([torch.cat([torch.ones(40, 1, 16, 16), -torch.ones(40, 1, 16, 16), odd])], [0])
    assert label_preserving(Brightness(left=True), mostly, 0) == FlipShift(False, 2)
    found = label_preserving(Brightness(left=True), part, 0)
    assert found is None or not found.flip
    assert label_preserving(nn.Linear(4, 2), Part([torch.randn(10, 4)], [0]), 0) is None
    assert label_preserving(nn.Embedding(9, 4), Part([torch.randint(9, (10, 12))], [0]), 0) is None


def test_features_are_blended_two_by_two():
    values, targets = torch.eye(40), torch.arange(40)
    mixed, kept = Pairs()((values, targets), torch.Generator().manual_seed(0))
    assert torch.equal(kept, targets)
    assert torch.allclose(mixed.sum(1), torch.ones(40))
    assert int((mixed > 0).sum(1).max()) == 2
    assert 5 < int((mixed.diagonal() > 0.5).sum()) < 35  # shares are uniform


def test_pictures_are_blended_or_get_a_square_of_one_other():
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


def test_samples_are_mixed_only_where_the_dense_network_answers():
    part = Part([(torch.randn(50, 1, 16, 16), torch.zeros(50))], [0])
    assert isinstance(suited(Brightness(left=False), part, 0, mix=True), Pairs)
    assert isinstance(suited(Brightness(left=False), part, 0, mix=False), FlipShift)
    assert suited(nn.Linear(4, 2), Part([torch.randn(10, 4)], [0]), 0, mix=True) == Pairs(None)
    assert suited(nn.Linear(4, 2), Part([torch.randn(10, 4)], [0]), 0, mix=False) is None
    assert suited(nn.Embedding(9, 4), Part([torch.randint(9, (10, 12))], [0]), 0, mix=True) is None


def test_masked_entries_stay_zero_and_the_rest_learns():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    reference = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).requires_grad_(False)
    mask = (torch.rand(5, 6) < 0.5).float()
    with torch.no_grad():
        model[0].weight *= mask
    step = GradientStep(lr=0.01, optimizer="adam", steps=30, loss="kl", decay=True, batch_size=16)
    part = Part([torch.randn(64, 6)], [0])
    trainer = Trainer(model, dict(model.named_parameters()), step, kl_to(reference), 30, 0, {"0.weight": mask})
    losses = trainer.run(part, lambda done, total, loss: None)
    assert int((model[0].weight * (1 - mask) != 0).sum()) == 0
    assert losses[-1] < losses[0]
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 30)


def mean_output(model, batch):
    return model(batch).float().mean()


def test_the_rate_rises_over_a_tenth_of_the_steps_and_falls_to_nothing():
    rates, model = [], nn.Linear(1, 1)
    step = GradientStep(lr=1.0, steps=20, decay=True, loss=mean_output)
    trainer = Trainer(model, dict(model.named_parameters()), step, mean_output, 20, 0)
    trainer.run(Part([torch.ones(2, 1)], [0]), lambda *_: rates.append(trainer.optimizer.param_groups[0]["lr"]))
    assert rates == pytest.approx([(1 - taken / 20) * min(1, (taken + 1) / 2) for taken in range(20)])


def test_small_steps_add_up_in_bfloat16():
    model = nn.Linear(4, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    step = GradientStep(lr=1e-3, steps=20, loss=mean_output)
    trainer = Trainer(model, dict(model.named_parameters()), step, mean_output, 20, 0)
    trainer.run(Part([torch.ones(2, 4).bfloat16()], [0]), lambda *_: None)
    assert float(model.weight[0, 0].detach()) == pytest.approx(0.98, abs=4e-3)  # a step of 1e-3 alone rounds to 1.0


IMPOSSIBLE = [
    {"lr": 0},
    {"lr": -1.0},
    {"lr": "x"},
    {"steps": 0},
    {"steps": 2.5},
    {"optimizer": "lion"},
    {"loss": "mse"},
    {"batch_size": 0},
    {"batch_size": "32"},
    {"augment": "flip"},
]


@pytest.mark.parametrize("settings", IMPOSSIBLE)
def test_impossible_steps_are_refused_at_once(settings):
    with pytest.raises(ProblemError, match=next(iter(settings))):
        GradientStep(**settings)


RATES = (5e-5, 1.5e-4, 5e-4, 1.5e-3, 4e-3)


def test_rates_are_tried_upwards_until_they_do_harm():
    seen = []

    def trial(rate):
        seen.append(rate)
        return abs(rate - 4e-4) + 1e-4

    losses = try_rates(trial, RATES, before=1.0)
    assert min(losses, key=losses.get) == 5e-4
    assert list(losses) == sorted(seen)
    assert max(seen) < 4e-3


def test_divergence_ends_the_search():
    def trial(rate):
        if rate > 1e-4:
            raise NonFiniteError("diverged")
        return 1.0

    assert try_rates(trial, RATES, before=1.0) == {5e-5: 1.0}


def test_a_first_rate_that_does_harm_is_the_last():
    assert try_rates(lambda rate: 9.4, RATES, before=0.9) == {5e-5: 9.4}


def test_the_largest_rate_that_is_as_good_as_the_best_is_taken():
    tried = {("adam", 1e-3): 0.5, ("adam", 1e-2): 0.505, ("adam", 1e-1): 0.52, ("momentum", 1.0): 0.501}
    assert boldest(tried) == ("adam", 1e-2)
    assert boldest({("adam", 1e-4): -1.0, ("adam", 1e-3): -0.99, ("adam", 1e-2): -0.5}) == ("adam", 1e-3)
    assert boldest({}) is None


def test_cheap_networks_take_more_steps():
    step = GradientStep(steps=10, most_steps=100, batch_size=4)
    small, large = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(30000, 30000, device="meta"))
    part = Part([torch.randn(20, 8)], [0])
    assert affordable(step, small, tuple(find_layers(small)), part) == replace(step, steps=100, most_steps=None)
    assert affordable(replace(step, most_steps=None), small, tuple(find_layers(small)), part).steps == 10
    with pytest.raises(ProblemError, match="most_steps"):
        GradientStep(steps=10, most_steps=5)
    part = Part([torch.randn(20, 30000, device="meta")], [0])
    # 30,000 x 30,000 weights, 4 samples, 4 passes: 14.4 G a step, 12,500 G in all
    assert affordable(replace(step, most_steps=1000), large, tuple(find_layers(large)), part).steps == 868


@pytest.mark.parametrize(("mixes", "gentle", "expected"), [(True, True, 8), (False, True, 4), (True, False, 2)])
def test_copies_of_samples_hold_them_as_they_are_and_as_many_mixed_as_not(mixes, gentle, expected):
    change = FlipShift(True, 1) if gentle else None
    part = Part([(torch.rand(size, 3, 8, 8), torch.arange(size)) for size in (1, 2, 5)], [4, 5, 6])
    found = copies(Pairs(change) if mixes else change, part, seed=0)
    assert found.samples == 8 * expected
    assert torch.equal(found.batches[0][0], torch.cat([pictures for pictures, _ in part.batches]))
    assert [labels.tolist() for _, labels in found.batches] == [[0, 0, 1, 0, 1, 2, 3, 4]] * expected
    again = copies(Pairs(change) if mixes else change, part, seed=0)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found.batches, again.batches, strict=True))


def test_samples_of_other_shapes_are_not_joined():
    part = Part([{"pixel_values": torch.rand(2, 3, 8, side)} for side in (8, 9)], [0, 1])
    assert copies(FlipShift(True, 0), part, seed=0).samples == 16
    assert rebatched(part, 64) is part
    joined = rebatched(Part([{"a": torch.ones(3), "b": "text"}] * 3, [0, 1, 2]), 4)
    assert [size(batch) for batch in joined.batches] == [4, 4, 1]


def seen_by(part, step):
    """The samples of every step, by the number that each sample is."""
    model, seen = nn.Linear(1, 1), []

    def loss(network, batch):
        seen.append(batch[:, 0].int().tolist())
        return network(batch).mean()

    masters = dict(model.named_parameters())
    Trainer(model, masters, step, loss, step.steps, seed=0).run(part, lambda *_: None)
    return seen


def test_steps_draw_from_all_batches_however_they_were_made_up():
    numbers = torch.arange(20.0)[:, None]
    step = GradientStep(lr=1e-3, optimizer="sgd", steps=7, loss=lambda model, batch: model(batch).mean(), batch_size=8)
    found = seen_by(Part.of([numbers]), step)
    assert [len(batch) for batch in found] == [8] * 7  # the last 4 of each round wait for another
    assert len(set(found[0]) | set(found[1])) == 16
    pieces = seen_by(Part.of(list(numbers.split(3))), step)
    assert [set(batch) for batch in pieces] == [set(batch) for batch in found]


def test_fewer_samples_than_a_step_asks_for_are_all_of_them():
    step = GradientStep(lr=1e-3, optimizer="sgd", steps=2, loss=lambda model, batch: model(batch).mean(), batch_size=8)
    assert [sorted(batch) for batch in seen_by(Part.of([torch.arange(5.0)[:, None]]), step)] == [[0, 1, 2, 3, 4]] * 2


def test_the_first_samples_of_a_part():
    part = Part.of([torch.arange(3.0), torch.arange(3.0, 7.0)])
    assert [batch.tolist() for batch in part.first(5).batches] == [[0, 1, 2], [3, 4]]
    assert part.first(99).samples == 7


def test_numbers_may_be_numpys():
    GradientStep(lr=np.float32(0.1), steps=np.int64(3), batch_size=np.int32(8))
