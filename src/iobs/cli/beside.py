"""Time of a model beside another one, such as the one before its units were removed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from iobs.errors import ModelError, first_line
from iobs.report.running import BesideRow

if TYPE_CHECKING:
    from torch import Tensor

    from iobs.cli.benching import Workload
    from iobs.core.structured import Runtime
    from iobs.models import LoadedModel


def runtimes_of(asked: str | None) -> tuple[Runtime, ...]:
    """The runtimes to measure: the one asked for, otherwise torch, and ONNX Runtime where it is installed.

    Raises:
        ProblemError: the runtime is unknown or not installed.
    """
    from iobs.core.structured import require_known_runtime
    from iobs.pruning.widths.clock import require_runtime

    if asked is None:
        installed = all(find_spec(name) is not None for name in ("onnx", "onnxruntime"))
        return ("torch", "onnx") if installed else ("torch",)
    known = require_known_runtime(asked)
    require_runtime(known)
    return (known,)


def measured_beside(
    work: Workload, beside: str, runtimes: tuple[Runtime, ...], on_progress: Callable[[str], object] = lambda _: None
) -> list[BesideRow]:
    """One row a runtime, in float32; the two models take turns on one input.

    Args:
        work: the model, and the prompt or the shape of its input.
        beside: the other model.
        runtimes: to measure.
        on_progress: called with what comes next.

    Raises:
        ModelError: a model cannot be loaded, or does not take the input, or no runtime can run both.
    """
    import torch

    from iobs.models import load
    from iobs.pruning.widths.clock import NAMES
    from iobs.pruning.widths.latency import shares_of

    if work.threads is not None:
        torch.set_num_threads(work.threads)
    models = []
    for name in (beside, work.model):
        on_progress(f"loading {name}")
        models.append(load(name, dtype=torch.float32, trust_remote_code=work.trust_remote_code))
    before, after = (one.module for one in models)
    entries = [sum(value.numel() for value in one.parameters()) for one in (before, after)]
    given = input_of(models[1], work)
    rows, reasons = [], []
    for runtime in runtimes:
        on_progress(f"running both in {NAMES[runtime]}")
        try:
            seconds = shares_of(before, after, given, runtime)
        except Exception as error:  # of any runtime, and of a model that does not take the input
            reasons.append(f"{NAMES[runtime]}: {first_line(error)}")
            continue
        rows.append(BesideRow(beside, work.model, NAMES[runtime], *seconds, entries[0], entries[1]))
    if not rows:
        raise ModelError(f"{beside} and {work.model} could not be compared. {'; '.join(reasons)}")
    for reason in reasons:
        on_progress(f"not measured in {reason}")
    return rows


def input_of(loaded: LoadedModel, work: Workload) -> Tensor | dict[str, Tensor]:
    """One sample: a prompt for a model of text, otherwise an image of the shape that the model or the user says.

    Raises:
        ModelError: neither says a shape.
    """
    import torch

    from iobs.cli.benching import image_of

    embeddings = getattr(loaded.module, "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embeddings, "num_embeddings", None)
    if work.shape is not None or vocabulary is None:
        return image_of(loaded, work)
    length = min(work.prompt, loaded.context or work.prompt)
    return {"input_ids": torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))}
