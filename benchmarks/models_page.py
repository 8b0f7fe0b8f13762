"""The blocks of docs/models.md that the surveys write; the rest of the page is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.survey import Blocks
from benchmarks.tiny_models import COMPOSITES

MOST_USED = """
    qwen3_5 qwen3_5_moe nemotron_h deepseek_v3 gemma4 qwen2_5_vl qwen3_vl mistral3 kimi_k25 qwen3 llama olmo3 phi3 qwen2
    glm4 cohere2 smollm3 granite exaone4 seed_oss apertus arcee gpt_oss glm4_moe glm4_moe_lite mimo_v2_flash
    ernie4_5_moe kimi_linear bailing_hybrid granitemoehybrid falcon_h1 lfm2 qwen3_next qwen3_moe minimax_m2 mixtral
    olmoe gemma3 gemma3n llama4
"""
"""The forty that are fine-tuned most in 2026, by commits that name them in eleven public code bases."""
STEPS = ("packed", "trees", "step", "cp 4", "LoRA", "export")
NATIVE = "transformers' own packing"


def of_models(findings: list[Any]) -> Blocks:
    """Returns the blocks of what benchmarks/survey_models.py found."""
    decoders = [x for x in findings if x.family not in COMPOSITES]
    composites = [x for x in findings if x.family in COMPOSITES]
    most = MOST_USED.split()
    counts = [
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, on CPU.",
        "",
        f"**{summary(decoders)} of {len(decoders)} decoder-only families; {summary(composites)} of {len(composites)} "
        f"composites; {len(exact_of(most, findings))} of the {len(most)} most fine-tuned families exact end to end.** The "
        "others are refused with an error before training starts; documents never leak silently.",
    ]
    ties = [
        f"{x.family} ({x.near_ties} of {x.near_ties + 1})" for x in exact(findings) if x.near_ties
    ]
    if ties:
        counts += ["", f"Tried with other random weights, for a near tie: {', '.join(ties)}."]
    unread = [x.family for x in findings if x.steps.get("fp8", "").startswith("refused")]
    if unread:
        names = ", ".join(unread)
        counts += [
            "",
            f"Checkpoints in fp8 that transformers cannot read, and that are refused: {names}.",
        ]
    others = []
    for title, verdicts, text in (
        ("Refused before training", ["refused"], lambda x: x.refused),
        ("Exact in part", ["in part"], inexact),
        ("Wrong or broken", ["WRONG", "BROKEN"], inexact),
        ("Not tried", ["not tried"], lambda x: x.native),
    ):
        chosen = [x for x in findings if x.verdict in verdicts]
        if chosen:
            others += [
                "",
                f"## {title}",
                "",
                *table(chosen, {"error message": text, NATIVE: native}),
            ]
    columns = {name: steps_of(name) for name in STEPS} | {NATIVE: native}
    return {
        "counts": counts,
        "decoders": table(exact(decoders), columns),
        "composites": table(exact(composites), columns),
        "others": others[1:],
    }


def of_images(findings: list[Any]) -> Blocks:
    """Returns the blocks of what benchmarks/survey_images.py found."""
    refused = [x for x in findings if x.verdict == "refused"]
    others = [x for x in findings if x.verdict not in ("exact", "refused")]
    jobs = [x.job for x in exact(findings)]
    num_trained = jobs.count("trains")
    num_untried = sum(not job or job.startswith("not tried") for job in jobs)
    counts = [
        f"**{num_trained} of {len(findings)} families train as a job, exactly**: of {len(jobs)} whose packs are exact, "
        f"{len(jobs) - num_trained - num_untried} are refused by the recipe, and for {num_untried} no job of tiny sizes "
        f"was made. {len(refused)} are refused before training, {len(others)} not built; in transformers "
        f"{transformers.__version__}."
    ]
    kinds = ("loss", "language", "projector", "tower")
    columns = {kind: lambda x, kind=kind: f"{x.gaps.get(kind, 0.0):.0e}" for kind in kinds}
    columns |= {
        "job": lambda x: x.job or "not tried",
        "eager / sdpa": lambda x: f"{max(x.own.values()):.0e}" if x.own else "no sdpa",
        "": lambda x: ", ".join([*x.notes, *[f"{x.fp64:.0e} in fp64"] * bool(x.fp64)]),
    }
    unbuilt = []
    if others:
        why = {"reason": lambda x: x.not_built or x.broken or x.verdict}
        unbuilt = ["### Not built", "", *table(others, why)]
    return {
        "image counts": counts,
        "images": table(exact(findings), columns),
        "images refused": table(refused, {"error message": lambda x: x.refused}),
        "images not built": unbuilt,
    }


def table(findings: list[Any], columns: dict[str, Callable[[Any], str]]) -> list[str]:
    """Returns a row for each finding; `columns` is heading -> its text."""
    rows = [f"| family | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for finding in findings:
        cells = [" ".join(text(finding).split()).replace("|", "/") for text in columns.values()]
        rows.append(f"| {finding.family} | {' | '.join(cells)} |")
    return rows


def steps_of(name: str) -> Callable[[Any], str]:
    return lambda finding: finding.steps.get(name, "not run").removeprefix("exact, ")


def native(finding: Any) -> str:
    return finding.native


def inexact(finding: Any) -> str:
    """Returns the steps that are not exact."""
    steps = finding.steps.items()
    return "; ".join(f"{name}: {word}" for name, word in steps if not word.startswith("exact"))


def exact(findings: list[Any]) -> list[Any]:
    return [finding for finding in findings if finding.verdict == "exact"]


def exact_of(families: list[str], findings: list[Any]) -> list[str]:
    """Returns those of `families` that are exact; of a composite, its text part alone does not count."""
    found = {finding.family for finding in exact(findings)}
    # a decoder that is listed by its composite's name
    of_text = {name for name in families if name not in COMPOSITES and f"{name}_text" in found}
    return [name for name in families if name in found | of_text]


def summary(findings: list[Any]) -> str:
    num_refused = sum(finding.verdict == "refused" for finding in findings)
    return f"{len(exact(findings))} exact end to end, {num_refused} refused"
