"""The model that is pruned: its weight matrices, and its modes."""
