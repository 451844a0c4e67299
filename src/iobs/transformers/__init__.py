"""Sparse models in the Hugging Face libraries: a callback for the `Trainer`, and LoRA on a sparse base with `peft`.

`Trainer` needs `accelerate` and adapters need `peft`: `pip install 'iobs[peft]'` installs both.
"""

from iobs.transformers.adapters import MaskedAdapters, MergedMatrix, MergeReport, mask_adapters, merge_adapters
from iobs.transformers.callback import SparsityCallback

__all__ = ["MaskedAdapters", "MergeReport", "MergedMatrix", "SparsityCallback", "mask_adapters", "merge_adapters"]
