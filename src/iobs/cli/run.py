"""`iobs run`: continue a text with a language model on the CPU."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import chain, islice
from typing import Annotated, Any

import typer

from iobs.cli import console, options


@options.command
def run(
    model: options.GivenModel,
    prompt: Annotated[str, typer.Argument(metavar="TEXT")],
    *,
    tokens: options.Positive = 64,
    precision: options.PrecisionOrDense = None,
    threads: options.OptionalPositive = None,
    loading: options.LoadingOnCPU,
    talk: options.Talk,
) -> None:
    """Continue a text with a language model, with zeros used for speed. Always takes the most likely token.

    Args:
        model (MODEL): A directory that iobs prune wrote, or any MODEL.
        prompt: The text to continue.
        tokens: Number of new tokens.
        precision (bf16|int8|int4|dense): Fewest bits of a weight; dense: the model as it is. A packed file keeps its
            own.
        threads: Threads. By default one or all, as is faster; one compiled call a token takes one.

    Examples:
        iobs run OUT.packed 'Once upon a time'  # a packed model, without unpacking
        iobs run OUT 'Once upon a time'  # continue a text, with the zeros used for speed
        iobs run OUT 'Once upon a time' --precision bf16 --tokens 20 --json  # exact to bfloat16, for a program
    """
    import torch

    from iobs.cli.console import ConsoleSteps
    from iobs.cli.loading import checked_precision, load_to_run, use_threads
    from iobs.errors import ModelError
    from iobs.inference import accelerate
    from iobs.inference.decoder import generated
    from iobs.inference.storing import precision_of

    precision = checked_precision(precision, model)
    loading.require_cpu("stored matrices compute on the CPU only")
    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_to_run(model, replace(loading, device="cpu"))
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
    packed_precision, speedup = precision_of(loaded.module), None
    if packed_precision is not None:
        use_threads(loaded.module, threads)
    elif precision != "dense":
        with ConsoleSteps("choosing the form of each layer"):
            speedup = accelerate(loaded.module, precision=precision, threads=threads)  # type: ignore[arg-type]
        console.say(str(speedup))
    precision = packed_precision or precision
    dense_form: Any = "bf16" if precision == "bf16" else "int8"  # of layers that stayed dense
    if precision == "dense" or (threads or 1) > 1:
        dense_form = None
    new_tokens: list[int] = []
    whole, printed, started = "", "", time.perf_counter()
    out, coming = (
        console.output_console(),
        generated(loaded.module, ids, tokens, _end_tokens(loaded.module), dense_form),
    )
    with ConsoleSteps("reading the text (the first run also compiles)"):
        opening = [*islice(coming, 1)]
    first = time.perf_counter()
    for token in chain(opening, coming):
        new_tokens.append(token)
        whole = tokenizer.decode(new_tokens, skip_special_tokens=True)
        if not talk.as_json and not whole.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a character follows
            out.print(whole[len(printed) :], end="", markup=False, highlight=False, soft_wrap=True)
            printed = whole
    ended = time.perf_counter()
    tokens_per_second = (len(new_tokens) - 1) / (ended - first) if len(new_tokens) > 1 else 0.0
    if talk.as_json:
        sizes = {} if speedup is None else {"bytes_before": speedup.bytes_before, "bytes_after": speedup.bytes_after}
        console.print_json(
            {
                "text": tokenizer.decode(new_tokens, skip_special_tokens=True),
                "tokens": len(new_tokens),
                "tokens_per_second": tokens_per_second,
                "seconds_to_first_token": first - started,
                **sizes,
            }
        )
        return
    out.print(whole[len(printed) :], markup=False, highlight=False, soft_wrap=True)  # a character that was not finished
    console.say(f"{len(new_tokens)} tokens, {tokens_per_second:.1f} a second; the first after {first - started:.2f} s.")


def _end_tokens(model: Any) -> tuple[int, ...]:
    """Tokens that end a text: those that `generate` reads, or else those of the configuration."""
    for name in ("generation_config", "config"):
        tokens = getattr(getattr(model, name, None), "eos_token_id", None)
        if tokens is not None:
            return tuple(tokens) if isinstance(tokens, (list, tuple)) else (tokens,)
    return ()
