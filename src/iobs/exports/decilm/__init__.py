"""Code that a nemotron-nas directory brings along: transformers and vLLM read `block_configs` through it."""
