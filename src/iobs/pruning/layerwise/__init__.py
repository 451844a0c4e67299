"""Pruning of single layers: from Gram matrices to sparse weights."""
