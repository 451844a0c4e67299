"""Removal of tokens: `reduce_vocabulary` makes a smaller tokenizer, and a model with fewer rows."""

from iobs.vocabulary.reduction import VocabularyRemoval, reduce_vocabulary
from iobs.vocabulary.rows import open_without_weights

__all__ = ["VocabularyRemoval", "open_without_weights", "reduce_vocabulary"]
