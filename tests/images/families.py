"""Tiny vision-language models as folders: weights, tokenizer with a chat template, processor; and drawn pictures."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)

from benchmarks.image_families import PROCESSED_AS
from benchmarks.tiny_models import MROPE, SPECIAL, random_model, tiny_config

TEMPLATE = """{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}\
{% for part in m['content'] %}{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}\
{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
WORDS = [*"abcdefghijklmnopqrstuvwxyz?.:"]
GRIDS = [[28, 56], [56, 28], [56, 56]]
PLAIN = ("<image>", "<image>", {})
# placeholder, what the template writes, tokens of a processor that its tokenizer names
FAMILIES: dict[str, tuple[str, str, dict[str, str]]] = {
    "qwen3_vl": ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", {}),
    "qwen3_5": ("<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", {}),
    "idefics3": PLAIN,
    "llava_next": PLAIN,
    "internvl": (
        "<IMG_CONTEXT>",
        "<IMG_CONTEXT>",
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "gemma3": (
        "<image_soft_token>",
        "<start_of_image>",
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
}
# of which tests name those that they need
MORE: dict[str, tuple[str, str, dict[str, str]]] = {
    "qwen3_vl_moe": FAMILIES["qwen3_vl"],
    "paligemma": PLAIN,
    "glm4v": ("<|image|>", "<|begin_of_image|><|image|><|end_of_image|>", {}),
    "glm_ocr": ("<|image|>", "<|begin_of_image|><|image|><|end_of_image|>", {}),
    "aya_vision": (
        "<|IMG_PATCH|>",
        "<image>",
        {
            "start_token": "<|START_OF_IMG|>",
            "end_token": "<|END_OF_IMG|>",
            **{f"tile_{i}": f"TILE_{i}" for i in ("GLOBAL", 1, 2, 3)},
        },
    ),
}
_MODELS: dict[str, dict[str, Any]] = {
    "llava_next": {"image_grid_pinpoints": GRIDS},
    "gemma3": {"mm_tokens_per_image": 4, "vision_config": {"image_size": 56}},
    "glm_ocr": {"text_config": MROPE},
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"patch_size": 14, "size": {"shortest_edge": 1568, "longest_edge": 6272}},
    "qwen3_5": {"patch_size": 14, "size": {"shortest_edge": 1568, "longest_edge": 6272}},
    "idefics3": {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}},
    "llava_next": {
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
        "image_grid_pinpoints": GRIDS,
    },
    "gemma3": {"size": {"height": 56, "width": 56}},
    "internvl": {"size": {"height": 28, "width": 28}, "max_patches": 3, "crop_to_patches": True},
    "paligemma": {"size": {"height": 28, "width": 28}, "image_seq_length": 4},
    "glm4v": {"patch_size": 14, "size": {"shortest_edge": 1568, "longest_edge": 6272}},
    "glm46v": {"patch_size": 14, "size": {"shortest_edge": 1568, "longest_edge": 6272}},
    "aya_vision": {"size": {"height": 28, "width": 28}, "max_patches": 3, "crop_to_patches": True},
}
_SETTINGS: dict[str, dict[str, Any]] = {
    "glm_ocr": {"processor_class": "Glm46VProcessor"},
    "gemma3": {"image_seq_length": 4},
    "aya_vision": {"patch_size": 14, "img_size": 28, "downsample_factor": 2},
    "llava_next": {
        "patch_size": 14,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    },
}


def write_model(family: str, folder: Path, seed: int = 0) -> Path:
    """Writes a family's tiny model, whose placeholder is a token of its tokenizer."""
    token, written, named = {**FAMILIES, **MORE}[family]
    specials = ["<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", token]
    specials += ["<|vision_start|>", "<|vision_end|>", "<|video_pad|>", *named.values()]
    specials += ["<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<image>"]
    specials += ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    specials += [f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)]
    vocab = {word: i for i, word in enumerate(dict.fromkeys([*specials, *WORDS, "\n", " "]))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        extra_special_tokens=named,
    )
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", written)
    tokenizer.save_pretrained(folder)
    SPECIAL.setdefault(family, {}).update(_MODELS.get(family, {}))
    config = tiny_config(family)
    ids = tokenizer.get_vocab()
    text = config.get_text_config()
    text.vocab_size = len(ids) + 8
    for part in (config, text):
        part.eos_token_id, part.bos_token_id, part.pad_token_id = 2, 1, 0
    text.max_position_embeddings = 512
    own = {
        "image_token_id": token,
        "image_token_index": token,
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
        "video_token_id": "<|video_pad|>",
    }
    for name, value in own.items():
        if name in vars(config):
            setattr(config, name, ids[value])
    random_model(config, seed).save_pretrained(folder)
    processed_as = PROCESSED_AS.get(family, family)
    names = IMAGE_PROCESSOR_MAPPING_NAMES[processed_as]
    kind = get_image_processor_class_from_name(names["pil"])
    vision = config.vision_config
    made = kind(**_PROCESSORS[processed_as])
    made.save_pretrained(folder)
    settings = dict(_SETTINGS.get(family, {}))
    if family in ("internvl", "idefics3"):
        patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        tokens = (28 // patch) ** 2
        settings["image_seq_length" if family == "internvl" else "image_seq_len"] = max(
            1,
            int(tokens * (getattr(config, "downsample_ratio", 1) ** 2))
            // getattr(config, "scale_factor", 1) ** 2,
        )
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


def draw(path: Path, width: int, height: int, seed: int) -> None:
    """Draws a picture of noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


SIZES = [(80, 60), (60, 122), (114, 114), (58, 160)]
CHATS = [
    ["tell. i", "a cat."],
    ["hi.", "ok."],
    ["i what? i", "two dogs.", "i", "red."],
    ["i", "x y."],
]
"""i is an image."""


def write_chats(folder: Path, num: int = 8, seed: int = 0) -> Path:
    """Writes chats in which images are parts, as lines of JSON."""
    rng, lines, number = random.Random(seed), [], 0
    for row in range(num):
        messages = []
        for place, said in enumerate(CHATS[row % len(CHATS)]):
            parts: list[dict[str, str]] = []
            for piece in said.split(" "):
                if piece != "i":
                    parts.append({"type": "text", "text": "".join(rng.choices(WORDS, k=3)) + piece})
                    continue
                draw(folder / f"{number}.png", *rng.choice(SIZES), seed=number)
                parts.append({"type": "image", "image": f"{number}.png"})
                number += 1
            messages.append({"role": ("user", "assistant")[place % 2], "content": parts})
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder / "chats.jsonl"
