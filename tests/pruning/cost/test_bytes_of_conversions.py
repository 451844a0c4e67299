"""Bytes of the conversion of hub tensors in the plan, against counted bytes of tensors."""

import families
import pytest
import torch
from tensor_bytes import TensorBytes

from iobs.models.directory import Directory
from iobs.models.streamed import BlockWriter, StreamedModel, StreamedStore
from iobs.pruning import blockwise
from iobs.pruning.cost.memory import peaks
from iobs.pruning.recipe import Recipe


@pytest.fixture
def folder(tmp_path):
    """A directory with the tensors of experts one by one."""
    sizes = {**families.EXPERTS, "hidden_size": 64, "intermediate_size": 96}
    model = families.hf.AutoModelForCausalLM.from_config(families.hf.MixtralConfig(**sizes, num_local_experts=8))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("arithmetic", [torch.bfloat16, torch.float32])
def test_plan_foretells_the_bytes_of_conversions(arithmetic, folder, tmp_path, monkeypatch):
    streamed = StreamedModel.open(folder, arithmetic=arithmetic)
    block, directory, given = streamed.blocks[0], streamed.directory, []
    monkeypatch.setattr(blockwise, "peaks", lambda sizes, *rest: given.append(sizes) or peaks(sizes, *rest))
    store = StreamedStore(streamed, tmp_path / "out")
    store.plan(families.request_of(store), families.language_batches(), timed=False)

    stored, reading = Directory.stored, TensorBytes()

    def noted(self, sources):
        for name, tensor in stored(self, sources):
            reading.leave(tensor)
            yield name, tensor

    with monkeypatch.context() as patch, reading:
        patch.setattr(Directory, "stored", noted)
        streamed.load(block)
    tensors = [*streamed.module.get_submodule(block.path).parameters()]
    weights = sum(tensor.nbytes for tensor in tensors)
    assert 0.95 < (weights + given[0].reading) / reading.peak < 1.1

    keys = {layer.key for layer in store.select(None, None, False).layers if block.holds(layer.path)}
    with BlockWriter(streamed, tmp_path, writes=False) as writer, TensorBytes().hold(*tensors) as writing:
        writer.block(block, keys)
    assert 0.95 < (weights + given[0].writing) / writing.peak < 1.1

    found = peaks(given[0], Recipe(target="layer"), False)
    assert found["reading of blocks"] == weights + given[0].reading
    assert found["writing of blocks"] == weights + given[0].writing
    assert directory.writing_bytes({f"{block.path}.self_attn.q_proj.weight"}, arithmetic) == 0
