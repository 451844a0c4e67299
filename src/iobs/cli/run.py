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
    precision: Annotated[str | None, console.precision("dense")] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads. By default one or all, as is faster; one compiled call a token takes one.",
            show_default=False,
        ),
    ] = None,
    loading: console.LoadingOnCPU = console.LoadingOnCPU(),  # noqa: B008 - frozen
    talk: console.Talk = console.Talk(),  # noqa: B008 - frozen
) -> None:
    """Continue a text with a language model, with zeros used for speed. Always takes the most likely token."""
    import torch

    from iobs.cli.loading import checked_precision, load_to_run, use_threads
    from iobs.cli.progress import Steps
    from iobs.errors import ModelError
    from iobs.inference import accelerate
    from iobs.inference.choices import PRECISIONS
    from iobs.inference.generation import generated
    from iobs.inference.storing import precision_of

    asked = checked_precision(precision, model, (*PRECISIONS, "dense"))
    loading.require_cpu("stored matrices compute on the CPU only")
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
    kept, found = precision_of(loaded.module), None
    if kept is not None:
        use_threads(loaded.module, threads)
    elif asked != "dense":
        with Steps("choosing the form of each layer"):
            found = accelerate(loaded.module, precision=asked, threads=threads)  # type: ignore[arg-type]
        console.say(str(found))
    form: Any = "bf16" if (kept or asked) == "bf16" else "int8"  # of layers that stayed dense
    if (kept or asked) == "dense" or (threads or 1) > 1:
        form = None
    made: list[int] = []
    whole, text, started = "", "", time.perf_counter()
    out, coming = console.output_console(), generated(loaded.module, ids, tokens, _ends(loaded.module), form)
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
    out.print(whole[len(text) :], markup=False, highlight=False, soft_wrap=True)  # a character that was not finished
    console.say(f"{len(made)} tokens, {rate:.1f} a second; the first after {first - started:.2f} s.")


def _ends(model: Any) -> tuple[int, ...]:
    """Tokens that end a text: those that `generate` reads, or else those of the configuration."""
    found = [getattr(getattr(model, name, None), "eos_token_id", None) for name in ("generation_config", "config")]
    stop = found[1] if found[0] is None else found[0]
    return tuple(stop) if isinstance(stop, (list, tuple)) else () if stop is None else (stop,)
