"""LoRA on a sparse base: merges keep every zero, and masked training makes the merge exact."""

import copy

import pytest
import torch
from sparse_llama import holds, rows, sparse_llama, trainer, zeros

import iobs
from iobs.errors import LayerSelectionError, ModelError, NonFiniteError
from iobs.transformers import mask_adapters, merge_adapters

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and peft about this machine

TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(model, trained=True, **options):
    """A PEFT model; `trained` gives its adapters random values, as training would."""
    options = {"r": 2, "lora_alpha": 4, "target_modules": TARGETS, "lora_dropout": 0.0} | options
    whole = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, value in whole.named_parameters():
            if trained and "lora_B" in name:
                value.copy_(0.1 * torch.randn(value.shape, generator=generator))
    return whole.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.stack([row["input_ids"] for row in rows(4)])).logits


def test_merge_keeps_exactly_the_zeros_and_reports_them():
    model = sparse_llama()
    masks, dense = zeros(model), copy.deepcopy(model.state_dict())
    whole = adapted(model)
    update = whole.base_model.model.model.layers[1].self_attn.q_proj.get_delta_weight("default").detach()
    merged, report = merge_adapters(whole)
    assert holds(merged, masks)
    name = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(merged.state_dict()[name], dense[name] + update * ~masks[name])
    assert report.zeros_before == report.zeros_after == sum(int(mask.sum()) for one, mask in masks.items() if _is(one))
    row = next(row for row in report.rows if row.name == name)
    lost = update[masks[name]].square().sum() / update.square().sum()
    assert row.dropped == pytest.approx(float(lost), rel=1e-4)
    assert torch.equal(merged.state_dict()["model.embed_tokens.weight"], dense["model.embed_tokens.weight"])
    assert sum(row.zeros for row in iobs.audit(merged)) == sum(int(mask.sum()) for mask in masks.values())
    assert f"{report.zeros_after:,} after" in str(report)


def _is(name):
    return any(target in name for target in TARGETS)


def test_plain_merge_warns_of_the_lost_zeros():
    whole = adapted(sparse_llama())
    expected = copy.deepcopy(whole).merge_and_unload().state_dict()
    with pytest.warns(UserWarning, match=r"lost [\d,]+ of [\d,]+ zeros"):
        merged, report = merge_adapters(whole, keep_zeros=False)
    assert all(torch.equal(value, expected[name]) for name, value in merged.state_dict().items())
    assert report.zeros_after < report.zeros_before


def test_masked_adapters_compute_what_the_merge_gives():
    whole = adapted(sparse_llama())
    free = logits(whole)
    mask_adapters(whole)
    before = logits(whole)
    merged, report = merge_adapters(whole)
    assert not torch.allclose(free, before, atol=1e-3)
    torch.testing.assert_close(logits(merged), before, atol=1e-5, rtol=1e-5)
    assert all(row.dropped == 0 for row in report.rows)


def test_masks_are_those_of_the_adapter_of_each_sample():
    whole = adapted(sparse_llama())
    whole.add_adapter("other", peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False))
    mask_adapters(whole.eval())
    tokens = torch.stack([row["input_ids"] for row in rows(3)])
    with torch.no_grad():
        found = whole(input_ids=tokens, adapter_names=["default", "other", "__base__"]).logits
        alone = [whole(input_ids=tokens[:1]).logits]
        whole.set_adapter("other")
        alone.append(whole(input_ids=tokens[1:2]).logits)
        with whole.disable_adapter():
            alone.append(whole(input_ids=tokens[2:]).logits)
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_masked_adapters_can_be_removed():
    whole = adapted(sparse_llama())
    free = logits(whole)
    mask_adapters(whole).remove()
    assert torch.equal(logits(whole), free)


def test_masked_adapters_have_the_gradients_of_the_masked_product():
    whole = adapted(sparse_llama())
    mask_adapters(whole)
    layer = whole.base_model.model.model.layers[0].mlp.down_proj
    inputs = torch.randn(5, 24, generator=torch.Generator().manual_seed(3))
    layer(inputs).square().sum().backward()
    a, b = (getattr(layer, name)["default"].weight for name in ("lora_A", "lora_B"))
    base, found = layer.get_base_layer().weight.detach(), (a.grad.clone(), b.grad.clone())
    a.grad = b.grad = None
    (inputs @ (base + (base != 0) * (2.0 * b @ a)).T).square().sum().backward()
    torch.testing.assert_close(found, (a.grad, b.grad), atol=1e-4, rtol=1e-4)


def test_adapters_trained_by_the_trainer_merge_without_loss(tmp_path, caplog):
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    model = sparse_llama()
    masks, start = zeros(model), copy.deepcopy(model.state_dict())
    whole = adapted(model, trained=False)
    mask_adapters(whole)
    trainer(whole, tmp_path).train()
    assert "a plain merge fills the zeros" in caplog.text
    before = logits(whole.eval())
    merged, _ = merge_adapters(whole)
    assert holds(merged, masks)
    assert not torch.equal(
        merged.state_dict()["model.layers.0.mlp.down_proj.weight"], start["model.layers.0.mlp.down_proj.weight"]
    )
    torch.testing.assert_close(logits(merged), before, atol=1e-5, rtol=1e-5)


def test_modules_trained_in_full_keep_their_zeros():
    model = sparse_llama()
    masks = zeros(model)
    whole = adapted(model, target_modules=["q_proj"], modules_to_save=["up_proj"])
    with torch.no_grad():
        for name, value in whole.named_parameters():
            if "modules_to_save" in name:
                value.add_(0.1)
    merged, report = merge_adapters(whole)
    assert holds(merged, masks)
    assert any("up_proj" in row.name and row.dropped > 0 for row in report.rows)


@pytest.mark.parametrize("kind", ["IA3Config", "LoHaConfig"])
def test_merge_keeps_zeros_for_other_adapters(kind):
    model = sparse_llama()
    masks = zeros(model)
    options = {"target_modules": ["q_proj", "down_proj"]}
    options |= {"feedforward_modules": ["down_proj"]} if kind == "IA3Config" else {"init_weights": False}
    merged, _ = merge_adapters(peft.get_peft_model(model, getattr(peft, kind)(**options)))
    assert holds(merged, masks)


def test_merge_keeps_zeros_for_dora():
    model = sparse_llama()
    masks = zeros(model)
    whole = adapted(model, use_dora=True)
    with pytest.raises(ModelError, match="another adapter"):
        mask_adapters(whole)
    merged, _ = merge_adapters(whole)
    assert holds(merged, masks)


def test_impossible_merges_are_refused_before_any_work():
    with pytest.raises(ModelError, match="no adapted layers"):
        merge_adapters(sparse_llama())
    whole = adapted(sparse_llama())
    whole.merge_adapter()
    with pytest.raises(ModelError, match="merged already"):
        merge_adapters(whole)
    whole = adapted(sparse_llama())
    layer = whole.base_model.model.model.layers[1].mlp.down_proj
    start = copy.deepcopy(whole.state_dict())
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="lora_B"):
        merge_adapters(whole)
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    assert torch.equal(whole.state_dict()[name], start[name])
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = 0
    layer.get_base_layer().weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match="quantised"):
        merge_adapters(whole)


def test_a_merged_weight_that_is_too_large_is_named_and_nothing_is_merged():
    whole = adapted(sparse_llama().half())
    with torch.no_grad():
        for part in ("lora_A", "lora_B"):
            getattr(whole.base_model.model.model.layers[1].mlp.down_proj, part)["default"].weight.fill_(6e4)
    start = copy.deepcopy(whole.state_dict())
    with pytest.raises(NonFiniteError, match=r"layers\.1\.mlp\.down_proj.*float16"):
        merge_adapters(whole)
    assert all(torch.equal(value, start[name]) for name, value in whole.state_dict().items())
    assert not whole.base_model.model.model.layers[0].mlp.down_proj.merged


def test_masks_are_refused_on_a_dense_base_and_with_dropout():
    with pytest.raises(LayerSelectionError, match="holds a zero"):
        mask_adapters(adapted(sparse_llama(0.0)))
    with pytest.raises(ModelError, match="lora_dropout=0"):
        mask_adapters(adapted(sparse_llama(), lora_dropout=0.1))
