"""Weights as safetensors files, written by all ranks, in the dtypes and names of the family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.config.schema import Config
from automodel_lite.extras.load_run import load_trained
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.run import export, weight_files
from automodel_lite.run.weight_files import model_files
from automodel_lite.training.build import assemble
from automodel_lite.training.settings import build_parts
from tests.attention.families import FAMILIES
from tests.parallel.test_sharded_start import bytes_read, tokenizer
from tests.ranks import run_ranks
from tests.runs import config_of, train

IDS = torch.tensor([[5, 9, 3, 7, 1, 2]])


FEW = ["training.max_steps=3", "training.val_every_steps=0", "optimizer.lr=1e-2"]


EXPERTS = [
    "~model.config",
    "model.config.model_type=glm4_moe",
    "model.config.hidden_size=32",
]
EXPERTS += [
    f"model.config.{key}=2"
    for key in ("num_hidden_layers", "num_key_value_heads", "num_experts_per_tok")
]
EXPERTS += [f"model.config.{key}=4" for key in ("num_attention_heads", "n_routed_experts")]
EXPERTS += ["model.config.intermediate_size=64", "model.config.moe_intermediate_size=16"]


def test_weights_kept_in_fp32_survive_a_bf16_export(tmp_path: Path):
    """The bias by which the router of GLM 4.5, DeepSeek V3 and a dozen others chooses experts."""
    train("smoke", tmp_path / "run", *FEW, *EXPERTS)
    trained = load_trained(tmp_path / "run")
    bias = trained.model.lm.model.layers[1].mlp.gate.e_score_correction_bias
    bias.data.copy_(torch.tensor([1.001, -2.003, 3.007, 0.1]))
    export.export_hf(
        tmp_path / "hf", trained.model, trained.tokenizer, torch.bfloat16, trained.model.logits, 3
    )
    weights = load_file(tmp_path / "hf/model.safetensors")
    kept = {name: value for name, value in weights.items() if value.dtype == torch.float32}
    assert torch.equal(kept["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    # transformers 5.24 keeps the router's weight, too
    in_fp32 = {name for name, value in loaded.state_dict().items() if value.dtype == torch.float32}
    assert kept.keys() == in_fp32


def test_ranks_write_files_of_their_own_in_the_names_of_the_hub(tmp_path: Path):
    """Experts are fused in the model and lie one by one in checkpoints; the embedding is tied."""
    config = FAMILIES["qwen3_moe"]()
    config.tie_word_embeddings = True
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    run = config_of(
        "smoke", tmp_path / "run", "model=pretrained", f"model.pretrained={tmp_path / 'base'}"
    )
    run_ranks(export_untrained, 2, run, tmp_path / "hf")
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(index.values())) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    expected = load_file(tmp_path / "base/model.safetensors")
    written = {
        name: weight
        for file in set(index.values())
        for name, weight in load_file(tmp_path / "hf" / file).items()
    }
    assert written.keys() == expected.keys() == index.keys()
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in written
    for name, weight in expected.items():
        assert written[name].dtype == weight.dtype
        assert torch.equal(written[name], weight), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, base.eval()(IDS).logits)


def export_untrained(rank: int, world: int, config: Config, folder: Path) -> None:
    weight_files.LEAST_FILE_BYTES = 1000
    mesh, parts = init_mesh(config.mesh), build_parts(config)
    model, _ = assemble(parts, tokenizer(), mesh, "fsdp", torch.float32)
    install(model.loss_model.lm, ReferenceAttention())
    export.export_hf(
        folder,
        model.loss_model,
        tokenizer(),
        parts.model.dtype,
        model.logits,
        0,
        model.sharded_over,
    )


def _folder(path: Path, num_bytes: int, rope_theta: float = 1e4) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"rope_theta": rope_theta}))
    with open(path / "model.safetensors", "wb") as file:
        file.truncate(num_bytes)  # sparse
    return path


def test_of_sixteen_gigabytes_some_blocks_are_read(tmp_path: Path) -> None:
    for number in range(4):
        _folder(tmp_path / str(number), 4 << 30)
    before = bytes_read()
    found = [model_files(str(tmp_path / str(number))) for number in range(4)]
    assert bytes_read() - before < 4 << 20
    assert found[0] == found[3]
    assert found[0].keys() == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("at", [0, 100_000_000, (1 << 30) - 1], ids=["header", "inside", "end"])
def test_trained_weights_have_another_digest(tmp_path: Path, at: int) -> None:
    """Training changes every block; a single byte in an unread one is not seen."""
    one, other = _folder(tmp_path / "one", 1 << 30), _folder(tmp_path / "other", 1 << 30)
    with open(other / "model.safetensors", "r+b") as file:
        file.seek(at)
        file.write(b"x" * min(1 << 26, (1 << 30) - at))
    differing = {
        name
        for name, digest in model_files(str(one)).items()
        if model_files(str(other))[name] != digest
    }
    assert differing == {"model.safetensors"}


def test_a_changed_configuration_has_another_digest(tmp_path: Path) -> None:
    one, other = _folder(tmp_path / "one", 10), _folder(tmp_path / "other", 10, rope_theta=1e6)
    assert model_files(str(one))["config.json"] != model_files(str(other))["config.json"]


def test_no_model_has_no_files() -> None:
    assert model_files(None) == {}
    assert model_files("nobody/has-this-model") == {}
