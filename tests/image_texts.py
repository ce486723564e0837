"""Tiny models of images and texts, their processors, and data for them, all made on the spot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

SMOL_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The chat template of SmolVLM."""
MARKED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>{% endgeneration %}"
    "{% else %}{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% else %}<image>{% endif %}{% endfor %}<end_of_utterance>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that marks what the assistant wrote, as TRL needs it."""
TILE, PATCH = 16, 4
TOKENS_OF_TILE = (TILE // PATCH // 2) ** 2


def tiny_tokenizer(special: Sequence[str]) -> Any:
    """Returns a tokenizer of bytes with some special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={each: number for number, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*special],
    )


def smol_processor(*, template: str = SMOL_TEMPLATE, splits: bool = True) -> Any:
    """Returns the processor of a tiny SmolVLM (Idefics3)."""
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    tiles = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
    special = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<|im_start|>", *tiles]
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 2 * TILE}, max_image_size={"longest_edge": TILE}, do_image_splitting=splits
    )
    return Idefics3Processor(
        image_processor=images, tokenizer=tiny_tokenizer(special), image_seq_len=TOKENS_OF_TILE, chat_template=template
    )


SMOL = "Idefics3ForConditionalGeneration"
SMOL_CONFIG: Mapping[str, Any] = {
    "scale_factor": 2,
    "tie_word_embeddings": False,
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": TILE,
        "patch_size": PATCH,
    },
    "text_config": {
        "model_type": "llama",
        "vocab_size": 288,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": None,
    },
}


def write_image(file: Path, *, width: int, height: int, seed: int) -> None:
    """Writes an image of noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file)


QWEN_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for line in message['content'] %}{{ line['text'] }}{% endfor %}{% endif %}<|im_end|>{% endgeneration %}"
    "{% elif message['content'] is string %}{{ message['content'] }}<|im_end|>{% else %}"
    "{% for line in message['content'] %}{% if line['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ line['text'] }}{% endif %}{% endfor %}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template as that of Qwen2-VL, which marks what the assistant wrote."""


def qwen_processor(*, template: str = QWEN_TEMPLATE) -> Any:
    """Returns the processor of a tiny Qwen2-VL without its part for videos, which needs torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
    from transformers.processing_utils import ProcessorMixin

    class Processor(Qwen2VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
            self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    sizes = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (6 * PATCH) ** 2}
    images = Qwen2VLImageProcessorPil(size=sizes, patch_size=PATCH, merge_size=2)
    return Processor(images, tiny_tokenizer(special), chat_template=template)


def save_processor(processor: Any, folder: Path) -> None:
    """Saves a processor, without a part for videos."""
    if type(processor).__name__ == "Processor":
        processor.tokenizer.chat_template = processor.chat_template
        processor.tokenizer.save_pretrained(folder)
        processor.image_processor.save_pretrained(folder)
    else:
        processor.save_pretrained(folder)


QWEN, QWEN_2_5 = "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"
_QWEN_TEXT = {
    "vocab_size": 288,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
}
QWEN_CONFIG: Mapping[str, Any] = {
    "tie_word_embeddings": False,
    "text_config": _QWEN_TEXT,
    "vision_config": {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
    },
}
QWEN_2_5_CONFIG: Mapping[str, Any] = {
    **QWEN_CONFIG,
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "window_size": 4 * PATCH,
        "fullatt_block_indexes": [1],
    },
}


COLOURS = ("red", "green", "blue")


def write_rows(folder: Path, *, number: int = 12) -> list[dict[str, Any]]:
    """Writes images of several sizes and train.jsonl with conversations of one to three of them; returns the rows."""
    rows = []
    for row in range(number):
        names = [f"images/{row}-{each}.png" for each in range(1 + row % 3)]
        for each, name in enumerate(names):
            write_image(folder / name, width=12 + 7 * ((row + each) % 4), height=10 + 5 * (row % 5), seed=row + each)
        parts: list[dict[str, Any]] = []
        for each, name in enumerate(names):
            parts += [{"type": "image", "image": name}, {"type": "text", "text": f" {each}? "}]
        answer = f"It is {COLOURS[row % 3]}, {row}."
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        if row % 4 == 3:
            messages += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
        rows.append({"messages": messages})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows
