"""Layouts of ranks, stops and adapters: the same numbers as one process that runs through."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from automodel_lite.data.prepare import build_packer, check_sizes, prepare_data
from automodel_lite.models.layers import text_decoder
from automodel_lite.parallel.context_parallel import cp_shard
from tests.attention.hybrids import InFloat64
from tests.images.families import draw, write_chats, write_model
from tests.images.test_exact import (
    batches_of,
    config_of_images,
    data_of,
    gradients,
    images_settings,
    packed_model,
)
from tests.ranks import run_ranks
from tests.runs import losses, train, train_until
from tests.tiers import rarely

FAMILIES = ["qwen3_vl", "idefics3", "gemma3"]
TRAINED = "model.train_towers=true"


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few rows have images, so that a step has packs with images and packs without."""
    made = tmp_path_factory.mktemp(request.param)
    lines = []
    for row in range(16):
        asked = [{"type": "text", "text": "abcdefgh"[row % 7 :] + "?"}]
        if row % 4 == 0:
            draw(made / f"{row}.png", 60, 122, seed=row)
            asked.insert(0, {"type": "image", "image": f"{row}.png"})
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "xyz"}]
        lines.append(json.dumps({"messages": messages}))
    (made / "chats.jsonl").write_text("\n".join(lines))
    return write_model(request.param, made)


SLOTS = "packed_sequence.slot_multiple=4"


def settings_of(folder: Path, output: Path) -> list[str]:
    return [
        *images_settings(folder),
        f"output_dir={output}",
        f"cache_dir={folder}/cache",
        "packed_sequence.packed_sequence_size=48",
        "training.global_batch_size=2",
        "training.max_steps=4",
        "training.log_every_steps=1",
        "training.num_threads=1",
        "checkpoint.every_steps=2",
        "checkpoint.export_hf=false",
        "optimizer.lr=0.01",
    ]


def run(folder: Path, output: Path, *more: str, world_size: int = 1) -> list[tuple[float, float]]:
    settings = settings_of(folder, output)
    return losses(train("finetune", output, *settings, *more, world_size=world_size))


@cache
def on_one_rank(folder: Path, *trained: str) -> list[tuple[float, float]]:
    return run(folder, folder / f"one-{len(trained)}-{trained[-1][:20]}", *trained, SLOTS)


def check_two_ranks(folder: Path, output: Path, mesh: str, *trained: str) -> None:
    """One of the ranks often has a pack without images; a sharded tower runs as often on both.

    Products that are summed over tp are rounded otherwise, and AdamW's first steps grow that.
    """
    later = 1e-4 if "tp" in mesh else 1e-5
    one = on_one_rank(folder, *trained)
    two = run(folder, output, mesh, *trained, SLOTS, world_size=2)
    assert len(one) == 4
    for step, ((loss, norm), (other_loss, other_norm)) in enumerate(zip(one, two, strict=True)):
        limit = later if step else 1e-6
        assert other_loss == pytest.approx(loss, rel=limit)
        assert other_norm == pytest.approx(norm, rel=10 * limit)


@pytest.mark.system
@pytest.mark.parametrize(
    ("folder", "mesh"),
    [
        ("qwen3_vl", "dp_shard"),
        ("qwen3_vl", "cp"),
        ("idefics3", "dp_shard"),
        ("gemma3", "cp"),
        ("gemma3", "tp"),
        *rarely(("idefics3", "cp"), ("idefics3", "tp"), ("gemma3", "dp_shard")),
    ],
    indirect=["folder"],
)
def test_two_ranks_give_the_numbers_of_one(mesh: str, folder: Path, tmp_path: Path) -> None:
    check_two_ranks(folder, tmp_path, f"mesh.{mesh}=2", TRAINED)


@pytest.mark.system
@pytest.mark.parametrize("folder", ["qwen3_vl"], indirect=True)
@pytest.mark.parametrize(
    ("mesh", "trained"),
    [
        *rarely(("mesh.dp_shard=2", ["peft=lora"])),
        ("mesh.dp_shard=2", ["peft=lora", "peft.target_modules=[q_proj,qkv]"]),
        *rarely(("mesh.dp_shard=2", [TRAINED, "model.freeze=[vision]"])),
        ("mesh.strategy=ddp", [TRAINED]),
        ("mesh.dp_replicate=2", [TRAINED, "mesh.strategy=fsdp"]),
    ],
    ids=["lora", "lora_towers", "projector", "ddp", "hsdp"],
)
def test_two_ranks_of_other_layouts(
    mesh: str, trained: list[str], folder: Path, tmp_path: Path
) -> None:
    check_two_ranks(folder, tmp_path, mesh, *trained)


@pytest.mark.system
@pytest.mark.parametrize("folder", ["llava_next"], indirect=True)
@pytest.mark.parametrize("mesh", ["mesh.dp_shard=2", "mesh.strategy=ddp"])
def test_a_tower_returns_an_inner_layer_and_no_more_is_trained(
    mesh: str, folder: Path, tmp_path: Path
) -> None:
    """Sharded, it returned none; of a replicated one, layers without a gradient ended the second step."""
    check_two_ranks(folder, tmp_path, mesh, TRAINED)


@pytest.mark.system
@pytest.mark.parametrize("folder", ["qwen3_vl_moe"], indirect=True)
def test_experts_of_two_ranks(folder: Path, tmp_path: Path) -> None:
    check_two_ranks(folder, tmp_path, "mesh.ep=2", TRAINED)


@pytest.mark.system
@pytest.mark.parametrize("folder", ["qwen3_vl"], indirect=True)
def test_a_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    how = ["model.train_towers=true", "dataloader.num_workers=2"]
    whole = run(folder, tmp_path / "whole", *how)
    stopped = tmp_path / "stopped"
    code, screen = train_until("finetune", stopped, *settings_of(folder, stopped), *how, stop_at=3)
    assert "saved step_00000003" in screen
    assert code != 0
    assert run(folder, stopped, *how) == whole
    assert len(whole) == 4


EXCHANGES = ["all_gather", "all_to_all", "ring"]


def errors_over_ranks(
    rank: int, cp: int, folders: list[Path]
) -> dict[tuple[str, str], tuple[float, float, float, int]]:
    """Of each family and exchange: by how much loss, gradients of the language model and of all else
    differ from one process's (0 where this is not the first rank: what is compared is the sum over
    ranks), and how many images this rank has read.
    """
    mesh = init_device_mesh("cpu", (cp,), mesh_dim_names=("cp",))
    found = {}
    for folder in folders:
        slots = f"packed_sequence.slot_multiple={2 * cp}"
        config = config_of_images(folder, slots, f"mesh.cp={cp}")
        shared = prepare_data(config, check_sizes(config, cp), build_packer(config))
        with InFloat64():
            model = packed_model(folder, shared)
            if rank == 0:
                data = data_of(config_of_images(folder, slots))
                want_loss = sum(model(batch).sum for batch in batches_of(data))
                want = gradients(model.lm, want_loss)
        of_text = {id(p) for p in text_decoder(model.lm).parameters()}
        for exchange in EXCHANGES:
            num_own = 0
            with InFloat64():
                own = batches_of(shared)
                loss = sum(model(cp_shard(batch, mesh, exchange)).sum for batch in own)
                got = gradients(model.lm, loss)
            for batch in own:
                num_own += int((batch.images.owner == rank).sum())  # type: ignore[union-attr]
            dist.all_reduce(loss.detach())
            together = torch.cat([gradient.flatten() for gradient in got.values()])
            dist.all_reduce(together)
            sums = together.split([gradient.numel() for gradient in got.values()])
            got = {name: total.view_as(got[name]) for name, total in zip(got, sums, strict=True)}
            worst = {True: 0.0, False: 0.0}
            relative = 0.0
            if rank == 0:
                assert got.keys() == want.keys()
                largest = max(float(x.abs().max()) for x in want.values())
                for name, parameter in model.lm.named_parameters():
                    if name in want:
                        error = float((got[name] - want[name]).abs().max()) / largest
                        is_text = id(parameter) in of_text
                        worst[is_text] = max(worst[is_text], error)
                relative = abs(float(loss) - float(want_loss)) / float(want_loss)
            found[folder.name, exchange] = (relative, worst[True], worst[False], num_own)
    return found


@pytest.mark.system
def test_images_over_four_context_parallel_ranks(tmp_path: Path) -> None:
    folders = []
    for family in ["qwen3_vl", "idefics3", "llava_next", "internvl"]:
        folder = tmp_path / family
        folder.mkdir()
        write_chats(folder)
        folders.append(write_model(family, folder))
    for found in run_ranks(errors_over_ranks, 4, folders):
        assert len(found) == len(folders) * len(EXCHANGES)
        for case, (loss, text, towers, num_own) in found.items():
            assert loss < 1e-9, case
            assert text < 1e-8, case
            assert towers < 1e-8, case
            assert num_own > 0
