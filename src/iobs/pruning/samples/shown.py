"""Inputs that a report shows, with the outputs of both models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One input, and the outputs of the dense and of the pruned model for it.

    Args:
        shown: the input: text, or the address of an image as "data:image/png;base64,...".
        dense: continuation or predicted label of the dense model.
        pruned: the same of the pruned model.
        label: true label, or None.
    """

    shown: str
    dense: str
    pruned: str
    label: str | None = None

    @property
    def is_image(self) -> bool:
        """Check that the input is an image."""
        return self.shown.startswith("data:image/")
