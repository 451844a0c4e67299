"""Replay of a network block by block."""

import pytest
import torch
from menagerie import SkipsABlock, for_each_group

from iobs.pruning.calibration.replay import exact_chain
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.network.selection import select
from iobs.pruning.samples.subsets import Samples


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
