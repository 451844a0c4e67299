"""Prune a network, then train it further with its zeros kept: mixed precision, an average of weights, a schedule.

python examples/train_on.py [--steps 300]
"""

import argparse

import torch
from digits import accuracy, digits, network, train
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import iobs


def main(steps: int) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    inputs, labels = (tensor.to(device) for tensor in digits())
    model = network().to(device)
    train(model, inputs, labels, steps)
    print("dense: accuracy", accuracy(model, inputs, labels))
    iobs.prune(model, [(inputs[:1000], labels[:1000])], 0.95, "one-shot")
    zeros = [row.zeros for row in iobs.audit(model)]
    print(f"pruned: accuracy {accuracy(model, inputs, labels)}, {sum(zeros):,} zeros")

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    kept = iobs.keep_sparse(model, optimizer)  # the only line that a sparse network needs
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    model.train()
    for step in range(steps):
        batch = torch.arange(64 * step, 64 * (step + 1)) % 1200
        with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
            loss = cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        average.update_parameters(model)
    kept.remove()

    for name, trained in (("trained on", model), ("its average", average.module)):
        assert [row.zeros for row in iobs.audit(trained)] == zeros
        print(f"{name}: accuracy {accuracy(trained, inputs, labels)}, {sum(zeros):,} zeros")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(**vars(parser.parse_args()))
