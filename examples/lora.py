"""Prune a language model, train LoRA adapters on the sparse base, and merge them; the zeros stay. Needs 'iobs[peft]'.

python examples/lora.py [--steps 60]
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model

import iobs
from iobs.transformers import mask_adapters, merge_adapters


def main(steps: int) -> None:
    torch.manual_seed(0)
    loaded = iobs.load()  # the embedded model; give a directory or a Hugging Face name
    base, tokenizer = loaded.module, loaded.require_tokenizer()
    text = " ".join(["Once upon a time, there was a little girl who liked to play outside with her red ball."] * 200)
    tokens = torch.tensor(tokenizer([text], verbose=False)["input_ids"][0])
    windows = tokens[: len(tokens) // 64 * 64].reshape(-1, 64)
    iobs.prune(base, [{"input_ids": windows[:16]}], 0.5, "one-shot", solver="sparsegpt")
    zeros = [row.zeros for row in iobs.audit(base)]

    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    mask_adapters(model)  # the adapters act only where the base is not zero, so the merge loses nothing
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad], lr=1e-2)
    model.train()
    for step in range(steps):
        rows = windows[torch.arange(8 * step, 8 * (step + 1)) % len(windows)]
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 4) == 0:
            print(f"step {step}: loss {loss.item():.3f}")

    model.eval()
    with torch.no_grad():
        before = model(input_ids=windows[:4]).logits
        merged, report = merge_adapters(model)
        after = merged(input_ids=windows[:4]).logits
    print(report)
    print(f"largest change of a logit by the merge: {float((after - before).abs().max()):.1e}")
    assert [row.zeros for row in iobs.audit(merged)] == zeros


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    main(**vars(parser.parse_args()))
