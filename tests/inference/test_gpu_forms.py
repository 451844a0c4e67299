"""Forms of layers on CUDA devices, without such a device: the kernel in Triton's interpreter, the choice with
pretended times and a pretended device, torch's 2:4 layout on the CPU."""

import contextlib
import copy
import importlib
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.sparse import _semi_structured_conversions as layout

import iobs
from iobs.errors import ModelError, ProblemError
from iobs.inference import choices, gpu
from iobs.inference.gpu import OffsetLinear, is_two_four, no_two_four, packed, smallest

AMPERE = (8, 0)


@pytest.fixture
def interpreted():
    """The kernel, run by Triton's interpreter on the CPU (tests/conftest.py)."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ["TRITON_INTERPRET"] != "1":
        pytest.skip("TRITON_INTERPRET is not 1")
    return importlib.import_module("iobs.inference.offsets_triton")


def sparse(rows, columns, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(columns, rows, bias=bias).to(dtype)
    layer.weight.data[torch.rand(rows, columns) < 0.6] = 0
    layer.weight.data[rows // 2] = 0
    return layer


def two_four(rows, columns, dtype=torch.bfloat16):
    layer = sparse(rows, columns, dtype)
    weight = torch.randn(rows, columns).to(dtype)
    least = weight.view(rows, -1, 4).abs().argsort(2)[..., :2]
    layer.weight.data = weight.view(rows, -1, 4).scatter(2, least, 0).view(rows, columns)
    return layer


def parts(form):
    return form.values, form.offsets, form.bases, form.starts, form.longest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (6, 64), (5, 129), (4, 1024), (3, 2600)])
def test_triton_kernel_equals_the_plain_form(interpreted, dtype, shape):
    layer = sparse(*shape, dtype=dtype)
    form = OffsetLinear(layer)
    for tokens, bias in ((1, None), (3, layer.bias)):
        given = torch.randn(tokens, shape[1]).to(dtype)
        wanted = given.double() @ layer.weight.double().t() + (0 if bias is None else bias.double())
        found = interpreted.multiply(*parts(form), given, bias)
        assert found.dtype == dtype
        assert (found.double() - wanted).abs().max() <= torch.finfo(dtype).eps * (1 + wanted.abs().max())
    assert torch.equal(interpreted.unpack(*parts(form), shape[1]), layer.weight)


def test_activations_that_meet_only_zeros_are_skipped(interpreted):
    layer = nn.Linear(64, 2, bias=False)
    layer.weight.data[1] = 0
    layer.weight.data[0, 1:] = 0
    given = torch.full((1, 64), float("nan"))
    given[0, 0] = 2.0
    wanted = [[2 * layer.weight[0, 0].item(), 0.0]]
    assert OffsetLinear(layer)(given).tolist() == wanted


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles_for_a_gpu_that_is_not_here(capability):
    """The interpreter accepts what the compiler refuses, such as Python's annotations."""
    pytest.importorskip("triton", reason="triton is not installed")
    code = f"""
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from iobs.inference import offsets_triton as module
constants = dict(tokens=4, steps=3)
types = dict(values="*bf16", offsets="*u8", bases="*i16", starts="*i32", bias="*bf16", activations="*bf16")
types |= dict(output="*bf16", matrix="*bf16")
without_bias = constants | dict(bias=None)
for kernel, constants in ((module._rows, constants), (module._rows, without_bias), (module._unpack, constants)):
    names = kernel.arg_names
    own = {{name: "constexpr" if name in constants else types.get(name, "i32") for name in names}}
    source = ASTSource(kernel, own, constexprs={{name: constants[name] for name in names if name in constants}})
    assert "ptx" in triton.compile(source, target=GPUTarget("cuda", {capability}, 32)).asm
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_note_names_the_reason_and_not_the_place():
    class CompilationError(Exception):
        pass

    assert gpu.reason(CompilationError("at 2:10:\ndef f(\n  ^\nNameError('Any')")) == "NameError('Any')"
    assert gpu.reason(RuntimeError("CUDA error: no kernel\nCompile with DSA")) == "CUDA error: no kernel"
    assert gpu.reason(RuntimeError()) == "RuntimeError"


def without_triton(monkeypatch):
    """The module of the kernel with names of triton that do nothing."""
    names = SimpleNamespace(
        jit=lambda function: function, language=SimpleNamespace(constexpr=lambda value: SimpleNamespace(value=value))
    )
    names.cdiv, names.next_power_of_2 = lambda a, b: -(-a // b), lambda a: 1 << (a - 1).bit_length()
    monkeypatch.setitem(sys.modules, "triton", names)
    monkeypatch.setitem(sys.modules, "triton.language", names.language)
    spec = importlib.util.spec_from_file_location("kernel", Path(gpu.__file__).with_name("offsets_triton.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    """Triton takes the current device, which may be another one than that of the model."""
    module, current, launched = without_triton(monkeypatch), [], []
    form, given = OffsetLinear(sparse(4, 40)), torch.ones(1, 40)

    @contextlib.contextmanager
    def device_of(tensor):
        current.append(tensor)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, num_warps: launched.append([*current])

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(module, "_rows", Kernel())
    module.multiply(*parts(form), given, None)
    assert len(launched) == 1
    assert launched[0][0] is given


def test_few_tokens_of_a_layer_of_offsets_take_the_kernel(interpreted, monkeypatch):
    layer, calls, multiply = sparse(20, 70), [], interpreted.multiply
    form = OffsetLinear(layer)
    monkeypatch.setattr(interpreted, "multiply", lambda *given: calls.append(1) or multiply(*given))
    monkeypatch.setattr(gpu, "_has_kernel", lambda given: True)
    torch.testing.assert_close(form(torch.ones(1, 2, 70)), layer(torch.ones(1, 2, 70)))
    assert calls == [1]
    torch.testing.assert_close(form(torch.ones(9, 70)), layer(torch.ones(9, 70)))
    assert calls == [1]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 129), (40, 320)])
def test_layer_of_offsets_holds_the_dense_weight(shape):
    layer = sparse(*shape)
    form = OffsetLinear(layer)
    assert torch.equal(form.weight, layer.weight)
    assert torch.equal(form(torch.ones(9, shape[1])), layer(torch.ones(9, shape[1])))
    assert form(torch.ones(0, shape[1])).shape == (0, shape[0])


def test_groups_end_where_an_offset_would_be_too_large():
    weight = torch.zeros(3, 2000)
    weight[0, [0, 255, 256, 1999]] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    weight[2, 100:140] = 5.0
    values, offsets, bases, starts = packed(weight, torch.uint8)
    assert starts.tolist() == [0, 3, 3, 5]
    assert bases.tolist() == [0, 256, 1999, 100, 132]
    assert offsets.view(-1, 32)[0, :3].tolist() == [0, 255, 0]
    assert values.view(-1, 32).count_nonzero(1).tolist() == [2, 1, 1, 32, 8]
    assert len(packed(weight, torch.int16)[2]) == 3


@pytest.mark.parametrize(("share", "offset", "bits"), [(0.5, torch.uint8, 12.6), (0.97, torch.int16, 1.3)])
def test_offsets_take_the_width_of_fewer_bytes(share, offset, bits):
    torch.manual_seed(0)
    weight = torch.randn(64, 8192, dtype=torch.bfloat16) * (torch.rand(64, 8192) >= share)
    found = smallest(weight)
    assert found[1].dtype is offset
    assert 8 * sum(one.numel() * one.element_size() for one in found) <= bits * weight.numel()


def test_copies_and_state_dicts_of_a_layer_of_offsets_keep_the_weight():
    form = OffsetLinear(sparse(8, 40))
    other = copy.deepcopy(form)
    other.values.zero_()
    other.load_state_dict(form.state_dict())
    assert torch.equal(other.weight, form.weight)


def test_a_layer_of_offsets_computes_without_its_kernel_on_the_cpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "iobs.inference.offsets_triton", None)
    layer = sparse(8, 40)
    assert torch.equal(OffsetLinear(layer)(torch.ones(1, 40)), layer(torch.ones(1, 40)))


def test_rows_of_other_lengths_are_loaded_into_a_layer_of_offsets():
    """The kernel would leave out the last groups of a row that has become longer."""
    even, uneven = torch.zeros(2, 80), torch.zeros(2, 80)
    even[:, :64] = uneven[0] = 1.0
    uneven[1, 0] = 1.0
    form, other = (OffsetLinear(filled(weight)) for weight in (even, uneven))
    assert (form.longest, other.longest) == (2, 3)
    form.load_state_dict(other.state_dict())
    assert form.longest == 3
    assert torch.equal(form.weight, uneven)


def filled(weight):
    layer = nn.Linear(*reversed(weight.shape), bias=False)
    layer.weight.data.copy_(weight)
    return layer


@pytest.mark.parametrize("part", ["starts", "bases", "offsets"])
@pytest.mark.parametrize("assign", [False, True])
def test_damaged_parts_of_a_layer_of_offsets_are_refused(part, assign):
    model = nn.Sequential(OffsetLinear(sparse(8, 40)))
    before, state = model[0].weight, {name: one.clone() for name, one in model.state_dict().items()}
    state[f"0.{part}"][1] = 100
    with pytest.raises(RuntimeError, match=r"0\.weight: the column offsets are damaged"):
        model.load_state_dict(state, assign=assign)
    assert torch.equal(model[0].weight, before)


def test_two_four_is_at_most_two_of_each_four():
    weight = two_four(8, 16).weight.detach().clone()
    assert is_two_four(weight)
    assert is_two_four(torch.zeros(2, 8))
    weight[3, 4:7] = 1
    assert not is_two_four(weight)
    assert not is_two_four(torch.zeros(2, 6))


@pytest.mark.parametrize(
    ("rows", "columns", "dtype", "capability", "reason"),
    [
        (32, 64, torch.bfloat16, AMPERE, None),
        (64, 128, torch.float16, (9, 0), None),
        (32, 64, torch.bfloat16, (7, 5), "8.0"),
        (32, 64, torch.float32, AMPERE, "bfloat16"),
        (48, 64, torch.bfloat16, AMPERE, "48 x 64"),
        (32, 32, torch.bfloat16, AMPERE, "32 x 32"),
    ],
)
def test_layers_without_a_product_of_torch_have_a_reason(rows, columns, dtype, capability, reason):
    found = no_two_four(torch.zeros(rows, columns, dtype=dtype), capability)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("shape", [(32, 64), (96, 320)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_torch_compresses_the_accepted_layers_without_loss(shape, dtype):
    weight = two_four(*shape, dtype=dtype).weight.detach()
    assert no_two_four(weight, AMPERE) is None
    values, places = layout.sparse_semi_structured_from_dense_cutlass(weight)
    assert values.numel() + places.numel() * places.element_size() // values.element_size() == (
        gpu.bytes_of(nn.Identity(), "2:4", weight) // weight.element_size()
    )
    assert torch.equal(layout.sparse_semi_structured_to_dense_cutlass(values, places), weight)


@pytest.fixture
def device(monkeypatch):
    """Pretend that the model is on a CUDA device, and that each form takes the named seconds."""
    seconds = {"dense": 1.0}
    monkeypatch.setattr(choices, "_require", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: AMPERE)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(choices, "_best_seconds", lambda calls: {name: seconds.get(name, 9.0) for name in calls})
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    return seconds


def network(dtype=torch.bfloat16):
    return nn.Sequential(two_four(128, 256, dtype), nn.ReLU(), two_four(256, 128, dtype)).eval()


def test_fastest_form_on_a_device_replaces_the_layer(device, monkeypatch):
    made = []
    monkeypatch.setattr(gpu, "semi_structured", lambda layer: made.append(layer) or copy.deepcopy(layer))
    device["2:4"] = 0.5
    model = network()
    first, given = model[0], torch.randn(3, 256).bfloat16()
    before = model(given)
    found = iobs.accelerate(model)
    assert found.level == "cuda"
    assert [one.format for one in found.choices] == ["2:4", "2:4"]
    assert model[0] is not first
    assert any(one is first for one in made)
    assert torch.equal(model(given), before)
    assert found.bytes_after / found.bytes_before == 9 / 16
    assert "128 x 256, 50% zeros: 2:4, 1000.000 -> 500.000 ms" in str(found)
    assert "pip install triton" in str(found)


def test_dense_layer_stays_where_it_is_faster_and_forms_that_fail_are_noted(device):
    model = network()
    first = model[0]
    found = iobs.accelerate(model)  # torch refuses a 2:4 tensor on the CPU: so does a build without its kernels
    assert model[0] is first
    assert {one.format for one in found.choices} == {"dense"}
    assert any("2:4 does not run here" in note and "CUDA" in note for note in found.notes)


def test_offsets_are_chosen_where_triton_is_there(device, interpreted, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    device["offsets"] = 0.5
    model = nn.Sequential(sparse(128, 256), nn.Tanh(), sparse(100, 128)).eval()
    before = model(torch.ones(1, 256))
    found = iobs.accelerate(model)
    assert [type(one) for one in model] == [OffsetLinear, nn.Tanh, nn.Linear]  # the last layer is too small
    assert found.bytes_after < 0.6 * found.bytes_before
    torch.testing.assert_close(model(torch.ones(1, 256)), before)


def test_float32_layers_are_noted(device):
    assert any("model.to(torch.bfloat16)" in note for note in iobs.accelerate(network(torch.float32)).notes)


def test_two_four_layers_on_the_cpu_are_noted():
    assert any("CUDA devices" in note for note in iobs.accelerate(network(torch.float32), threads=1).notes)
    assert not iobs.accelerate(nn.Sequential(nn.Linear(256, 128)), threads=1).notes


def test_a_model_on_two_devices_is_refused():
    model = network()
    model[0].to("meta")
    with pytest.raises(ProblemError, match="one CUDA device"):
        iobs.accelerate(model)


def compressed(layer):
    """The layer with torch's 2:4 tensor, made on the CPU; it refuses functions of dense tensors there too."""
    weight = layer.weight.detach()
    values, places = layout.sparse_semi_structured_from_dense_cutlass(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the tensors a prototype
        stored = torch.sparse.SparseSemiStructuredTensorCUTLASS(weight.shape, values, places, None, None, None)
    made = copy.copy(layer)
    made._parameters = {**layer._parameters, "weight": nn.Parameter(stored, requires_grad=False)}
    return made


@pytest.fixture
def accelerated(device, monkeypatch):
    """A network whose layers are 2:4 tensors, and its dense form."""
    monkeypatch.setattr(gpu, "semi_structured", compressed)
    monkeypatch.setattr(gpu, "usable", lambda makers, given: ({name: make() for name, make in makers.items()}, []))
    device["2:4"] = 0.5
    dense = network()
    model = copy.deepcopy(dense)
    model.save_pretrained = lambda folder: None
    assert [one.format for one in iobs.accelerate(model).choices] == ["2:4", "2:4"]
    return model, dense


def test_layers_that_a_device_multiplies_are_left_alone_by_another_call(accelerated):
    model, _ = accelerated
    layers = [*model]
    found = iobs.accelerate(model)
    assert not found.choices
    assert any("2 layers are stored already" in note for note in found.notes)
    assert [*model] == layers


def test_layers_that_a_device_multiplies_are_neither_pruned_nor_saved(accelerated):
    model, _ = accelerated
    with pytest.raises(ModelError, match=r"2 layers of the model, '0' first, are stored matrices"):
        iobs.prune(model, [torch.randn(4, 256).bfloat16()], 0.5, "one-shot")
    with pytest.raises(ModelError, match="from_pretrained cannot read"):
        model.save_pretrained("folder")


def test_zeros_of_layers_that_a_device_multiplies_are_counted(accelerated):
    model, dense = accelerated
    assert iobs.audit(model) == iobs.audit(dense)
    mixed = nn.Sequential(OffsetLinear(dense[0]), nn.ReLU(), dense[2])
    assert {row.name: row.zeros for row in iobs.audit(mixed)} == {row.name: row.zeros for row in iobs.audit(dense)}
