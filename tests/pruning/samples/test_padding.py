"""Padded tokens are left out of Hessians and losses."""

import copy

import pytest
import torch
from menagerie import for_each_group
from torch import nn

import iobs
from iobs.models import ensure_torchvision
from iobs.pruning.calibration.losses import kl_to
from iobs.pruning.calibration.sweep import Sweep
from iobs.pruning.network.selection import select
from iobs.pruning.samples.batches import Samples


def test_padded_text_is_pruned_with_dense_targets():
    """Blocks of the dense network run several times, so a key-value cache would grow."""
    ensure_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=64, **shape)).eval()
    ids = torch.randint(64, (6, 12))
    mask = torch.ones_like(ids)
    mask[:3, 8:], mask[3:, :3] = 0, 0
    report = iobs.prune(
        model, [{"input_ids": ids, "attention_mask": mask}], iobs.Unstructured(0.5), "one-shot", target="dense"
    )
    assert report.sparsity == 0.5
    assert model.config.use_cache, "restored"


def test_padding_counts_in_no_gram_and_no_loss():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16)).eval()

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids)

    network = Language().eval()
    ids, mask = torch.randint(16, (5, 12)), torch.ones(5, 12, dtype=torch.int64)
    mask[:, 7:] = 0
    other = torch.where(mask == 1, ids, (ids + 1) % 16)
    batches = [{"input_ids": tokens, "attention_mask": mask} for tokens in (ids, other)]
    layers = select(network).layers
    found = []
    for batch in batches:
        sweep = Sweep(network, Samples.of([batch]), Samples(), layers, [])
        for_each_group(sweep, lambda group, statistics: found.append(statistics))
    assert [statistics.calibration.count for statistics in found] == [35, 35]
    assert torch.equal(found[0].calibration.own, found[1].calibration.own)
    changed = copy.deepcopy(network)
    with torch.no_grad():
        changed.model[1].weight *= 0.5
    losses = [float(kl_to(network)(changed, batch).detach()) for batch in batches]
    assert losses[0] > 0
    assert losses[0] == pytest.approx(losses[1])
