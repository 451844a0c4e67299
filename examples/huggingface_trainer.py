"""Prune a language model and train it on with the Hugging Face Trainer; the zeros stay. Needs 'iobs[peft]'.

python examples/huggingface_trainer.py [--steps 60] [--folder trained]
"""

import argparse
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

import iobs


def main(steps: int, folder: Path) -> None:
    loaded = iobs.load()  # the embedded model; give a directory or a Hugging Face name
    model, tokenizer = loaded.module, loaded.require_tokenizer()
    text = " ".join(["Once upon a time, there was a little girl who liked to play outside with her red ball."] * 200)
    tokens = torch.tensor(tokenizer([text], verbose=False)["input_ids"][0])
    windows = tokens[: len(tokens) // 64 * 64].reshape(-1, 64)
    iobs.prune(model, [{"input_ids": windows[:16]}], 0.5, "one-shot", solver="sparsegpt")
    zeros = [row.zeros for row in iobs.audit(model)]

    settings = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=max(1, steps // 4),
        save_strategy="no",
        report_to=[],
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in windows],
        callbacks=[iobs.transformers.SparsityCallback()],
    )
    trainer.train()
    model.save_pretrained(folder / "model")
    assert [row.zeros for row in iobs.audit(model)] == zeros
    assert sum(row.zeros for row in iobs.audit(folder / "model")) >= sum(zeros)
    print(f"{sum(zeros):,} zeros before and after; the log says {trainer.state.log_history[-1]['sparsity']:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, default=Path("trained"))
    main(**vars(parser.parse_args()))
