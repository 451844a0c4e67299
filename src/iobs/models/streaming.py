"""Prune a model directory block by block: never more of it in memory than one block, or what is run before the first.

The files are read a tensor at a time, and the output's files are written a block at a time.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.errors import CalibrationError, ModelError
from iobs.models.huggingface import check_directory, context_of, has_tokenizer, load_tokenizer
from iobs.models.loaded import LoadedModel
from iobs.models.output import check_output, output_directory
from iobs.models.shards import Entry, ShardWriter, read_entries
from iobs.models.vision_shim import ensure_torchvision
from iobs.prune import batches as data_batches
from iobs.prune.allocation import uniform
from iobs.prune.audit import asked_zeros
from iobs.prune.batches import Batch
from iobs.prune.checkpoint import Journal, identity_of
from iobs.prune.layers import Layer, Selection, select
from iobs.prune.memory import MemoryWatch, give_back_what_is_freed
from iobs.prune.network import evaluating
from iobs.prune.plan import Plan, plan
from iobs.prune.progress import Progress, Quiet
from iobs.prune.record import AuditRow, Report
from iobs.prune.settings import Settings, resolve
from iobs.prune.spread import require_fit
from iobs.prune.sweep import BlockWalk, Projection, samples, spilled_to
from iobs.prune.trace import Block, inside


@dataclass
class Directory:
    """The tensors of a model directory by name, read one at a time."""

    path: Path
    shards: dict[Path, dict[str, Entry]] = field(default_factory=dict)
    metadata: dict[Path, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_directory(self.path, allow_pickle=False)
        for file in sorted(self.path.glob("*.safetensors")):
            self.shards[file], self.metadata[file] = read_entries(file)

    @property
    def entries(self) -> dict[str, Entry]:
        """Every tensor of every file."""
        return {name: entry for entries in self.shards.values() for name, entry in entries.items()}

    def read(
        self, names: Sequence[str], device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The named tensors on a device, floating ones in another dtype where one is given."""
        wanted = set(names)
        for file, entries in self.shards.items():
            present = wanted & entries.keys()
            if present:
                with safe_open(file, framework="pt") as opened:
                    for name in sorted(present):
                        stored = opened.get_tensor(name)
                        wanted_dtype = dtype if dtype is not None and stored.is_floating_point() else stored.dtype
                        yield name, stored.to(device, wanted_dtype, copy=True)


@dataclass
class StreamedModel:
    """A module whose blocks have no weights yet; everything else is loaded.

    Blocks are loaded in `arithmetic`, what they are computed in; the files keep the dtypes that they had.
    """

    directory: Directory
    module: nn.Module
    blocks: list[Block]
    selection: Selection
    device: torch.device
    arithmetic: torch.dtype

    @classmethod
    def open(
        cls,
        path: Path,
        include: Any = None,
        skip: Any = None,
        *,
        device: str = "cpu",
        arithmetic: torch.dtype | None = None,
    ) -> StreamedModel:
        """Build the module of a directory and load what lies outside its blocks.

        Args:
            path: the directory.
            include: name patterns of layers to prune.
            skip: name patterns of layers that stay dense.
            device: where blocks are computed.
            arithmetic: what blocks are computed in; by default as stored, but in float32 on processors that would
                have to imitate 16-bit numbers, which takes several times as long.

        Raises:
            ModelError: the directory is damaged, its files name their tensors otherwise than the module does, or the
                module has no list of equal blocks.
        """
        directory = Directory(path)
        module = _skeleton(path)
        _require_same_names(module, directory)
        blocks = _blocks(module)
        outside = [name for name in directory.entries if not any(name.startswith(f"{b.path}.") for b in blocks)]
        _move_buffers(module, device)
        _fill(module, directory.read(outside, device))
        _tie(module)
        inner = {layer.name for layer in select(module, check_finite=False).layers}
        chosen = select(module, include, skip, check_finite=False)
        layers = tuple(one for one in chosen.layers if any(inside(one, block.path) for block in blocks))
        dropped = {one.name: "outside the blocks" for one in chosen.layers if one not in layers and one.name in inner}
        selection = Selection(layers, {**chosen.skipped, **dropped})
        place, stored = torch.device(device), next(module.parameters()).dtype
        return cls(directory, module, blocks, selection, place, arithmetic or _native(stored, place))

    def names(self, block: Block) -> list[str]:
        """The names of a block's tensors."""
        return [name for name in self.directory.entries if name.startswith(f"{block.path}.")]

    def load(self, block: Block) -> None:
        """Bring a block's weights into memory."""
        _fill(self.module, self.directory.read(self.names(block), self.device, self.arithmetic))

    def drop(self, block: Block) -> None:
        """Let a block's weights go."""
        self.module.get_submodule(block.path).to("meta")

    def drop_outside(self) -> None:
        """Let all weights go: the embedding has been run, and the head is not run at all."""
        for holder in self.module.modules():
            for name, parameter in holder._parameters.items():
                holder._parameters[name] = None if parameter is None else nn.Parameter(parameter.to("meta"), False)

    def rounded(self, layer: Layer, weight: Tensor) -> Tensor:
        """A weight as the layer's file can hold it."""
        return weight.to(self.directory.entries[layer.key].dtype)


def prune_directory(
    source: str | Path,
    output: str | Path,
    batches: Sequence[Batch],
    pattern: Pattern,
    *,
    checkpoint: str | Path | None = None,
    progress: Progress | None = None,
    include: Any = None,
    skip: Any = None,
    announce: Callable[[Plan], None] = lambda plan: None,
    device: str = "cpu",
    arithmetic: torch.dtype | None = None,
    **settings: Any,
) -> Report:
    """Prune a Hugging Face directory into another one, in one round, with one block in memory at a time.

    Args:
        source: a directory with safetensors, whose tensors are named as the module names them.
        output: the directory to write; it must not exist.
        batches: calibration data.
        pattern: for every pruned layer.
        checkpoint: as `iobs.prune`.
        progress: is told how the run is getting on.
        include: as `iobs.prune`.
        skip: as `iobs.prune`.
        announce: is told the plan, with predicted memory and time, before the work.
        device: where blocks are computed. Activations lie in mapped files on a CPU, in the memory of any other device.
        arithmetic: what blocks are computed in; see `StreamedModel.open`.
        settings: solver, budget, refine, damping, seed and holdout, as `iobs.prune`.

    Raises:
        CalibrationError: settings that need the whole network: rounds, gradient steps, dense targets.
        ModelError, OutputError, CheckpointError: as `iobs.models.load`, `iobs.models.check_output`, `iobs.prune`.
    """
    chosen = resolve(None, {"target": "current", "allocation": "uniform", **settings})
    if chosen.rounds > 1 or chosen.step or chosen.polish or chosen.target != "current" or chosen.inputs != "pruned":
        raise CalibrationError(
            "Pruning block by block is one round with targets of the current weights; gradient steps and dense targets "
            "need the whole network in memory: use iobs.prune for those."
        )
    check_output(Path(output))
    give_back_what_is_freed()
    started = time.perf_counter()
    collected = data_batches.collect(batches)
    streamed = StreamedModel.open(Path(source), include, skip, device=device, arithmetic=arithmetic)
    require_fit(streamed.selection, pattern)
    memory = MemoryWatch()
    announce(plan_of(streamed, collected, chosen))
    fit, heldout = data_batches.split(collected, chosen.holdout, chosen.seed)
    patterns = uniform(pattern, streamed.selection.layers)
    journal = None
    if checkpoint is not None:
        described = {**chosen.summary(), "pattern": str(pattern), "layers": [one.name for one in patterns]}
        described["arithmetic"] = str(streamed.arithmetic)
        weights = streamed.directory.read([*streamed.directory.entries])
        journal = Journal(checkpoint, identity_of(described, weights, fit.batches, heldout.batches))
    told = progress or Quiet()
    told.begin(1, [layer.name for layer in patterns])
    projection = Projection(streamed.module, patterns, chosen, told, journal, streamed.rounded, memory)
    audit: list[AuditRow] = []
    with ExitStack() as stack:
        stack.enter_context(memory.watching())
        temporary = stack.enter_context(output_directory(Path(output)))
        spill = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=temporary)))
        writer = stack.enter_context(_Output(streamed, temporary))
        stack.enter_context(evaluating(streamed.module))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        torch.manual_seed(chosen.seed)

        def residence(block: Block, present: bool) -> None:
            if present:
                streamed.load(block)
                return
            audit.extend(_audited(streamed, block, patterns))
            writer.block(block)
            streamed.drop(block)

        walk = BlockWalk(
            streamed.module,
            fit if fit.batches else samples(collected),
            heldout,
            streamed.selection.layers,
            seed=chosen.seed,
            blocks=streamed.blocks,
            residence=residence,
            begun=streamed.drop_outside,
            spill=spilled_to(spill) if streamed.device.type == "cpu" else lambda index, hidden: hidden,
            arithmetic=streamed.arithmetic,
        )
        unseen = walk.sweep_blocks(projection.visit, projection.replay)
    skipped = {**streamed.selection.skipped, **{one.name: "the network fed it nothing" for one in unseen}}
    projection.record.seconds = time.perf_counter() - started
    return Report(
        settings={
            "model": str(source),
            "arithmetic": str(streamed.arithmetic),
            **chosen.summary(),
            "pattern": str(pattern),
            "samples": fit.samples,
        },
        loss_name="not measured: the whole network is never in memory",
        dense_loss=None,
        rounds=[projection.record],
        best_round=0,
        skipped=skipped,
        audit=audit,
        seconds=time.perf_counter() - started,
        peak_memory_bytes=projection.memory.look(),
    )


def plan_of(streamed: StreamedModel, batches: Sequence[Batch], settings: Settings) -> Plan:
    """What a run over a directory will need."""
    entries, itemsize = streamed.directory.entries, streamed.arithmetic.itemsize
    model_bytes = sum(entry.bytes for entry in entries.values())
    inner = [entries[name] for block in streamed.blocks for name in streamed.names(block)]
    numbers = [
        sum(entries[name].bytes // entries[name].dtype.itemsize for name in streamed.names(block))
        for block in streamed.blocks
    ]
    return plan(
        layers=streamed.selection.layers,
        block_bytes=itemsize * max(numbers),
        outside_bytes=model_bytes - sum(entry.bytes for entry in inner),
        model_bytes=model_bytes,
        batches=batches,
        settings=settings,
        itemsize=itemsize,
        device=streamed.device,
    )


def _native(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype itself, or float32 where a CPU has no instructions for it."""
    if device.type != "cpu" or stored not in (torch.bfloat16, torch.float16):
        return stored
    able = torch.cpu.get_capabilities()
    names = ("avx512_bf16", "amx_bf16", "bf16") if stored is torch.bfloat16 else ("avx512_fp16", "amx_fp16")
    return stored if any(able.get(name) for name in names) else torch.float32


@dataclass
class _Output:
    """The files of the pruned model: as those of the source, filled block by block."""

    streamed: StreamedModel
    directory: Path

    def __enter__(self) -> _Output:
        source = self.streamed.directory
        for file in source.path.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and file.suffix not in (".bin", ".pt"):
                shutil.copyfile(file, self.directory / file.name)
        self.writers = {
            file: ShardWriter(self.directory / file.name, entries, source.metadata[file])
            for file, entries in source.shards.items()
        }
        inner = {name for block in self.streamed.blocks for name in self.streamed.names(block)}
        for name, tensor in source.read([name for name in source.entries if name not in inner]):
            self._put(name, tensor)
        return self

    def block(self, block: Block) -> None:
        """Write a block as it is in memory now."""
        state = self.streamed.module.state_dict()
        for name in self.streamed.names(block):
            self._put(name, state[name].to(self.streamed.directory.entries[name].dtype))

    def _put(self, name: str, tensor: Tensor) -> None:
        for file, entries in self.streamed.directory.shards.items():
            if name in entries:
                self.writers[file].put(name, tensor)

    def __exit__(self, kind: Any, *_: Any) -> None:
        for writer in self.writers.values():
            writer.opened.close() if kind else writer.close()


def without_weights(path: Path) -> LoadedModel:
    """The tokenizer and the context of a model directory, as calibration data needs them; it has no weights.

    Raises:
        ModelError: the directory is damaged.
    """
    check_directory(path, allow_pickle=False)
    ensure_torchvision()
    import transformers

    def refuse(model: LoadedModel, folder: Path) -> None:
        raise ModelError("A model whose weights are not in memory cannot be written.")

    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises every kind
        raise ModelError(f"{path} cannot be opened as a language model: {error}") from error
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    return LoadedModel(nn.Module(), tokenizer, str(path), "causal-lm", context_of(config, tokenizer), refuse)


def _audited(streamed: StreamedModel, block: Block, patterns: dict[Layer, Pattern]) -> Iterator[AuditRow]:
    for layer, pattern in patterns.items():
        if inside(layer, block.path):
            zeros = int((layer.tensor(streamed.module) == 0).sum())
            yield AuditRow(layer.name, layer.shape, zeros, asked_zeros(pattern, layer.shape))


def _skeleton(path: Path) -> nn.Module:
    """The module with parameters that take no memory and buffers that are real."""
    ensure_torchvision()
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(path)
        with _parameters_on_meta():
            factory: Any = transformers.AutoModelForCausalLM
            module: nn.Module = factory.from_config(config, dtype=config.dtype)
    except Exception as error:  # transformers raises every kind
        raise ModelError(f"{path} cannot be opened as a language model: {error}") from error
    return module.eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _require_same_names(module: nn.Module, directory: Directory) -> None:
    state, entries = module.state_dict(), directory.entries
    strange = [name for name in entries if name not in state]
    if strange:
        raise ModelError(
            f"{directory.path} names its tensors otherwise than {type(module).__name__} does ({strange[0]}), so it "
            "cannot be pruned block by block; prune it in memory instead."
        )
    wrong = [name for name, entry in entries.items() if tuple(state[name].shape) != entry.shape]
    if wrong:
        raise ModelError(
            f"{wrong[0]} has the shape {entries[wrong[0]].shape} in the files of {directory.path} and "
            f"{tuple(state[wrong[0]].shape)} by its configuration; one of them is wrong."
        )
    tied = getattr(module, "_tied_weights_keys", None) or ()
    missing = [name for name in state if name not in entries and name not in tied]
    if missing:
        raise ModelError(f"{directory.path} lacks {len(missing)} weights, {missing[0]} the first; complete the files.")


def _blocks(module: nn.Module) -> list[Block]:
    """The elements of the module's list that holds the most weights: its decoder blocks."""
    lists = {path: found for path, found in module.named_modules() if isinstance(found, nn.ModuleList)}
    if not lists:
        raise ModelError(f"{type(module).__name__} has no list of blocks; prune it in memory instead.")
    path = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return [Block(f"{path}.{name}", 0, torch.empty(0)) for name, _ in lists[path].named_children()]


def _fill(module: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        path, _, last = name.rpartition(".")
        holder = module.get_submodule(path)
        if last in holder._parameters:
            holder._parameters[last] = nn.Parameter(tensor, requires_grad=False)
        else:
            holder._buffers[last] = tensor


def _move_buffers(module: nn.Module, device: str) -> None:
    for holder in module.modules():
        for name, buffer in holder._buffers.items():
            holder._buffers[name] = None if buffer is None else buffer.to(device)


def _tie(module: nn.Module) -> None:
    """Give weights that the files hold once to every module that uses them."""
    module.tie_weights()  # type: ignore[operator]
