"""Full precision: no TF32 where iobs computes, and the user's own settings before, after and in measured times."""

import pytest
import torch
from torch import nn

import iobs
import iobs.solvers.interface
from iobs.core.modes import full_precision, precision_of_user
from iobs.evaluate import accuracy
from iobs.pruning.network.modes import evaluating
from iobs.pruning.widths.latency import shares_of

NEWER = hasattr(torch.backends, "fp32_precision")


def settings():
    """Settings of torch for products and convolutions of float32; an error's type where torch refuses to read one."""
    found = []
    backends = torch.backends
    reads = [torch.get_float32_matmul_precision, lambda: backends.cudnn.allow_tf32]
    if NEWER:
        owners = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
        reads += [lambda one=one: one.fp32_precision for one in owners]
    for read in reads:
        try:
            found.append(read())
        except RuntimeError as error:
            found.append(type(error))
    return found


def exact():
    """True if products and convolutions of float32 have all bits: on a GPU by the settings, on this CPU by a product.

    A CPU may be allowed to round to bfloat16 where it does not.
    """
    left, right = torch.randn(2, 200, 200).unbind()
    error = (left @ right).double() - left.double() @ right.double()
    return settings()[1:5] == [False, *["ieee"] * (3 if NEWER else 0)] and bool(error.norm() < 1e-6 * 200**1.5)


@pytest.fixture(params=["default", "high", "medium", *(["newer"] if NEWER else [])])
def user(request):
    """Settings of a user; torch's own come back afterwards."""
    with precision_of_user():
        if request.param == "newer":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        elif request.param != "default":
            torch.set_float32_matmul_precision(request.param)
        yield settings()


def test_the_settings_of_the_user_come_back(user):
    assert not exact()
    with full_precision():
        assert exact()
        with full_precision():
            assert exact()
        with precision_of_user():
            assert settings() == user
        assert exact()
    assert settings() == user


@pytest.mark.parametrize("positions", [20, 300])
@pytest.mark.parametrize("grad", [False, True])
def test_attention_has_all_bits_and_comes_back(positions, grad, monkeypatch):
    usual = nn.functional.scaled_dot_product_attention
    query, key, value = torch.randn(3, 2, 3, positions, 16, requires_grad=grad).unbind()
    expected = usual(*(tensor.double() for tensor in (query, key, value)), is_causal=True)
    with full_precision():
        found = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        assert exact()
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    assert nn.functional.scaled_dot_product_attention is usual
    with monkeypatch.context() as patch:  # a library may have replaced it
        patch.setattr(nn.functional, "scaled_dot_product_attention", lambda *_, **__: "another")
        with full_precision():
            assert nn.functional.scaled_dot_product_attention(query, key, value) == "another"


def test_attention_that_a_library_wraps_inside_does_not_call_itself(monkeypatch):
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", nn.functional.scaled_dot_product_attention)
    query = torch.randn(2, 3, 20, 16)
    with full_precision():
        inner = nn.functional.scaled_dot_product_attention
        nn.functional.scaled_dot_product_attention = lambda *args: inner(*args)
    expected = nn.functional.scaled_dot_product_attention(query, query, query)
    with full_precision():
        found = nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_attention_of_ragged_batches_is_left_to_torch():
    """A nested tensor has no length that can be compared."""
    attention = nn.functional.scaled_dot_product_attention
    ragged = [torch.randn(length, 2, 8) for length in (3, 5)]
    query = torch.nested.nested_tensor(ragged, layout=torch.jagged).transpose(1, 2)
    expected = attention(query, query, query)
    with full_precision():
        found = nn.functional.scaled_dot_product_attention(query, query, query)
    torch.testing.assert_close(found.values(), expected.values())


def test_the_settings_of_the_user_come_back_after_an_error(user):
    @full_precision()
    def fails():
        assert exact()
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert settings() == user


def test_the_settings_of_the_user_come_back_when_the_last_thread_ends(user):
    """The settings are those of the process, so that a thread which ends first leaves them to the other."""
    first, second = full_precision(), full_precision()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert exact()
    second.__exit__(None, None, None)
    assert settings() == user


class Noting(nn.Module):
    """A linear layer that notes the settings at every call."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(6, 3), []

    def forward(self, x):
        self.seen.append((exact(), settings()))
        return self.linear(x)


@pytest.fixture
def high():
    with precision_of_user():
        torch.set_float32_matmul_precision("high")
        yield settings()


def test_prune_and_evaluate_compute_in_full_precision(high):
    model = Noting()
    iobs.prune(model, [torch.randn(20, 6)], 0.5, iobs.Recipe(solver="magnitude"))
    accuracy(model, [(torch.randn(4, 6), torch.tensor([0, 1, 2, 0]))])
    assert model.seen
    assert all(full for full, _ in model.seen)
    assert settings() == high


def test_solve_computes_in_full_precision(high):
    seen = []

    def solver(problem, pattern):
        seen.append(exact())
        return iobs.solvers.SOLVERS["magnitude"]()(problem, pattern)

    problem = iobs.Quadratic.at(torch.randn(2, 4), torch.eye(4))
    iobs.solve(problem, iobs.Unstructured(0.5), solver)
    iobs.solvers.interface.solve_many([problem], [iobs.Unstructured(0.5)], solver)
    assert seen == [True, True]
    assert settings() == high


def test_models_with_recurrent_layers_keep_cudnn_off_only_inside():
    before = torch.backends.cudnn.enabled
    with evaluating(nn.LSTM(3, 3)):
        assert not torch.backends.cudnn.enabled
        assert exact()
    assert torch.backends.cudnn.enabled == before


def test_times_are_measured_with_the_settings_of_the_user(high):
    wide, narrow = Noting(), Noting()
    with evaluating(wide):
        shares_of(wide, narrow, torch.randn(2, 6), "torch", lambda calls: [call() or 1.0 for call in calls])
        assert exact()
    assert wide.seen == narrow.seen == [(False, high)]
