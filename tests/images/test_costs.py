"""What towers cost is counted: by torch's own counter on the real model, and on every row of the metrics."""

from __future__ import annotations

import gc
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from automodel_lite.config.schema import MeshConfig
from automodel_lite.data.feeding.order import BatchShape, assign_packs, pack_costs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import TokenizedDocuments
from automodel_lite.extras.dry_run import what_is_trained
from automodel_lite.extras.plan.capacity import SLACK
from automodel_lite.extras.plan.heaviest import most_work_of_towers
from automodel_lite.extras.plan.recompute import choose_recomputation
from automodel_lite.extras.plan.simulation import simulate
from automodel_lite.models.flops import CostModel
from automodel_lite.models.layers import towers
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.mesh import MeshShape, init_mesh
from automodel_lite.parts.datasets.mixture import MixedRows
from automodel_lite.parts.images.costs import TowerCosts, count_tower
from automodel_lite.parts.images.packs import document_flops
from automodel_lite.parts.images.tower import encode, placed_fields
from automodel_lite.telemetry.metrics import count_own, counts_of
from automodel_lite.training.decide import decide
from automodel_lite.training.settings import build_parts
from benchmarks.image_families import image_config, image_model
from tests.images.families import write_chats, write_model
from tests.images.test_exact import batches_of, config_of_images, data_of
from tests.tiers import only_in_ci
from tests.training.test_simulation import Living

ALONE = init_mesh(MeshConfig())


@pytest.fixture(scope="module", params=["qwen3_vl", "idefics3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    write_chats(made, num=16)
    return write_model(request.param, made)


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for each in value for found in tensors(each)]


def counted(model: Any, record: dict[str, torch.Tensor]) -> float:
    """Forward and backward of the towers, by torch's counter, which knows no fused attention of a CPU."""
    with FlopCounterMode(display=False) as counter:
        output = model.base_model.get_image_features(**record, return_dict=True)
        flat = tensors([output.pooler_output, output.get("deepstack_features") or []])
        trained = [x for x in flat if x.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.ones_like(x) for x in trained])
    return float(counter.get_total_flops())


WHOLE = {"qwen3_vl": "merger", "idefics3": "connector"}


@pytest.mark.parametrize("how", ["train", "frozen", "projector", "whole", "whole_and_names"])
def test_the_work_of_towers_is_what_torch_counts(how: str, folder: Path) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    whole = next(name for family, name in WHOLE.items() if folder.name.startswith(family))
    beside = ["peft=lora", f"peft.modules_to_save=[{whole}]"]
    settings = {
        "train": ["model.train_towers=true"],
        "frozen": [],
        "projector": ["model.train_towers=true", "model.freeze=[vision]"],
        "whole": beside,
        "whole_and_names": [*beside, "peft.target_modules=[q_proj]"],
    }[how]
    for tower in towers(model):
        tower.requires_grad_(how == "train")
    named = {"projector": ("merger", "connector"), "frozen": ()}.get(how, (f".{whole}.",))
    for name, parameter in model.named_parameters() if how != "train" else ():
        parameter.requires_grad_(any(one in name for one in named))
    data = data_of(config_of_images(folder, *settings))
    batches = batches_of(data)
    for batch in batches:
        images: Any = batch.images
        assert images.flops == pytest.approx(counted(model, images.record), rel=1e-9)
    assert data.packs_of(0).tower_flops() == pytest.approx(
        [batch.images.flops for batch in batches]
    )


RECORDS: dict[str, dict[str, torch.Tensor]] = {
    "gemma4": {
        "pixel_values": torch.rand(1, 36, 588),
        "image_position_ids": torch.cat(  # half of them are padding
            [torch.cartesian_prod(torch.arange(6), torch.arange(3)), torch.full((18, 2), -1)]
        )[None],
    },
    "llama4": {"pixel_values": torch.rand(1, 3, 28, 28)},
    "step3p7": {
        "pixel_values": torch.rand(1, 3, 28, 28),
        "num_local_patches": torch.zeros(1, dtype=torch.long),
    },
    "nemotron_h_omni": {
        "pixel_values": torch.rand(16, 588),
        "image_grid_hw": torch.tensor([[4, 4]]),
    },
    "chameleon": {"pixel_values": torch.rand(1, 3, 28, 28)},
}
"""What their processors make of an image; some need torchvision."""


@pytest.mark.parametrize(
    "family", ["gemma4", "llama4", "step3p7", *only_in_ci("nemotron_h_omni", "chameleon")]
)
def test_towers_whose_code_reads_numbers_of_the_device_are_counted(family: str) -> None:
    """Masks of padding, tables of rotations that follow the pixels, and grids that are made on the device."""
    config = image_config(family)
    model = image_model(family, config).float().train()
    model.set_attn_implementation("eager")
    record = RECORDS[family]
    with FlopCounterMode(display=False) as counter:
        output = model.base_model.get_image_features(**record, return_dict=True)
        trained = [x for n in placed_fields(output) for x in tensors(output[n]) if x.requires_grad]
        torch.autograd.backward(trained, [torch.ones_like(x) for x in trained])
    _, flops = count_tower(describe(config), record)
    assert flops == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_a_row_of_the_metrics_counts_them(folder: Path, tmp_path: Path) -> None:
    """Two steps, a frozen tower and a trained one: the work differs by what the tower's backward pass is."""
    per_step = {}
    for towers_too in ("false", "true"):
        data = data_of(config_of_images(folder, f"model.train_towers={towers_too}"))
        (batch, *_) = batches_of(data)
        found = counts_of(count_own([batch, batch], ALONE, CostModel(1.0, 1.0)))
        assert batch.images is not None
        assert found.tower_flops == 2 * batch.images.flops
        per_step[towers_too] = found.tower_flops
    assert 2 * per_step["false"] < per_step["true"] <= 3 * per_step["false"]


def test_work_of_documents_of_several_images_and_of_mixtures() -> None:
    """Rows of 2 and 3 of one image, cut by a token, are one image of 5; the same number in another document is another."""
    image = np.array([0, 7, 7, 0, 7, 7, 7, 0, 7, 7, 0, 9], np.int64)
    ids = np.zeros(12, np.int32)
    rows = TokenizedDocuments({"input_ids": ids, "image": image}, np.array([0, 8, 11, 12]))
    costs = TowerCosts(per_row=10.0, per_pair=1.0)
    assert document_flops(rows, costs).tolist() == [75.0, 24.0, 11.0]
    mixed = MixedRows([rows, rows], ["a", "b"], np.array([1, 0, 1]), np.array([2, 0, 0]))
    assert document_flops(mixed, costs).tolist() == [11.0, 75.0, 75.0]
    text = TokenizedDocuments({"input_ids": ids}, np.array([0, 12]))
    assert document_flops(text, costs).tolist() == [0.0]


def test_packs_are_balanced_by_their_images_too() -> None:
    plan = plan_packs(np.array([8, 8, 8, 8]), packed_sequence_size=8)
    costs = pack_costs(
        plan, np.array([8] * 4), CostModel(1.0, 0.0), None, np.array([0.0, 90, 90, 0])
    )
    assert costs.tolist() == [8, 98, 98, 8]
    order = assign_packs(costs, "step", BatchShape(4, 1, dp_size=2)).tolist()
    assert [set(order[:2]), set(order[2:])] == [{0, 3}, {1, 2}]


@pytest.mark.system
def test_what_towers_keep_is_simulated(folder: Path) -> None:
    """A trained tower keeps activations, a frozen one none: as many bytes as on a real machine."""
    after = {}
    kept = {}
    for trains in (True, False):
        config = config_of_images(
            folder,
            f"model.train_towers={str(trains).lower()}",
            "training.precision=fp32",
            "optimizer.lr=1e-3",
            "training.activation_checkpointing=none",
        )
        parts = build_parts(config)
        data = data_of(config)
        batch = most_work_of_towers(data, parts)
        assert batch is not None
        step = simulate(
            parts, parts.model.config(data.tokenizer), MeshShape(1, 1, 1), batch, is_whole=False
        )
        after[trains] = step.after_layers[0] - step.optimizer
        lm = CausalLM(pretrained=str(folder), train_towers=trains).build(data.tokenizer)
        images: Any = batch.images
        with Living() as living:
            output = encode(lm, images)
        gc.collect()
        kept[trains] = sum(living.sizes.values())
        del output
    assert after[True] - after[False] == kept[True] - kept[False] > 0


@pytest.mark.system
def test_a_step_with_images_is_counted_with_inputs_on_the_host(folder: Path) -> None:
    """Two layers hold no more with offloading than with full recomputation, and the step is counted."""
    peaks = []
    for how in ("full", "offload"):
        recomputed = f"training.activation_checkpointing={how}"
        config = config_of_images(
            folder, recomputed, "training.precision=fp32", "optimizer.lr=1e-3"
        )
        parts = build_parts(config)
        data = data_of(config)
        batch = most_work_of_towers(data, parts)
        model_config = parts.model.config(data.tokenizer)
        found = simulate(parts, model_config, MeshShape(1, 1, 1), batch, is_whole=False)
        peaks.append(found.peaks["forward"])
    assert 0 < peaks[1] <= peaks[0]


@pytest.mark.system
def test_recomputation_is_chosen_with_the_images(folder: Path) -> None:
    """On a GPU that holds the step without its trained tower, and not with it, layers are recomputed."""
    if "qwen3_vl" not in folder.name:
        pytest.skip("one family is enough")
    config = config_of_images(
        folder,
        "model.train_towers=true",
        "training.precision=fp32",
        "optimizer.lr=1e-3",
        "packed_sequence.packed_sequence_size=128",
    )
    parts = build_parts(config)
    data = data_of(config)
    model_config = parts.model.config(data.tokenizer)
    shape = MeshShape(1, 1, 1)
    plain = replace(parts, training=replace(parts.training, activation_checkpointing="none"))
    batch = most_work_of_towers(data, plain)
    text, seen = (
        simulate(plain, model_config, shape, x, is_whole=False).peak for x in (None, batch)
    )
    assert seen > 1.2 * text
    between = (text + seen) // 2 + SLACK
    decisions = [
        decide(
            one,
            data.tokenizer,
            shape,
            torch.device("cpu"),
            gpu=between,
            recompute=choose_recomputation,
        )
        for one in (parts, replace(parts, data=data))
    ]
    assert what_is_trained(decisions[1], None) == (decisions[1].size.parameters, "all trained")
    without = copy(parts.model)
    without.train_towers = False
    frozen = replace(decisions[1], model=without)
    num_trained, text = what_is_trained(frozen, None)
    assert num_trained == frozen.size.parameters - frozen.size.towers
    assert text.endswith(" trained, not the towers")
    # what model.freeze names was counted among what is trained
    without.freeze = ["embed_tokens"]
    num_left, text = what_is_trained(replace(frozen, model=without), None)
    of_text = frozen.config.get_text_config()
    assert num_trained - num_left == of_text.vocab_size * of_text.hidden_size
    assert text.endswith(" trained, not embed_tokens, the towers")
    chosen = [one.training.activation_checkpointing for one in decisions]
    assert chosen[0] == "none"
    assert chosen[1] != "none"


@pytest.mark.system
def test_images_are_counted_over_ranks_of_tp(tmp_path: Path) -> None:
    """This family divides its embedding over the ranks: ids that have values meet weights that have none."""
    write_chats(tmp_path, num=8)
    config = config_of_images(
        write_model("qwen3_5", tmp_path), "training.precision=fp32", "optimizer.lr=1e-3"
    )
    parts = build_parts(config)
    data = data_of(config)
    model_config = parts.model.config(data.tokenizer)
    batch = most_work_of_towers(data, parts)
    one, two = (
        simulate(parts, model_config, MeshShape(1, 1, 1, tp), batch, is_whole=False)
        for tp in (1, 2)
    )
    assert two.weights < one.weights
    assert two.sent["tp"] > 0
    assert two.peaks["forward"] < one.peaks["forward"]
