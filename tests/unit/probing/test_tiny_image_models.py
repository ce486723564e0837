"""Small versions of models of images and texts in the sizes that are published: their parts still fit together."""

import pytest
import torch

from ringmaster.techniques.models.architectures import instantiate
from ringmaster.techniques.probing.tiny import tiny_config

TOKEN = 5
TEXT = {
    "vocab_size": 2000,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
QWEN_2 = {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "num_heads": 16, "mlp_ratio": 4}
QWEN_2_5 = {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16}


@pytest.mark.parametrize(
    ("architecture", "vision"),
    [("Qwen2VLForConditionalGeneration", QWEN_2), ("Qwen2_5_VLForConditionalGeneration", QWEN_2_5)],
)
def test_what_a_part_for_images_writes_has_the_width_of_the_text(architecture, vision):
    import transformers

    config_class = getattr(transformers, architecture).config_class
    config = config_class(text_config=TEXT, vision_config=vision, image_token_id=TOKEN)
    config.architectures = [architecture]
    model = instantiate(tiny_config(config))
    assert sum(parameter.numel() for parameter in model.parameters()) < 5e6
    tokens = torch.tensor([[1, *[TOKEN] * 4, 7, 8]])
    patches, grids = torch.randn(16, 3 * 2 * 14 * 14), torch.tensor([[1, 4, 4]])
    types = (tokens == TOKEN).long()
    output = model(input_ids=tokens, pixel_values=patches, image_grid_thw=grids, mm_token_type_ids=types)
    assert output.logits.shape == (1, 7, 2000)
