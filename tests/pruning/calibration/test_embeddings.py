"""Embedding models are compared by the angles between embeddings."""

import pytest
import scipy.stats
import torch
from transformers import BertConfig, BertModel

import iobs
from iobs.pruning.calibration.losses import similarity


def test_report_of_an_encoder_has_cosine_and_rank_correlation_to_the_dense_embeddings():
    torch.manual_seed(0)
    model = BertModel(
        BertConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
    ).eval()
    mask = torch.ones(16, 6, dtype=torch.int64)
    mask[:, 4:] = 0  # padding, which is no part of an embedding
    texts = {"input_ids": torch.randint(30, (16, 6)), "attention_mask": mask}

    def embeddings():
        with torch.no_grad():
            return model(**texts).last_hidden_state[:, :4].mean(1)

    dense = embeddings()
    report = iobs.prune(model, [texts], 0.9, "one-shot", solver="magnitude", holdout=0.0, ignore="pooler*")
    after = report.scores["pruned"]
    assert report.scores["dense"]["calibration cosine to the dense embedding"] == pytest.approx(1.0)
    assert 0 < after["calibration cosine to the dense embedding"] < 1
    assert "cosine to the dense embedding: 1 dense, " in str(report)
    cosine = torch.nn.functional.cosine_similarity(dense, embeddings()).mean()
    assert float(cosine) == pytest.approx(after["calibration cosine to the dense embedding"], abs=1e-7)


def test_rank_correlation_is_that_of_scipy():
    first, second = torch.randn(9, 5), torch.randn(9, 5)
    cosines = [unit @ unit.T for unit in map(_unit, (first, second))]
    pairs = torch.triu_indices(9, 9, 1)
    expected = scipy.stats.spearmanr(*(each[pairs[0], pairs[1]] for each in cosines)).statistic
    assert similarity(first, second)["rank correlation of pairs"] == pytest.approx(expected, abs=1e-9)


def _unit(vectors):
    return torch.nn.functional.normalize(vectors)
