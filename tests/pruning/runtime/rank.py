"""Worker of the distributed tests, run by each rank: `rank.py MODE OUTPUT`."""

import os
import signal
import sys

import torch
from safetensors.torch import save_file

import iobs
from iobs.pruning.runtime import ranks as distributed


class Dies(iobs.Callback):
    """Kills its process after two layers."""

    seen = 0

    def on_layer(self, *_):
        self.seen += 1
        if self.seen == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def network():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 8)]
    return torch.nn.Sequential(*layers), [(torch.randn(32, 32), torch.randint(0, 8, (32,))) for _ in range(6)]


def train(model, data):
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", solver="magnitude")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
    iobs.keep_sparse(model, optimizer)
    for inputs, targets in data[distributed.current().rank :: 2] * 17:  # 51 steps
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()


def main(mode, output):
    model, data = network()
    options = {}
    if mode == "rounds":
        step = iobs.FineTune(lr=1e-3, optimizer="adam", steps=3, loss="task")
        options = {"rounds": iobs.Rounds(3, finetune=step)}
    with distributed.joined() as ranks:
        if mode == "ddp":
            train(model, data)
        else:
            callbacks = [Dies()] if mode == "death" and ranks.first else []
            pattern = iobs.Unstructured(0.5)
            iobs.prune(
                model, data, pattern, "one-shot", solver="sparsegpt", target="layer", callbacks=callbacks, **options
            )
        save_file(
            {name: value.contiguous() for name, value in model.state_dict().items()},
            f"{output}.{ranks.rank}.safetensors",
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
