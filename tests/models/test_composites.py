"""Vision-language checkpoints trained on text: their language model alone learns, and they are written back whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import is_timm_available

from automodel_lite.attention.documents import runs_by_rows
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.errors import ConfigError
from automodel_lite.models.flops import model_size
from automodel_lite.models.freezing import freeze_named
from automodel_lite.models.layers import (
    decoder_layers,
    freeze_towers,
    output_head,
    text_decoder,
    towers,
)
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parts.adapters.lora import Lora
from automodel_lite.run.weight_files import as_saved, groups_of, stored_dtypes, unique_weights
from benchmarks.image_families import image_config, image_model
from benchmarks.survey_models import load, run, save, separate, step_of, weights_of
from benchmarks.tiny_models import tiny_model
from tests.ranks import run_ranks

FAMILIES = [
    "gemma3",
    "qwen2_5_vl",
    "qwen3_5",
    "kimi_k25",
    "nemotron_h_omni",
    "got_ocr2",
    "deepseek_vl_hybrid",
]
"""The last two: a class whose attention cannot be replaced around a language model whose can, and a tower that looks its
attention up in a table of its own.
"""


@pytest.mark.parametrize("family", FAMILIES)
def test_what_text_does_not_meet_is_frozen(family: str) -> None:
    model = tiny_model(family)
    freeze_towers(model, torch.bfloat16)
    of_towers = {p for tower in towers(model) for p in tower.parameters()}
    assert of_towers
    frozen = {p for p in model.parameters() if not p.requires_grad}
    assert frozen >= of_towers
    # a factor between towers, of DeepSeek-VL's hybrid
    assert all(p.numel() == 1 for p in frozen - of_towers)
    assert {p.dtype for p in of_towers} == {torch.bfloat16}
    assert sum(p.numel() for p in frozen) == model_size(model.config).towers
    assert len(decoder_layers(model)) == model.config.get_text_config().num_hidden_layers


@pytest.mark.skipif(is_timm_available(), reason="timm is here")
def test_a_tower_of_a_missing_package_is_refused_at_once(tmp_path: Path) -> None:
    AutoConfig.for_model("gemma3n").save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError,
        match="model_type=gemma3n needs the package timm for its vision tower: pip install",
    ):
        CausalLM(pretrained=str(tmp_path)).resolve_model_config({})


@pytest.mark.parametrize("family", ["got_ocr2", "granite_speech", "deepseek_vl_hybrid"])
def test_the_kernel_is_put_under_the_language_model_alone(family: str) -> None:
    """Their towers, or their class as a whole, cannot take it: once a KeyError at the export, or refused."""
    model = tiny_model(family)
    install(model, ReferenceAttention())
    check_packing_isolation(model)
    assert not runs_by_rows(model)
    config = model.config
    assert config.get_text_config()._attn_implementation == "thd_reference"
    of_towers = [
        part
        for key in config.sub_configs
        if (part := getattr(config, key)) is not config.get_text_config()
    ]
    assert of_towers
    assert "thd_reference" not in {part._attn_implementation for part in of_towers}
    assert describe(config).config.model_type == family


def test_a_head_of_several_layers_is_no_tower() -> None:
    model = tiny_model("modernbert-decoder")
    freeze_towers(model, torch.bfloat16)
    assert towers(model) == []
    assert all(p.requires_grad and p.dtype == torch.float32 for p in model.parameters())


def test_towers_in_a_list_are_told_apart() -> None:
    """FSDP gathers for a forward, and a list has none."""
    model = image_model("granite4_vision", image_config("granite4_vision"))
    found = towers(model)
    assert not any(isinstance(tower, nn.ModuleList) for tower in found)
    of_text = {*text_decoder(model).parameters(), *output_head(model).parameters()}
    of_towers = {p for tower in found for p in tower.parameters()}
    assert {*model.parameters()} - of_text - of_towers == {model.model.image_newline}


def test_the_head_of_a_language_model_inside_a_composite() -> None:
    model = tiny_model("nemotron_h_omni")
    assert model.get_output_embeddings() is None
    assert output_head(model) is model.language_model.lm_head
    assert text_decoder(model) is model.language_model.model


def test_fused_weights_are_written_layer_by_layer() -> None:
    """Ernie's checkpoints hold the experts of text and those of images in one list."""
    model = tiny_model("ernie4_5_vl_moe")
    dtypes = stored_dtypes(model, torch.bfloat16)
    groups = groups_of(model, dtypes)
    together = max(groups, key=lambda group: len(group.parameters))
    assert {name.split(".experts")[0] for name in together.parameters if ".experts." in name} == {
        "model.language_model.layers.1.mlp.text_moe",
        "model.language_model.layers.1.mlp.vision_moe",
    }
    assert all(".layers.1." in name for name in together.parameters)
    names = [name for group in groups for name in group.weights]
    assert len(names) == len({*names})
    assert {*names} == as_saved(model, unique_weights(model)).keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_lie_in_the_language_model_alone(family: str) -> None:
    model = tiny_model(family)
    Lora(r=2).adapt(model, "base")
    adapted = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert adapted
    assert all("language_model." in name for name in adapted)


def add_untouched(folder: Path) -> None:
    """What the model does not load: layers that predict several tokens, and the settings of the images."""
    weights = load_file(folder / "model.safetensors") | {"mtp.layers.0.weight": torch.randn(4, 4)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')


def test_a_composite_is_written_back_whole(tmp_path: Path) -> None:
    """Class, config, keys and dtypes as they were; towers and unread weights bit by bit; the language model trained."""
    save(tiny_model("qwen3_5"), tmp_path / "model")
    add_untouched(tmp_path / "model")
    row = json.loads(run(tmp_path, "full"))
    want = step_of(separate(load(tmp_path)))
    # ten times what three instruction sets show
    assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert row["grad_norm"] == pytest.approx(want["grad_norm"], rel=2e-5)
    assert weights_of(tmp_path / "full/hf") == weights_of(tmp_path / "model")
    before = load_file(tmp_path / "model/model.safetensors")
    after = {}
    for path in (tmp_path / "full/hf").glob("*.safetensors"):
        after |= load_file(path)
    trained = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert trained
    assert all(".language_model." in name or name == "lm_head.weight" for name in trained)
    assert torch.equal(after["mtp.layers.0.weight"], before["mtp.layers.0.weight"])
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "full/hf")
    ]
    assert (
        configs[0]["architectures"]
        == configs[1]["architectures"]
        == ["Qwen3_5ForConditionalGeneration"]
    )
    assert configs[0]["vision_config"] == configs[1]["vision_config"]
    assert (tmp_path / "full/hf/preprocessor_config.json").is_file()
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "full/hf", dtype="auto")
    assert type(loaded).__name__ == "Qwen3_5ForConditionalGeneration"


def _train_on_rank(rank: int, world_size: int, folder: Path) -> str:
    return run(folder, "two", "mesh.cp=2")


@pytest.mark.system
def test_two_ranks_train_and_write_the_composite_of_one(tmp_path: Path) -> None:
    save(tiny_model("gemma3"), tmp_path / "model")
    want = step_of(separate(load(tmp_path)))
    row = json.loads(run_ranks(_train_on_rank, 2, tmp_path)[0])
    assert row["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert weights_of(tmp_path / "two/hf") == weights_of(tmp_path / "model")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "two/hf")
    )
    of_towers = [name for name in before if "language_model" not in name]
    assert of_towers
    assert all(torch.equal(after[name], before[name]) for name in of_towers)
    assert not all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("family", "projector"),
    [("llava_next", "multi_modal_projector"), ("qwen3_vl", "merger"), ("glm4v", "merger")],
)
def test_vision_names_the_encoder_of_any_family(family: str, projector: str) -> None:
    """LLaVA's projector stands beside it; of Qwen and GLM, it is a part of it."""
    model = tiny_model(family)
    freeze_named(model, ["vision"])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert any(projector in name for name in trained)
    others = ("language_model", "lm_head", "image_newline", projector)
    assert all(any(other in name for other in others) for name in trained)
    # nothing of its forward is kept for a backward pass
    if family == "llava_next":
        output = model.model.vision_tower(torch.rand(1, 3, 28, 28))
    elif family == "qwen3_vl":
        grid = torch.tensor([[1, 2, 2]])
        output = model.model.visual(torch.rand(4, 3 * 2 * 14 * 14), grid_thw=grid)
    else:
        return
    assert output.last_hidden_state.grad_fn is None
