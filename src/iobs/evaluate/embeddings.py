"""Rank correlation of an embedding model with labelled pairs of texts."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch import nn

from iobs.core.modes import full_precision
from iobs.data import PairSource
from iobs.errors import DataError, ModelError
from iobs.models import LoadedModel
from iobs.pruning.calibration.losses import embedded
from iobs.pruning.samples.subsets import Samples


@full_precision()
def rank_correlation(model: LoadedModel, source: PairSource, batch: int = 32) -> float:
    """Spearman's correlation of the cosines of pairs of texts with the labels of the pairs.

    The embedding of a text is the mean of the states of its tokens, or the state of the first token if the folder of
    sentence-transformers says so (1_Pooling/config.json).

    Args:
        model: an encoder, whose output has `last_hidden_state`, with its tokenizer.
        source: labelled pairs of texts.
        batch: texts per forward pass.

    Raises:
        ModelError: the model has no tokenizer, or other outputs.
        DataError: all labels or all cosines are equal.
    """
    texts = [*dict.fromkeys(text for pair in source.pairs for text in pair)]
    tokens = model.require_tokenizer()(texts, verbose=False)["input_ids"]
    if model.context is not None:
        tokens = [ids if len(ids) <= model.context else [*ids[: model.context - 1], ids[-1]] for ids in tokens]
    order = sorted(range(len(texts)), key=lambda number: len(tokens[number]))  # little padding
    device = next(model.module.parameters()).device
    batches = []
    for start in range(0, len(order), batch):
        rows = [torch.tensor(tokens[number]) for number in order[start : start + batch]]
        batches.append(
            {
                "input_ids": nn.utils.rnn.pad_sequence(rows, True).to(device),
                "attention_mask": nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], True).to(device),
            }
        )
    vectors = embedded(model.module, Samples.of(batches), _pools_first(Path(model.source)))
    if vectors is None:
        raise ModelError(
            f"{model.source} returns no last_hidden_state, so it has no embeddings of texts to compare with pairs."
        )
    place = {texts[number]: row for row, number in enumerate(order)}
    first, second = (vectors[[place[pair[side]] for pair in source.pairs]] for side in (0, 1))
    cosines = nn.functional.cosine_similarity(first, second).numpy()
    if len({*source.labels}) == 1 or len({*cosines.tolist()}) == 1:
        what = "labels" if len({*source.labels}) == 1 else "cosines"
        raise DataError(f"All {what} of {source.name} are equal, so they have no order to compare.")
    return float(spearmanr(cosines, source.labels).statistic)


def _pools_first(directory: Path) -> bool:
    """True if a folder of sentence-transformers takes the state of the first token for the embedding."""
    try:
        return bool(
            json.loads((directory / "1_Pooling" / "config.json").read_text(encoding="utf8"))["pooling_mode_cls_token"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False
