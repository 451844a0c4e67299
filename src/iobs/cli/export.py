"""`iobs export`: write a pruned model in the format of another runtime."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from iobs.cli import completion, console
from iobs.core.files import expanded

# In the order of the table of iobs.exports, which a test compares; the help page imports no torch.
NAMES = ("gguf", "onnx", "macko", "compressed-tensors", "openvino", "coreml")


@console.with_groups
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory that iobs prune wrote, or any MODEL.")],
    to: Annotated[
        str,
        typer.Option(
            metavar="|".join(NAMES),
            help="Format of the files.",
            autocompletion=completion.words(NAMES),
            show_default=False,
        ),
    ],
    bits: Annotated[
        int | None,
        typer.Option(
            metavar="32|16|8|4",
            help="Bits of the weights of layers; by default as few as hold them exactly.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=console.at_home,
            metavar="DIR",
            help="Output directory; MODEL.FORMAT by default.",
            show_default=False,
        ),
    ] = None,
    shape: console.Shape = None,
    overwrite: console.Overwrite = False,
    loading: console.LoadingOnCPU = console.LoadingOnCPU(),  # noqa: B008 - frozen
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Write a pruned model for another runtime: zeros stay exact zeros, weights on a grid stay whole numbers."""
    from torch import zeros

    from iobs.cli.loading import load_model
    from iobs.cli.progress import Steps
    from iobs.exports import TARGETS, export, require_packages
    from iobs.models import beside, names_to_replace
    from iobs.models.output import holds

    if to not in TARGETS:
        raise typer.BadParameter(f"{to!r} is not one of {', '.join(TARGETS)}", param_hint="--to")
    if bits is not None and bits not in TARGETS[to].bits:
        known = ", ".join(map(str, TARGETS[to].bits))
        raise typer.BadParameter(f"{to} holds {known} bits, not {bits}", param_hint="--bits")
    loading.require_cpu("files are written from main memory; leave it out")
    sizes = console.shape_of(shape)
    if output is None and not expanded(model).is_dir():
        raise typer.BadParameter(
            f"{model} is no directory here, so the files have no place beside it; correct it, or say where they go",
            param_hint="--output / -o",
        )
    target = output or beside(Path(model), to)
    replaceable = names_to_replace(target, TARGETS[to].weights, overwrite)
    if replaceable and holds(target, Path(model)):
        told = "this is the directory that is read, or holds it; give another one"
        raise typer.BadParameter(told, param_hint="--output / -o")
    require_packages(to)
    loaded = load_model(model, loading.dtype, "cpu", loading.allow_pickle, loading.trust_remote_code)
    console.say(f"Writing {to}. For a large model this takes minutes.")
    with Steps(f"writing {to}"):
        example = None if sizes is None else zeros(1, *sizes)
        found = export(loaded, target, to, bits, example, replaceable)
    if talk.as_json:
        matrices = [asdict(one) for one in found.matrices]
        console.print_json(
            {"output": str(target), "to": to, "bytes": found.bytes, "zeros": found.zeros}
            | {"kept_zeros": found.kept_zeros, "matrices": matrices}
        )
        return
    console.output_console().print(str(found))
