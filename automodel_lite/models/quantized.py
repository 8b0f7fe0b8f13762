"""Checkpoints in fp8 or mxfp4, read as plain weights.

576 rows in blocks of 128 have 5 rows of scales, the last one for 64 rows: transformers' own
converter does not meet such ragged ends.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from automodel_lite.config.sizes import ceil_div
from automodel_lite.errors import ConfigError
from automodel_lite.models.checkpoints import replaced

FP8_DTYPES = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
_dequantize_by_grid = Fp8Dequantize._dequantize_one


def plain_arguments(quantization: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `from_pretrained` that ask for plain weights."""
    kind = Mxfp4Config if quantization["quant_method"] == "mxfp4" else FineGrainedFP8Config
    return {"quantization_config": kind.from_dict({**quantization, "dequantize": True})}


def dequantizing() -> AbstractContextManager[None]:
    """Dequantizes fp8 weights, inside, by the blocks that their config names."""
    return replaced(Fp8Dequantize, "_dequantize_one", _dequantize)


def forget(model: transformers.PreTrainedModel, unexpected: Collection[str]) -> None:
    """Makes a model plain, in fp32: otherwise its export would quantize again, as the checkpoint
    was.

    unexpected  keys of the checkpoint that are not the model's
    Raises ConfigError for scales of weights that are: they were read without them.
    """
    for key in sorted(unexpected):
        if key.endswith("_scale_inv") and key.removesuffix("_scale_inv") not in unexpected:
            raise ConfigError(
                f"the scales {key} of the checkpoint were not applied: transformers "
                f"{transformers.__version__} fuses or splits their weights of "
                f"{type(model).__name__} without them. Take an unquantized checkpoint."
            )
    for part in (model.config, model.config.get_text_config()):
        vars(part).pop("quantization_config", None)
    model.hf_quantizer = None
    model.is_quantized = False
    model._weight_conversions = None
    model.float()


def _dequantize(
    op: Any, quantized: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    """Dequantizes fp8 weights by `weight_block_size` of their config. transformers divides the
    weight evenly over the scales: 24 rows in blocks of 16 become two blocks of 12, without an
    error.
    """
    block = op.hf_quantizer.quantization_config.weight_block_size
    # One scale for the whole weight, and packed fp4 inside fp8 checkpoints, are read rightly by the
    # grid.
    if quantized.dtype not in FP8_DTYPES or not block or scales.numel() == 1:
        return _dequantize_by_grid(op, quantized, scales, output_dtype)
    num_blocks = [ceil_div(size, step) for size, step in zip(quantized.shape[-2:], block)]
    if list(scales.shape[-2:]) != num_blocks:
        raise ValueError(
            f"a weight of {list(quantized.shape)} in blocks of {block} has {num_blocks} scales, "
            f"and the checkpoint holds {list(scales.shape[-2:])}."
        )
    scales = (scales.float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()
    weight = quantized.float()
    # One row of blocks at a time: the scales of all elements would be as large as the weight.
    for rows, scale in zip(weight.split(block[0], -2), scales.unbind(-2)):
        rows *= scale.repeat_interleave(block[1], -1)[..., None, : weight.shape[-1]]
    return weight.to(output_dtype or torch.bfloat16)
