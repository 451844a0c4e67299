"""Prune a model directory block by block: never more of it in memory than one block, or what is run before the first.

The files are read a tensor at a time, and the output's files are written a block at a time.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from iobs.core.patterns import Pattern
from iobs.errors import LayerSelectionError, ModelError, ProblemError, first_line
from iobs.models.companions import REPORTS, copy_companions
from iobs.models.huggingface import check_directory, context_of, has_tokenizer, load_tokenizer
from iobs.models.loaded import LoadedModel
from iobs.models.output import check_output, expanded, output_directory
from iobs.models.shards import ShardWriter
from iobs.models.streamed import StreamedModel
from iobs.models.vision_shim import ensure_torchvision
from iobs.prune import batches as data_batches
from iobs.prune.allocation import uniform
from iobs.prune.audit import audit, audit_layers, require_promised
from iobs.prune.batches import Batch
from iobs.prune.block_walk import BlockWalk, spilled_to
from iobs.prune.checkpoint import Journal, fingerprint, identity_of
from iobs.prune.distributed import require_alone
from iobs.prune.layers import require_finite
from iobs.prune.memory import MemoryWatch, giving_memory_back
from iobs.prune.network import evaluating, seeded
from iobs.prune.parts import Part, split
from iobs.prune.plan import Plan, plan
from iobs.prune.progress import Progress, Quiet
from iobs.prune.projection import Projection
from iobs.prune.record import AuditRow, Report
from iobs.prune.settings import Settings, resolve
from iobs.prune.spread import require_fit
from iobs.prune.trace import Block, inside

# What can be chosen about a run with one block in memory at a time.
SETTINGS = ("solver", "refine", "budget", "holdout", "damping", "keep_zeros", "seed")


@giving_memory_back()
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
    complete: Callable[[Report, Path], None] = lambda report, directory: None,
    device: str = "cpu",
    arithmetic: torch.dtype | None = None,
    **settings: Any,
) -> Report:
    """Prune a Hugging Face directory into another one, in one round, with one block in memory at a time.

    Args:
        source: a directory with safetensors, whose tensors are named as the module names them.
        output: the directory to write; it must not exist, or be empty.
        batches: calibration data.
        pattern: for every pruned layer.
        checkpoint: as `iobs.prune`.
        progress: is told how the run is getting on.
        include: as `iobs.prune`.
        skip: as `iobs.prune`.
        announce: is told the plan, with predicted memory and time, before the work.
        complete: writes what else belongs into the directory, before it appears.
        device: where blocks are computed. Activations lie in mapped files on a CPU, in the memory of any other device.
        arithmetic: what blocks are computed in; see `StreamedModel.open`.
        settings: those of `SETTINGS`, as `iobs.prune`; nothing is held out by default.

    Raises:
        ProblemError: another setting: rounds, gradient steps and the like need the whole network; or one out of range.
        CalibrationError: no data, or data that does not fit.
        PatternError: the pattern does not fit a layer.
        LayerSelectionError: a name pattern matches nothing, or nothing that was chosen is fed anything.
        NonFiniteError: NaN or infinity in weights or inputs.
        AuditError: fewer zeros than asked, in memory or in the files written.
        DistributedError: several processes were started, which would all write the same files.
        ModelError: as `iobs.models.load`, or the network cannot be run block by block.
        OutputError, CheckpointError: as `iobs.models.check_output`, `iobs.prune`.
    """
    chosen = one_round(settings)
    require_alone()
    check_output(Path(output))
    started = time.perf_counter()
    collected = data_batches.collect(batches)
    streamed = StreamedModel.open(Path(source), include, skip, device=device, arithmetic=arithmetic)
    require_fit(streamed.selection, pattern)
    memory = MemoryWatch(streamed.device)
    needed = plan_of(streamed, collected, chosen)
    announce(needed)
    check_room(Path(output), needed)
    fit, heldout = split(Part.of(collected), chosen.holdout, chosen.seed)
    patterns = uniform(pattern, streamed.selection.layers)
    projection = Projection(
        streamed.module,
        patterns,
        chosen,
        progress or Quiet(),
        journal=_journal(checkpoint, chosen, pattern, streamed, fit, heldout) if checkpoint is not None else None,
        rounded=streamed.rounded,
        memory=memory,
    )
    projection.progress.begin(1, [layer.name for layer in patterns])
    with memory.watching(), output_directory(Path(output)) as temporary:
        rows, unseen = _sweep(streamed, projection, fit, heldout, temporary)
        require_promised(audit(temporary), rows, Path(output))
        projection.record.seconds = time.perf_counter() - started
        report = Report(
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
            skipped={**streamed.selection.skipped, **dict.fromkeys(unseen, "the network fed it nothing")},
            audit=rows,
            seconds=time.perf_counter() - started,
            peak_memory_bytes=memory.look(),
        )
        complete(report, temporary)
    return report


def one_round(given: Mapping[str, Any]) -> Settings:
    """The settings of a run, which may ask for nothing that needs the whole network."""
    others = sorted(given.keys() - set(SETTINGS))
    if others:
        raise ProblemError(
            f"{', '.join(others)}: not with one block in memory at a time, which is one round with targets of the "
            f"current weights and the same sparsity everywhere. Choose among {', '.join(SETTINGS)}, or use iobs.prune."
        )
    return resolve(None, {"holdout": 0.0, **given})


def _journal(
    path: str | Path, settings: Settings, pattern: Pattern, streamed: StreamedModel, fit: Part, heldout: Part
) -> Journal:
    """The checkpoint of this very run: other weights, data or settings make another one."""
    described = {
        **settings.summary(fingerprint),
        "pattern": repr(pattern),
        "layers": [layer.name for layer in streamed.selection.layers],
        "arithmetic": str(streamed.arithmetic),
    }
    weights = streamed.directory.read([*streamed.directory.entries])
    return Journal(path, identity_of(described, weights, fit.batches, heldout.batches))


def _sweep(
    streamed: StreamedModel, projection: Projection, fit: Part, heldout: Part, directory: Path
) -> tuple[list[AuditRow], set[str]]:
    """Prune every block in its turn and write it into the directory.

    Returns:
        The zeros of the layers that were pruned, as they are written, and the names of those that were fed nothing.
    """
    rows: list[AuditRow] = []
    with ExitStack() as stack:
        spill = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        writer = stack.enter_context(_Output(streamed, directory))
        stack.enter_context(evaluating(streamed.module))
        stack.enter_context(seeded(streamed.module, projection.settings.seed))

        def residence(block: Block, present: bool) -> None:
            if present:
                streamed.load(block)
                require_finite(streamed.module, [layer for layer in projection.patterns if inside(layer, block.path)])
                return
            solved = {entry.name for entry in projection.record.layers}
            written = {
                layer: pattern
                for layer, pattern in projection.patterns.items()
                if inside(layer, block.path) and layer.name in solved
            }
            rows.extend(audit_layers(streamed.module, written))
            writer.block(block, {layer.key for layer in written})
            streamed.drop(block)

        walk = BlockWalk(
            streamed.module,
            fit,
            heldout,
            streamed.selection.layers,
            streamed.blocks,
            seed=projection.settings.seed,
            residence=residence,
            begun=streamed.drop_outside,
            spill=spilled_to(spill) if streamed.device.type == "cpu" else lambda index, hidden: hidden,
            arithmetic=streamed.arithmetic,
        )
        unseen = {layer.name for layer in walk.sweep_blocks(projection.visit, projection.replay)}
    if not rows:
        raise LayerSelectionError("Nothing was pruned: the network feeds its layers nothing on this data.")
    return rows, unseen


def check_room(output: Path, plan: Plan) -> None:
    """Find out whether the disk has room for the output and for the activations that lie beside it meanwhile.

    Raises:
        OutputError: it has not, or as `check_output`.
    """
    check_output(output, needed_bytes=plan.model_bytes + plan.spilled_bytes)


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


@dataclass
class _Output:
    """The files of the pruned model: as those of the source, filled block by block."""

    streamed: StreamedModel
    directory: Path

    def __enter__(self) -> _Output:
        source = self.streamed.directory
        copy_companions(source.path, self.directory, keep_index=True, leave=REPORTS)
        self.writers = {
            file: ShardWriter(self.directory / file.name, entries, source.metadata[file])
            for file, entries in source.shards.items()
        }
        inner = {name for block in self.streamed.blocks for name in self.streamed.names(block)}
        for name, tensor in source.read([name for name in source.entries if name not in inner]):
            self._put(name, tensor)
        return self

    def block(self, block: Block, pruned: set[str]) -> None:
        """Write a block: what was pruned as it is in memory now, the others as they are in the source, bit for bit."""
        source, state = self.streamed.directory, self.streamed.module.state_dict()
        for name in pruned:
            self._put(name, state[name].to(source.entries[name].dtype))
        for name, tensor in source.read([name for name in self.streamed.names(block) if name not in pruned]):
            self._put(name, tensor)

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
    path = expanded(path)
    check_directory(path, allow_pickle=False)
    ensure_torchvision()
    import transformers

    def refuse(model: LoadedModel, folder: Path) -> None:
        raise ModelError("A model whose weights are not in memory cannot be written.")

    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except Exception as error:  # transformers raises every kind
        raise ModelError(f"{path} cannot be opened as a language model: {first_line(error)}") from error
    tokenizer = load_tokenizer(path) if has_tokenizer(path) else None
    return LoadedModel(nn.Module(), tokenizer, str(path), "causal-lm", context_of(config, tokenizer), refuse)
