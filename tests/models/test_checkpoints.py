"""Blocks of fp8 that end raggedly, and errors of transformers' converters."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
from benchmarks.survey_models import save
from benchmarks.tiny_models import random_model, tiny_config, tiny_model
from tests.models.test_quantized import BLOCK, change_config, quantize


@pytest.mark.parametrize("size", [24, 40, 36])
def test_fp8_blocks_may_end_raggedly(size: int, tmp_path: Path) -> None:
    """24 rows in blocks of 16 are 16 and 8, not two of 12; 36 do not divide into three."""
    config = tiny_config("qwen3")
    config.intermediate_size = size
    save(random_model(config), tmp_path / "model")
    path, meant = tmp_path / "model/model.safetensors", {}
    stored = load_file(path)
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        rows, columns = stored[name].shape
        scale = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.5
        stored[name] = stored[name].to(torch.float8_e4m3fn)
        whole = stored[name].float()
        for row in range(rows):
            for column in range(columns):
                whole[row, column] *= scale[row // BLOCK, column // BLOCK]
        meant[name], stored[f"{name}_scale_inv"] = whole, scale
    save_file(stored, path, metadata={"format": "pt"})
    change_config(
        tmp_path / "model",
        quant_method="fp8",
        activation_scheme="dynamic",
        weight_block_size=[BLOCK, BLOCK],
    )
    lm = CausalLM(str(tmp_path / "model")).build(AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert len(meant) == 7 * lm.config.num_hidden_layers
    for name, want in meant.items():
        assert torch.equal(lm.state_dict()[name], want), name


def test_scales_that_do_not_fit_the_blocks_name_their_weight(tmp_path: Path) -> None:
    save(tiny_model("qwen3"), tmp_path / "model")
    quantize(tmp_path / "model")
    change_config(
        tmp_path / "model",
        quant_method="fp8",
        activation_scheme="dynamic",
        weight_block_size=[8, 8],
    )
    source = CausalLM(str(tmp_path / "model"))
    with pytest.raises(
        ConfigError,
        match=r"the weight model.layers.0.*_proj.weight cannot be converted: a weight of \[.* in blocks",
    ):
        source.build(AutoTokenizer.from_pretrained(tmp_path / "model"))
