"""Times of blocks: savings add up, widths that a wider one beats are left out. A clock that counts work stands in."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from traced_sites import find_sites

from iobs.core.structured import Structured
from iobs.errors import ModelError, ProblemError
from iobs.pruning.network.modes import evaluating
from iobs.pruning.plan import widths
from iobs.pruning.runtime.ranks import Ranks
from iobs.pruning.widths import latency
from iobs.pruning.widths.knapsack import choices_of, chosen_widths
from iobs.pruning.widths.latency import (
    Example,
    Latency,
    Times,
    called_in,
    grid,
    interleaved,
    measure,
    narrowed,
    require_runtime,
    shares_of,
)


def work(calls):
    """Floating-point operations in place of seconds."""
    found = []
    for call in calls:
        with FlopCounterMode(display=False) as counter:
            call()
        found.append(float(counter.get_total_flops()))
    return found


class Mlp(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.up, self.down = nn.Linear(6, inner), nn.Linear(inner, 6)

    def forward(self, x, *, scale):
        return x + scale * self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Mlp(12), Mlp(12), Mlp(20)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x, scale=x.new_ones(()))
        return x


@pytest.fixture
def stack():
    torch.manual_seed(0)
    model, batch = Stack().eval(), torch.randn(5, 6)
    return model, batch, find_sites(model, batch)


def test_savings_of_blocks_add_up_to_those_of_the_network(stack):
    model, batch, sites = stack
    latency = measure(model, batch, {site: range(1, site.count + 1) for site in sites}, "torch", work)
    assert latency.dense == 2 * 2 * 6 * (12 + 12 + 20)  # one sample
    eight = measure(model, batch, {}, "torch", work, samples=8)  # more than the batch has
    assert eight.dense == 8 * latency.dense
    widths = {site.name: width for site, width in zip(sites, (3, 12, 7), strict=True)}
    narrow = narrowed(model, sites, widths)
    assert [block.up.out_features for block in narrow.blocks] == [3, 12, 7]
    wide, left = shares_of(model, narrow, batch, "torch", work)
    assert (latency.of({}), latency.of(widths)) == (wide, left) == (latency.dense, 24 * (3 + 12 + 7))


def test_timing_changes_no_buffers(stack):
    model, batch, sites = stack
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda *_: model.calls.add_(1))
    measure(model, batch, {site: (3, site.count) for site in sites}, "torch", work)
    shares_of(model, model, batch, "torch", work)
    assert int(model.calls) == 0


def test_blocks_of_equal_shape_are_timed_once(stack):
    model, batch, sites = stack
    counted = []

    def counting(calls):
        counted.append(len(calls))
        return work(calls)

    measure(model, batch, {site: (3, 6, site.count) for site in sites}, "torch", counting)
    assert counted == [3, 3, 1]  # widths of two kinds of blocks, and the network


def test_blocks_that_differ_by_a_stride_alone_have_times_of_their_own():
    class Block(nn.Module):
        def __init__(self, stride):
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 8, 3, stride, 1), nn.Conv2d(8, 4, 3, 3 - stride, 1)

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    blocks = nn.ModuleList([Block(1), Block(2)])
    given, site = torch.randn(1, 4, 8, 8), {}
    for place, block in enumerate(blocks):
        (found,) = find_sites(block.eval(), given)
        (site[place],) = measure(block, given, {found: (4, 8)}, "torch", work).times.values()

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            return sum(block(x) for block in self.blocks)

    model = Beside().eval()
    latency = measure(model, given, dict.fromkeys(find_sites(model, given), (4, 8)), "torch", work)
    assert [one.seconds for one in latency.times.values()] == [site[0].seconds, site[1].seconds]
    assert site[0].seconds != site[1].seconds


def test_branches_of_a_concatenation_have_times_of_their_own():
    class Joined(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.large = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 3, padding=1)
            self.last = nn.Conv2d(16, 4, 3, padding=1)

        def forward(self, x):
            return self.last(torch.cat([torch.relu(self.small(x)), torch.relu(self.large(x))], 1))

    model, batch = Joined().eval(), torch.randn(2, 4, 6, 6)
    sites = find_sites(model, batch)
    assert len(sites) == 2
    latency = measure(model, batch, dict.fromkeys(sites, (4, 8)), "torch", work)
    small, large = (latency.times[f"last:{name}"].saved(4) for name in ("small", "large"))
    assert large - small == 2 * 36 * 4 * 4 * (9 - 1)  # multiplications and additions of the four channels


def test_widths_slower_than_a_wider_one_are_not_chosen(stack):
    _, _, sites = stack
    site = dataclasses.replace(sites[2], kind="channels")
    times = Times((4, 8, 11, 16, 20), (0.5, 0.6, 1.1, 0.7, 1.0))
    latency = Latency(2.0, {site.name: times})
    assert latency.useful(site, range(1, 21)) == (4, 8, 16, 20)
    choices = choices_of([site], Structured(0.5), (), None, {site.name: (4, 8, 16, 20)})
    assert chosen_widths(choices, latency, 1.72, equal=False) == {site.name: 16}
    assert chosen_widths(choices, latency, 1.65, equal=True) == {site.name: 8}


def test_times_of_neurons_are_interpolated(stack):
    _, _, sites = stack
    latency = Latency(2.0, {sites[2].name: Times((10, 20), (0.5, 1.0))})
    assert latency.of({sites[2].name: 15}) == pytest.approx(1.75)
    assert latency.useful(sites[2], range(10, 21)) == tuple(range(10, 21))


def test_a_width_that_is_no_multiple_takes_the_place_of_none(stack, monkeypatch):
    """A class loads 8 and 9 of 20 neurons, and 9 are the faster ones."""
    site, asked = stack[2][2], Structured(0.5, of="latency", multiple_of=8)
    latency = Latency(2.0, {site.name: Times((8, 9, 20), (0.6, 0.5, 1.0))})
    monkeypatch.setattr(widths, "measure", lambda *_, **__: latency)
    run = SimpleNamespace(
        request=SimpleNamespace(offered={site.name: (8, 9, 20)}, added=()),
        store=SimpleNamespace(model=None),
        fit=SimpleNamespace(batches=[None]),
    )
    (choice,) = choices_of([site], asked, (), None, widths._timed(run, asked, (site,))[1])
    assert choice.widths == (8, 20)


def test_measured_widths_hold_the_blocks_of_convolutions(stack):
    site = dataclasses.replace(stack[2][2], kind="channels")
    assert grid(site, range(1, 21)) == (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20)
    assert len(grid(dataclasses.replace(site, kind="neurons"), range(1, 1001))) <= 18


def test_fused_attention_is_timed_as_it_is_used_afterwards():
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), nn.Linear(16, 3)).eval()
    enabled = []

    def clock(calls):
        enabled.append(torch.backends.mha.get_fastpath_enabled())
        return [1.0 for _ in calls]

    with evaluating(model):
        batch = torch.randn(2, 5, 16)
        measure(model, batch, dict.fromkeys(find_sites(model, batch), (12, 24)), "torch", clock)
        shares_of(model, model, batch, "torch", clock)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert enabled == [True, True, True]


def test_clock_gives_the_median_of_each_call(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(latency.time, "thread_time", lambda: now[0])
    monkeypatch.setattr(latency.time, "perf_counter", lambda: now[0])

    def taking(seconds):
        def call():
            now[0] += seconds

        return call

    assert interleaved([taking(0.25), taking(0.002)]) == pytest.approx([0.25, 0.002])


def test_module_gives_the_same_in_onnx_runtime(stack):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    model, batch, _ = stack
    found = called_in("onnx", Example(model.blocks[0], (batch,), {"scale": torch.tensor(0.5)}))()
    torch.testing.assert_close(torch.from_numpy(found[0]), model.blocks[0](batch, scale=0.5).detach())


def test_attention_with_shared_keys_is_measured_in_onnx_runtime():
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")

    class Shared(nn.Module):
        def forward(self, query, key):
            return nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)

    given = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    plain = nn.functional.scaled_dot_product_attention
    found = called_in("onnx", Example(Shared(), given, {}))()
    torch.testing.assert_close(torch.from_numpy(found[0]), Shared()(*given))
    assert nn.functional.scaled_dot_product_attention is plain


def test_newer_exporter_helps_where_the_older_fails():
    for package in ("onnxruntime", "onnx", "onnxscript"):
        pytest.importorskip(package)

    class Differences(nn.Module):
        def forward(self, x):
            return torch.diff(x) * 2

    given = torch.arange(6.0).square()[None]
    found = called_in("onnx", Example(Differences(), (given,), {}))()
    torch.testing.assert_close(torch.from_numpy(found[0]), Differences()(given))


def test_module_that_cannot_be_exported_is_named(capfd):
    pytest.importorskip("onnxruntime")

    class Odd(nn.Module):
        def forward(self, x):
            return torch.linalg.eigvalsh(x @ x.T)

    with pytest.raises(ModelError, match="Odd cannot be exported"):
        called_in("onnx", Example(Odd(), (torch.randn(3, 3),), {}))
    assert capfd.readouterr().out == ""


def test_module_that_onnx_runtime_does_not_take_is_named():
    pytest.importorskip("onnxruntime")
    example = Example(nn.Linear(3, 3).bfloat16(), (torch.randn(2, 3, dtype=torch.bfloat16),), {})
    with pytest.raises(ModelError, match=r'Linear does not run in ONNX Runtime.*runtime="torch"'):
        called_in("onnx", example)


def test_runtime_that_is_missing_is_named(monkeypatch):
    require_runtime("torch")
    monkeypatch.setattr(latency, "find_spec", lambda name: None)
    with pytest.raises(ProblemError, match="onnx and onnxruntime"):
        require_runtime("onnx")


class OnSecondGpu(nn.Module):
    """Its parameters report the second GPU."""

    def parameters(self, recurse=True):
        yield SimpleNamespace(device=torch.device("cuda", 1))

    def forward(self):
        return torch.ones(())


def test_a_call_ends_when_the_accelerator_of_its_module_has_ended(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: waited.append(device))
    called_in("torch", Example(OnSecondGpu(), (), {}))()
    assert waited == [torch.device("cuda", 1)]


def test_all_ranks_choose_by_the_times_of_the_first(monkeypatch):
    class Second(Ranks):
        def broadcast(self, tensor, source):
            assert source == 0
            tensor += 1.0  # what the first rank has measured

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    monkeypatch.setattr(latency, "current", lambda: Second(1, 2))
    assert shares_of(model, model, torch.randn(3, 4), "torch", lambda calls: [0.5, 0.25]) == (1.5, 1.25)
