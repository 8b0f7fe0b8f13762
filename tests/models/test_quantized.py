"""Checkpoints whose weights are quantized: turned back into one dtype, or refused before anything is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from automodel_lite.errors import ConfigError
from automodel_lite.models.quantized import forget
from automodel_lite.models.source import CausalLM
from benchmarks.survey_models import run, save
from benchmarks.tiny_models import random_model, tiny_config, tiny_model

BLOCK = 16


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether weights are to be dequantized, as transformers is asked. Off a GPU it does so by itself; on one, experts
    would stay packed, which cannot be trained.
    """
    found: list[bool] = []
    for quantizer in (Mxfp4HfQuantizer, FineGrainedFP8HfQuantizer):

        def validate(
            self: Any, *args: Any, own: Any = quantizer.validate_environment, **kwargs: Any
        ) -> None:
            found.append(self.quantization_config.dequantize)
            own(self, *args, **kwargs)

        monkeypatch.setattr(quantizer, "validate_environment", validate)
    return found


def quantize(folder: Path) -> dict[str, torch.Tensor]:
    """Linear layers of a checkpoint in fp8 with a scale for each block, as DeepSeek's -> what they stand for."""
    path, meant, stored = folder / "model.safetensors", {}, {}
    for name, weight in load_file(path).items():
        meant[name] = stored[name] = weight
        if name.endswith("_proj.weight"):
            rows, columns = weight.shape  # the last block of a side may be cut off
            padded = torch.nn.functional.pad(
                weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK)
            )
            scale = (
                padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).abs().amax((1, 3)) / 448
            )
            scales = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
            stored[name] = (weight.float() / scales).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            meant[name] = stored[name].float() * scales
    save_file(stored, path, metadata={"format": "pt"})
    change_config(
        folder, quant_method="fp8", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK]
    )
    return meant


def change_config(folder: Path, **quantization: object) -> None:
    path = folder / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )


def test_fp8_blocks_become_weights_that_are_trained_and_exported(
    tmp_path: Path, asked: list[bool]
) -> None:
    save(tiny_model("qwen3"), tmp_path / "model")
    meant = quantize(tmp_path / "model")
    source = CausalLM(str(tmp_path / "model"))
    lm = source.build(AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert asked == [True]
    assert {p.dtype for p in lm.parameters()} == {torch.float32}
    for name, value in lm.state_dict().items():
        # transformers' own rounds to bf16
        torch.testing.assert_close(value, meant[name].float(), atol=4e-3, rtol=1e-2)
    run(tmp_path, "full")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "full/hf", dtype="auto")
    assert exported.dtype == torch.bfloat16
    assert not hasattr(exported.config, "quantization_config")
    assert load_file(tmp_path / "full/hf/model.safetensors").keys() == meant.keys()


def test_a_scale_that_was_not_applied_is_refused() -> None:
    """As of a weight that transformers splits when it loads it; not so of layers that the model does not have."""
    of_a_head = ("model.layers.9.up_proj.weight", "model.layers.9.up_proj.weight_scale_inv")
    forget(tiny_model("qwen3"), of_a_head)
    with pytest.raises(
        ConfigError, match=r"the scales model\.in_proj\.weight_scale_inv .* were not"
    ):
        forget(tiny_model("qwen3"), (*of_a_head, "model.in_proj.weight_scale_inv"))


FP4 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)


def test_gpt_oss_own_checkpoints_are_trained_in_full_precision(
    tmp_path: Path, asked: list[bool]
) -> None:
    """MXFP4: two 4-bit values in a byte, an exponent for each 32 of them."""
    config = tiny_config("gpt_oss")
    config.hidden_size, config.intermediate_size = 32, 64
    save(random_model(config), tmp_path / "model")
    path, meant = tmp_path / "model/model.safetensors", {}
    stored = load_file(path)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, width, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
        exponents = torch.randint(117, 124, (experts, rows, width // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
        values = torch.stack([FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]], -1).flatten(3)
        meant[name] = (
            (values * 2.0 ** (exponents[..., None].float() - 127)).flatten(2).transpose(1, 2)
        )
    save_file(stored, path, metadata={"format": "pt"})
    change_config(tmp_path / "model", quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    lm = CausalLM(str(tmp_path / "model")).build(AutoTokenizer.from_pretrained(tmp_path / "model"))
    assert asked == [True]
    assert len(meant) == 2 * lm.config.num_hidden_layers
    assert {p.dtype for p in lm.parameters()} == {torch.float32}
    for name, want in meant.items():
        assert torch.equal(lm.state_dict()[name], want)
    run(tmp_path, "full")
    assert not hasattr(
        AutoModelForCausalLM.from_pretrained(tmp_path / "full/hf").config, "quantization_config"
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors"])
def test_others_are_refused_before_anything_is_loaded(method: str, tmp_path: Path) -> None:
    save(tiny_model("llama"), tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    change_config(tmp_path / "model", quant_method=method, bits=4, load_in_4bit=True)
    with pytest.raises(
        ConfigError, match=rf"is quantized \({method}\).*: use the original checkpoint"
    ):
        run(tmp_path, "full")
