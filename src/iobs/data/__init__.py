"""Calibration and evaluation data."""

from .topics import embedded_text

__all__ = ["embedded_text"]
