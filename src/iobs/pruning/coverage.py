"""Coverage of a run: the share of a model that was pruned, and the reasons why the rest stayed dense."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from iobs.errors import listed

Kind: TypeAlias = Literal[
    "embedding",
    "output head",
    "tied",
    "depthwise",
    "recurrent",
    "convolution",
    "transformed",
    "not multiplied",
    "unreached",
    "parameter",
    "quantised",
    "complex",
    "outside",
    "asked",
    "shared",
    "empty",
]

# Descriptions of the kinds, for readers.
KINDS: dict[Kind, str] = {
    "embedding": "embeddings",
    "output head": "output heads",
    "tied": "embeddings tied to an output head",
    "depthwise": "depthwise convolutions",
    "recurrent": "other parameters of recurrent layers",
    "convolution": "convolutions of a kind that is not supported",
    "transformed": "weights that the model transforms before it multiplies",
    "not multiplied": "layers that the model uses, but not in a product that can be observed",
    "unreached": "layers that no calibration sample reaches",
    "parameter": "parameters in no matrix product that was observed",
    "complex": "matrices of complex numbers",
    "quantised": "quantised weights: integers, or floats of 8 bits or less",
    "outside": "layers outside the blocks, which --low-memory leaves dense",
    "asked": "layers that you left dense (include, ignore, rules)",
    "shared": "weights counted with another layer",
    "empty": "weights without entries",
}
EXPECTED: frozenset[Kind] = frozenset({"embedding", "output head", "tied", "asked"})  # cause no warning
WARNED_SHARE = 0.2  # left dense, of the weight entries without those of `EXPECTED`
_NAMED = 3  # layers named for each kind in a text


@dataclass(frozen=True)
class Reason:
    """The reason why a weight stays dense.

    Args:
        kind: one of `KINDS`.
        text: for this weight, in a few words.
    """

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class DenseWeight:
    """A weight matrix that stayed dense.

    Args:
        name: of the layer, or of the parameter if it belongs to no layer.
        kind: one of `KINDS`.
        reason: in a few words.
        entries: number of entries; 0 if they are counted under another name.
    """

    name: str
    kind: Kind
    reason: str
    entries: int


@dataclass(frozen=True)
class Coverage:
    """Numbers of entries in a model, counted over its parameters; shared parameters count once.

    Args:
        parameters: entries of all parameters.
        weights: entries of the weight matrices: of layers, and of other parameters with two or more dimensions. The
            rest of the parameters are vectors, such as biases and the scales of normalisations.
        pruned: entries of the pruned matrices.
        zeros: zeros among all parameters.
        dense: the weight matrices that stayed dense.
    """

    parameters: int
    weights: int
    pruned: int
    zeros: int
    dense: tuple[DenseWeight, ...] = ()

    @property
    def share(self) -> float:
        """Share of the weight entries that belong to pruned matrices."""
        return self.pruned / max(1, self.weights)

    @property
    def sparsity(self) -> float:
        """Share of zeros among all parameters."""
        return self.zeros / max(1, self.parameters)

    @property
    def vectors(self) -> int:
        """Entries of biases, normalisations and other vectors, which always stay dense."""
        return self.parameters - self.weights

    @property
    def by_kind(self) -> dict[Kind, int]:
        """Dense weight entries of each kind, the most first; kinds without entries are left out."""
        entries = {kind: sum(weight.entries for weight in self.dense if weight.kind == kind) for kind in get_args(Kind)}
        return {kind: entries[kind] for kind in sorted(entries, key=lambda kind: -entries[kind]) if entries[kind]}

    @property
    def unexpected(self) -> int:
        """Dense weight entries of the kinds that can surprise: not embeddings, output heads, or the user's choice."""
        return sum(entries for kind, entries in self.by_kind.items() if kind not in EXPECTED)

    @property
    def reasons(self) -> dict[str, str]:
        """The reason of every dense weight, by name."""
        return {weight.name: weight.reason for weight in self.dense}

    def lines(self) -> list[str]:
        """The coverage in words, one line for each number."""
        lines = [
            f"{self.share:.1%} of the {self.weights:,} weight entries belong to pruned layers; {self.sparsity:.1%} of "
            f"all {self.parameters:,} parameters are zero."
        ]
        for kind, entries in self.by_kind.items():
            lines.append(f"{entries / self.weights:.1%} left dense: {KINDS[kind]} ({self.names(kind)})")
        if self.vectors:
            lines.append(f"{self.vectors:,} entries of biases, normalisations and other vectors are never pruned.")
        return lines

    def names(self, kind: Kind) -> str:
        """The largest dense weights of a kind, named, and the number of the others."""
        weights = sorted(
            (weight for weight in self.dense if weight.kind == kind and weight.entries),
            key=lambda weight: -weight.entries,
        )
        return listed([weight.name for weight in weights], _NAMED)

    def warning(self) -> str | None:
        """A sentence if much of the model stays dense for a reason that can surprise, otherwise None."""
        expected = sum(entries for kind, entries in self.by_kind.items() if kind in EXPECTED)
        if self.unexpected < WARNED_SHARE * max(1, self.weights - expected):
            return None
        listed = "; ".join(
            f"{entries / self.weights:.0%} {KINDS[kind]} ({self.names(kind)})"
            for kind, entries in self.by_kind.items()
            if kind not in EXPECTED
        )
        return f"Only {self.share:.0%} of the weight entries are pruned. Left dense: {listed}."

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Coverage:
        """Rebuild a coverage from plain types."""
        return cls(**{**values, "dense": tuple(DenseWeight(**row) for row in values["dense"])})
