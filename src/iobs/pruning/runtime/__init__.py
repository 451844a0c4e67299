"""Processes and storage of a run: checkpoints, ranks, memory."""
