"""Zeros survive a Hugging Face `Trainer` with `SparsityCallback`."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from sparse_llama import holds, rows, sparse_llama, trainer, zeros
from transformers import TrainerCallback

import iobs
from iobs.errors import AuditError, LayerSelectionError, ModelError

pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and torch about this machine


def trained(model, before):
    return any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        pytest.param({"gradient_accumulation_steps": 3}, marks=pytest.mark.slow),
        pytest.param({"optim": "adafactor"}, marks=pytest.mark.slow),
        pytest.param({"optim": "sgd", "optim_args": "momentum=0.9"}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"torch_compile": False, "max_grad_norm": 1e-3}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_trainer_keeps_exactly_the_zeros(tmp_path, options):
    model = sparse_llama()
    masks, before = zeros(model), {name: value.clone() for name, value in model.state_dict().items()}
    run = trainer(model, tmp_path, **options)
    run.train()
    assert trained(model, before)
    assert holds(model, masks)
    assert [row.zeros for row in iobs.audit(model) if "proj" in row.name] == [
        int(mask.sum()) for mask in masks.values()
    ]


def test_trainer_keeps_zeros_of_half_precision_weights(tmp_path):
    model = sparse_llama().to(torch.bfloat16)
    masks = zeros(model)
    trainer(model, tmp_path).train()
    assert all((value[masks[name]] == 0).all() for name, value in model.named_parameters() if name in masks)


def test_zeros_are_kept_under_a_gradient_scaler(tmp_path):
    """fp16 on a GPU steps through accelerate's wrapper and a GradScaler; here with the scaler of the CPU."""
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    model = sparse_llama()
    masks, start = zeros(model), model.model.layers[0].mlp.up_proj.weight.detach().clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = AcceleratedOptimizer(torch.optim.AdamW(model.parameters(), weight_decay=0.1), scaler=scaler)
    iobs.keep_sparse(model, optimizer)
    for row in rows(3):
        loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
        scaler.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, start)
    assert holds(model, masks)


@pytest.mark.slow
def test_trainer_keeps_exactly_the_zeros_on_two_ranks(tmp_path):
    script = Path(__file__).with_name("trainer_rank.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script, tmp_path]
    found = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]


def test_training_without_the_callback_fills_zeros(tmp_path):
    model = sparse_llama()
    masks = zeros(model)
    trainer(model, tmp_path, callbacks=[]).train()
    assert not holds(model, masks)


def test_logs_hold_the_sparsity(tmp_path):
    model = sparse_llama()
    share = torch.cat([mask.flatten() for mask in zeros(model).values()]).double().mean()
    run = trainer(model, tmp_path)
    run.train()
    logged = [entry["sparsity"] for entry in run.state.log_history]
    assert len(logged) >= 4
    assert logged == pytest.approx([float(share)] * len(logged))


def test_resumed_training_keeps_the_zeros_and_ends_in_the_same_bits(tmp_path):
    whole, model = sparse_llama(), sparse_llama()
    masks = zeros(model)
    trainer(whole, tmp_path / "whole", max_steps=6, save_strategy="steps", save_steps=3).train()
    run = trainer(model, tmp_path / "resumed", max_steps=6)
    run.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert holds(model, masks)
    for (name, value), other in zip(whole.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


def test_checkpoint_that_lost_zeros_is_refused(tmp_path):
    trainer(sparse_llama(), tmp_path, callbacks=[], save_strategy="steps", save_steps=2).train()
    run = trainer(sparse_llama(), tmp_path / "resumed")
    with pytest.raises(AuditError, match="fewer zeros than the Trainer was given"):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_best_model_at_the_end_holds_the_zeros(tmp_path):
    model = sparse_llama()
    masks = zeros(model)
    options = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    run = trainer(model, tmp_path, load_best_model_at_end=True, learning_rate=1.0, **options)
    run.train()
    best = load_file(f"{run.state.best_model_checkpoint}/model.safetensors")
    assert run.state.best_global_step < 4
    assert all(torch.equal(model.state_dict()[name], value) for name, value in best.items())
    assert holds(model, masks)
    entries = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert all("sparsity" in entry for entry in entries)


def test_masks_are_removed_after_training(tmp_path):
    model = sparse_llama()
    masks = zeros(model)
    trainer(model, tmp_path).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(input_ids=rows()[0]["input_ids"][None], labels=rows()[0]["labels"][None]).loss.backward()
    optimizer.step()
    assert not holds(model, masks)


def test_dense_model_is_refused(tmp_path):
    with pytest.raises(LayerSelectionError, match="no zeros"):
        trainer(sparse_llama(0.0), tmp_path).train()


@pytest.mark.parametrize("name", ["fsdp", "deepspeed"])
@pytest.mark.parametrize("where", ["arguments", "launcher"])
def test_split_parameters_are_refused_before_any_work(monkeypatch, name, where):
    given = {name: True} if where == "arguments" else {}
    if where == "launcher":
        monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(ModelError, match=f"under {name}.*DistributedDataParallel"):
        iobs.transformers.SparsityCallback().on_init_end(SimpleNamespace(**given), None, None)


def test_optimizer_of_other_tensors_is_refused(tmp_path):
    model = sparse_llama()
    copies = [value.detach().clone().requires_grad_() for value in model.parameters()]
    run = trainer(model, tmp_path, optimizers=(torch.optim.SGD(copies, lr=0.1), None))
    with pytest.raises(ModelError, match="not parameters of the model"):
        run.train()


class WriteAfterTheStep(TrainerCallback):
    """A callback that writes weights after the optimizer step, as a faulty average of weights would."""

    def on_optimizer_step(self, args, state, control, **given):
        with torch.no_grad():
            given["model"].model.layers[0].mlp.up_proj.weight.add_(0.1)


def test_zeros_lost_outside_of_the_step_are_found_after_the_first_step(tmp_path):
    run = trainer(sparse_llama(), tmp_path, callbacks=[WriteAfterTheStep(), iobs.transformers.SparsityCallback()])
    with pytest.raises(AuditError, match="after the first step"):
        run.train()
    assert run.state.global_step == 1


def test_callback_tells_the_zeros_to_the_log(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="iobs"):
        trainer(sparse_llama(), tmp_path).train()
    assert "Training keeps" in caplog.text
    assert "Training kept all" in caplog.text
