"""Small networks that together cover every kind of weight and every way of chaining blocks."""

import torch
from torch import nn

import iobs


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
    """No containers: calibration runs the whole network for each layer."""

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
    """Blocks pass on two tensors: a hidden state and a memory."""

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
    """A second head reads the output of the middle block."""

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
    """Layers of different blocks share one weight."""

    def share(self, block: Mixing, first: Mixing) -> None:
        block.down.weight = first.down.weight


class SharedKernel(nn.Module):
    """Two convolutions of different strides share one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1, stride=2)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.second(10 * torch.relu(self.first(x))).mean((2, 3)))


class TiedAutoencoder(nn.Module):
    """The decoder multiplies by the transposed encoder weight, a square matrix: shapes do not distinguish them."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        hidden = nn.functional.linear(torch.relu(self.encoder(x)), self.encoder.weight.t())
        return self.head(torch.relu(hidden) @ self.encoder.weight)


class Recurrent(nn.Module):
    """A layer that is called once for each position of a sequence."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(width, width), nn.Linear(width, 3)

    def forward(self, x):
        state = torch.zeros_like(x[:, 0])
        for step in x.unbind(1):
            state = torch.tanh(self.cell(state + step))
        return self.head(state)


class Amplifying(nn.Module):
    """Its outputs turn the rounding of sums in float32 into differences of a percent."""

    def __init__(self, frequency):
        super().__init__()
        self.first, self.last, self.frequency = nn.Linear(8, 256), nn.Linear(256, 4), frequency

    def forward(self, x):
        return torch.sin(self.frequency * self.last(torch.relu(self.first(x))))


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


class Tied(nn.Module):
    """An output head tied to the embedding, and two layers that share one weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.second(torch.relu(self.first(self.embedding(tokens))))))


class Unfed(nn.Module):
    """The second layer is never called."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


class Squeezed(nn.Module):
    """Removes the last dimension."""

    def forward(self, x):
        return x.squeeze(-1)


class SkipsABlock(nn.Module):
    """Three blocks; the middle one runs only on batches of 10 samples."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.blocks[0](x)
        if x.shape[0] == 10:
            x = self.blocks[1](x)
        return self.head(self.blocks[2](x))


def sparse_inside():
    """A network whose middle layer is pruned, its data, and the zeros of that layer."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    data = [torch.randn(30, 8) for _ in range(4)]
    iobs.prune(network, data, iobs.Unstructured(0.5), "one-shot", include="2")
    zeros = network[2].weight == 0
    return network, data, zeros


class Routed(nn.Module):
    """A mixture of experts that are modules; few tokens reach the last expert.

    With `always` every expert is called, also without a token.
    """

    def __init__(self, always=False):
        super().__init__()
        self.always = always
        generator = torch.Generator().manual_seed(0)
        self.body = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        with torch.no_grad():
            for layer in (self.body, *self.experts):
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) / 3)
                layer.bias.zero_()

    def forward(self, inputs):
        hidden = self.body(inputs)
        chosen = (hidden[:, 0] > 0).int() + (hidden[:, 0] > 1.5)
        output = torch.zeros(len(inputs), 4)
        for number, expert in enumerate(self.experts):
            if self.always or bool((chosen == number).any()):
                output[chosen == number] = expert(hidden[chosen == number])
        return output


class Rare(nn.Module):
    """The second layer receives only samples whose first hidden value is large."""

    def __init__(self):
        super().__init__()
        self.common, self.rare = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.common(x)
        rare = x.new_zeros(len(x), dtype=torch.bool) if not (found := x[:, 0] > 50).any() else found
        return torch.where(rare[:, None], self.rare(x[rare].mean(0)), x) if rare.any() else x


def one_rare_sample(place):
    """`Rare` and twelve samples, of which only the one at `place` reaches the rare layer."""
    torch.manual_seed(0)
    model, data = Rare(), torch.randn(12, 8)
    data[place] = 1000 * torch.linalg.pinv(model.common.weight.detach())[:, 0]
    return model, list(data.split(3))


def for_each_group(sweep, visit):
    """Call `visit(layers, statistics)` for every group of a sweep; returns the layers without input."""
    for group in sweep.groups():
        visit(group.layers, group.statistics())
    return sweep.without_input


# Few gradient steps on the projected weights, and a longer fine-tuning with a fixed support.
STEP = iobs.FineTune(lr=1e-3, optimizer="adam", steps=2, loss="kl")
POLISH = iobs.FineTune(lr=3e-3, optimizer="adam", steps=60, loss="kl", parameters="all", decay=True, batch_size="auto")


def two_layers():
    """Two linear layers with a ReLU between them, and 60 samples."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval(), torch.randn(60, 8)


def two_sparse_layers(dtype: torch.dtype = torch.float32):
    """Two linear layers of 64 x 64 pruned to half, and the samples that they were pruned on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)
    data = torch.randn(128, 64).to(dtype)
    iobs.prune(model, data, iobs.Unstructured(0.5), "one-shot", solver="sparsegpt")
    return model, data


def three_layers():
    """Three linear layers with random weights, and 120 samples labelled by the network itself in batches of 40."""
    generator = torch.Generator().manual_seed(11)
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    inputs = torch.randn(120, 16, generator=generator)
    return model, [(part, model(part).argmax(1).detach()) for part in inputs.split(40)]
