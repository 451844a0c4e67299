"""Train the language model that ships inside iobs, from nothing but text that every Python carries.

    python scripts/train_embedded.py --steps 2600 --batch 8 [--output src/iobs/embedded] [--threads 1]

Training text: the training split of the help topics (`iobs.data.embedded_text`) and the docstrings of the standard
library, less every paragraph that the calibration or held-out topics own. The tokenizer is trained on the same text.
Weights are stored in float16 with a config that loads them as float32. About 12 minutes on one core.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import platform
import sysconfig
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.nn import functional

from iobs.data import embedded_text
from iobs.data.text import clean, without_paragraphs
from iobs.models.vision_shim import ensure_torchvision

ensure_torchvision()

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

CONTEXT = 256
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
LEFT_OUT = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "turtledemo")


def training_documents() -> list[str]:
    """The training topics, then one document of docstrings for each module of the standard library."""
    owned: set[str] = set()
    for split in ("heldout", "calibration", "train"):
        topics = [without_paragraphs(document, owned) for document in embedded_text(split)]
    docstrings = [without_paragraphs(clean(text), owned) for text in standard_library_docstrings()]
    return [document for document in topics + docstrings if len(document) > 200]


def standard_library_docstrings() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in sorted(root.rglob("*.py")):
        if any(part in LEFT_OUT for part in file.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text(encoding="utf8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, nodes)]
        documents.append("\n\n".join(text for text in found if text))
    return documents


def train_tokenizer(documents: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE that puts `<s>` before each document, so nothing is ever unknown."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
    )


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> Tensor:
    encoded = tokenizer(documents, verbose=False)["input_ids"]
    return torch.tensor([token for document in encoded for token in document])


def build_model(vocabulary: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=160,
        intermediate_size=432,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, stream: Tensor, steps: int, batch: int, peak: float, seed: int) -> None:
    """AdamW with a linear warm-up and a cosine to a twentieth of the peak; windows start anywhere in the text."""
    decayed = [p for p in model.parameters() if p.ndim == 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    warm_up = max(1, steps // 20)
    started, running = time.perf_counter(), 0.0
    for step in range(steps):
        progress = max(0.0, (step - warm_up) / max(1, steps - warm_up))
        scale = min((step + 1) / warm_up, 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = peak * scale
        starts = torch.randint(len(stream) - CONTEXT, (batch,), generator=generator)
        windows = torch.stack([stream[start : start + CONTEXT] for start in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=windows).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = loss.item() if step == 0 else 0.95 * running + 0.05 * loss.item()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {running:.3f}  {time.perf_counter() - started:6.1f} s", flush=True)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, stream: Tensor) -> float:
    windows = stream[: len(stream) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    total = 0.0
    for part in windows.split(16):
        logits = model(input_ids=part).logits[:, :-1].float()
        total += functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (windows.shape[0] * (CONTEXT - 1)))


def unigram_perplexity(train_stream: Tensor, stream: Tensor, vocabulary: int) -> float:
    counts = torch.bincount(train_stream, minlength=vocabulary).double() + 1
    return math.exp(-(counts / counts.sum()).log()[stream].mean().item())


def bigram_perplexity(train_stream: Tensor, stream: Tensor, vocabulary: int, weight: float = 0.8) -> float:
    """Bigram counts mixed with unigram ones, so that unseen pairs have a probability."""
    pairs = Counter(zip(train_stream[:-1].tolist(), train_stream[1:].tolist(), strict=True))
    counts = torch.bincount(train_stream, minlength=vocabulary).double() + 1
    unigram = (counts / counts.sum()).tolist()
    occurrences = torch.bincount(train_stream, minlength=vocabulary).tolist()
    total = 0.0
    for first, second in zip(stream[:-1].tolist(), stream[1:].tolist(), strict=True):
        bigram = pairs[first, second] / max(1, occurrences[first])
        total -= math.log(weight * bigram + (1 - weight) * unigram[second])
    return math.exp(total / (len(stream) - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("src/iobs/embedded"))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--peak", type=float, default=3e-3)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    documents = training_documents()
    tokenizer = train_tokenizer(documents, options.vocabulary)
    stream = token_stream(tokenizer, documents)
    heldout = token_stream(tokenizer, embedded_text("heldout"))
    model = build_model(options.vocabulary, options.seed)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(documents)} documents, {len(stream)} tokens, {len(heldout)} held out, {parameters} parameters")

    started = time.perf_counter()
    train(model.train(), stream, options.steps, options.batch, options.peak, options.seed)
    seconds = time.perf_counter() - started

    model.half().save_pretrained(options.output)
    config_file = options.output / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "dtype": "float32"}, indent=2) + "\n")
    tokenizer.save_pretrained(options.output)
    recipe = {
        "text": "pydoc_data.topics (training split) and the docstrings of the standard library",
        "text_licence": "Python Software Foundation Licence",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "seed": options.seed,
        "steps": options.steps,
        "batch": options.batch,
        "context": CONTEXT,
        "peak_learning_rate": options.peak,
        "optimizer": "AdamW, betas 0.9 and 0.95, weight decay 0.1, warm-up over 5 % of the steps, cosine to 5 %",
        "precision": "bfloat16 autocast with float32 masters; stored as float16",
        "parameters": parameters,
        "training_documents": len(documents),
        "training_tokens": len(stream),
        "heldout_tokens": len(heldout),
        "training_seconds": round(seconds),
        "heldout_perplexity": round(perplexity(model.float().eval(), heldout), 4),
        "heldout_perplexity_unigram": round(unigram_perplexity(stream, heldout, options.vocabulary), 2),
        "heldout_perplexity_bigram": round(bigram_perplexity(stream, heldout, options.vocabulary), 2),
    }
    (options.output / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    print(json.dumps(recipe, indent=2))


if __name__ == "__main__":
    main()
