"""Command line options for a short run on the embedded model."""

# Two prunable matrices of the embedded model are enough.
SMALL = ("--include", "model.layers.0.mlp.up_proj", "--include", "model.layers.3.mlp.down_proj")
ONE_SHOT = ("--recipe", "one-shot")
QUICK = (*SMALL, "--samples", "10", "--seq-len", "32", "--batch-size", "5")
