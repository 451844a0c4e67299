"""Command line options for a short run on the embedded model, or on the small one in its place."""

# Two prunable matrices are enough.
SMALL = ("--include", "model.layers.0.mlp.up_proj", "--include", "model.layers.1.mlp.down_proj")
ONE_SHOT = ("--recipe", "one-shot")
# Hardly any gradient steps on blocks, and no trials of learning rates.
FEW_STEPS = ("--set", "blocks.steps=2", "--set", "blocks.lr=1e-3")
QUICK = (*SMALL, "--samples", "10", "--seq-len", "32", "--batch-size", "5")
