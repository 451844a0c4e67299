"""Table 4: MMLU of Llama-3 over ten rounds."""

from __future__ import annotations

from iobs.paper.llama import experiment

EXPERIMENT = experiment("Llama-3", "Table 4", "table")
