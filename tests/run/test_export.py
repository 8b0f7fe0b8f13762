"""What is exported is the trained model: weights, dtypes, ties and logits; what is not is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from automodel_lite.models.loss import LossModel
from automodel_lite.run import export
from automodel_lite.tools.merge import load_trained
from tests.recipes.runs import train

IDS = torch.tensor([[5, 9, 3, 7, 1, 2]])
FEW = ["training.max_steps=3", "training.val_every_steps=0", "optimizer.lr=1e-2"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own-head", "tied"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_exported_model_is_the_trained_one(tmp_path: Path, world_size: int, is_tied: bool, precision: str):
    options = [f"model.config.tie_word_embeddings={is_tied}", f"training.precision={precision}"]
    train("smoke", tmp_path / "run", *FEW, *options, world_size=world_size)
    weights = load_file(tmp_path / "run/hf/model.safetensors")
    assert ("lm_head.weight" in weights) != is_tied
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/hf", dtype="auto").eval()
    assert loaded.dtype == torch.float32
    is_one = loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert is_one == is_tied
    trained = load_trained(tmp_path / "run")
    assert trained.checkpoint.name == "step_00000003"
    want = trained.model.lm.state_dict()
    got = loaded.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert value.dtype == got[name].dtype
        assert torch.equal(value, got[name]), name
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, trained.model.lm.eval()(IDS).logits)


def test_a_tied_model_is_tuned_again_from_its_export(tmp_path: Path):
    train("smoke", tmp_path / "base", *FEW, "model.config.tie_word_embeddings=true")
    base = ["model=pretrained", f"model.pretrained={tmp_path}/base/hf"]
    train("smoke", tmp_path / "again", *FEW, *base, world_size=2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again/hf")
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    before = load_file(tmp_path / "base/hf/model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(loaded.get_output_embeddings().weight, before)


def test_a_setting_that_changes_on_the_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Equal weights are not the same model: here the base of the rotary embedding changes on the way to the disk."""
    train("smoke", tmp_path / "run", *FEW, "model.config.initializer_range=0.5")
    trained = load_trained(tmp_path / "run")
    save = LlamaConfig.to_dict

    def lossy(config: LlamaConfig) -> dict[str, Any]:
        return {**save(config), "rope_parameters": {"rope_theta": 10.0, "rope_type": "default"}}

    monkeypatch.setattr(LlamaConfig, "to_dict", lossy)
    with pytest.raises(RuntimeError, match="answers otherwise than the trained one"):
        export.export_hf(tmp_path / "hf", trained.model, trained.tokenizer, trained.dtype, trained.model.logits)
    assert not (tmp_path / "hf").exists()


def test_a_weight_that_changes_on_the_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train("smoke", tmp_path / "run", *FEW)
    trained = load_trained(tmp_path / "run")
    compare = export._compare

    def damaged(folder: Path, *others: Any) -> Any:
        path = folder / "model.safetensors"
        with open(path, "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\x7f\x3f")
        return compare(folder, *others)

    monkeypatch.setattr(export, "_compare", damaged)
    with pytest.raises(RuntimeError, match=r"the exported weight .* differs"):
        export.export_hf(tmp_path / "hf", trained.model, trained.tokenizer, trained.dtype, trained.model.logits)
    assert isinstance(trained.model, LossModel)
    assert not (tmp_path / "hf").exists()
