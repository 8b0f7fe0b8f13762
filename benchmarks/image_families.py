"""A tiny random model of each image-text-to-text family of transformers, and its own image processor at small sizes.

The models are those of benchmarks/tiny_models.py, at which text alone is trained; here their towers get images, so ids
of placeholders lie inside the vocabulary and grids have several shapes. Processors are made from their classes.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.image_processing_auto import (
    IMAGE_PROCESSOR_MAPPING_NAMES,
    get_image_processor_class_from_name,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from automodel_lite.parts.images.tower import PackedImages
from automodel_lite.thd import ThdBatch, to_thd
from benchmarks import tiny_models
from benchmarks.tiny_models import MROPE, ROPE, VOCAB, random_model, tiny_config

FAMILIES = list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
IMAGE, FIRST_TEXT, LAST_TEXT = 60, 3, 50
"""Ids of the placeholder, and of words."""
GRIDS = [[28, 56], [56, 28], [56, 56]]
LARGEST = 80e6
"""Parameters of a model whose sizes are all tiny."""
PROCESSED_AS = {
    "glm4v_moe": "glm4v",
    "glm_ocr": "glm46v",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen2_5_omni_thinker": "qwen2_vl",
    "qwen3_omni_moe_thinker": "qwen3_vl",
    "diffusion_gemma": "gemma4",
    "fast_vlm": "vipllava",
}
"""Families without an entry of their own among the image processors."""
_FOUR_AXES = {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 1, 1]}}
_SAM = {
    "hidden_size": 32,
    "output_channels": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 16,
    "window_size": 2,
    "global_attn_indexes": [1],
    "downsample_channels": [32, 32],
    "image_size": 128,
}
_ENCODER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
}
# ids that no text has: models that draw keep their labels from them
_CODES = {f"IMGIMG{chr(ord('A') + i)}Z": LAST_TEXT + 1 + i for i in range(8)}
_VISUAL_TOKENS = {f"<|visual token {i:06d}|>": LAST_TEXT + 1 + i for i in range(8)}
_SPECIAL: dict[str, dict[str, Any]] = {
    "aria": {"vision_config": {"image_size": 490}},
    "chameleon": {
        "vocabulary_map": {"<image>": IMAGE, **_CODES},
        "vq_config": {"num_embeddings": len(_CODES)},
    },
    "cosmos3_edge": {"text_config": MROPE},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"sam_config": _SAM, "encoder_config": _ENCODER},
    },
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0, 1]}},
    "dots3_note": {
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
        "vision_config": {
            "mlp_layer_types": ["dense", "dense"],
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
    },
    "emu3": {
        "vocabulary_map": {"<image>": IMAGE, "<|extra_200|>": 2, **_VISUAL_TOKENS},
        "vq_config": {
            "codebook_size": len(_VISUAL_TOKENS),
            "base_channels": 32,
            "hidden_size": 128,
            "num_attention_heads": 1,
        },
    },
    "fast_vlm": {
        "vision_config": {"architecture": "test_resnet", "hidden_size": 96, "model_args": {}}
    },
    "gemma3": {"mm_tokens_per_image": 4, "vision_config": {"image_size": 56}},
    "gemma3n": {
        "vision_soft_tokens_per_image": 4,
        "vision_config": {"architecture": "test_convnext", "hidden_size": 64},
    },
    "gemma4": {"vision_config": {"position_embedding_size": 128, "pooling_kernel_size": 3}},
    "glm5_next": {
        "text_config": {
            "qk_rope_head_dim": 0,
            "layer_types": ["linear_attention", "indexed_attention"],
        }
    },
    "glm_ocr": {"text_config": MROPE},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 0], [-2, 1]],
        "downsample_rate": "1/2",
        "projector_dropout": 0.0,
        "vision_config": {"hidden_size": 64},
    },
    "granite_docling": {"vision_config": {"image_size": 56, "scale_factor": 2}},
    "hunyuan_vl": {"text_config": _FOUR_AXES},
    "inkling_mm_model": {
        "vision_config": {"text_hidden_size": 32, "patch_size": 28},
        "audio_config": {"text_hidden_size": 32},
    },
    "kimi_k25": {"projection_hidden_size": 32},
    "llama4": {
        "vision_config": {
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "intermediate_size": 128,
        }
    },
    "molmo2": {
        "vision_config": {"image_size": [56, 56], "num_position_embeddings": 16},
        "adapter_config": {"vision_feature_layer": [1, 0]},
    },
    "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "muse_spark": {"out_hidden_size": 128, "projector_hidden_size": 32},
    "nemotron_h_omni": {"projector_hidden_size": 32, "vision_hidden_size": 32},
    "ovis2": {"hidden_size": 32, "visual_indicator_token_ids": [61, 62, 63, 64, 65]},
    "paddleocr_vl": {"text_config": MROPE},
    "paligemma": {"projection_dim": 32},
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_lang_large_patch14_448",
            "do_pooling": False,
            "model_args": {
                "embed_dim": 32,
                "depth": 2,
                "num_heads": 4,
                "img_size": [28, 28],
                "ref_feat_shape": [2, 2],
            },
        }
    },
    "qianfan_ocr": {"vision_config": {"drop_path_rate": 0.0}},
    "qwen2_5_omni_thinker": {"text_config": MROPE},
    "qwen3_omni_moe_thinker": {"text_config": MROPE},
    "shieldgemma2": {"mm_tokens_per_image": 4, "vision_config": {"image_size": 56}},
    "vipllava": {"vision_feature_layer": [-1, -2]},
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "aria": {"max_image_size": 490},
    "deepseek_ocr2": {"size": {"height": 128, "width": 128}, "tile_size": 128},
    "deepseek_vl_hybrid": {"high_res_size": {"height": 28, "width": 28}},
    "emu3": {"min_pixels": 32 * 32, "max_pixels": 64 * 64},
    "gemma3n": {"size": {"height": 64, "width": 64}},
    "gemma4": {"max_soft_tokens": 70},
    "gemma4_unified": {"max_soft_tokens": 70},
    "kimi_k25": {"merge_size": 2},
    "lfm2_vl": {
        "encoder_patch_size": 14,
        "tile_size": 56,
        "min_image_tokens": 1,
        "max_image_tokens": 4,
        "max_num_patches": 16,
    },
    "minicpm_ocr": {"scale_resolution": 56},
    "minicpmv4_6": {"scale_resolution": 56},
    "minicpmv4_7": {"scale_resolution": 56, "max_slice_nums": 1},
    "mistral3": {"size": {"longest_edge": 112}},
    "molmo2": {"size": {"height": 56, "width": 56}, "overlap_margins": [0, 0]},
    "nemotron_h_omni": {"min_num_patches": 4, "max_num_patches": 16},
    "perception_lm": {"vision_input_type": "vanilla"},
}
"""Sizes that only these processors have."""


def image_config(family: str) -> PretrainedConfig:
    """Returns the tiny config, with placeholders inside the vocabulary."""
    special = tiny_models.SPECIAL.setdefault(family, {})
    special.update(_SPECIAL.get(family, {}))
    config = tiny_config(family)
    free = iter(range(IMAGE + 1, VOCAB))
    for part in {id(x): x for x in (config, config.get_text_config())}.values():
        for name, value in list(vars(part).items()):
            if not isinstance(value, int) or not name.endswith(("_token_id", "_token_index")):
                continue
            if name in ("image_token_id", "image_token_index"):
                setattr(part, name, IMAGE)
            elif value >= VOCAB:
                setattr(part, name, next(free))
    for name in ("image_token_id", "image_patch_id"):
        if hasattr(config, name):  # which may be null, or another name of a text model's
            setattr(config, name, IMAGE)
    if family.endswith("_thinker"):
        config.vision_start_token_id = next(free)
        config.vision_end_token_id = next(free)
    for name in ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id"):
        if hasattr(config, name):  # by which a rule for positions finds images
            setattr(config, name, next(free))
    if getattr(config, "image_grid_pinpoints", None):
        config.image_grid_pinpoints = GRIDS
    return config


def image_model(family: str, config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Builds the model with random weights and a config of its own, which an attention that is installed changes;
    raises ValueError for one whose sizes are not all tiny.
    """
    own = copy.deepcopy(config)
    with torch.device("meta"):
        kind = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family])
        size = sum(p.numel() for p in kind(own).parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} M parameters: its sizes have names of their own")
    return random_model(own, seed)


def image_processor(family: str, config: PretrainedConfig) -> Any:
    """Makes the family's image processor, its sizes those of the tiny tower; PIL where there is such a class."""
    names = IMAGE_PROCESSOR_MAPPING_NAMES.get(PROCESSED_AS.get(family, family)) or {}
    kind = get_image_processor_class_from_name(names.get("pil") or names["torchvision"])
    vision = getattr(config, "vision_config", config)
    side = _first(getattr(vision, "image_size", 28), 28)
    patch = _first(getattr(vision, "patch_size", 14), 14)
    merges = [
        getattr(part, name, None)
        for part in (vision, config)
        for name in ("spatial_merge_size", "merge_size")
    ]
    merge = _first(next(filter(None, merges), 1), 1)
    known = {key: value for key, value in kind().to_dict().items() if value is not None}
    square = {"height": patch, "width": patch}
    temporal = getattr(vision, "temporal_patch_size", known.get("temporal_patch_size"))
    largest = {"longest_edge": side} if isinstance(known.get("max_image_size"), dict) else side
    sizes: dict[str, Any] = {
        "patch_size": square if isinstance(known.get("patch_size"), dict) else patch,
        "merge_size": merge,
        "temporal_patch_size": temporal,
        "crop_size": {"height": side, "width": side},
        "tile_size": side,
        "max_patches": 3,
        "min_patches": 1,
        "crop_to_patches": True,
        "image_grid_pinpoints": GRIDS,
        "max_image_size": largest,
        "size": _size(known.get("size") or {}, side, (patch * merge) ** 2),
    }
    given = {key: value for key, value in sizes.items() if key in known}
    return kind(**given | _PROCESSORS.get(family, {}))


def _first(value: Any, default: int) -> int:
    if isinstance(value, (list, tuple)):
        value = value[0]
    return value if isinstance(value, int) else default


def _size(known: dict[str, int], side: int, unit: int) -> dict[str, int]:
    keys = set(known)
    if keys == {"shortest_edge", "longest_edge"} and known["longest_edge"] > 2000:
        return {"shortest_edge": 2 * unit, "longest_edge": 8 * unit}  # numbers of pixels
    if keys == {"min_pixels", "max_pixels"}:
        return {"min_pixels": 2 * unit, "max_pixels": 8 * unit}
    if "max_height" in keys:
        return {"max_height": 2 * side, "max_width": 2 * side}
    return {key: 2 * side if key == "longest_edge" else side for key in keys}


SIZES = [(80, 60), (60, 122), (114, 114), (58, 160), (180, 66)]


def random_image(rng: random.Random, size: tuple[int, int] | None = None) -> Image.Image:
    """Draws an image of noise, of one of a few sizes."""
    width, height = size or rng.choice(SIZES)
    generator = np.random.default_rng(rng.randrange(10**6))
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(processor: Any, images: list[Image.Image], accepted: set[str]) -> dict[str, Tensor]:
    """Returns what the processor makes of some images in one call, as far as the model takes it."""
    made = processor(images=images, return_tensors="pt")
    if "pixel_values" not in made and "pixel_values_images" in made:
        made["pixel_values"] = made["pixel_values_images"]
    if "pixel_values" not in made and "image_unpadded_heights" in made:
        made["pixel_values"] = _patches(processor, made)
    return {name: torch.as_tensor(x) for name, x in made.items() if name in accepted}


def _patches(processor: Any, made: Any) -> Tensor:
    """Cuts padded images to patches [1, N, pixels], as Fuyu's processor does beside its text."""
    side = processor.patch_size["height"]
    patches = []
    for number, (padded,) in enumerate(made["images"]):
        height, width = (
            -(-int(made[f"image_unpadded_{name}s"][number]) // side) * side
            for name in ("height", "width")
        )
        cut = np.asarray(padded)[:, :height, :width]
        patches.append(torch.as_tensor(processor.patchify_image(cut[None])).flatten(0, -2))
    return torch.cat(patches)[None]


def image_stream(columns: dict[str, list[Tensor]], images: PackedImages) -> ThdBatch:
    """Returns the stream of documents, whose parts stand in `columns`."""
    lens = [len(ids) for ids in columns["input_ids"]]
    row = {name: torch.cat(parts)[None] for name, parts in columns.items()}
    row["position_ids"] = torch.cat([torch.arange(n) for n in lens])[None]
    row["seq_lens"] = row["seq_lens_padded"] = torch.tensor([lens])
    return to_thd({**row, "images": images})
