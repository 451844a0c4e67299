"""Networks that multiply with parameters in every way but by calling a layer, and the same networks made of layers."""

import torch
from torch import nn
from torch.nn import functional


def data(*shape, count=3):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*(shape or (40, 12)), generator=generator) for _ in range(count)]


def zeros(tensor):
    return int((tensor == 0).sum())


class Direct(nn.Module):
    """A product with a parameter, `use(x, w)`, and then a Linear head."""

    def __init__(self, shape, use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(*shape) / 4)
        self.head = nn.Linear(10, 4)
        self.use = use

    def forward(self, x):
        return self.head(torch.relu(self.use(x, self.w)).flatten(1))


# By name: shape of the parameter, product with an input (n, 12), the matrix (outputs, inputs), value of an added bias.
PLAIN = {
    "linear": ((10, 12), functional.linear, lambda w: w, None),
    "linear after a transpose": ((12, 10), lambda x, w: functional.linear(x, w.T), lambda w: w.T, None),
    "matmul": ((12, 10), lambda x, w: x @ w, lambda w: w.T, None),
    "weight on the left": ((10, 12), lambda x, w: (w @ x.T).T, lambda w: w, None),
    "expanded bmm": (
        (1, 12, 10),
        lambda x, w: torch.bmm(x[:, None], w.expand(len(x), -1, -1))[:, 0],
        lambda w: w[0].T,
        None,
    ),
    "addmm": ((12, 10), lambda x, w: torch.addmm(torch.ones(10), x, w), lambda w: w.T, 1.0),
    "addmm by keywords": ((12, 10), lambda x, w: torch.addmm(torch.ones(10), mat1=x, mat2=w), lambda w: w.T, 1.0),
    "einsum": ((12, 10), lambda x, w: torch.einsum("bi,io->bo", x, w), lambda w: w.T, None),
    "einsum with heads": (
        (12, 5, 2),
        lambda x, w: torch.einsum("bi,ihd->bhd", x, w).flatten(1),
        lambda w: w.flatten(1).T,
        None,
    ),
    "einsum over two dimensions": (
        (10, 3, 4),
        lambda x, w: torch.einsum("bhd,ohd->bo", x.view(-1, 3, 4), w),
        lambda w: w.flatten(1),
        None,
    ),
    "einsum with dots": ((10, 12), lambda x, w: torch.einsum("...i,oi->...o", x, w), lambda w: w, None),
    "tensordot": ((12, 10), lambda x, w: torch.tensordot(x, w, 1), lambda w: w.T, None),
    "contiguous copy": ((12, 10), lambda x, w: functional.linear(x, w.T.contiguous()), lambda w: w.T, None),
    "another dtype": ((10, 12), lambda x, w: functional.linear(x.double(), w.double()).float(), lambda w: w, None),
    "flat parameter": ((120,), lambda x, w: functional.linear(x, w.view(10, 12)), lambda w: w.view(10, 12), None),
    "cat of slices": ((10, 12), lambda x, w: functional.linear(x, torch.cat([w[:4], w[4:]])), lambda w: w, None),
    "baddbmm": (
        (1, 12, 10),
        lambda x, w: torch.baddbmm(torch.ones(1, 1, 10), x[None], w)[0],
        lambda w: w[0].T,
        1.0,
    ),
    "vectors": ((10, 12), lambda x, w: torch.stack([torch.mv(w, one) for one in x]), lambda w: w, None),
    "inner": ((10, 12), torch.inner, lambda w: w, None),
    "stack of rows": ((10, 12), lambda x, w: functional.linear(x, torch.stack([*w])), lambda w: w, None),
    "chunks side by side": (
        (20, 6),
        lambda x, w: functional.linear(x, torch.cat(w.chunk(2), 1)),
        lambda w: torch.cat(w.chunk(2), 1),
        None,
    ),
    "permuted copy": (
        (12, 5, 2),
        lambda x, w: x @ w.permute(0, 2, 1).reshape(12, 10),
        lambda w: w.permute(0, 2, 1).reshape(12, 10).T,
        None,
    ),
    "equalised scale": ((10, 12), lambda x, w: functional.linear(x, w * 0.3), lambda w: w * 0.3, None),
    "divided by a tensor": ((10, 12), lambda x, w: x @ (w / torch.tensor(4.0)).T, lambda w: w / 4, None),
    "inside vmap": ((10, 12), lambda x, w: torch.vmap(lambda one: w @ one)(x), lambda w: w, None),
    "conv2d": (
        (10, 3, 2, 2),
        lambda x, w: functional.conv2d(x.view(-1, 3, 2, 2), w).flatten(1),
        lambda w: w.flatten(1),
        None,
    ),
    "conv3d": (
        (10, 3, 2, 2, 1),
        lambda x, w: functional.conv3d(x.view(-1, 3, 2, 2, 1), w).flatten(1),
        lambda w: w.flatten(1),
        None,
    ),
    "conv1d": ((10, 12, 1), lambda x, w: functional.conv1d(x[..., None], w)[..., 0], lambda w: w[..., 0], None),
    "conv_transpose1d": (
        (12, 10, 1),
        lambda x, w: functional.conv_transpose1d(x[..., None], w)[..., 0],
        lambda w: w[..., 0].T,
        None,
    ),
}


class Equal(nn.Module):
    """The same network with a Linear in place of the product."""

    def __init__(self, direct, matrix, bias) -> None:
        super().__init__()
        found = matrix(direct.w.detach())
        self.w = nn.Linear(found.shape[1], found.shape[0], bias=bias is not None)
        if bias is not None:
            self.w.bias.data.fill_(bias)
        self.w.weight.data = found.contiguous().clone()
        self.head = nn.Linear(direct.head.in_features, 4)
        self.head.load_state_dict(direct.head.state_dict())

    def forward(self, x):
        return self.head(torch.relu(self.w(x)))
