"""Forms of layers on CUDA devices, without such a device: the kernel in Triton's interpreter, the choice with
pretended times and a pretended device."""

import contextlib
import copy
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import iobs
from iobs.errors import ModelError, ProblemError
from iobs.inference import choices, gpu
from iobs.inference.gpu import OffsetLinear, packed, smallest


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


@pytest.fixture
def device(monkeypatch):
    """Pretend that the model is on a CUDA device, and that each form takes the named seconds."""
    seconds = {"dense": 1.0}
    monkeypatch.setattr(choices, "_require", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(choices, "_best_seconds", lambda calls: {name: seconds.get(name, 9.0) for name in calls})
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    return seconds


def network():
    return nn.Sequential(sparse(128, 256), nn.ReLU(), sparse(256, 128)).eval()


def test_dense_layer_stays_where_it_is_faster_and_a_form_that_fails_is_noted(device, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(gpu.OffsetLinear, "forward", lambda *_: 1 / 0)
    model = network()
    first = model[0]
    found = iobs.accelerate(model)
    assert model[0] is first
    assert {one.format for one in found.choices} == {"dense"}
    assert any("offsets does not run here (division by zero)" in note for note in found.notes)


def test_a_missing_package_is_noted(device):
    assert any("pip install triton" in note for note in iobs.accelerate(network()).notes)


def test_offsets_are_chosen_where_triton_is_there(device, interpreted, monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: name)
    device["offsets"] = 0.5
    model = nn.Sequential(sparse(128, 256), nn.Tanh(), sparse(100, 128)).eval()
    before = model(torch.ones(1, 256))
    found = iobs.accelerate(model)
    assert [type(one) for one in model] == [OffsetLinear, nn.Tanh, nn.Linear]  # the last layer is too small
    assert found.bytes_after < 0.6 * found.bytes_before
    torch.testing.assert_close(model(torch.ones(1, 256)), before)


def test_a_model_on_two_devices_is_refused():
    model = network()
    model[0].to("meta")
    with pytest.raises(ProblemError, match="one CUDA device"):
        iobs.accelerate(model)


@pytest.fixture
def accelerated(device):
    """A network whose layers have the form of a device, and its dense form."""
    dense = network()
    model = nn.Sequential(OffsetLinear(dense[0]), nn.ReLU(), OffsetLinear(dense[2]))
    model.save_pretrained = lambda folder: None
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
    iobs.accelerate(model)
    with pytest.raises(ModelError, match=r"2 layers of the model, '0' first, are stored matrices"):
        iobs.prune(model, [torch.randn(4, 256)], 0.5, "one-shot")
    with pytest.raises(ModelError, match="from_pretrained cannot read"):
        model.save_pretrained("folder")


def test_zeros_of_layers_that_a_device_multiplies_are_counted(accelerated):
    model, dense = accelerated
    assert {row.name: row.zeros for row in iobs.audit(model)} == {row.name: row.zeros for row in iobs.audit(dense)}
