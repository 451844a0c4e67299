"""Removal of whole units from a network: the run, the choice of units, and what a removal leaves."""
