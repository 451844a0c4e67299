"""Results of the golden cases: how they are computed, compared and stored.

Floating-point results depend on the torch version and the processor. So two things are stored of each result: its hash
for each kind of machine that stored it, and a sketch, from which the distance to a result of any other machine follows.

A commit that changes results stores them again with `make golden-store`, and says which changed, and why. Hashes of
other machines go where the results of this machine changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import iobs

STORED = Path(__file__).with_name("results.json")
# Relative Frobenius distance that another processor may cause: it adds up products of matrices in another order, keeps
# another entry where two are nearly equal, and divides zeros otherwise after that. Runs of whole random networks, with
# the oldest instructions instead of AVX2, were .09 to .22 away, a convolutional one on a Xeon .45 from one on an EPYC;
# single problems and files hardly at all.
TOLERANCE, TOLERANCE_OF_NETWORKS = 0.02, 0.6
_SIGNS = 16  # a sketch of 16 numbers tells a distance to about a fifth of it


@dataclass(frozen=True)
class Result:
    """The result of a case: a hash of its bits, its norm, its zeros, and products with vectors of random signs."""

    hash: str
    norm: float
    zeros: int
    sketch: tuple[float, ...]

    @classmethod
    def of(cls, run: Callable[[], Iterable[Tensor]]) -> Result:
        """Run a case; the name of an error stands for the hash of a run that ends with one."""
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tensors = [tensor.detach().cpu().contiguous().view(-1) for tensor in run()]
            except iobs.errors.IOBSError as error:
                return cls(type(error).__name__, 0.0, 0, (0.0,) * _SIGNS)
        bits, values = hashlib.sha256(), []
        for tensor in tensors:
            bits.update(tensor.view(torch.uint8).numpy().tobytes())
            values.append(tensor.double().numpy())
        flat = np.concatenate(values)
        words = np.random.PCG64(0).random_raw(math.ceil(_SIGNS * flat.size / 64))  # the same on every machine
        signs = np.unpackbits(words.view(np.uint8))[: _SIGNS * flat.size].reshape(_SIGNS, flat.size) * 2.0 - 1
        return cls(
            bits.hexdigest()[:16], float(np.linalg.norm(flat)), int((flat == 0).sum()), tuple((signs @ flat).tolist())
        )

    def distance(self, other: Result) -> float:
        """Estimated relative distance of the results: the mean square of a product with random signs is the norm's."""
        difference = np.subtract(self.sketch, other.sketch)
        return float(np.sqrt(np.mean(difference**2)) / (other.norm or 1.0))


def machine() -> dict[str, str]:
    """The torch version and the processor, which the bits of a result depend on besides the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    fields = dict(reversed([tuple(part.strip() for part in line.split(":", 1)) for line in lines if ":" in line]))
    name = " / ".join(fields.get(field, "?") for field in ("model name", "cpu family", "model"))
    return {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": name if fields else platform.processor(),
    }


@dataclass
class Stored:
    """The stored results: a reference for each case, and hashes by machine and case."""

    results: dict[str, Result]
    hashes: dict[tuple[str, ...], dict[str, str]]

    @classmethod
    def read(cls) -> Stored:
        """Read results.json."""
        stored = json.loads(STORED.read_text(encoding="utf-8"))
        results = {
            name: Result(**{**entry, "sketch": tuple(entry["sketch"])}) for name, entry in stored["cases"].items()
        }
        return cls(results, {tuple(entry["machine"].values()): entry["hashes"] for entry in stored["machines"]})

    def write(self) -> None:
        """Write results.json, a line for each case."""
        cases = {
            name: {
                **vars(result),
                "norm": float(f"{result.norm:.9g}"),
                "sketch": [float(f"{x:.9g}") for x in result.sketch],
            }
            for name, result in self.results.items()
        }
        names = tuple(machine())
        machines = [
            {"machine": dict(zip(names, place, strict=True)), "hashes": hashes} for place, hashes in self.hashes.items()
        ]
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in cases.items())
        STORED.write_text(
            f'{{"cases": {{\n{lines}\n}},\n"machines": {json.dumps(machines, indent=1)}}}\n', encoding="utf-8"
        )

    def here(self) -> dict[str, str]:
        """Hashes of this kind of machine, by case."""
        return self.hashes.get(tuple(machine().values()), {})


def tolerance(name: str) -> float:
    """The relative distance that a case may have on a processor that has stored no results."""
    return TOLERANCE_OF_NETWORKS if name.startswith(("main", "prune", "peer", "low memory")) else TOLERANCE
