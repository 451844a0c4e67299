"""Options of `iobs prune`: what becomes smaller, by which method, in which layers, on which data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from iobs.cli import options
from iobs.cli.options import completed

if TYPE_CHECKING:
    from iobs.core.patterns import Pattern


@dataclass(frozen=True)
class PatternOptions:
    """Options for what becomes smaller, and how much.

    Attributes:
        sparsity (SHARE): Share of zeros: 0.5 or 50% (default 50%).
        pattern (N:M|structured:SHARE): Instead: keep N of every M neighbours, as 2:4; or remove whole units, as
            structured:30%.
        bits (2..8): Values of the kept weights on a grid; alone, without --sparsity or --pattern, no zeros.
        bits_per_weight (NUMBER): Instead: choose zeros and bits of every layer within these bits, with masks and
            scales.
        of (COST): Of structured:SHARE: macs (default), parameters or latency.
        runtime (NAME): Of structured:SHARE: times are those of torch (default) or onnx.
        units (KIND): Of structured:SHARE: auto (channels, neurons, heads; default), stream, blocks or experts.
    """

    sparsity: Annotated[str | None, completed(options.SHARES)] = None
    pattern: Annotated[str | None, completed(options.PATTERNS)] = None
    bits: int | None = None
    bits_per_weight: float | None = None
    of: str | None = None
    runtime: str | None = None
    units: str | None = None

    def parse(self) -> Pattern | None:
        """The pattern that the options ask for, or None.

        Raises:
            typer.BadParameter: options that exclude each other.
            PatternError: the options name no pattern.
        """
        from iobs.core.grids import Budget, grid_of
        from iobs.core.patterns import Grid, parse

        if self.pattern is not None and self.sparsity is not None:
            raise typer.BadParameter("give --sparsity or --pattern, not both", param_hint="--pattern")
        text = self.pattern if self.pattern is not None else self.sparsity
        if self.bits_per_weight is not None:
            if text is not None or self.bits is not None:
                raise typer.BadParameter(
                    "give it without --sparsity, --pattern and --bits", param_hint="--bits-per-weight"
                )
            return Budget(self.bits_per_weight)
        for name in ("of", "runtime", "units"):
            value = getattr(self, name)
            if value is not None and not (text or "").startswith("structured"):
                raise typer.BadParameter("it belongs to --pattern structured:SHARE", param_hint=f"--{name}")
            text = text if value is None else f"{text},{name}={value}"
        pattern = None if text is None else parse(text)
        if self.bits is None:
            return pattern
        if pattern is not None and grid_of(pattern) is not None:
            raise typer.BadParameter(f"{pattern} has bits already", param_hint="--bits")
        return Grid(self.bits) if pattern is None else pattern & Grid(self.bits)


@dataclass(frozen=True)
class MethodOptions:
    """Options for the recipe, and changes of it.

    Attributes:
        recipe (NAME|FILE): fast (default), best, one-shot, paper, or a recipe.yaml.
        rounds (N): Rounds of Algorithm 2, with fine-tuning between them.
        solver (NAME): admm, sparsegpt, obc, lobs, nettrim, wanda, magnitude, exact; or chita, cbs, woodfisher,
            global-magnitude; of whole units search, greedy, osscar, flap, random.
        settings (KEY=VALUE): Any field of the recipe, as damping=0.1 or finetune.steps=200; repeat.
        seed (N): Seed of every random choice (default 0).
    """

    panel: ClassVar = "Method"
    recipe: Annotated[str | None, completed(options.RECIPES)] = None
    rounds: int | None = None
    solver: Annotated[str | None, completed([*options.SOLVERS, *options.NETWORK_SOLVERS, *options.UNIT_SOLVERS])] = None
    settings: Annotated[list[str] | None, typer.Option("--set")] = None
    seed: int | None = None


@dataclass(frozen=True)
class LayerOptions:
    """Options for the layers.

    Attributes:
        include (PATTERN): Prune only these layers: `*.mlp.*` or re:EXPRESSION; repeat.
        ignore (PATTERN): Leave these layers dense; repeat.
    """

    panel: ClassVar = "Layers"
    include: list[str] | None = None
    ignore: list[str] | None = None


@dataclass(frozen=True)
class CalibrationOptions(options.DataOptions):
    """Options for calibration and evaluation data.

    Attributes:
        samples (N): Number of calibration samples (default 128).
        seq_len (N): Tokens per sample (default 2048); at most the model's context.
        batch_size (N): Samples per forward pass (default 8).
        eval_data (SOURCE): Score the model before and after on these data; by default only the embedded model is
            scored.
    """

    samples: options.OptionalPositive = None
    seq_len: Annotated[int | None, typer.Option(min=2)] = None
    batch_size: options.OptionalPositive = None
    eval_data: list[str] | None = None
