"""Stores of models of which one or two blocks are in the memory of the device at a time."""
