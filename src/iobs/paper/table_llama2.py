"""Table 3: MMLU of Llama-2 over ten rounds."""

from __future__ import annotations

from iobs.paper.llama import experiment

EXPERIMENT = experiment("Llama-2", "Table 3", "table")
