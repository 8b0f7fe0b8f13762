"""recipes/verify.py passes on a right program and fails on broken ones."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import recipes.verify
from automodel_lite.attention import kernel
from automodel_lite.columns import IGNORE_INDEX, labeled_rows
from automodel_lite.errors import ConfigError
from automodel_lite.thd import ThdBatch
from automodel_lite.thd import to_thd as right_to_thd
from tests.attention.test_isolation import LeakingAttention
from tests.ranks import run_ranks
from tests.recipes.test_trees import answered_prompts, settings
from tests.runs import config_of

CAUSAL_LM = "automodel_lite.models.source.CausalLM"


def verify(folder: Path, *overrides: str) -> int:
    return recipes.verify.main(config_of("smoke", folder, *overrides))


def test_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "PASS: 6 checks" in said
    assert "packed = each document alone" in said
    assert said.count("noticed") == 3
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides", [["packed_sequence=none"], ["packed_sequence.strategy=wrapped"]], ids=str
)
def test_other_packings(tmp_path: Path, overrides: list[str]) -> None:
    assert verify(tmp_path / "run", *overrides) == 0


def test_the_truth_of_a_tree_is_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree was taken for one row, so that right packs failed."""
    path = answered_prompts(tmp_path / "a.jsonl")
    assert verify(tmp_path / "run", *settings(path, "training.global_batch_size=2")) == 0
    assert "fault: branches of a tree see each other" in capsys.readouterr().out


def test_pairs_are_compared_by_their_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of pairs was compared with the cross-entropy of each document: a right run failed."""
    path = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a ship " * 30, "chosen": "sea " * n, "rejected": "fog"} for n in (3, 5)]
    path.write_text("\n".join(map(json.dumps, rows)))
    pairs = settings(path, "dataset.format=preference", "loss=simpo")
    assert verify(tmp_path / "run", *pairs) == 0
    assert "next-token cross-entropy, in place of SimPo" in capsys.readouterr().out


def test_weights_in_bf16_are_no_truth(tmp_path: Path) -> None:
    bf16 = ["training.master_weights=bf16", "training.precision=bf16", "optimizer=adamw_bf16"]
    assert verify(tmp_path / "run", *bf16) == 0


def verify_on_rank(rank: int, world_size: int, folder: Path, overrides: list[str]) -> int:
    return verify(folder, *overrides)


EXPERTS = [
    "model.config.model_type=qwen3_moe",
    "model.config.num_experts=4",
    "model.config.num_experts_per_tok=2",
    "model.config.moe_intermediate_size=24",
]


def test_a_mixture_in_bf16_has_the_experts_of_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And how many tokens choose others is printed."""
    more = ["model.config.num_experts=32", "training.precision=bf16"]
    assert verify(tmp_path / "run", *EXPERTS, *more) == 0
    said = capsys.readouterr().out
    share = re.search(r"experts +(\d+\.\d)% of tokens.* others in bfloat16 than in fp32", said)
    assert share
    assert 0 < float(share[1]) < 20
    assert re.search(r"bfloat16, experts pinned .* PASS", said)


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        (2, ["mesh.cp=2"]),
        pytest.param(
            4,
            ["mesh.cp=2", "mesh.strategy=ddp", "mesh.cp_exchange=all_to_all"],
            marks=pytest.mark.slow,
        ),
        pytest.param(4, ["mesh.dp_replicate=2", "mesh.cp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["mesh.tp=2"], marks=pytest.mark.slow),
        pytest.param(2, ["mesh.ep=2", *EXPERTS], marks=pytest.mark.slow),
        pytest.param(2, ["mesh.ep=2", *EXPERTS, "model.experts=sorted_mm"], marks=pytest.mark.slow),
        pytest.param(2, ["mesh.cp=2", *EXPERTS, "model.experts=sorted_mm"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_a_mesh(tmp_path: Path, world_size: int, overrides: list[str]) -> None:
    assert run_ranks(verify_on_rank, world_size, tmp_path / "run", overrides) == [0] * world_size


def shifted_to_thd(batch: dict[str, Any]) -> ThdBatch:
    """The classical bug: labels that are aligned already are shifted once more."""
    thd = right_to_thd(batch)
    labels = torch.nn.functional.pad(thd.labels, (0, 1), value=IGNORE_INDEX)[1:]
    return replace(thd, labels=labels, label_rows=labeled_rows(labels))


def test_shifted_labels_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipes.verify, "to_thd", shifted_to_thd)
    assert verify(tmp_path / "run") == 1
    assert "FAIL: 3 of" in capsys.readouterr().out


def test_a_leaking_kernel_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes.verify, "ReferenceAttention", LeakingAttention)
    with pytest.raises(ConfigError, match="documents of a pack see each other"):
        verify(tmp_path / "run")


def test_a_fused_kernel_does_not_give_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FA3, FA4 and cuDNN are taken for the whole process: the reference in bf16 was the kernel that it judged."""
    attention = F.scaled_dot_product_attention

    def wrong_where_fused(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = attention(query, *args, **kwargs)
        is_fused = torch.backends.cuda.flash_sdp_enabled() and query.dtype == torch.bfloat16
        return out * 1.5 if is_fused else out

    monkeypatch.setattr(kernel, "SHORT_TOKENS", 0)  # a CPU widens shorter documents
    settings = ["training.precision=bf16", "attention=reference"]
    assert verify(tmp_path / "run", *settings) == 0
    monkeypatch.setattr(F, "scaled_dot_product_attention", wrong_where_fused)
    assert verify(tmp_path / "run", *settings) == 1
    assert "FAIL: 1 of" in capsys.readouterr().out


def test_positions_that_run_on_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting on through the documents of a pack is invisible to rotary models, but not to learned positions."""

    def counting_on(batch: dict[str, Any]) -> ThdBatch:
        thd = right_to_thd(batch)
        return replace(thd, position_ids=torch.arange(len(thd.input_ids)))

    monkeypatch.setattr(recipes.verify, "to_thd", counting_on)
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_head": 2, "n_layer": 2, "attn_pdrop": 0}
    learned = replace(
        config_of("smoke", tmp_path / "run"), model={"_target_": CAUSAL_LM, "config": gpt2}
    )
    assert recipes.verify.main(learned) == 1
    monkeypatch.setattr(recipes.verify, "to_thd", right_to_thd)
    assert recipes.verify.main(learned) == 0
