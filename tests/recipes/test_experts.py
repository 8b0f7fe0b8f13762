"""A mixture of fewer experts than ranks, whole runs: some ranks hold no part of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from tests.runs import QUICK, losses, losses_by_step, train

EXPERTS = [
    *("~model.config", "model.config.model_type=qwen3_moe", "model.config.num_experts=3"),
    *(
        "model.config.num_experts_per_tok=2",
        "model.config.hidden_size=32",
        "model.config.num_hidden_layers=2",
    ),
    *(
        "model.config.num_attention_heads=4",
        "model.config.num_key_value_heads=2",
        "model.config.intermediate_size=32",
    ),
    *("model.config.moe_intermediate_size=32", "training.max_steps=4", "checkpoint.export_hf=true"),
]


@pytest.mark.system
def test_ranks_without_experts_train_save_load_and_go_on(tmp_path: Path) -> None:
    alone = train("smoke", tmp_path / "alone", *QUICK, *EXPERTS)
    train("smoke", tmp_path / "shared", *QUICK, *EXPERTS, "training.max_steps=2", world_size=4)
    # on as many ranks as experts, from shards of which one was empty
    goes_on = (*QUICK, *EXPERTS, "training.global_batch_size=4", "checkpoint.accept_changes=true")
    train("smoke", tmp_path / "shared", *goes_on, world_size=2)
    for (loss, norm), (other_loss, other_norm) in zip(
        losses(alone), losses_by_step(tmp_path / "shared").values(), strict=True
    ):
        assert loss == pytest.approx(other_loss, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-5)
    folders = (tmp_path / name / "hf" for name in ("alone", "shared"))
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    for (name, weight), value in zip(one.named_parameters(), other.parameters(), strict=True):
        assert (weight - value).abs().max() < 1e-5, name


@pytest.mark.system
def test_ranks_without_experts_read_a_checkpoint(tmp_path: Path) -> None:
    train("smoke", tmp_path / "made", *QUICK, *EXPERTS, "training.max_steps=1")
    pretrained = [
        *(
            "model=pretrained",
            f"model.pretrained={tmp_path / 'made' / 'hf'}",
            "tokenizer=pretrained",
            "~model.config",
        ),
        *("training.max_steps=2", "checkpoint.export_hf=false"),
    ]
    alone = train("smoke", tmp_path / "alone", *QUICK, *pretrained)
    shared = train("smoke", tmp_path / "shared", *QUICK, *pretrained, world_size=4)
    for one, other in zip(losses(alone), losses(shared), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
