"""`iobs pack`: compress the weights of a pruned model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from iobs.cli import console, options
from iobs.core.files import is_packed_file
from iobs.core.outputs import beside, check_output, holds, names_to_replace

# File names by which an output of this command is known, packed, ready to run, and dense: only such ones are replaced.
_PACKED, _READY, _DENSE = ("*.safetensors",), ("*.packed",), ("recipe.yaml", "iobs.json")


@options.command
def pack(
    directory: Annotated[Path, typer.Argument(metavar="DIR", callback=options.written_directory)],
    output: options.Output = None,
    precision: str | None = None,
    dtype: str | None = None,
    back: Annotated[bool, typer.Option("--unpack")] = False,
    overwrite: options.Overwrite = False,
    talk: options.Talk = options.Talk(),  # noqa: B008 - frozen
) -> None:
    """Store a pruned model in fewer bytes: losslessly, or with --precision ready to run.

    Integers of --pattern rate:3 are stored as their code, weights on a grid as multiples and scales, others as a mask
    and values with short exponents. transformers loads the directory after "import iobs".

    Args:
        directory: A directory that iobs prune wrote.
        output (DIR): Output directory; DIR.packed by default, DIR.dense with --unpack.
        precision (bf16|int8|int4): Round linear layers to at least this and store them ready to run. By default
            nothing is rounded.
        dtype (bfloat16|float16): Round only what has no code: embeddings that stayed dense, norms, biases.
        back: Convert a packed directory back to dense files.

    Examples:
        iobs pack OUT  # writes OUT.packed
        iobs pack OUT --dtype bfloat16  # norms, biases and what stayed dense in 16 bits
        iobs pack OUT --precision int8  # rounded, for iobs run and iobs evaluate as it is
        iobs pack --unpack OUT.packed -o DENSE  # ordinary files again
    """
    if dtype is not None and (back or precision is not None or dtype not in ("bfloat16", "float16")):
        apart = "it goes without --unpack and --precision"
        names = apart if back or precision is not None else f"{dtype!r} is not one of bfloat16, float16"
        raise typer.BadParameter(names, param_hint="--dtype")
    if precision is not None and (back or precision not in options.PRECISIONS):
        choices = ", ".join(options.PRECISIONS)
        names = "--unpack takes no precision" if back else f"{precision!r} is not one of {choices}"
        raise typer.BadParameter(names, param_hint="--precision")
    target = output or beside(directory, "dense" if back else "packed")
    marks = _DENSE if back else _PACKED if any(map(is_packed_file, target.glob("*.safetensors"))) else _READY
    replaceable = names_to_replace(target, marks, overwrite)
    if replaceable and holds(target, directory):
        reason = "this is the directory that is read, or holds it; give another one"
        raise typer.BadParameter(reason, param_hint="--output / -o")
    check_output(target, replaceable=replaceable)

    from iobs.cli.console import ConsoleSteps
    from iobs.cli.loading import checked_dtype
    from iobs.models import output_directory
    from iobs.models.packed import packed_share, save_packed
    from iobs.models.packed_files import unpack, unpacked_bytes

    out = console.output_console()
    if back:
        check_output(target, unpacked_bytes(directory), replaceable)
        with output_directory(target, replaceable) as temporary, ConsoleSteps("unpacking"):
            unpack(directory, temporary)
        if talk.as_json:
            console.print_json({"output": str(target)})
        else:
            out.print(f"Written: {target}")
        return
    with ConsoleSteps("packing"):
        save_packed(directory, target, replaceable, precision, checked_dtype(dtype))
    share = packed_share(directory, target)
    if talk.as_json:
        console.print_json({"output": str(target), "share_of_dense_bytes": share})
        return
    if precision is not None:
        given = shlex.quote(str(target))
        out.print(
            f"Written: {target}, {share:.1%} of the dense bytes (a language model runs by: iobs run {given} TEXT)"
        )
        out.print(f"Speed and memory on this machine: iobs bench {given}")
        return
    again = f"iobs pack --unpack {shlex.quote(str(target))}"
    out.print(f"Written: {target}, {share:.1%} of the dense bytes (to reverse: {again})")
