"""Removal of tokens: `reduce_vocabulary` makes a smaller tokenizer, and a model with fewer rows."""

from iobs.vocabulary.files import open_without_weights
from iobs.vocabulary.reduction import VocabularyRemoval, reduce_vocabulary

__all__ = ["VocabularyRemoval", "open_without_weights", "reduce_vocabulary"]
