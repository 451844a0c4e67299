"""Speed of pruned networks on a CPU, beside torch: single products, and text of a Llama of 522 million parameters.

    python benchmarks/running.py [--quick]

Weights are random and pruned by magnitude: speed does not depend on their values. One thread, processor time, all forms
in turn, medians. "torch" is the faster of float32 and bfloat16. Text: one prompt token and 16 new tokens. "modules" is
transformers' generate after `iobs.accelerate`; rows with AVX-512 are from before each token of it became one call. "One
call" is a compiled call for each token (`iobs run`). Prompts: 128 tokens; OpenVINO, where it is installed, has the same
weights in int8 and keeps its defaults. Each kind of CPU has its own tables, since it has other kernels, and torch is
faster or slower there.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rows import Row, Rows, importable, parser, stamp
from torch import Tensor, nn

import iobs
from iobs.inference import FORMATS, cpu, store
from iobs.inference.decodable import undecodable
from iobs.inference.decoder import generated
from iobs.inference.product import StoredProduct

SIZE, REPETITIONS = 4096, 15
SPARSITIES = (0.5, 0.7, 0.9)
NEW_TOKENS, TEXT_REPETITIONS = 16, 3
PROMPT, PROMPT_REPETITIONS = 128, 9
LLAMA = {
    "hidden_size": 1280,
    "intermediate_size": 3072,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "vocab_size": 32000,
}
TARGETS = {  # of issue and study: time of torch / time of the form, for a kind of CPU
    ("avx512", "modules bf16", 0.5): 1.9,
    ("avx512", "modules bf16", 0.7): 2.5,
    ("avx512", "modules bf16", 0.9): 4.0,
    ("avx512", "modules int8", 0.5): 3.4,
    ("avx512", "modules int8", 0.9): 4.8,
    ("avx512", "one call int8", 0.5): 6.5,
    ("avx2", "modules bf16", 0.5): 2.0,
    ("avx2", "modules int8", 0.5): 2.5,
}
KINDS = {"avx512": "AVX-512", "avx2": "AVX2", "none": "torch alone"}
FORMS = ("bf16", "int8", "int4")


def pruned(weight: Tensor, sparsity: float) -> Tensor:
    """The weight without its smallest entries."""
    count = int(sparsity * weight.numel())
    bound = weight.abs().flatten().kthvalue(count).values if count else -1.0
    return torch.where(weight.abs() > bound, weight, torch.zeros(()))


@torch.no_grad()
def medians(
    calls: Mapping[str, Callable[[], Any]], repetitions: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, float]:
    """Median processor seconds of each call, of this thread or by another clock, with all calls in turn."""
    for call in calls.values():
        call()
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repetitions):
        for name, call in calls.items():
            start = clock()
            call()
            found[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in found.items()}


def has(rows: Rows, part: str, names: Sequence[str], sparsity: float, tokens: int) -> bool:
    """Check that there are rows of a part for this kind of CPU."""
    key = {"instructions": cpu.level(), "part": part, "sparsity": sparsity, "tokens": tokens}
    return all(rows.has(**key, name=name) for name in names)


def products(rows: Rows, tokens: int) -> None:
    """Products of a 4096 x 4096 matrix with some tokens."""
    for sparsity in SPARSITIES:
        if has(rows, "product", FORMATS, sparsity, tokens):
            continue
        torch.manual_seed(0)
        weight, given = pruned(torch.randn(SIZE, SIZE), sparsity), torch.randn(tokens, SIZE)
        halves, half_given = weight.bfloat16(), given.bfloat16()
        forms = {name: StoredProduct(store(weight, name)) for name in FORMATS}
        calls: dict[str, Callable[[], Any]] = {
            "torch float32": lambda w=weight, x=given: x @ w.t(),
            "torch bfloat16": lambda w=halves, x=half_given: x @ w.t(),
            **{name: lambda form=form, x=given: form(x) for name, form in forms.items()},
        }
        seconds = medians(calls, REPETITIONS)
        base = min(seconds["torch float32"], seconds["torch bfloat16"])
        for name, one in seconds.items():
            bits = 8 * forms[name].matrix.bytes / weight.numel() if name in forms else 32.0 if "32" in name else 16.0
            rows.put(
                {"instructions": cpu.level(), "part": "product", "name": name, "sparsity": sparsity, "tokens": tokens}
                | {"ratio": base / one, "bits": round(bits, 2), "processor_seconds": one, **stamp(0)}
            )


def network(sparsity: float) -> nn.Module:
    """A Llama with random weights, its layers pruned, embedding and head dense."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and ".layers." in name:
            parameter.data = pruned(parameter.data, sparsity)
    return model


@torch.no_grad()
def texts(rows: Rows, sparsities: tuple[float, ...]) -> None:
    """Tokens of the Llama by all forms, in turn."""
    names = [f"{how} {precision}" for how in ways() for precision in FORMS]
    for sparsity in sparsities:
        if has(rows, "text", names, sparsity, 1):
            continue
        dense = network(sparsity)
        models = {"torch float32": dense, "torch bfloat16": copy.deepcopy(dense).bfloat16()}
        sizes = {name: megabytes(model) for name, model in models.items()}
        prompt = torch.tensor([[1]])
        settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
        settings["pad_token_id"] = 0
        calls: dict[str, Callable[[], Any]] = {
            name: partial(model.generate, prompt, **settings) for name, model in models.items()
        }
        wanted = dense(prompt).logits
        errors = {}
        for precision in FORMS:
            model = copy.deepcopy(dense)
            print(iobs.accelerate(model, precision=precision, threads=1), flush=True)  # type: ignore[arg-type]
            errors[precision] = float((model(prompt).logits - wanted).norm() / wanted.norm())
            form: Any = "bf16" if precision == "bf16" else "int8"
            calls[f"modules {precision}"] = partial(model.generate, prompt, **settings)
            if undecodable(model) is None:
                calls[f"one call {precision}"] = partial(tokens_of, model, prompt, form)
            sizes[f"modules {precision}"] = sizes[f"one call {precision}"] = megabytes(model)
        seconds = medians(calls, TEXT_REPETITIONS)
        base = min(seconds["torch float32"], seconds["torch bfloat16"])
        for name, one in seconds.items():
            rows.put(
                {"instructions": cpu.level(), "part": "text", "name": name, "sparsity": sparsity, "tokens": 1}
                | {"ratio": base / one, "tokens_per_second": NEW_TOKENS / one, "megabytes": sizes[name]}
                | {"error": errors.get(name.split()[-1], 0.0), "processor_seconds": one, **stamp(0)}
            )


@torch.no_grad()
def prompts(rows: Rows, sparsities: tuple[float, ...]) -> None:
    """A long prompt of the Llama by all forms, in turn."""
    names = [f"modules {precision}" for precision in FORMS]
    ids = [3 + 37 * place % 500 for place in range(PROMPT)]
    prompt = torch.tensor([ids])
    settings: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
    for sparsity in sparsities:
        if has(rows, "prompt", names, sparsity, PROMPT):
            continue
        dense = network(sparsity)
        wanted = dense(prompt, **settings).logits[0, -1]
        models = {"torch float32": dense, "torch bfloat16": copy.deepcopy(dense).bfloat16()}
        calls: dict[str, Callable[[], Any]] = {
            name: (lambda model=model: model(prompt, **settings).logits[0, -1]) for name, model in models.items()
        }
        for precision in FORMS:
            model = copy.deepcopy(dense)
            iobs.accelerate(model, precision=precision, threads=1)  # type: ignore[arg-type]
            calls[f"modules {precision}"] = lambda model=model: model(prompt, **settings).logits[0, -1]
        with tempfile.TemporaryDirectory() as place:
            if importable("OpenVINO", "openvino", "nncf"):
                from peers_forms import OpenVINO, write_openvino

                write_openvino(dense, Path(place) / "model", 8)
                peer = OpenVINO(Path(place) / "model", 1)
                calls["OpenVINO int8"] = partial(fed, peer, ids)
            errors = {name: float((call().float() - wanted).norm() / wanted.norm()) for name, call in calls.items()}
            seconds = medians(calls, PROMPT_REPETITIONS, time.process_time)
        base = min(seconds["torch float32"], seconds["torch bfloat16"])
        for name, one in seconds.items():
            rows.put(
                {"instructions": cpu.level(), "part": "prompt", "name": name, "sparsity": sparsity, "tokens": PROMPT}
                | {"ratio": base / one, "tokens_per_second": PROMPT / one, "error": errors[name]}
                | {"processor_seconds": one, **stamp(0)}
            )


def ways() -> tuple[str, ...]:
    """How text is made on this CPU."""
    return ("modules", "one call") if cpu.level() != "none" else ("modules",)


def fed(peer: Any, ids: list[int]) -> Tensor:
    """Logits of another runtime after a prompt."""
    peer.reset()
    return torch.from_numpy(peer.feed(ids).copy())


def tokens_of(model: nn.Module, prompt: Tensor, form: Any) -> list[int]:
    """New tokens, with one compiled call for each."""
    return list(generated(model, prompt, NEW_TOKENS, form=form))


def megabytes(model: nn.Module) -> float:
    """Memory of all parameters and buffers."""
    held = {one.data_ptr(): one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers())}
    return sum(held.values()) / 2**20


def tables(rows: list[Row]) -> str:
    """The section of RESULTS.md."""
    text = ["# Pruned networks on a CPU", "", "Made by `python benchmarks/running.py`."]
    text += ["", (__doc__ or "").rpartition("\n\n")[2].replace("\n", " ").strip()]
    for kind, title in KINDS.items():
        found = [row for row in rows if row["instructions"] == kind]
        if found:
            processors = sorted({row["machine"].partition(",")[0] for row in found})
            text += ["", f"## {title}: {', '.join(processors)}"]
            text += [*product_tables(found), *text_tables(found, kind), *prompt_tables(found)]
    return "\n".join(text)


def product_tables(rows: list[Row]) -> list[str]:
    """A table for each number of tokens."""
    text: list[str] = []
    for tokens in sorted({row["tokens"] for row in rows if row["part"] == "product"}):
        found = [row for row in rows if row["part"] == "product" and row["tokens"] == tokens]
        text += ["", f"### A product of 4096 x 4096 with {tokens} token(s): time of torch / time", ""]
        text += ["| form | " + " | ".join(f"{value:.0%} zeros | bits" for value in SPARSITIES) + " |"]
        text += ["|---|" + "---|---|" * len(SPARSITIES)]
        for name in dict.fromkeys(row["name"] for row in found):
            cells = {row["sparsity"]: row for row in found if row["name"] == name}
            shown = (f"{cells[one]['ratio']:.2f} | {cells[one]['bits']:.2f}" for one in SPARSITIES if one in cells)
            text += [f"| {name} | " + " | ".join(shown) + " |"]
    return text


def text_tables(rows: list[Row], kind: str) -> list[str]:
    """The table of text."""
    found = [row for row in rows if row["part"] == "text"]
    if not found:
        return []
    text = ["", "### Text of a Llama of 522 million parameters", ""]
    text += ["| form | zeros | tokens/s | time of torch / time | target | MiB of weights | error of logits |"]
    text += ["|---|---|---|---|---|---|---|"]
    for row in found:
        target = TARGETS.get((kind, row["name"], row["sparsity"]), "")
        text += [
            f"| {row['name']} | {row['sparsity']:.0%} | {row['tokens_per_second']:.1f} | {row['ratio']:.2f} "
            f"| {target} | {row['megabytes']:.0f} | {row['error']:.1e} |"
        ]
    return text


def prompt_tables(rows: list[Row]) -> list[str]:
    """The table of long prompts."""
    found = [row for row in rows if row["part"] == "prompt"]
    if not found:
        return []
    text = ["", f"### A prompt of {PROMPT} tokens for this Llama", ""]
    text += ["| form | zeros | tokens/s | time of torch / time | error of logits |", "|---|---|---|---|---|"]
    for row in found:
        text += [
            f"| {row['name']} | {row['sparsity']:.0%} | {row['tokens_per_second']:.0f} | {row['ratio']:.2f} "
            f"| {row['error']:.1e} |"
        ]
    return text


def main() -> None:
    options = parser(__doc__, data=False).parse_args()
    torch.set_num_threads(1)
    rows = Rows("running", ("instructions", "part", "name", "sparsity", "tokens"), options.again)
    products(rows, 1)
    if not options.quick:
        products(rows, 16)
        texts(rows, SPARSITIES)
        prompts(rows, (0.5, 0.9))


if __name__ == "__main__":
    main()
