"""Models that cannot be pruned are refused before any work, with the remedy, and stay as they are."""

import copy

import pytest
import torch
from torch import distributed, nn

import iobs
from iobs.errors import ModelError, ProblemError
from iobs.pruning.blockwise.offloaded import OffloadedStore

BATCH = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
PATTERNS = [0.5, iobs.Structured(0.3)]


def network():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).eval()


def exported():
    return torch.export.export(network(), (BATCH,))


def scripted():
    return torch.jit.script(network())


@torch.inference_mode()
def copied_while_inferring():
    return copy.deepcopy(network())


def with_table_of_an_evaluation():
    model = network()
    with torch.inference_mode():
        model.table = torch.ones(3)
    return model


def without_values():
    with torch.device("meta"):
        return network()


def offloaded():
    return pytest.importorskip("accelerate").cpu_offload(network(), execution_device="cpu")


class Streaming(nn.Module):
    """Keeps its state between calls of equal numbers of samples."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.state = nn.GRUCell(4, 6), nn.Linear(6, 3), None

    def forward(self, x):
        known = self.state is not None and len(self.state) == len(x)
        self.state = self.cell(x, self.state if known else None)
        return self.head(self.state)


class InBuffer(Streaming):
    """Changes the state in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.mul_(0.5).add_(self.cell(x).mean(0), alpha=0.5)
        return self.head(self.mean.expand(len(x), 6))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (scripted, "torch.jit hides the layers inside. Prune the Python modules"),
        (lambda: torch.jit.trace(network(), BATCH), "torch.jit hides the layers inside"),
        (lambda: nn.Sequential(nn.Linear(4, 4), scripted()), "1 is a RecursiveScriptModule: torch.jit"),
        (lambda: exported().module(), "Prune the Python module, and export it afterwards"),
        (lambda: torch.export.unflatten(exported()), "Prune the Python module, and export it afterwards"),
        (exported, "Prune the Python module, and export it afterwards"),
        (copied_while_inferring, r"0.weight was made in inference mode.* copy.deepcopy\(model\)"),
        (with_table_of_an_evaluation, "table was made in inference mode"),
        (without_values, "0.weight has no values here .*OffloadedStore.*--low-memory"),
        (offloaded, "0.weight has no values here .*without device_map"),
        (Streaming, "Streaming gives two outputs for the same batch"),
        (InBuffer, "InBuffer gives two outputs for the same batch"),
    ],
)
def test_unusual_models_are_refused_before_any_work(build, message, pattern):
    model = build()
    parameters = model.parameters() if isinstance(model, nn.Module) else []
    tensors = [value for value in parameters if not value.is_meta]
    before = [value.clone() for value in tensors]
    with pytest.raises(ModelError, match=message):
        iobs.prune(model, [BATCH], pattern, "one-shot")
    assert all(map(torch.equal, before, tensors))


def test_copies_outside_of_inference_mode_can_be_pruned():
    model = copy.deepcopy(copied_while_inferring())
    assert iobs.prune(model, [BATCH], 0.5, "one-shot").sparsity == 0.5


def test_noise_under_the_seed_of_torch_is_not_taken_for_state():
    model = network()
    model.register_forward_hook(lambda module, args, output: output + torch.randn_like(output))
    assert iobs.prune(model, [BATCH], 0.5, "one-shot").sparsity == 0.5


@pytest.fixture
def one_process(tmp_path):
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_wrappers_of_several_processes(one_process):
    wrapped = nn.parallel.DistributedDataParallel(network())
    with pytest.raises(ModelError, match=r"Prune its \.module, then wrap that again"):
        iobs.prune(wrapped, [BATCH], iobs.Structured(0.3), "one-shot")
    assert wrapped.module[0].out_features == 16
    assert iobs.prune(wrapped, [BATCH], 0.5, "one-shot").sparsity == 0.5
    split = network()
    torch.distributed.fsdp.fully_shard(split, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    for pattern in PATTERNS:
        with pytest.raises(ModelError, match=r"0.weight is split over processes .* before it is split"):
            iobs.prune(split, [BATCH], pattern, "one-shot")


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_compiled_models_are_pruned(pattern):
    model = network()
    iobs.prune(torch.compile(model, backend="eager"), [BATCH], pattern, "one-shot")
    assert model[0].out_features < 16 or float((model[0].weight == 0).float().mean()) > 0.2


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_other_functions_refuse_them_too(tmp_path):
    empty = without_values()
    for use in (
        lambda: iobs.audit(empty),
        lambda: iobs.keep_sparse(empty, torch.optim.SGD(empty.parameters(), 0.1)),
        lambda: iobs.save_packed(empty, tmp_path / "packed"),
    ):
        with pytest.raises(ModelError, match="no values here"):
            use()
    for hidden in (exported().module(), scripted()):
        with pytest.raises(ModelError, match="Prune the Python module"):
            iobs.audit(hidden)
    with pytest.raises(ModelError, match="exported program is a fixed graph"):
        iobs.save_packed(exported(), tmp_path / "packed")
    with pytest.raises(ModelError, match="no values here"):
        OffloadedStore(without_values())
    with pytest.raises(ModelError, match="an exported program is a fixed graph"):
        iobs.fold(exported().module(), BATCH)
    with pytest.raises(ProblemError, match=r"torch\.jit hides them; script the model afterwards"):
        iobs.accelerate(scripted())
