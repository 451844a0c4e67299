"""Models built by a function of a user's file or by timm: loading, saving, errors."""

import json

import pytest
import torch
from checks import same_weights
from safetensors.torch import load_file

import iobs
from iobs import load_packed, models, save_packed
from iobs.errors import ModelError


def test_factory_model_round_trips_through_save(factory, tmp_path):
    loaded = models.load(f"{factory}:build")
    assert not loaded.module.training
    with torch.no_grad():
        loaded.module[0].weight.fill_(0.25)
    loaded.save(tmp_path / "out")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"model.safetensors", "iobs.json"}
    again = models.load(tmp_path / "out")
    assert same_weights(loaded.module, again.module)
    assert again.module[0].weight is again.module[2].weight
    again.save(tmp_path / "out2")
    assert same_weights(models.load(tmp_path / "out2").module, loaded.module)


@pytest.mark.parametrize(
    ("stored", "computed"), [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)], ids=str
)
def test_factory_model_keeps_the_dtype_of_its_files(stored, computed, factory, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    models.load(f"{factory}:build", dtype=stored).save(tmp_path / "out")
    again = models.load(tmp_path / "out")
    assert again.module[0].weight.dtype == computed
    assert again.module[0].weight is again.module[2].weight
    again.save(tmp_path / "out2")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "out2"))
    assert first.keys() == second.keys()
    assert all(second[name].dtype == stored and torch.equal(second[name], first[name]) for name in first)
    assert models.load(tmp_path / "out", dtype=torch.float64).module[0].weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("function", "message"),
    [("number", "returned int"), ("broken", "RuntimeError: mine"), ("absent", "no function 'absent'")],
)
def test_factory_function_that_fails_is_named(factory, function, message):
    with pytest.raises(ModelError, match=message):
        models.load(f"{factory}:{function}")


def test_factory_file_that_fails_is_named(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        models.load(f"{tmp_path / 'none.py'}:build")
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(ModelError, match="ZeroDivisionError"):
        models.load(f"{tmp_path / 'bad.py'}:build")
    (tmp_path / "script.py").write_text("import sys\ndef build():\n    pass\nsys.exit(0)\n")
    with pytest.raises(ModelError, match="SystemExit"):
        models.load(f"{tmp_path / 'script.py'}:build")


def test_factory_that_changed_after_saving_is_refused(factory, tmp_path):
    models.load(f"{factory}:build").save(tmp_path / "out")
    factory.write_text("from torch import nn\n\ndef build():\n    return nn.Linear(3, 3)\n")
    with pytest.raises(ModelError, match="does not fit"):
        models.load(tmp_path / "out")
    factory.unlink()
    with pytest.raises(ModelError, match="does not exist"):
        models.load(tmp_path / "out")


def test_factory_inside_a_directory_needs_trust_remote_code(factory, tmp_path, monkeypatch):
    out = tmp_path / "out"
    models.load(f"{factory}:build").save(out)
    (out / "net.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n{factory.read_text()}")
    monkeypatch.chdir(out)
    for file in ("net.py", out / "net.py", tmp_path / "else" / ".." / "out" / "net.py"):
        (out / "iobs.json").write_text(json.dumps({"factory": f"{file}:build"}))
        with pytest.raises(ModelError, match="--trust-remote-code"):
            models.load(out)
        assert not (tmp_path / "ran").exists()
    assert models.load(out, trust_remote_code=True).module[0].in_features == 4


def test_timm_model_round_trips_through_save(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    build = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained: build(name, pretrained=False))
    loaded = models.load("timm:mobilenetv3_small_050")
    loaded.save(tmp_path / "out")
    assert same_weights(models.load(tmp_path / "out").module, loaded.module)
    with pytest.raises(ModelError, match="no model 'resnet_of_mine'"):
        models.load("timm:resnet_of_mine")


ODD = """
import torch
from torch import nn

class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6, bias=False) for _ in range(3))
        self.q.weight.data, self.k.weight.data, self.v.weight.data = torch.randn(18, 6).chunk(3)
        self.part, self.again = nn.Parameter(torch.randn(10, 6)[:4]), nn.Linear(6, 6, bias=False)
        self.again.weight = self.q.weight
        self.mode = {"version": 1}

    def forward(self, x):
        return self.again(self.q(x) * self.k(x) + self.v(x)) @ self.part.T

    def get_extra_state(self):
        return self.mode

    def set_extra_state(self, state):
        self.mode = state

def build():
    return Odd()
"""


def test_factory_model_with_shared_memory_round_trips(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    loaded = models.load(f"{tmp_path / 'odd.py'}:build")
    iobs.prune(loaded.module, [torch.randn(20, 6)], iobs.Unstructured(0.5), "one-shot", solver="magnitude")
    with pytest.warns(UserWarning, match="_extra_state"):
        loaded.save(tmp_path / "out")
    assert "again.weight" not in load_file(tmp_path / "out" / "model.safetensors"), "written once"
    again = models.load(tmp_path / "out").module
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), loaded.module.parameters(), strict=True))
    assert again.mode == {"version": 1}
    with pytest.warns(UserWarning, match="_extra_state"):
        save_packed(loaded.module, tmp_path / "packed")
    other = models.load(f"{tmp_path / 'odd.py'}:build").module
    load_packed(tmp_path / "packed", into=other)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), loaded.module.parameters(), strict=True))


def test_weights_of_two_shapes_in_one_memory_are_both_written(tmp_path):
    (tmp_path / "views.py").write_text(
        "from torch import nn\n\ndef build():\n"
        "    net = nn.Sequential(nn.Conv2d(4, 3, 1), nn.Flatten(), nn.Linear(4, 3))\n"
        "    net[2].weight = nn.Parameter(net[0].weight.detach().view(3, 4))\n    return net\n"
    )
    loaded = models.load(f"{tmp_path / 'views.py'}:build")
    loaded.save(tmp_path / "out")
    again = models.load(tmp_path / "out").module
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), loaded.module.parameters(), strict=True))
    assert torch.equal(again[0].weight.flatten(), again[2].weight.flatten())


def test_factory_function_may_import_a_file_beside_its_own(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 7\n")
    (tmp_path / "late.py").write_text(
        "def build():\n    from beside import WIDTH\n    from torch import nn\n    return nn.Linear(WIDTH, 2)\n"
    )
    assert models.load(f"{tmp_path / 'late.py'}:build").module.in_features == 7
