"""`iobs run`: continue a text with a language model on the CPU."""

from __future__ import annotations

import time
from itertools import chain, islice
from typing import Annotated, Any

import typer

from iobs.cli import console


@console.with_groups
def run(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A directory that iobs prune wrote, or any MODEL.")],
    prompt: Annotated[str, typer.Argument(metavar="TEXT", help="The text to continue.")],
    tokens: Annotated[int, typer.Option(min=1, help="Number of new tokens.")] = 64,
    precision: Annotated[
        str, typer.Option(metavar="bf16|int8|int4|dense", help="Fewest bits of a weight; dense: the model as it is.")
    ] = "int8",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads; by default the fastest number.", show_default=False)
    ] = None,
    loading: console.Loading = console.Loading(),  # noqa: B008 - frozen
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Continue a text with a language model, with zeros used for speed. Always takes the most likely token."""
    import torch

    from iobs.cli.loading import load_to_run
    from iobs.cli.progress import Steps
    from iobs.errors import ModelError
    from iobs.inference import StoredLinear, accelerate
    from iobs.inference.choices import PRECISIONS
    from iobs.inference.generation import generated

    if precision not in (*PRECISIONS, "dense"):
        names = ", ".join((*PRECISIONS, "dense"))
        raise typer.BadParameter(f"{precision!r} is not one of {names}", param_hint="--precision")
    if loading.device not in (None, "cpu"):
        raise typer.BadParameter("stored matrices compute on the CPU only", param_hint="--device")
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_to_run(model, loading.dtype, "cpu", loading.allow_pickle, loading.trust_remote_code)
    if loaded.task != "causal-lm":
        raise ModelError(f"{model} is no causal language model; iobs.accelerate speeds up other networks in Python.")
    tokenizer: Any = loaded.require_tokenizer()
    ids = torch.tensor(tokenizer([prompt], verbose=False)["input_ids"])
    if not ids.numel():
        raise typer.BadParameter("the text has no tokens", param_hint="TEXT")
    if loaded.context is not None and ids.shape[1] + tokens > loaded.context:
        raise typer.BadParameter(
            f"the text has {ids.shape[1]} tokens, and the model reads {loaded.context} in all", param_hint="--tokens"
        )
    ready = any(isinstance(one, StoredLinear) for one in loaded.module.modules())
    found = None
    if precision != "dense" and not ready:
        with Steps("choosing the form of each layer"):
            found = accelerate(loaded.module, precision=precision, threads=threads)  # type: ignore[arg-type]
        console.say(str(found))
    config: Any = loaded.module.config
    stop = config.eos_token_id
    ends = tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,)
    form: Any = (
        None
        if (precision == "dense" and not ready) or (threads or 1) > 1
        else "bf16"
        if precision == "bf16"
        else "int8"
    )
    made: list[int] = []
    text, started = "", time.perf_counter()
    out, coming = console.output_console(), generated(loaded.module, ids, tokens, ends, form)
    with Steps("reading the text (the first run also compiles)"):
        opening = [*islice(coming, 1)]
    first = time.perf_counter()
    for token in chain(opening, coming):
        made.append(token)
        whole = tokenizer.decode(made, skip_special_tokens=True)
        if not talk.as_json and not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a character follows
            out.print(whole[len(text) :], end="", markup=False, highlight=False, soft_wrap=True)
            text = whole
    ended = time.perf_counter()
    rate = (len(made) - 1) / (ended - first) if len(made) > 1 else 0.0
    if talk.as_json:
        answer = {"text": tokenizer.decode(made, skip_special_tokens=True), "tokens": len(made)}
        sizes = {} if found is None else {"bytes_before": found.bytes_before, "bytes_after": found.bytes_after}
        console.print_json({**answer, "tokens_per_second": rate, "seconds_to_first_token": first - started, **sizes})
        return
    out.print()
    console.say(f"{len(made)} tokens, {rate:.1f} a second; the first after {first - started:.2f} s.")
