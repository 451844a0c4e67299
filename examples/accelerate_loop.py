"""Prune a language model and train it on in a loop of one's own with accelerate; the zeros stay. Needs 'iobs[peft]'.

python examples/accelerate_loop.py [--steps 60] [--folder trained]
accelerate launch --num_processes 2 examples/accelerate_loop.py      # on two GPUs, or two processes of a CPU
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator

import iobs


def main(steps: int, folder: Path) -> None:
    accelerator = Accelerator()
    loaded = iobs.load()  # the embedded model; give a directory or a Hugging Face name
    model, tokenizer = loaded.module, loaded.require_tokenizer()
    text = " ".join(["Once upon a time, there was a little girl who liked to play outside with her red ball."] * 200)
    tokens = torch.tensor(tokenizer([text], verbose=False)["input_ids"][0])
    windows = tokens[: len(tokens) // 64 * 64].reshape(-1, 64)
    iobs.prune(model, [{"input_ids": part} for part in windows[:16].split(4)], 0.5, "one-shot", solver="sparsegpt")
    zeros = [row.zeros for row in iobs.audit(model)]

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    iobs.keep_sparse(model, optimizer)  # before prepare, which wraps both
    loader = torch.utils.data.DataLoader(windows, batch_size=8, shuffle=True)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    done = 0
    while done < steps:
        for batch in loader:
            optimizer.zero_grad()
            accelerator.backward(wrapped(input_ids=batch, labels=batch).loss)
            optimizer.step()
            done += 1
            if done == steps:
                break

    accelerator.wait_for_everyone()
    model = accelerator.unwrap_model(wrapped)
    assert [row.zeros for row in iobs.audit(model)] == zeros
    if accelerator.is_main_process:
        model.save_pretrained(folder / "model")
        print(f"{sum(zeros):,} zeros before and after {steps} steps")
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("trained"))
    main(**vars(parser.parse_args()))
