"""A small random language model with half of its projection weights at zero, and text to train it on."""

import torch

import iobs
from iobs.models import ensure_torchvision

ensure_torchvision()
from transformers import (  # noqa: E402 - after the operators of torchvision are declared
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 32,
}


@torch.no_grad()
def sparse_llama(share=0.5):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    for name, value in model.named_parameters():
        if "proj" in name:
            value.mul_(torch.rand_like(value) >= share)
    return model


def rows(count=32):
    tokens = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def zeros(model):
    return {name: value == 0 for name, value in model.named_parameters() if "proj" in name and "lora" not in name}


def holds(model, masks):
    """Check that the model is zero exactly where it was, and nowhere else."""
    return all(torch.equal(dict(model.named_parameters())[name] == 0, mask) for name, mask in masks.items())


def trainer(model, folder, callbacks=None, **options):
    settings = {"max_steps": 4, "learning_rate": 1e-2, "weight_decay": 0.1, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "disable_tqdm": True} | options
    callbacks = [iobs.transformers.SparsityCallback()] if callbacks is None else callbacks
    optimizers = settings.pop("optimizers", (None, None))
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    return Trainer(
        model=model,
        args=arguments,
        train_dataset=rows(),
        eval_dataset=rows(8),
        callbacks=callbacks,
        optimizers=optimizers,
    )
