"""Noise of embeddings: its size, and that it is a document's own in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from automodel_lite.models.neftune import noise_of, with_keys
from automodel_lite.thd import ThdBatch, stream_of, to_thd
from tests.models.test_policy import save_model
from tests.runs import losses, train, train_until

DOCUMENTS = [torch.arange(5, 14), torch.arange(20, 36), torch.tensor([5, 6, 7, 8])]


def noise(batch: ThdBatch, seed: int = 1, dim: int = 64) -> Tensor:
    return noise_of(with_keys(batch), 5.0, seed, dim)


def test_noise_is_uniform_within_its_bounds() -> None:
    """5 / sqrt(9 * 64) of a document of 9 tokens and 64 channels, 5 / sqrt(16 * 64) of 16."""
    found = noise(stream_of(DOCUMENTS))
    for part, bound in zip(found.split([9, 16, 4]), (5 / 24, 5 / 32, 5 / 16)):
        assert bool((part.abs() <= bound).all())
        assert part.abs().max() > 0.97 * bound
        assert part.mean().abs() < 0.12 * bound
        assert part.std() == pytest.approx(bound / 3**0.5, rel=0.1)
    rows = torch.corrcoef(found)
    assert (rows - torch.eye(len(rows))).abs().max() < 0.55  # no two tokens have the same noise


def test_noise_is_the_documents_own() -> None:
    """Whatever stands beside it, and however long its slot is; of another step it is another."""
    whole = noise(stream_of(DOCUMENTS))
    turned = noise(stream_of(DOCUMENTS[::-1]))
    assert torch.equal(turned[-9:], whole[:9])
    ids = torch.cat([DOCUMENTS[2], torch.tensor([3, 3])])
    row = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(6)}
    padded = to_thd({**row, "seq_lens": torch.tensor([4]), "seq_lens_padded": torch.tensor([6])})
    assert torch.equal(noise(padded)[:4], whole[-4:])
    assert not torch.equal(whole[:4], whole[-4:])  # documents that begin alike
    assert not torch.isclose(noise(stream_of(DOCUMENTS), seed=2), whole).any(1).all()


def settings(tmp_path: Path) -> list[str]:
    folder = save_model("llama", tmp_path / "model")
    draw = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for length in draw.integers(8, 40, 24).tolist():
        ids = draw.integers(5, 100, length).tolist()
        rows.append({"input_ids": ids, "labels": [-100, -100, *ids[3:], -100]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = [f"model.pretrained={folder}", f"dataset.path={tmp_path}/rows.jsonl", "name=x"]
    chosen += ["training.max_steps=2", "training.num_epochs=null", "training.log_every_steps=1"]
    chosen += ["training.global_batch_size=4", "training.num_threads=1", "optimizer.lr=1e-3"]
    chosen += ["dataset.val_frac=0.2", "checkpoint.export_hf=false", "lr_scheduler=constant"]
    return [*chosen, "packed_sequence.packed_sequence_size=64", "packed_sequence.slot_multiple=4"]


def test_layouts_train_with_the_same_noise(tmp_path: Path) -> None:
    """Micro-batches, cp and fsdp; validation has none."""
    chosen = settings(tmp_path)
    noisy = [*chosen, "training.neftune_noise_alpha=5"]
    plain = train("finetune", tmp_path / "plain", *chosen)
    one = train("finetune", tmp_path / "one", *noisy)
    assert abs(losses(one)[0][0] - losses(plain)[0][0]) > 1e-3
    frozen = [*noisy, "optimizer.lr=0.0"]
    val = [
        row["val_loss/val"]
        for row in train("finetune", tmp_path / "frozen", *frozen)
        if "val_loss/val" in row
    ]
    still = [*chosen, "optimizer.lr=0.0"]
    want = [
        row["val_loss/val"]
        for row in train("finetune", tmp_path / "still", *still)
        if "val_loss/val" in row
    ]
    assert val == want
    layouts = {
        "micro": (["training.micro_batch_size=2"], 1),
        "cp": (["mesh.cp=2"], 2),
        "fsdp": (["mesh.dp_shard=2"], 2),
    }
    for name, (layout, size) in layouts.items():
        found = losses(train("finetune", tmp_path / name, *noisy, *layout, world_size=size))
        assert [x for pair in found for x in pair] == pytest.approx(
            [x for pair in losses(one) for x in pair], rel=2e-5
        ), name


def test_a_continued_run_draws_the_same_noise(tmp_path: Path) -> None:
    noisy = [*settings(tmp_path), "training.neftune_noise_alpha=5"]
    whole = train("finetune", tmp_path / "whole", *noisy)
    code, _ = train_until("finetune", tmp_path / "parts", *noisy, stop_at=1)
    assert code != 0
    assert losses(train("finetune", tmp_path / "parts", *noisy)) == losses(whole)
