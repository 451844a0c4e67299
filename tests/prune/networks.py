"""Small networks that between them have every kind of weight and every way of chaining blocks."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, groups=2)
        self.short = nn.Conv2d(width, width, 1, stride)

    def forward(self, x):
        return torch.relu(self.conv2(torch.relu(self.norm(self.conv1(x)))) + self.short(x))


class SmallConvolutional(nn.Module):
    """Stem, three residual blocks in nested containers, a depthwise convolution, a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(nn.Sequential(Residual(8), Residual(8)), nn.Sequential(Residual(8, 2)))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.depthwise(self.stages(self.stem(x))).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden, *, scale):
        weights = (self.q(hidden) @ self.k(hidden).transpose(1, 2) * scale).softmax(-1)
        hidden = hidden + self.out(weights @ self.v(hidden))
        return (hidden + self.down(torch.relu(self.up(hidden))), None)


class SmallTransformer(nn.Module):
    """Token ids in, logits out; blocks take a keyword and return tuples, the head is tied to the embedding."""

    def __init__(self, width: int = 16, vocabulary: int = 20, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Attention(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids):
        hidden, scale = self.embed(input_ids), torch.tensor(0.25)
        for layer in self.layers:
            hidden = layer(hidden, scale=scale)[0]
        return self.head(self.norm(hidden))


class Perceptron(nn.Module):
    """No containers: it can only be walked whole."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 16), nn.Linear(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class Gated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.state, self.memory = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden, memory):
        hidden = hidden + torch.tanh(self.state(hidden)) * memory
        return hidden, torch.sigmoid(self.memory(hidden))


class TwoStreams(nn.Module):
    """Blocks hand on more than a hidden state."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        memory = torch.ones_like(x)
        for block in self.blocks:
            x, memory = block(x, memory)
        return self.head(x)


class Mixing(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class TwoHeads(nn.Module):
    """A second head is fed from the middle of the blocks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing(width) for _ in range(3))
        self.head, self.auxiliary = nn.Linear(width, 3), nn.Linear(width, 3)

    def forward(self, x):
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return {"logits": self.head(x), "auxiliary": self.auxiliary(outputs[1])}


class SharedModule(nn.Module):
    """One layer is part of every block."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing(width) for _ in range(3))
        self.head = nn.Linear(width, 3)
        for block in self.blocks[1:]:
            self.share(block, self.blocks[0])

    def share(self, block: Mixing, first: Mixing) -> None:
        block.down = first.down

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SharedWeight(SharedModule):
    """Layers of the blocks have one weight."""

    def share(self, block: Mixing, first: Mixing) -> None:
        block.down.weight = first.down.weight


class SharedKernel(nn.Module):
    """Two convolutions of other strides have one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, stride=2)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.second(10 * torch.relu(self.first(x))).mean((2, 3)))


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's weight the other way round; it is square, so that shapes do not tell them apart."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        hidden = nn.functional.linear(torch.relu(self.encoder(x)), self.encoder.weight.t())
        return self.head(torch.relu(hidden) @ self.encoder.weight)


class Recurrent(nn.Module):
    """A layer is called as often as a sequence is long."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = torch.tanh(self.cell(state + step))
        return self.head(state)


def perceptron_batches(count: int = 4, size: int = 16):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 12, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def image_batches(count: int = 3, size: int = 8):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(size, 3, 8, 8, generator=generator) for _ in range(count)]


def token_batches(count: int = 3, size: int = 8, length: int = 12):
    generator = torch.Generator().manual_seed(3)
    return [{"input_ids": torch.randint(0, 20, (size, length), generator=generator)} for _ in range(count)]


def sequence_batches(lengths: tuple[int, ...] = (1, 9, 4), size: int = 16):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(size, length, 8, generator=generator) for length in lengths]


CHAINED = {
    "convolutional": (SmallConvolutional, image_batches),
    "transformer": (SmallTransformer, token_batches),
}
CASES = CHAINED | {
    "perceptron": (Perceptron, perceptron_batches),
    "two streams": (TwoStreams, perceptron_batches),
    "two heads": (TwoHeads, perceptron_batches),
    "shared module": (SharedModule, perceptron_batches),
    "shared weight": (SharedWeight, perceptron_batches),
    "shared kernel": (SharedKernel, image_batches),
    "tied autoencoder": (TiedAutoencoder, perceptron_batches),
    "recurrent": (Recurrent, sequence_batches),
}


def build(name: str):
    torch.manual_seed(0)
    network, batches = CASES[name]
    return network().eval(), batches()
