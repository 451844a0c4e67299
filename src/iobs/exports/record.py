"""Records of an export: the form of every matrix, and its zeros before and after."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor


@dataclass(frozen=True)
class Written:
    """One matrix of the model in the exported files.

    Attributes:
        name: of its parameter.
        form: type of the values in the file, such as "Q4_0" or "float16".
        entries: number of entries.
        zeros: entries that are zero in the model.
        kept: entries that are zero in the model and in the file.
        exact: the file holds the same numbers; otherwise they were rounded.
    """

    name: str
    form: str
    entries: int
    zeros: int
    kept: int
    exact: bool

    @classmethod
    def of(cls, name: str, form: str, before: Tensor, after: Tensor) -> Written:
        """The record of a matrix.

        Args:
            name: of its parameter.
            form: type of the values in the file.
            before: the weight.
            after: the values that a reader of the file computes, in the same order.
        """
        zero = before == 0
        same = bool((before.float() == after.float()).all())
        return cls(name, form, before.numel(), int(zero.sum()), int((zero & (after == 0)).sum()), same)


@dataclass(frozen=True)
class Export:
    """The result of `iobs.export`. `print` shows it.

    Attributes:
        to: name of the target.
        path: the output directory.
        bytes: size of all files of weights and graphs, without companions such as the tokenizer.
        matrices: the weight matrices of the layers.
    """

    to: str
    path: Path
    bytes: int
    matrices: tuple[Written, ...]

    @property
    def zeros(self) -> int:
        """Zeros of the layers in the model."""
        return sum(one.zeros for one in self.matrices)

    @property
    def kept_zeros(self) -> int:
        """Zeros of the layers that are zero in the file, too."""
        return sum(one.kept for one in self.matrices)

    def __str__(self) -> str:
        forms = Counter(one.form for one in self.matrices)
        held = ", ".join(f"{count} as {form}" for form, count in forms.most_common())
        rounded = sum(not one.exact for one in self.matrices)
        how = f"{rounded} of them rounded" if rounded else "all of them exactly"
        return (
            f"Written: {self.path}, {self.bytes:,} bytes. {len(self.matrices)} matrices: {held}; {how}. "
            f"{self.kept_zeros:,} of {self.zeros:,} zeros are exact zeros in the file."
        )
