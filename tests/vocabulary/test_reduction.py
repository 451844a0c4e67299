"""`iobs.reduce_vocabulary`: rows, ids, files and figures of the smaller model."""

import json
from dataclasses import replace

import pytest
import torch
from small_tokenizers import TEXTS, with_bytes, word_piece
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import iobs
from iobs.data import embedded_text
from iobs.errors import DataError, ModelError, PatternError, ProblemError
from iobs.models import load
from iobs.vocabulary import VocabularyRemoval, open_without_weights

pytestmark = pytest.mark.filterwarnings("ignore:The corpus has")

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model with a head of its own, in several files, whose special ids are not the first."""
    folder, tokenizer = tmp_path_factory.mktemp("llama"), with_bytes()
    tokenizer.add_special_tokens(["<pad>"])
    size = tokenizer.get_vocab_size()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>").save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        **SMALL, vocab_size=size + 5, pad_token_id=size - 1, bos_token_id=1, eos_token_id=[2, size - 1]
    )
    module = LlamaForCausalLM(config)
    module.generation_config.suppress_tokens = [size - 2, 0]
    module.save_pretrained(folder, max_shard_size="20KB")
    return folder


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A masked language model: its head has a bias, and shares its weight with the embedding."""
    folder, tokenizer = tmp_path_factory.mktemp("bert"), word_piece()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", cls_token="[CLS]").save_pretrained(folder)
    torch.manual_seed(0)
    module = BertForMaskedLM(BertConfig(**SMALL, vocab_size=tokenizer.get_vocab_size(), pad_token_id=1))
    torch.nn.init.normal_(module.cls.predictions.bias)
    module.save_pretrained(folder)
    return folder


@torch.no_grad()
def scores(module, ids):
    return module(input_ids=ids).logits


def test_scores_of_kept_tokens_are_equal_bit_for_bit(embedded):
    texts = embedded_text("calibration")[:4]
    smaller, report = iobs.reduce_vocabulary(embedded, texts, 1024, heldout=texts[:1], length=64)
    rows = VocabularyRemoval(embedded, texts, 1024, heldout=[]).rows
    ids = torch.arange(0, 1024, 11)[None]
    assert torch.equal(scores(smaller.module, ids), scores(embedded.module, rows[ids])[..., rows])
    assert smaller.module.lm_head.weight is smaller.module.model.embed_tokens.weight
    assert len(embedded.module.lm_head.weight) == 2048  # the model itself is as before
    assert smaller.module.model.layers[0].mlp.up_proj.weight is embedded.module.model.layers[0].mlp.up_proj.weight
    (width,) = report.widths
    assert (width.kind, width.before, width.after) == ("tokens", 2048, 1024)
    cost = {cost.name: cost.before - cost.after for cost in report.costs}
    assert cost == pytest.approx({"parameters": 1024 * 160, "megabytes": 2e-6 * 1024 * 160})  # stored in 16 bits
    assert report.scores["pruned"]["bits per byte"] > report.scores["dense"]["bits per byte"] > 0
    assert report.scores["pruned"]["bytes per token"] < report.scores["dense"]["bytes per token"]


def test_share_of_the_corpus_that_is_split(embedded):
    texts = ["the the the lambda"] * 20
    removal = VocabularyRemoval(embedded, texts, 0.9, heldout=[""])  # without a token to score
    assert removal.heldout == []
    assert removal.split == 0
    assert len(removal.rows) == round(0.9 * 2048)
    text = " ".join(sorted(embedded.tokenizer.get_vocab()))
    removal = VocabularyRemoval(embedded, [text], 300, heldout=[])
    ids = embedded.tokenizer(text)["input_ids"]
    gone = sum(number not in set(removal.rows.tolist()) for number in ids[1:])
    assert removal.split == pytest.approx(gone / (len(ids) - 1))


@pytest.mark.parametrize("whole", [True, False])
def test_directory_is_written_with_new_ids_and_loads_unpatched(llama, tmp_path, whole):
    model = load(llama) if whole else open_without_weights(llama)
    smaller, _ = iobs.reduce_vocabulary(model, TEXTS, 300, length=32)
    smaller.save(tmp_path / "out")
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before, tokenizer = (AutoTokenizer.from_pretrained(folder) for folder in (llama, tmp_path / "out"))
    dense = load(llama).module
    rows = VocabularyRemoval(model, TEXTS, 300).rows
    ids = torch.arange(0, 300, 7)[None]
    assert torch.equal(scores(module, ids), scores(dense, rows[ids])[..., rows])
    assert module.lm_head.weight is not module.model.embed_tokens.weight
    pad = tokenizer.get_vocab()["<pad>"]
    assert pad == tokenizer.pad_token_id == module.config.pad_token_id == module.model.embed_tokens.padding_idx == 299
    assert module.config.eos_token_id == module.generation_config.eos_token_id == [2, 299]
    assert module.config.vocab_size == len(tokenizer) == 300
    assert module.generation_config.suppress_tokens == [0]  # the other one was removed
    for text in (*TEXTS, "Nów \U0001f600<pad>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == before.decode(before(text)["input_ids"])
    stored = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text()) if not whole else None
    assert stored is None or stored["metadata"]["total_size"] == 4 * sum(each.numel() for each in module.parameters())


def test_masked_language_model(bert, tmp_path):
    dense = load(bert)
    smaller, report = iobs.reduce_vocabulary(dense, TEXTS, 120)
    smaller.save(tmp_path / "out")
    rows, again = VocabularyRemoval(dense, TEXTS, 120).rows, load(tmp_path / "out")
    ids = torch.arange(2, 120, 5)[None]
    torch.testing.assert_close(scores(again.module, ids), scores(dense.module, rows[ids])[..., rows])
    assert again.module.cls.predictions.decoder.bias.shape == (120,)
    assert again.tokenizer("Lower rivers")["input_ids"]
    assert "bits per byte" not in report.scores["pruned"]
    assert any("not measured" in note for note in report.notes)


def test_real_model_of_sentencepiece(shared_data, tmp_path):
    dense = load(shared_data / "llama_stories260K")
    text = (shared_data / "tinystories" / "validation.txt").read_text(encoding="utf8")[:20_000]
    smaller, report = iobs.reduce_vocabulary(dense, [text], 480, heldout=[text[:500]])
    assert report.scores["pruned"]["bits per byte"] < 1.5 * report.scores["dense"]["bits per byte"]
    smaller.save(tmp_path / "out")
    before, after = (AutoTokenizer.from_pretrained(folder) for folder in (dense.source, tmp_path / "out"))
    assert len(after) == 480
    assert after.decode(after(text)["input_ids"]) == before.decode(before(text)["input_ids"])


def test_corpus_may_be_a_file_or_batches_of_ids(llama, tmp_path):
    model, file = load(llama), tmp_path / "text.txt"
    file.write_text("\n<|endoftext|>\n".join(TEXTS), encoding="utf8")
    rows = VocabularyRemoval(model, TEXTS, 300, heldout=[]).rows
    assert torch.equal(VocabularyRemoval(model, file, 300, heldout=[]).rows, rows)
    ids = [torch.tensor([model.tokenizer(text)["input_ids"]]) for text in TEXTS]
    assert torch.equal(VocabularyRemoval(model, ids, 300, heldout=[]).rows, rows)
    batches = [{"input_ids": each, "labels": each} for each in ids]
    assert torch.equal(VocabularyRemoval(model, batches, 300, heldout=[]).rows, rows)


def test_small_corpus_warns(llama):
    with pytest.warns(UserWarning, match="for each of the .* in the vocabulary"):
        iobs.reduce_vocabulary(load(llama), TEXTS, 300, heldout=TEXTS[:1], length=16)


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        (100_000, "not fewer than"),
        (1.0, "a share in"),
        (True, "a share in"),
        (0, "that must stay"),
        ("half", "a share in"),
    ],
)
def test_impossible_number_of_tokens(embedded, keep, message):
    with pytest.raises(PatternError, match=message):
        iobs.reduce_vocabulary(embedded, TEXTS, keep)


def test_corpus_that_is_none(embedded, tmp_path):
    with pytest.raises(DataError, match="is no file"):
        iobs.reduce_vocabulary(embedded, tmp_path / "missing.txt", 0.5)
    with pytest.raises(DataError, match="no text"):
        iobs.reduce_vocabulary(embedded, [], 0.5)
    with pytest.raises(DataError, match="takes texts, or batches"):
        iobs.reduce_vocabulary(embedded, [torch.zeros(2, 2)], 0.5)
    with pytest.raises(DataError, match="file, texts or batches"):
        iobs.reduce_vocabulary(embedded, 3, 0.5)


def test_models_without_tokens(embedded):
    with pytest.raises(ModelError, match="has no tokenizer"):
        iobs.reduce_vocabulary(replace(embedded, tokenizer=None), TEXTS, 0.5)
    with pytest.raises(ModelError, match="has no embedding of tokens"):
        iobs.reduce_vocabulary(replace(embedded, module=torch.nn.Linear(2, 2)), TEXTS, 0.5)


def test_network_alone_is_referred_to_the_function(embedded):
    with pytest.raises(ProblemError, match="reduce_vocabulary"):
        iobs.prune(embedded.module, [torch.zeros(1, 4, dtype=torch.long)], iobs.Structured(0.5, units="vocabulary"))
