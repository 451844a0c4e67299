"""Processes and storage of a run: checkpoints, fingerprints, ranks, memory."""
