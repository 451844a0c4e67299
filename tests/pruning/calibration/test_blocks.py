"""Replay of a network block by block."""

import pytest
import torch
from menagerie import SkipsABlock, for_each_group
from torch import nn

from iobs.errors import ModelError
from iobs.pruning.calibration.blocks import Block
from iobs.pruning.calibration.chains import exact_chain, with_formats
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.network.selection import select
from iobs.pruning.samples.batches import Samples


@pytest.mark.parametrize("sizes", [(10, 9, 10), (9, 10, 10), (10, 10, 10)])
def test_exact_chain_is_empty_if_batches_differ_in_path(sizes):
    torch.manual_seed(0)
    network = SkipsABlock().eval()
    data = [torch.randn(size, 6) for size in sizes]
    selected = select(network).layers
    chain = exact_chain(network, data, selected)
    assert bool(chain) == (len(set(sizes)) == 1)
    fed = []
    handle = network.blocks[2][0].register_forward_pre_hook(lambda module, args: fed.append(args[0].double()))
    with torch.no_grad():
        for batch in data:
            network(batch)
    handle.remove()
    found = {}
    sweep = Sweep(network, Samples.of(data), Samples(), selected, chain)
    for_each_group(sweep, lambda group, stats: found.update({group[0].name: stats}))
    expected = torch.cat(fed).T @ torch.cat(fed) / sum(sizes)
    assert torch.allclose(found["blocks.2.0"].calibration.own[0], expected, atol=1e-6)


class Pair(nn.Module):
    """A block that returns its input or the sum of all before it beside its hidden state."""

    def __init__(self, adds):
        super().__init__()
        self.adds, self.layer = adds, nn.Linear(8, 8)

    def forward(self, hidden, beside=None):
        beside = hidden + beside if self.adds and beside is not None else hidden
        return self.layer(beside), beside


class Pairs(nn.Module):
    def __init__(self, adds):
        super().__init__()
        self.start, self.blocks = nn.Embedding(9, 8), nn.ModuleList(Pair(adds) for _ in range(3))

    def forward(self, input_ids):
        hidden, beside = self.start(input_ids), None
        for block in self.blocks:
            hidden, beside = block(hidden, beside)
        return hidden


def formats_of(model):
    chain = [Block(f"blocks.{number}", 0) for number in range(3)]
    data = {"input_ids": torch.arange(8).reshape(2, 4)}
    return with_formats(model, chain, data, torch.float32, lambda stage: None, lambda stage: None)


def test_blocks_that_read_a_residual_beside_the_hidden_state_are_refused():
    assert [block.rest for block in formats_of(Pairs(False).eval())] == [(None,)] * 3
    with pytest.raises(ModelError, match="The blocks of Pairs do not pass one hidden state"):
        formats_of(Pairs(True).eval())
