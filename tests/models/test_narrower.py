"""Networks whose code builds their full width: written narrower, and loaded with the same outputs."""

import json

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import iobs
from iobs import models
from iobs.cli import app
from iobs.errors import ModelError
from iobs.models.factory import changes, form_of, narrow

SOURCE = """
import torch, transformers
from torch import nn

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 12, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(12)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.conv2 = nn.Conv2d(12, 4, 3, padding=1, bias=False)

    def forward(self, x):
        return x + self.conv2(self.depthwise(torch.relu(self.bn1(self.conv1(x)))))

def residual():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), Residual(), Residual(), nn.Flatten(), nn.Linear(256, 3))

def chain():  # the second convolution gets a bias
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 2, 3, bias=False), nn.Flatten())

def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 4, 96, batch_first=True), nn.Linear(64, 3))

def llama():
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
"""


@pytest.mark.parametrize("name", ["residual", "chain", "encoder", "llama"])
def test_narrower_network_of_a_function_is_loaded_with_equal_outputs(name, tmp_path):
    (tmp_path / "nets.py").write_text(SOURCE)
    loaded = models.load(f"{tmp_path / 'nets.py'}:{name}")
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(40, 3, 8, 8, generator=generator)
    if name == "llama":
        batch = {"input_ids": torch.randint(32, (10, 8), generator=generator)}
    before = sum(one.numel() for one in loaded.module.parameters())
    iobs.prune(loaded.module, [batch], iobs.Structured(0.4), "one-shot")
    for number in range(2):  # a loaded network is written again
        loaded.save(tmp_path / f"out{number}")
        again = models.load(tmp_path / f"out{number}")
        assert sum(one.numel() for one in again.module.parameters()) < before
        with torch.no_grad():
            outputs = [one(**batch).logits if name == "llama" else one(batch) for one in (loaded.module, again.module)]
        assert torch.equal(*outputs)
        loaded = again
    narrower = sum(one.numel() for one in loaded.module.parameters())
    iobs.prune(loaded.module, [batch], iobs.Structured(0.3), "one-shot")
    loaded.save(tmp_path / "twice")
    twice = models.load(tmp_path / "twice").module
    assert sum(one.numel() for one in twice.parameters()) < narrower
    iobs.save_packed(loaded.module, tmp_path / "packed")


def test_network_of_full_width_is_written_without_widths(tmp_path):
    (tmp_path / "nets.py").write_text(SOURCE)
    models.load(f"{tmp_path / 'nets.py'}:chain").save(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "iobs.json").read_text()).keys() == {"format", "factory"}


def test_widths_of_another_network_are_refused(tmp_path):
    (tmp_path / "nets.py").write_text(SOURCE)
    loaded = models.load(f"{tmp_path / 'nets.py'}:chain")
    iobs.prune(loaded.module, [torch.randn(40, 3, 8, 8)], iobs.Structured(0.4), "one-shot")
    loaded.save(tmp_path / "out")
    file = tmp_path / "out" / "iobs.json"
    file.write_text(file.read_text().replace(":chain", ":residual"))
    with pytest.raises(ModelError, match="do not fit the network that its code builds"):
        models.load(tmp_path / "out")


def test_tied_parameters_stay_tied_and_lost_modules_are_refused():
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    narrow(tied, {"shapes": {"0.weight": [2, 4], "1.weight": [2, 4]}, "numbers": {"0": {"out_features": 2}}})
    assert tied[0].weight is tied[1].weight
    assert tied[0].weight.shape == (2, 4)
    whole = form_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(ModelError, match=r"builds 1, which is gone; use torch\.save"):
        changes(whole, form_of(nn.Sequential(nn.Linear(4, 4))))


class Rounds(nn.Module):
    """Layers that are called twice, under two names."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.head = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(6, 12)
        self.again, self.back, self.last = self.up, self.down, self.head

    def forward(self, x):
        return x


def test_modules_with_two_names_become_narrower_once():
    built = form_of(Rounds())
    model = Rounds()
    model.up, model.down, model.head = nn.Linear(6, 4), nn.Linear(4, 6), nn.Linear(6, 5)
    model.again, model.back, model.last = model.up, model.down, model.head
    wanted = json.loads(json.dumps(changes(built, form_of(model))))
    for _ in range(20):  # identities of freed parameters go to others now and then
        again = Rounds()
        narrow(again, wanted)
        again.load_state_dict(model.state_dict())
        assert again.again.weight is again.up.weight


def test_timm_network_is_written_narrower_from_the_command_line(tmp_path):
    timm = pytest.importorskip("timm")
    (tmp_path / "data.py").write_text("import torch\n\ndef batches():\n    return [torch.randn(64, 3, 32, 32)]\n")
    name, out = "timm:mobilenetv3_small_050", tmp_path / "out"
    given = ("--data", f"{tmp_path / 'data.py'}:batches", "--pattern", "structured:40%", "--recipe", "one-shot")
    given += ("--include", "blocks.1.*")
    made = timm.create_model("mobilenetv3_small_050", pretrained=False)
    full = sum(one.numel() for one in made.blocks[1].parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timm, "create_model", lambda *_, **__: made)  # without a download
        result = CliRunner().invoke(app, ["prune", name, "-o", str(out), *given])
    assert result.exit_code == 0, result.output
    again = models.load(out).module
    assert sum(one.numel() for one in again.blocks[1].parameters()) < full
    with torch.no_grad():
        batch = torch.randn(2, 3, 32, 32)
        assert torch.equal(again(batch), made(batch))
