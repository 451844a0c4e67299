"""`iobs pack`: compress the weights of a pruned model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from iobs.cli import console


def pack(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that iobs prune wrote.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=console.at_home,
            metavar="DIR",
            help="Output directory; DIR.packed by default, DIR.dense with --unpack.",
            show_default=False,
        ),
    ] = None,
    back: Annotated[bool, typer.Option("--unpack", help="Convert a packed directory back to dense files.")] = False,
) -> None:
    """Store a pruned model losslessly as bit masks and nonzero values; --unpack reverses this."""
    from iobs.models import beside, output_directory
    from iobs.models.packed import packed_share, save_packed, unpack

    target = output or beside(directory, "dense" if back else "packed")
    out = console.output_console()
    if back:
        with output_directory(target) as temporary:
            unpack(directory, temporary)
        out.print(f"Written: {target}")
        return
    save_packed(directory, target)
    share = packed_share(directory, target)
    again = f"iobs pack --unpack {shlex.quote(str(target))}"
    out.print(f"Written: {target}, {share:.1%} of the dense bytes (to reverse: {again})")
