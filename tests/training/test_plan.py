"""Parts that do not work together are refused in a sentence before data is read; a model with fewer layers."""

from __future__ import annotations

import copy
import importlib.machinery
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig

from automodel_lite.errors import ConfigError
from automodel_lite.extras.short_models import layer_settings, with_layers
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.parts.adapters import lora
from automodel_lite.parts.losses.decisions import Decisions
from automodel_lite.parts.losses.preference import SimPo
from automodel_lite.parts.optimizers.adamw import adamw
from automodel_lite.training import rules
from automodel_lite.training.rules import check_parts
from automodel_lite.training.settings import RunParts, build_parts, with_recomputation
from tests.runs import quick_config


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["packed_sequence.packed_sequence_size=120"],
            "multiples of 16 tokens: packed_sequence.packed_sequence_size x",
        ),
        (
            ["packed_sequence.packed_sequence_size=144", "mesh.cp=2"],
            "= 144 must be a multiple of 32",
        ),
        (["packed_sequence=none"], "and padded rows are not"),
    ],
    ids=["size", "cp", "padded"],
)
def test_sizes_that_fp8_cannot_multiply(
    overrides: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.machinery.ModuleSpec("torchao", None)
    # installed or not, the sizes are wrong
    monkeypatch.setattr(rules, "find_spec", lambda name: spec)
    config = quick_config(tmp_path, "training.fp8=rowwise", *overrides)
    with pytest.raises(ConfigError, match=sentence):
        check_parts(build_parts(config), "fsdp", torch.device("cpu"))


def test_4_bit_weights_are_not_multiplied_in_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = ModuleType("bitsandbytes")  # only its presence is asked for
    package.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    config = quick_config(
        tmp_path, "training.fp8=rowwise", "packed_sequence.packed_sequence_size=128"
    )
    config.peft = {"_target_": "automodel_lite.parts.adapters.lora.QLora"}
    with pytest.raises(ConfigError, match="cannot multiply peft=qlora's 4-bit weights"):
        check_parts(build_parts(config), "fsdp", torch.device("cpu"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> RunParts:
    return build_parts(quick_config(tmp_path_factory.mktemp("run")))


def changed(parts: RunParts, **settings: Any) -> RunParts:
    """`mesh__ep=2` sets a part's own setting, `peft=...` a part."""
    for key, value in settings.items():
        part, _, name = key.partition("__")
        if part == "model":
            value = copy.copy(parts.model)
            vars(value)[name] = settings[key]
        elif name:
            value = replace(getattr(parts, part), **{name: value})
        parts = replace(parts, **{part: value})
    return parts


PEFT = lora.Lora(r=4)
BF16 = {"training__precision": "bf16", "training__master_weights": "bf16", "optimizer": partial(adamw, lr=1e-3, moments="bf16")}  # fmt: skip
# settings, strategy, the key of the error and a word of its cure
REFUSED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "experts without fsdp": ({"mesh__ep": 2}, "ddp", "mesh.ep", "fsdp"),
    "experts and adapters": ({"mesh__ep": 2, "peft": PEFT}, "fsdp", "mesh.ep", "mesh.dp_shard"),
    "turns without experts": ({"mesh__ep_overlap": True}, "fsdp", "mesh.ep_overlap", "mesh.ep=2"),
    **{
        f"turns and {name}": (
            {"mesh__ep": 2, "mesh__ep_overlap": True, name: value},
            "fsdp",
            "mesh.ep_overlap",
            cure,
        )
        for name, value, cure in [
            ("mesh__tp", 2, "mesh.dp_shard"),
            ("mesh__cp", 2, "mesh.dp_shard"),
            ("advanced__reduce_every_micro_batch", True, "advanced.reduce_every_micro_batch=false"),
            ("advanced__reshard_after_forward", True, "advanced.reshard_after_forward=false"),
            ("model__router_aux_loss", 0.1, "model.router_aux_loss=0"),
            ("training__compile", True, "training.compile=false"),
        ]
    },
    "experts offloaded": (
        {"mesh__ep": 2, "mesh__cpu_offload": True},
        "fsdp",
        "mesh.cpu_offload",
        "mesh.dp_shard",
    ),
    "offloaded replicas": (
        {"mesh__cpu_offload": True},
        "ddp",
        "mesh.cpu_offload",
        "mesh.strategy=fsdp",
    ),
    "heads and adapters": (
        {"model__mtp_loss": 0.1, "peft": PEFT},
        "none",
        "model.mtp_loss",
        "model.mtp_loss=0",
    ),
    "heads and pairs": (
        {"model__mtp_loss": 0.1, "loss": SimPo()},
        "none",
        "model.mtp_loss",
        "model.mtp_loss=0",
    ),
    "heads and decisions": (
        {"model__mtp_loss": 0.1, "loss": Decisions()},
        "none",
        "model.mtp_loss",
        "model.mtp_loss=0",
    ),
    "heads and logits": (
        {"model__mtp_loss": 0.1, "loss": CrossEntropy()},
        "none",
        "model.mtp_loss",
        "loss=fused_linear_cross_entropy",
    ),
    "noise and tensors": (
        {"training__neftune_noise_alpha": 5.0, "mesh__tp": 2},
        "fsdp",
        "training.neftune_noise_alpha",
        "mesh.cp",
    ),
    "noise and heads": (
        {"training__neftune_noise_alpha": 5.0, "model__mtp_loss": 0.1},
        "fsdp",
        "training.neftune_noise_alpha",
        "to 0",
    ),
    "frozen and adapted": (
        {"model__freeze": ["embed_tokens"], "peft": PEFT},
        "fsdp",
        "model.freeze",
        "remove",
    ),
    "two batches": (
        {"training__global_batch_documents": 64, "training__global_batch_size": 8},
        "none",
        "training.global_batch_documents",
        "null",
    ),
    "adapted towers": (
        {"model__train_towers": True, "peft": PEFT},
        "fsdp",
        "model.train_towers",
        "peft.modules_to_save",
    ),
    "adapted rows": (
        {"model__resize_embeddings": True, "peft": PEFT},
        "fsdp",
        "model.resize_embeddings",
        "peft.modules_to_save",
    ),
    "bf16, rounded to the nearest": (
        {**BF16, "optimizer": partial(adamw, lr=1e-3)},
        "fsdp",
        "training.master_weights",
        "optimizer=adamw_bf16",
    ),
    "bf16 adapters": (
        {**BF16, "peft": PEFT},
        "fsdp",
        "training.master_weights",
        "training.master_weights=fp32",
    ),
    "bf16 sums": (
        {**BF16, "mesh__strategy": "ddp"},
        "ddp",
        "training.master_weights",
        "mesh.strategy=fsdp",
    ),
    "bf16 in fp32": (
        {**BF16, "training__precision": "fp32"},
        "fsdp",
        "training.master_weights",
        "training.precision=bf16",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parts_that_do_not_work_together(case: str, parts: RunParts) -> None:
    settings, strategy, key, cure = REFUSED[case]
    with pytest.raises(ConfigError) as raised:
        check_parts(changed(parts, **settings), strategy, torch.device("cpu"))
    (error,) = raised.value.problems
    assert error.key == key
    assert cure in error.cure


def test_each_of_them_alone_is_taken(parts: RunParts) -> None:
    taken: tuple[dict[str, Any], ...] = (
        {},
        BF16,
        {"peft": PEFT},
        {"mesh__ep": 2},
        {"mesh__cpu_offload": True},
    )
    for settings in taken:
        check_parts(changed(parts, **settings), "fsdp", torch.device("cpu"))


def test_all_that_is_wrong_is_said_at_once(parts: RunParts) -> None:
    settings = {"mesh__ep": 2, "peft": PEFT, "model__resize_embeddings": True}
    with pytest.raises(ConfigError) as error:
        check_parts(changed(parts, **settings), "ddp", torch.device("cpu"))
    assert [problem.key for problem in error.value.problems] == [
        "mesh.ep",  # without FSDP
        "mesh.ep",  # with adapters
        "model.resize_embeddings",
    ]


@pytest.mark.parametrize(
    ("part", "target", "key", "cure"),
    [
        ("loss", "parts.losses.distillation.Distill", "teacher", "teacher=pretrained"),
        ("teacher", "models.source.CausalLM", "teacher", "leave it out"),
        ("loss", "parts.losses.preference.Dpo", "packed_sequence.overlong", "use drop or error"),
    ],
    ids=["no teacher", "an idle teacher", "pairs cut"],
)  # fmt: skip
def test_a_loss_and_its_parts(part: str, target: str, key: str, cure: str, tmp_path: Path) -> None:
    config = quick_config(tmp_path)
    config.packed_sequence["overlong"] = "split"
    more = {"config": {"model_type": "llama"}} if part == "teacher" else {}
    setattr(config, part, {"_target_": f"automodel_lite.{target}", **more})
    with pytest.raises(ConfigError) as error:
        build_parts(config)
    assert error.value.key == key
    assert cure in error.value.cure


def test_recomputation_is_all_that_changes(parts: RunParts) -> None:
    other = with_recomputation(parts, "offload", 3)
    asked = {"training__activation_checkpointing": "offload", "advanced__recompute_every_layers": 3}
    assert other == changed(parts, **asked) != parts


def test_a_model_of_fewer_layers() -> None:
    """Lists that have an entry a layer are cut with it; the model that is given stays as it is."""
    whole = Gemma3TextConfig(
        num_hidden_layers=8, layer_types=["sliding_attention"] * 7 + ["full_attention"]
    )
    shorter = with_layers(whole, 3)
    assert layer_settings(whole, 3) == {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention"] * 3,
    }
    assert (shorter.num_hidden_layers, len(shorter.layer_types)) == (3, 3)
    assert (whole.num_hidden_layers, len(whole.layer_types)) == (8, 8)
    both = Gemma3Config(
        text_config={"num_hidden_layers": 8}, vision_config={"num_hidden_layers": 5}
    )
    assert with_layers(both, 3).get_text_config().num_hidden_layers == 3
    assert with_layers(both, 3).vision_config.num_hidden_layers == 5
