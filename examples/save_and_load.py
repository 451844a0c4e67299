"""Prune a network of your own, save it in three ways, and load it again.

python examples/save_and_load.py [--steps 300] [--folder saved]
"""

import argparse
from pathlib import Path

import torch
from digits import accuracy, digits, network, train
from safetensors.torch import load_model, save_model

import iobs


def main(steps: int, folder: Path) -> None:
    torch.manual_seed(0)
    (inputs, labels), model = digits(), network()
    train(model, inputs, labels, steps)
    print("dense: accuracy", accuracy(model, inputs, labels))
    iobs.prune(model, [(inputs[:1000], labels[:1000])], 0.9)
    zeros = [row.zeros for row in iobs.audit(model)]
    print(f"pruned: accuracy {accuracy(model, inputs, labels)}, {sum(zeros):,} zeros")

    folder.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), folder / "model.pt")  # zeros are ordinary zeros
    save_model(model, str(folder / "model.safetensors"))
    iobs.save_packed(model, folder / "packed")  # a mask and the nonzero values, both coded without loss

    loaded = [network(), network(), network()]
    loaded[0].load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    load_model(loaded[1], str(folder / "model.safetensors"))
    iobs.load_packed(folder / "packed", into=loaded[2])
    for other in loaded:
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert [row.zeros for row in iobs.audit(other)] == zeros
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        print(f"{file.name}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--folder", type=Path, default=Path("saved"))
    main(**vars(parser.parse_args()))
