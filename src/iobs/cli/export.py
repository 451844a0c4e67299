"""`iobs export`: write a pruned model in the format of another runtime."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from iobs.cli import console, options
from iobs.core.files import expanded
from iobs.core.outputs import beside, holds, names_to_replace
from iobs.core.specs import FORMATS


@options.command
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", callback=options.existing_model)],
    to: Annotated[
        str,
        typer.Option(
            metavar="|".join(FORMATS),
            autocompletion=options.complete([*FORMATS]),
            callback=options.one_of([*FORMATS]),
            show_default=False,
        ),
    ],
    bits: int | None = None,
    output: options.Output = None,
    shape: options.Shape = None,
    overwrite: options.Overwrite = False,
    loading: options.LoadingOnCPU = options.LoadingOnCPU(),  # noqa: B008 - frozen
    talk: options.Talk = options.Talk(),  # noqa: B008 - frozen
) -> None:
    """Write a pruned model for another runtime: zeros stay exact zeros, weights on a grid stay whole numbers.

    Args:
        model: A directory that iobs prune wrote, or any MODEL.
        to: Format of the files.
        bits (32|16|8|4): Bits of the weights of layers; by default as few as hold them exactly.
        output (DIR): Output directory; MODEL.FORMAT by default.

    Examples:
        iobs export OUT --to gguf  # writes OUT.gguf/model.gguf for llama.cpp
        iobs export OUT --to gguf --bits 8 -o FILES  # with weights rounded to 8 bits
        iobs export OUT --to nemotron-nas  # a directory for vLLM and mlx-lm, each layer with a width of its own
        iobs export OUT --to onnx --bits 8  # a graph for ONNX Runtime, weights rounded to 8 bits
        iobs export OUT --to compressed-tensors --bits 4  # a directory for transformers and vLLM
        iobs export OUT --to openvino --shape 3,224,224  # a graph for OpenVINO, of your own network for images
    """
    if bits is not None and bits not in FORMATS[to].bits:
        choices = ", ".join(map(str, FORMATS[to].bits))
        raise typer.BadParameter(f"{to} holds {choices} bits, not {bits}", param_hint="--bits")
    loading.require_cpu("files are written from main memory; leave it out")
    sizes = options.parse_shape(shape)
    if output is None and not expanded(model).is_dir():
        raise typer.BadParameter(
            f"{model} is no directory here, so the files have no place beside it; correct it, or say where they go",
            param_hint="--output / -o",
        )
    target = output or beside(Path(model), to)
    replaceable = names_to_replace(target, FORMATS[to].weights, overwrite)
    if replaceable and holds(target, Path(model)):
        reason = "this is the directory that is read, or holds it; give another one"
        raise typer.BadParameter(reason, param_hint="--output / -o")

    from torch import zeros

    from iobs.cli.console import ConsoleSteps
    from iobs.cli.loading import load_model
    from iobs.exports import export, require_packages

    require_packages(to)
    loaded = load_model(model, replace(loading, device="cpu"))
    console.say(f"Writing {to}. For a large model this takes minutes.")
    with ConsoleSteps(f"writing {to}"):
        example = None if sizes is None else zeros(1, *sizes)
        written = export(loaded, target, to, bits, example, replaceable)
    if talk.as_json:
        matrices = [asdict(matrix) for matrix in written.matrices]
        console.print_json(
            {"output": str(target), "to": to, "bytes": written.bytes, "zeros": written.zeros}
            | {"kept_zeros": written.kept_zeros, "matrices": matrices}
        )
        return
    console.output_console().print(str(written))
