"""The parts of `benchmarks/gpu_check.py`, in the order in which they convince: what is cut off is worth less than what ran.

Parts of one group share a process: torch and transformers take ten seconds to import, and a shape is built once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

PLANS = ("full", "smoke")


@dataclass(frozen=True)
class Part:
    """One line of the results: a function of `benchmarks/gpu`.

    limit_s    after so many seconds its process is ended; it begins only when half of that is left
    least_gib  of the GPU
    most_gib   of the GPU: a larger one has a row of its own for the same question
    """

    name: str
    call: str  # module.function
    limit_s: float
    arguments: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # packages
    least_gib: float = 0.0
    group: str = ""
    most_gib: float = float("inf")


def groups(parts: list[Part]) -> Iterator[list[Part]]:
    """Neighbors of one group."""
    for _, members in groupby(parts, key=lambda part: part.group):
        yield list(members)


def step(
    name: str,
    group: str,
    limit_s: int,
    needs: tuple[str, ...] = (),
    gib: float = 0.0,
    most_gib: float = float("inf"),
    **settings: Any,
) -> Part:
    arguments = {"settings": settings}
    return Part(f"step-{name}", "steps.measure", limit_s, arguments, needs, gib, group, most_gib)


def recipe(
    name: str,
    group: str,
    limit_s: int,
    *overrides: str,
    gib: float = 0.0,
    most_gib: float = float("inf"),
    **arguments: Any,
) -> Part:
    options = {"overrides": [*overrides], **arguments}
    return Part(name, "recipe.rate", limit_s, options, (), gib, group, most_gib)


def kernel(
    name: str, cases: tuple[str, ...], limit_s: int = 60, has_speed: bool = True
) -> list[Part]:
    """Each case is a part: what a kill cuts off leaves the cases before it."""
    packages = {"flash": ("flash_attn",), "te": ("transformer_engine",)}.get(name, ())
    parts = [
        Part(
            f"kernel-{name}: {case}",
            "kernels.run",
            limit_s,
            {"kernel_name": name, "case_name": case},
            packages,
        )
        for case in cases
    ]
    if has_speed:
        parts.append(
            Part(f"kernel-{name}: speed", "kernels.speed", limit_s, {"kernel_name": name}, packages)
        )
    return [Part(**vars(part) | {"group": f"kernel-{name}"}) for part in parts]


def feature(name: str, *overrides: str, needs: tuple[str, ...] = ()) -> Part:
    return Part(
        f"feature-{name}",
        "recipe.feature",
        120,
        {"overrides": [*overrides]},
        needs,
        group="features",
    )


CASES = (
    "grouped heads",
    "equal heads",
    "head dim 128",
    "head dim 256",
    "window 50",
    "softcap 30",
    "sinks, window",
)
CASES += ("latent 192/128",)
# for which no other kernel of CUDA is there
FLEX_FIRST = ("softcap 30", "sinks, window", "head dim 256")
BF16 = ("training.master_weights=bf16", "training.precision=bf16", "optimizer=adamw_bf16")
COMPILED = "training.compile=true"
RECOMPUTED = "training.activation_checkpointing=full"
SMALL_CARD = 100.0  # GiB; an H100 of 80 GB has 79, an H200 of 141 GB 140
# 48 GB where bf16 moments make 64, so that 80 GB hold the activations of 8,192 tokens, too
BF16_8BIT = ("training.master_weights=bf16", "training.precision=bf16", "optimizer=adamw_8bit")


def full_plan() -> list[Part]:
    """Some 28 minutes by estimate, four calls of nine minutes with their starts."""
    one_b: dict[str, Any] = {"shape": "1b", "pack": 8192}
    eight_b: dict[str, Any] = {"shape": "8b", "steps": 4, "repeats": 3, "warmup": 2}
    masters = eight_b | {"pack": 8192, "recompute": "full"}
    return [
        Part("header", "machine.header", 90, group="machine"),
        Part("expandable-segments", "machine.expandable_segments", 60, group="machine"),
        Part("ceilings", "machine.ceilings", 90, group="machine"),
        *kernel("varlen", CASES),
        step("packed", "1b", 120, **one_b),
        step("compiled", "1b", 150, compiled=True, **one_b),
        recipe("recipe-1b", "1b", 150),
        recipe("recipe-1b-compiled", "1b", 180, COMPILED),
        step("8b-bf16", "8b", 200, gib=120, weights="bf16", compiled=True, pack=8192, **eight_b),
        recipe(
            "recipe-8b",
            "8b",
            240,
            RECOMPUTED,
            COMPILED,
            gib=130,
            shape="8b",
            steps=9,
        ),
        recipe("recipe-8b-bf16", "8b", 240, *BF16, COMPILED, gib=120, shape="8b", steps=9),
        step(
            "8b-bf16-8bit",
            "8b",
            200,
            gib=70,
            most_gib=SMALL_CARD,
            weights="bf16",
            moments="8bit",
            recompute="full",
            compiled=True,
            pack=8192,
            **eight_b,
        ),
        recipe(
            "recipe-8b-bf16-8bit",
            "8b",
            240,
            *BF16_8BIT,
            RECOMPUTED,
            COMPILED,
            gib=70,
            most_gib=SMALL_CARD,
            shape="8b",
            steps=9,
        ),
        step(
            "8b-lora-compiled",
            "8b",
            200,
            ("peft",),
            60,
            pack=4096,
            lora=True,
            compiled=True,
            **eight_b,
        ),
        step(
            "qwen3-8b-lora-2k",
            "8b",
            200,
            ("peft",),
            60,
            shape="qwen3-8b",
            pack=2048,
            lora=True,
            compiled=True,
            published="8,429, Megatron-Bridge, model_verification_cards/qwen3-8b, LoRA on one H100",
            **{key: value for key, value in eight_b.items() if key != "shape"},
        ),
        step("transformers-flex", "peers", 200, attention="flex", compiled=True, **one_b),
        Part(
            "trl-liger", "rivals.trl", 200, {"liger": True}, ("trl", "liger_kernel"), group="peers"
        ),
        step(
            "packed-32k",
            "long",
            150,
            documents="long",
            **one_b | {"pack": 32768, "recompute": "full", "steps": 4},
        ),
        step(
            "packed-131k",
            "long",
            200,
            documents="long",
            **one_b | {"pack": 131072, "recompute": "full", "steps": 2},
        ),
        step("moe", "families", 200, shape="moe", weights="bf16", pack=8192),
        step("hybrid", "families", 200, shape="hybrid", weights="bf16", pack=8192),
        Part("curves", "curves.curves", 240, group="curves"),
        Part("gradients", "curves.gradients", 120, least_gib=30, group="curves"),
        Part("save-1b", "recipe.save_and_resume", 300, {"shape": "1b"}, least_gib=40, group="save"),
        Part("idle-1b", "recipe.idle", 150, group="inside"),
        Part("strict-step", "recipe.strict_step", 120, group="inside"),
        step("trees", "trees", 120, documents="trees", **one_b),
        step("rows-of-trees", "trees", 120, documents="rows of trees", **one_b),
        step("memory-200", "memory", 180, **one_b | {"steps": 200, "repeats": 1}),
        *kernel("flex", FLEX_FIRST, 90, has_speed=False),
        Part("built-in-job", "recipe.built_in_job", 180, group="built-in"),
        feature("async-save", "checkpoint.mode=async", "training.max_steps=12"),
        feature("adamw_8bit", "optimizer=adamw_8bit"),
        feature("flex", "attention=flex"),
        feature("compile", COMPILED),
        feature("fp8-compile", "training.fp8=tensorwise", COMPILED, needs=("torchao",)),
        feature("deterministic", "training.deterministic=true"),
        Part("verify", "recipe.verify", 150, group="features"),
        step("8b-accumulated", "8b fp32", 200, gib=132, micro_steps=2, **masters | {"steps": 2}),
        step("8b", "8b fp32", 200, gib=130, compiled=True, **masters),
        step("packed-plain-loss", "1b others", 120, loss="plain", **one_b),
        step("packed-gsm8k", "1b others", 120, documents="gsm8k", **one_b),
        step("sorted", "1b others", 120, attention="sorted", **one_b),
        # short documents: beside the longest of the others, at random, 13 rows fill a card of 140 GB
        step("padded-gsm8k", "1b others", 120, attention="padded", documents="gsm8k", **one_b),
        step("mask", "1b others", 120, attention="mask", **one_b),
        step("position_ids", "1b others", 120, attention="position_ids", **one_b),
        *kernel("flex", tuple(case for case in CASES if case not in FLEX_FIRST), 90),
        *kernel("flash", CASES),
        *kernel("te", CASES, 90),
        *kernel("reference", CASES),
    ]


def smoke_plan() -> list[Part]:
    """The same functions in miniature."""
    tiny: dict[str, Any] = {"shape": "tiny", "pack": 256, "steps": 1, "repeats": 2, "warmup": 1}
    return [
        Part("header", "machine.header", 120, group="machine"),
        Part("ceilings", "machine.ceilings", 120, group="machine"),
        *kernel("reference", ("grouped heads", "sinks, window"), 120, has_speed=False),
        *(
            step(a, "tiny", 120, attention=a, **tiny)
            for a in ("packed", "padded", "sorted", "mask", "position_ids")
        ),
        step("plain-loss", "tiny", 120, loss="plain", **tiny),
        step("lora", "tiny", 120, ("peft",), lora=True, **tiny),
        step("bf16", "tiny", 120, weights="bf16", **tiny),
        step("moe", "tiny", 120, **tiny | {"shape": "tiny-moe"}),
        step("hybrid", "tiny", 120, **tiny | {"shape": "tiny-hybrid"}),
        step("trees", "tiny", 120, documents="trees", **tiny | {"pack": 1024}),
        step("rows-of-trees", "tiny", 120, documents="rows of trees", **tiny | {"pack": 1280}),
        recipe("recipe-1b", "recipe", 180, shape="tiny", steps=12),
        Part("strict-step", "recipe.strict_step", 180, group="recipe"),
        Part("idle-1b", "recipe.idle", 180, {"shape": "tiny"}, group="recipe"),
        feature("adamw_8bit", "optimizer=adamw_8bit"),
        Part("save-1b", "recipe.save_and_resume", 180, {"shape": "tiny"}, group="features"),
        Part("curves", "curves.curves", 180, {"is_tiny": True}, group="features"),
        Part("gradients", "curves.gradients", 120, {"shape": "tiny"}, group="features"),
        Part("built-in-job", "recipe.built_in_job", 180, {"steps": 2}, group="built-in"),
        Part("trl-liger", "rivals.trl", 150, {"is_tiny": True}, ("trl",), group="peers"),
    ]
