"""Models that take pictures beside text: batches of patches, and position ids of one row."""

import families
import pytest
import torch

import iobs

hf = families.hf
PICTURE, BEGIN, END = 40, 41, 42  # tokens of a picture, and around it


def qwen():
    torch.manual_seed(0)
    text = {**families.DECODER, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    vision = {"embed_dim": 16, "hidden_size": 16, "depth": 2, "num_heads": 2, "patch_size": 4}
    tokens = {"image_token_id": PICTURE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    config = hf.Qwen2VLConfig(text_config=text, vision_config=vision, **tokens)
    return hf.Qwen2VLForConditionalGeneration(config).eval()


def pictures(samples, seed):
    """Text with a picture of 4 x 4 patches, which the model merges to 4 tokens, in each sample."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(3, 39, (samples, 6), generator=generator)
    shown = torch.tensor([BEGIN, *[PICTURE] * 4, END]).expand(samples, -1)
    tokens = torch.cat([words[:, :2], shown, words[:, 2:]], 1)
    return {
        "input_ids": tokens,
        "pixel_values": torch.randn(16 * samples, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * samples),
        "mm_token_type_ids": (tokens == PICTURE).int(),
    }


@pytest.mark.parametrize("samples", [1, 3])
def test_vision_tower_is_pruned_with_patches_in_the_batch(samples):
    data = [pictures(samples, seed) for seed in range(3)]
    report = iobs.prune(qwen(), data, 0.5, "one-shot", solver="magnitude", holdout=0.0)
    pruned = [row.name for row in report.audit]
    assert sum("visual" in name for name in pruned) == 2 * 4 + 3
    assert report.coverage.unexpected == 0


def test_position_ids_of_one_row_and_generators_of_batches_are_taken():
    torch.manual_seed(0)
    model = families.LANGUAGE_MODELS["llama"][0]().eval()
    positions = torch.arange(16)[None]
    batches = ({**one, "position_ids": positions} for one in families.language_batches())
    report = iobs.prune(model, batches, 0.5, "one-shot", holdout=0.0)
    assert len(report.audit) == 14
