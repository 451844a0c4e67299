"""Worker of the distributed tests, run by each rank: `rank.py MODE OUTPUT`."""

import os
import signal
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import iobs
from iobs.models.streamed import StreamedStore
from iobs.pruning.layerwise import problem
from iobs.pruning.recipe import BlockFit
from iobs.pruning.runtime import ranks as distributed
from iobs.pruning.workspace import Request


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
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", solver="magnitude", allocation="uniform")
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
    iobs.keep_sparse(model, optimizer)
    for inputs, targets in data[distributed.current().rank :: 2] * 17:  # 51 steps
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        optimizer.step()


def shard(model, data, output):
    """Train a sharded model in two parts, with a distributed checkpoint in between; returns whole tensors."""
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", solver="magnitude", allocation="uniform")
    zeros = {name: value == 0 for name, value in model.state_dict().items() if value.ndim > 1}
    state = {}
    for part in range(2):
        for layer in model:
            if part == 0 and isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        if part == 0:
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        if part:
            found = get_state_dict(model, optimizer)
            state = dict(zip(("model", "optimizer"), found, strict=True))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().normal_()
            checkpoint.load(state, checkpoint_id=f"{output}.checkpoint")
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        sparse = iobs.keep_sparse(model, optimizer)
        for inputs, targets in data[distributed.current().rank :: 2] * 3:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        for name, parameter in model.named_parameters():
            if name in zeros:  # the moments of pruned entries stay zero too
                moments = [optimizer.state[parameter][key].full_tensor() for key in ("exp_avg", "exp_avg_sq")]
                assert not any(bool(one[zeros[name]].any()) for one in moments), name
                assert all(bool(one[~zeros[name]].any()) for one in moments), name
        if not part:
            found = get_state_dict(model, optimizer)
            checkpoint.save(dict(zip(("model", "optimizer"), found, strict=True)), checkpoint_id=f"{output}.checkpoint")
        sparse.remove()
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, mask in zeros.items():
        assert torch.equal(whole[name] == 0, mask), name
    return whole


def llama(folder):
    """Save a random Llama of three blocks; returns it, and token batches."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).double().eval()
    model.save_pretrained(folder)  # the first rank writes
    return model, [{"input_ids": torch.randint(0, 64, (8, 12))} for _ in range(4)]


def reconstruct(output, ranks):
    """Prune with blocks, allocation and whole-network steps, in memory and from files; returns the weights in memory.

    A step takes four samples on all ranks together, so that the result does not depend on the number of ranks.
    """
    size, auto = 4 // ranks.size, iobs.Allocation("fisher")
    fit = BlockFit(masks=2, between=2, steps=4, lr=1e-3, batch_size=size, network_steps=3, network_lr=1e-4)
    options = {"solver": "sparsegpt", "target": "residual", "blocks": fit, "allocation": auto, "holdout": 0.0}
    if ranks.size > 1:
        means = ranks.means([torch.tensor(1.0 + 4 * ranks.rank), torch.ones(2)], 3.0 - 2 * ranks.rank)
        assert [one.tolist() for one in means] == [2.0, [1.0, 1.0]]
        broken = ranks.means([torch.tensor(float("nan") if ranks.first else 1.0)], 1.0)
        assert broken[0].isnan()  # on every rank, so that all of them stop
    source = Path(f"{output}.model")
    model, data = llama(source)
    ranks.wait()
    # One held-out batch for two ranks, and steps limited by epochs.
    iobs.prune(model, data, 0.5, "one-shot", **{**options, "holdout": 1 / 32, "blocks": BlockFit(1, 1, 0, 4, 1.0)})
    model, data = llama(Path(f"{output}.again"))
    iobs.prune(model, data, 0.5, "one-shot", **options)
    with StreamedStore.open(source, f"{output}.streamed", arithmetic=torch.float64) as store:
        iobs.prune(store, data, 0.5, "one-shot", **options)
        pattern = iobs.Unstructured(0.5)
        patterns = dict.fromkeys(store.select(None, None, False).layers, pattern)
        store.plan(Request(iobs.Recipe(), patterns, pattern, 0.0, 0, None), data)
    return dict(model.named_parameters())


def divide():
    """Prune a Llama whose layers are wide enough for ranks to divide their rows; returns its weights.

    The number of rows that this rank solved is among them.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 320, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, attention_bias=True)).eval()
    data = [{"input_ids": torch.randint(0, 64, (8, 24))} for _ in range(4)]
    solved = []

    def counting(solve):
        def counted(given, *arguments, **options):
            solved.extend(one.shape[0] for one in (given if isinstance(given, list) else [given]))
            return solve(given, *arguments, **options)

        return counted

    problem.solve, problem.solve_many = counting(problem.solve), counting(problem.solve_many)
    iobs.prune(model, data, 0.6, "one-shot", holdout=0.25, solver=iobs.ADMM("fast"), allocation="uniform")
    return {**dict(model.named_parameters()), "solved": torch.tensor(float(sum(solved)))}


def main(mode, output):
    model, data = network()
    options = {}
    if mode == "rounds":
        step = iobs.FineTune(lr=1e-3, optimizer="adam", steps=3, loss="task")
        options = {"rounds": iobs.Rounds(3, finetune=step)}
    with distributed.joined() as ranks:
        if mode == "fsdp":
            whole = shard(model, data, output)
            whole = {name: value.detach().contiguous().clone() for name, value in whole.items()}
            return save_file(whole, f"{output}.{ranks.rank}.safetensors")
        if mode == "blocks":
            whole = {name: value.detach().contiguous() for name, value in reconstruct(output, ranks).items()}
            return save_file(whole, f"{output}.{ranks.rank}.safetensors")
        if mode == "divide":
            whole = {name: value.detach().contiguous().clone() for name, value in divide().items()}
            return save_file(whole, f"{output}.{ranks.rank}.safetensors")
        if mode == "ddp":
            train(model, data)
        else:
            callbacks = [Dies()] if mode == "death" and ranks.first else []
            if mode in ("death", "resumed"):
                options["checkpoint"] = Path(output).parent / "checkpoint"
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
