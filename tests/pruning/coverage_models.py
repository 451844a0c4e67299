"""Models of many families, of which some parts stay dense, and their calibration batches."""

from __future__ import annotations

from collections.abc import Callable

import families
import menagerie
import torch
from torch import nn
from torch.nn import functional

HIDDEN = 16


def vectors(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, HIDDEN, generator=generator) for _ in range(count)]


def sequences(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return [torch.randn(6, 5, HIDDEN, generator=generator) for _ in range(count)]


def images(size: int = 12, batch: int = 4, count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(batch, 3, size, size, generator=generator) for _ in range(count)]


class Around(nn.Module):
    """A core between two Linear layers."""

    def __init__(self, core: nn.Module, width: int = HIDDEN):
        super().__init__()
        self.enter, self.core, self.leave = nn.Linear(HIDDEN, HIDDEN), core, nn.Linear(width, 4)

    def forward(self, x):
        hidden = self.core(self.enter(x))
        return self.leave(hidden[0] if isinstance(hidden, tuple) else hidden)


class Cell(nn.Module):
    """An LSTMCell over the positions."""

    def __init__(self):
        super().__init__()
        self.cell, self.leave = nn.LSTMCell(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, x):
        state = None
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
        return self.leave(state[0])


class Attention(nn.Module):
    """nn.MultiheadAttention, with keys and values of the same or of another width."""

    def __init__(self, **widths: int):
        super().__init__()
        self.enter = nn.Linear(HIDDEN, 8) if widths else nn.Identity()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, batch_first=True, **widths)
        self.leave = nn.Linear(HIDDEN, 4)

    def forward(self, x):
        return self.leave(self.attention(x, self.enter(x), self.enter(x))[0])


class Multiplied(nn.Module):
    """A Linear whose weight is multiplied by `multiply`, and a parameter of its own."""

    def __init__(self, multiply: Callable):
        super().__init__()
        self.enter, self.other, self.leave = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 4)
        self.raw = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.multiply = multiply

    def forward(self, x):
        hidden = self.multiply(self.enter(x), self.other.weight)
        return self.leave(functional.linear(hidden, self.raw))


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.leave = nn.Bilinear(HIDDEN, HIDDEN, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.leave(self.both(x, x))


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.leave = nn.EmbeddingBag(20, HIDDEN), nn.Linear(HIDDEN, 4)

    def forward(self, tokens):
        return self.leave(self.bag(tokens))


def transposed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 4, 2), nn.ReLU(), nn.Conv2d(8, 3, 1))


def separable() -> nn.Module:
    blocks = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), nn.Conv2d(8, 16, 1)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def normed(norm: Callable) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(HIDDEN, HIDDEN)), nn.ReLU(), nn.Linear(HIDDEN, 4)).eval()


def _hugging_face(build: Callable[[object], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: build(families.hf)


def tokens(count: int = 2) -> list[dict[str, torch.Tensor]]:
    return families.language_batches(count=count)


def pairs() -> list[dict[str, torch.Tensor]]:
    return [{**one, "decoder_input_ids": one["input_ids"]} for one in tokens()]


def _timm(name: str, size: int, **values: object) -> tuple[Callable[[], nn.Module], Callable[[], list]]:
    return families._timm(name, **values), lambda: images(size, batch=2)


def _family(name: str) -> tuple[Callable[[], nn.Module], Callable[[], list]]:
    return lambda: families.build(name)[0], lambda: families.build(name)[1]


def _menagerie(name: str) -> tuple[Callable[[], nn.Module], Callable[[], list]]:
    return menagerie.CASES[name]


BERT = {**families.LANGUAGE, "intermediate_size": 24, "max_position_embeddings": 32}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 48, "pad_token_id": 0}

# name -> (builder, batches)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], list]]] = {
    "lstm": (lambda: Around(nn.LSTM(HIDDEN, HIDDEN, batch_first=True)), sequences),
    "lstm projected": (lambda: Around(nn.LSTM(HIDDEN, HIDDEN, batch_first=True, proj_size=8), 8), sequences),
    "gru": (lambda: Around(nn.GRU(HIDDEN, HIDDEN, 2, batch_first=True)), sequences),
    "rnn both ways": (lambda: Around(nn.RNN(HIDDEN, 8, batch_first=True, bidirectional=True)), sequences),
    "lstm cell": (Cell, sequences),
    "attention": (Attention, sequences),
    "attention of other widths": (lambda: Attention(kdim=8, vdim=8), sequences),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(HIDDEN, 2, 24, batch_first=True), 2),
        sequences,
    ),
    "transposed convolution": (transposed, images),
    "depthwise separable": (separable, images),
    "bilinear": (Bilinear, vectors),
    "embedding bag": (Bag, lambda: [torch.randint(0, 20, (8, 5)) for _ in range(3)]),
    "einsum": (lambda: Multiplied(lambda x, w: torch.einsum("bi,oi->bo", x, w)), vectors),
    "squared": (lambda: Multiplied(lambda x, w: x @ w.square().t()), vectors),
    "addmm": (lambda: Multiplied(lambda x, w: torch.addmm(x, x, w.t())), vectors),
    "matmul": (lambda: Multiplied(lambda x, w: x @ w.t()), vectors),
    "weight norm": (normed(nn.utils.parametrizations.weight_norm), vectors),
    "spectral norm": (normed(nn.utils.parametrizations.spectral_norm), vectors),
    "unfed": (menagerie.Unfed, lambda: [torch.randn(20, 8)]),
    "tied": (menagerie.Tied, lambda: [torch.randint(0, 32, (6, 5)) for _ in range(3)]),
    **{name: _menagerie(name) for name in menagerie.CASES},
    **{name: _family(name) for name in families.MODELS},
    "bert": (_hugging_face(lambda hf: hf.BertForMaskedLM(hf.BertConfig(**BERT))), tokens),
    "t5": (_hugging_face(lambda hf: hf.T5ForConditionalGeneration(hf.T5Config(**T5))), pairs),
    "gpt_oss": (
        _hugging_face(
            lambda hf: hf.AutoModelForCausalLM.from_config(
                hf.GptOssConfig(**families.EXPERTS, head_dim=8, num_local_experts=4)
            )
        ),
        tokens,
    ),
    "test_efficientnet": _timm("test_efficientnet", 32),
    "test_vit": _timm("test_vit", 160),
    "test_nfnet": _timm("test_nfnet", 32),
    "mobilenetv3_small_050": _timm("mobilenetv3_small_050", 32),
    "ghostnet_050": _timm("ghostnet_050", 32),
    "sequencer2d_s": _timm(
        "sequencer2d_s",
        32,
        img_size=32,
        layers=(1, 1),
        embed_dims=(16, 16),
        hidden_sizes=(4, 4),
        patch_sizes=(8, 1),
        mlp_ratios=(2.0, 2.0),
    ),
}
QUICK = [
    "lstm",
    "transposed convolution",
    "depthwise separable",
    "einsum",
    "squared",
    "weight norm",
    "unfed",
    "tied",
    "mixtral",
]


def build(name: str) -> tuple[nn.Module, list]:
    """A seeded model of a family without a zero, and its batches."""
    torch.manual_seed(0)
    make, batches = CASES[name]
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter[parameter == 0] = 0.01
    return model, batches()
