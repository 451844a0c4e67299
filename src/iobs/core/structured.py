"""Structured pruning of a whole network: the share of its cost that removed units save."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Literal, NoReturn, cast, get_args

from iobs.core.partition import Partition
from iobs.errors import PatternError, is_a

Cost = Literal["macs", "parameters", "latency"]
Runtime = Literal["torch", "onnx"]
Units = Literal["auto", "stream", "blocks", "experts", "vocabulary"]


def require_known_runtime(name: str) -> Runtime:
    """The runtime of a name.

    Raises:
        PatternError: there is none.
    """
    if name not in get_args(Runtime):
        raise PatternError(f'runtime must be "torch" or "onnx", got {name!r}.')
    return cast(Runtime, name)


@dataclass(frozen=True)
class Structured:
    """Whole units of a network are removed: channels, neurons and heads, or blocks, or experts.

    A pattern of `iobs.prune` only. For one layer see `iobs.Groups`.

    Args:
        sparsity: share of the cost to remove, in [0, 1), of the layers that hold units; with "latency" of the time of
            the whole network. What is left of multiplications and parameters is at most the rest, and less if the next
            larger width costs too much. A measured time may be a hundredth above the rest. If no network was fast
            enough, the fastest that was measured is returned, and a note says so. Of blocks, experts and tokens
            `sparsity` is the share of their number, rounded.
        of: the cost. "macs": multiplications by weights. "parameters": entries of weight matrices. "latency": measured
            time of a call on this machine, with the threads of torch.
        multiple_of: the channels or neurons that a layer keeps are a multiple of this, such as 8 or 16. A layer may
            also stay as it is. Heads are not aligned.
        uniform: True: layers with the same kind and number of units keep the same number. False: every layer has its
            own width; a model of transformers can then be exported, but not loaded by its class. None: equal widths
            where the class of the model has one number for several layers, so that it loads the narrower model.
        units: "auto": channels, neurons and heads inside blocks: the network becomes narrower. "stream": also the
            channels between blocks of a network with batch norms, which many layers read. "blocks": whole blocks of
            the longest stack: the network becomes shorter. "experts": whole experts, the same number in every mixture.
            "vocabulary": tokens of a language model, by `iobs.reduce_vocabulary` or `iobs prune`: the tokenizer, too,
            becomes smaller.
        runtime: runtime whose time is meant and reported: "torch", or "onnx" for ONNX Runtime.
        batch: number of samples of a call whose time is meant and reported.

    Raises:
        PatternError: an argument is impossible.
    """

    sparsity: float
    of: Cost = "macs"
    multiple_of: int = 1
    uniform: bool | None = None
    runtime: Runtime = "torch"
    units: Units = "auto"
    batch: int = 1

    def __post_init__(self) -> None:
        if not is_a(Real, self.sparsity) or not 0 <= self.sparsity < 1:
            raise PatternError(f"Structured takes a share in [0, 1), got {self.sparsity!r}: 0.3 removes 30 %.")
        if self.of not in get_args(Cost):
            raise PatternError(f'Structured removes a share of="macs", "parameters" or "latency", got {self.of!r}.')
        if not is_a(Integral, self.multiple_of) or self.multiple_of < 1:
            raise PatternError(f"multiple_of must be a whole number of at least 1, got {self.multiple_of!r}.")
        if not is_a(Integral, self.batch) or self.batch < 1:
            raise PatternError(f"batch must be a whole number of at least 1, got {self.batch!r}.")
        if self.uniform is not None and not isinstance(self.uniform, bool):  # 0 is not False to the code that asks
            raise PatternError(f"uniform must be True, False or None, got {self.uniform!r}.")
        require_known_runtime(self.runtime)
        if self.units not in get_args(Units):
            names = ", ".join(f'"{name}"' for name in get_args(Units))
            raise PatternError(f"units must be one of {names}; got {self.units!r}.")
        if self.whole and (self.of != "macs" or self.multiple_of > 1 or self.uniform is not None):
            raise PatternError(
                f'units="{self.units}" removes a share of their number: leave out `of`, multiple_of and uniform.'
            )

    @property
    def whole(self) -> bool:
        """True if blocks, experts or tokens are removed, and widths stay as they are."""
        return self.units not in ("auto", "stream")

    @classmethod
    def read(cls, text: str, sparsity: float) -> Structured:
        """A pattern from its options as text, such as "of=latency,runtime=onnx", and its sparsity.

        Raises:
            PatternError: an unknown option, or a value outside its range.
        """
        options: dict[str, object] = {}
        for option in filter(None, text.split(",")):
            name, _, value = option.partition("=")
            if name not in {item.name for item in fields(cls)} - {"sparsity"} or not value:
                raise PatternError(
                    f"Cannot read the option {option!r} of a structured pattern: give of=macs, of=parameters, "
                    "of=latency, batch=8, multiple_of=8, uniform=true, units=blocks or runtime=onnx."
                )
            booleans: dict[str, object] = {"true": True, "false": False}
            options[name] = int(value) if value.isdecimal() else booleans.get(value.lower(), value)
        return cls(sparsity, **options)  # type: ignore[arg-type]

    def groups(self, shape: tuple[int, int]) -> Partition:
        """Raise an error: the units of a network are removed, and a single matrix has none.

        Raises:
            PatternError: always.
        """
        raise PatternError(
            f"The pattern {self} removes units of a whole network: use iobs.prune. For one layer use iobs.Groups."
        )

    def alone(self, other: object) -> PatternError:
        """The error that `other` is asked for in the same run."""
        return PatternError(
            f"{self} removes units in a run of its own, before zeros and bits: prune with it alone, "
            f"then prune the narrower model with {other}."
        )

    def __and__(self, other: object) -> NoReturn:
        raise self.alone(other)

    __rand__ = __and__

    def __str__(self) -> str:
        """Text that `core.patterns.parse` reads back."""
        options = [
            f"{item.name}={str(value).lower() if isinstance(value, bool) else value}"
            for item in fields(self)[1:]
            if (value := getattr(self, item.name)) != item.default
        ]
        return ",".join([f"structured:{float(self.sparsity)!r}", *options])
