"""Small tokenizers, trained on a few sentences."""

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordPiece

TEXTS = [
    "The lower newest widest house, the newer slower river.",
    "Lower rivers are slower; the newest of the widest houses are newer.",
    "Żółw ißt Müsli, naïve façade – 中文 и русский текст.",
] * 4


def byte_level():
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def with_bytes():
    """Byte-pair encoding of characters, with tokens for bytes, as of Llama 2: several merges build one token."""
    alphabet = sorted({*"".join(TEXTS).replace(" ", "\u2581")})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *alphabet]
    tokens += ["er", "\u2581t", "\u2581th", "\u2581the", "he", "lo", "low", "ow", "lower", "ów", "łów"]
    merges = [(t[:cut], t[cut:]) for t in tokens[259:] for cut in range(1, len(t)) if {t[:cut], t[cut:]} <= {*tokens}]
    model = BPE({token: number for number, token in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    strip = decoders.Strip(" ", 1, 0)
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def unigram():
    tokenizer = tokenizers.Tokenizer(Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def word_piece():
    tokenizer = tokenizers.Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=["[UNK]", "[CLS]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer
