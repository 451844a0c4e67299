"""Zeros of the given network that must stay zero."""

from dataclasses import replace

import torch
from menagerie import POLISH, sparse_inside

import iobs


def test_finetuning_keeps_frozen_parameters_and_old_zeros():
    network, data, zeros = sparse_inside()
    network[4].bias.requires_grad_(False)
    bias = network[4].bias.clone()
    iobs.prune(network, data, iobs.Unstructured(0.5), "one-shot", ignore="2", finetune=POLISH, keep_zeros=True)
    assert bool((network[2].weight[zeros] == 0).all())
    assert torch.equal(network[4].bias, bias)
    assert not network[4].bias.requires_grad


def test_keep_zeros_holds_through_dense_steps():
    network, data, zeros = sparse_inside()
    step = replace(POLISH, support="dense", parameters="all")
    iobs.prune(
        network,
        data,
        iobs.Unstructured(0.5),
        "one-shot",
        ignore="2",
        rounds=iobs.Rounds(2, finetune=step),
        holdout=0.0,
        keep_zeros=True,
    )
    assert bool((network[2].weight[zeros] == 0).all())
