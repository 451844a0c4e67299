"""A small network with its data, and one short run on it."""

import torch

import iobs


def problem():
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16), torch.nn.Linear(16, 4)
    )
    data = [(torch.randn(16, 12), torch.randint(0, 4, (16,))) for _ in range(4)]
    return model, data


def prune(model, data, pattern=0.5, **options):
    return iobs.prune(model, data, pattern, "one-shot", solver="sparsegpt", **options)
