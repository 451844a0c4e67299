"""Options of `iobs prune` for what becomes smaller, and by which method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iobs.cli import completion
from iobs.cli.completion import words

if TYPE_CHECKING:
    from iobs.core.patterns import Pattern

_METHOD, _LAYERS = "Method", "Layers"


def option(metavar: str, text: str, panel: str | None = None, least: float | None = None, **others: Any) -> Any:
    """An option without a shown default, in a panel of the help."""
    return typer.Option(metavar=metavar, help=text, rich_help_panel=panel, show_default=False, min=least, **others)


@dataclass(frozen=True)
class Wanted:
    """Options for what becomes smaller, and how much."""

    sparsity: Annotated[
        str | None,
        option("SHARE", "Share of zeros: 0.5 or 50% (default 50%).", autocompletion=words(completion.SHARES)),
    ] = None
    pattern: Annotated[
        str | None,
        option(
            "N:M|structured:SHARE",
            "Instead: keep N of every M neighbours, as 2:4; or remove whole units, as structured:30%.",
            autocompletion=words(completion.PATTERNS),
        ),
    ] = None
    bits: Annotated[
        int | None,
        option("2..8", "Values of the kept weights on a grid; alone, without --sparsity or --pattern, no zeros."),
    ] = None
    bits_per_weight: Annotated[
        float | None,
        option("NUMBER", "Instead: choose zeros and bits of every layer within these bits, with masks and scales."),
    ] = None
    of: Annotated[str | None, option("COST", "Of structured:SHARE: macs (default), parameters or latency.")] = None
    runtime: Annotated[
        str | None, option("NAME", "Of structured:SHARE: times are those of torch (default) or onnx.")
    ] = None

    units: Annotated[
        str | None,
        option("KIND", "Of structured:SHARE: auto (channels, neurons, heads; default), stream, blocks or experts."),
    ] = None

    def parsed(self) -> Pattern | None:
        """The pattern that the options ask for, or None.

        Raises:
            typer.BadParameter: --bits beside a pattern that has bits.
            PatternError: the options name no pattern.
        """
        from iobs.core.grids import Budget, grid_of
        from iobs.core.patterns import Grid, parse

        text = self.pattern if self.pattern is not None else self.sparsity
        if self.bits_per_weight is not None:
            if text is not None or self.bits is not None:
                told = "give it without --sparsity, --pattern and --bits"
                raise typer.BadParameter(told, param_hint="--bits-per-weight")
            return Budget(self.bits_per_weight)
        for name, value in (("of", self.of), ("runtime", self.runtime), ("units", self.units)):
            if value is not None and not (text or "").startswith("structured"):
                raise typer.BadParameter("it belongs to --pattern structured:SHARE", param_hint=f"--{name}")
            text = text if value is None else f"{text},{name}={value}"
        entries = None if text is None else parse(text)
        if self.bits is None:
            return entries
        if entries is not None and grid_of(entries) is not None:
            raise typer.BadParameter(f"{entries} has bits already", param_hint="--bits")
        return Grid(self.bits) if entries is None else entries & Grid(self.bits)


@dataclass(frozen=True)
class Method:
    """Options for the method and the layers."""

    recipe: Annotated[
        str | None,
        option(
            "NAME|FILE",
            "fast (default), best, one-shot, paper, or a recipe.yaml.",
            _METHOD,
            autocompletion=words(completion.RECIPES),
        ),
    ] = None
    rounds: Annotated[int | None, option("N", "Rounds of Algorithm 2, with fine-tuning between them.", _METHOD)] = None
    solver: Annotated[
        str | None,
        option(
            "NAME",
            "admm, sparsegpt, obc, lobs, nettrim, wanda, magnitude, exact; or chita, cbs, woodfisher, global-magnitude;"
            " of whole units search, greedy, osscar, flap, random.",
            _METHOD,
            autocompletion=words([*completion.SOLVERS, *completion.NETWORK_SOLVERS, *completion.UNIT_SOLVERS]),
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any field of the recipe, as damping=0.1 or finetune.steps=200; repeat.",
            rich_help_panel=_METHOD,
            show_default=False,
        ),
    ] = None
    seed: Annotated[int | None, option("N", "Seed of every random choice (default 0).", _METHOD)] = None
    include: Annotated[
        list[str] | None, option("PATTERN", "Prune only these layers: `*.mlp.*` or re:EXPRESSION; repeat.", _LAYERS)
    ] = None
    ignore: Annotated[list[str] | None, option("PATTERN", "Leave these layers dense; repeat.", _LAYERS)] = None
