"""docs/models.md, from what benchmarks/survey_models.py found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers

from benchmarks.survey_models import LENGTHS, MOST_USED, NEAR_TIE, Finding
from benchmarks.tiny_models import COMPOSITES


def markdown(findings: Iterable[Finding]) -> str:
    findings = list(findings)
    decoders = [finding for finding in findings if finding.family not in COMPOSITES]
    composites = [finding for finding in findings if finding.family in COMPOSITES]
    most = MOST_USED.split()
    used = len(exact_of(most, findings))
    lines = [
        "# Model families on packed sequences",
        "",
        "Written by `python benchmarks/survey_models.py --write docs/models.md`: do not edit, run it again.",
        "",
        "**After a new release of transformers**: `make survey` installs the newest version, surveys every family, "
        "new ones included, and writes this page (if interrupted, it continues where it stopped). The same survey "
        "is the slow test `tests/benchmarks/test_survey.py`.",
        "",
        f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}, on CPU. The survey "
        "covers every decoder-only causal LM in this version of transformers and the composites (vision, audio) "
        "whose language model is trained on text. Each family is a tiny random bf16 checkpoint, trained with the "
        f"recipe itself in fp32. The ground truth is the family's own code on separate documents of {LENGTHS} tokens. "
        "Whatever a family measures in tokens (windows, chunks, scales, the original length of its rotation) is less "
        "than the stream, so that it acts; widths and numbers of experts do not divide by the ranks; layers share keys "
        "and values where the family's do.",
        "",
        f"**{summary(decoders)} of {len(decoders)} decoder-only families; {summary(composites)} of {len(composites)} "
        f"composites; {used} of the {len(most)} most fine-tuned families exact end to end.** The others are refused "
        "with an error before training starts; documents never leak silently.",
        "",
        "| column | what is compared, and the limit |",
        "|---|---|",
        "| packed | logits and all gradients of one pack against separate documents, relative to the largest; 1e-5 |",
        "| trees | the same of rows that share beginnings, as trees, against each row alone; 1e-5 |",
        "| step | loss and gradient norm of a run's first step, in training mode; relative, 1e-5 |",
        "| cp 4 | the same on four ranks, with a sharded model (of six experts, one rank has none) and each pack split in "
        "four; 1e-5 |",
        "| LoRA | the first step's loss with new adapters; the saved adapter loads, and routers have no adapter |",
        "| export | bf16; same keys, dtypes and class as the checkpoint, every weight read back and compared |",
        "| fp8 | not a column: each checkpoint is also read from fp8 in blocks of 16 x 16 with ragged ends, bit for bit |",
        "| transformers' own packing | only `position_ids`, `use_cache=False` |",
        "",
        *ties(findings),
        *unread(findings),
        "## Mixtures of experts",
        "",
        "`model.experts` selects how experts are computed. `model.router_aux_loss=0.001` adds transformers' "
        "load-balancing loss, computed for each row separately, so that it does not depend on packs, "
        "micro-batches and ranks; the logged loss remains the cross-entropy. Families that balance their experts "
        "with a bias (DeepSeek V3, GLM 4.5) have no such loss: the bias is not changed and is exported in fp32. "
        "LoRA adapts attention and shared experts, routed experts with `peft.experts=true` ([lora.md](lora.md)), "
        "and never routers.",
        "",
        "## Parts of a model",
        "",
        "- `model.freeze` freezes weights by parts of their names ([lora.md](lora.md)).",
        '- `tokenizer.added_tokens=["<think>", "</think>"]` adds tokens. Many embeddings have spare rows for them; where '
        "they do not, `model.resize_embeddings=true` adds rows, each the mean of the others. Each rank then reads the whole "
        "model before it is sharded.",
        "- `model.pretrained=runs/first` continues from what a run has exported ([lora.md](lora.md) for adapters).",
        "- Weights of a checkpoint that the model does not have are named in the startup block; heads that predict further "
        "tokens (MTP: `mtp.*` of Qwen3-Next and Qwen3.5, the layers behind the last one of DeepSeek V3 and GLM 4.5) are "
        "copied into the export bit for bit. `model.mtp_loss=0.1` trains them instead, with DeepSeek's loss: 0.1 times the "
        "mean over heads of their cross-entropy, added to the loss that is logged (`mtp_loss` is a column of its own). "
        "Each head stays inside its document, and along the path of each row in a tree (`mesh.cp=1`); dp, fsdp, cp, tp and "
        "ep give the numbers of one process. Adapters, preference and policy losses, images and fp8 are refused.",
        "",
        "## Decoder-only families, exact end to end",
        "",
        *table(decoders),
        "",
        "## Composites trained on text, exact end to end",
        "",
        "Composites are loaded with their own class, and their towers are frozen and not part of the step. The "
        "export is the whole model, with every untrained weight bit-identical.",
        "",
        *table(composites),
    ]
    lines += section(
        "Refused before training",
        [f for f in findings if f.verdict == "refused"],
        lambda f: f.refused,
    )
    lines += section("Exact in part", [f for f in findings if f.verdict == "in part"], words)
    lines += section(
        "Wrong or broken", [f for f in findings if f.verdict in ("WRONG", "BROKEN")], words
    )
    lines += section(
        "Not tried", [f for f in findings if f.verdict == "not tried"], lambda f: f.native
    )
    return "\n".join(lines) + "\n"


IMAGES = "\n## Images\n"


def images_section(text: str) -> str:
    """Returns the section on images of a page that is written anew; it has a survey of its own."""
    _, heading, section = text.partition(IMAGES)
    return heading + section


def with_images(text: str, findings: Iterable[Any]) -> str:
    """Returns the page with the section on images that benchmarks/survey_images.py found."""
    findings = list(findings)
    exact = [x for x in findings if x.verdict == "exact"]
    refused = [x for x in findings if x.verdict == "refused"]
    others = [x for x in findings if x not in exact and x not in refused]
    lines = [
        text.partition(IMAGES)[0].rstrip("\n"),
        IMAGES,
        "Written by `python benchmarks/survey_images.py --write docs/models.md`: all families of "
        "AutoModelForImageTextToText, as tiny random models with their own image processors, their towers trained. "
        "Six documents with seven images in one pack, with one call of processor and towers, against plain transformers "
        "on each document alone with its own processor call: the loss (relative), and the gradients of language model, "
        "projector and tower (relative to the largest of the kind), in fp32. The last column is what transformers' own "
        "two attentions, eager and sdpa, differ by on the same documents. Limits: 1e-6 for the loss, 1e-5 for gradients; "
        "beyond them only what vanishes in fp64, or what transformers' own attentions differ by too.",
        "",
        f"**{len(exact)} of {len(findings)} exact, {len(refused)} refused before training, {len(others)} not built** in "
        f"transformers {transformers.__version__}.",
        "",
        "| family | loss | language | projector | tower | eager / sdpa | |",
        "|---|---|---|---|---|---|---|",
    ]
    for finding in exact:
        cells = [f"{finding.gaps.get(name, 0.0):.0e}" for name in _GAPS]
        own = f"{max(finding.own.values()):.0e}" if finding.own else "no sdpa"
        notes = list(finding.notes)
        if finding.fp64:
            notes.append(f"{finding.fp64:.0e} in fp64")
        lines.append(f"| {finding.family} | {' | '.join(cells)} | {own} | {', '.join(notes)} |")
    lines += ["", EXPLAINED]
    lines += ["", "### Refused with images", "", "| family | error message |", "|---|---|"]
    lines += [f"| {x.family} | {_cell(x.refused)} |" for x in refused]
    if others:
        lines += [
            "",
            "### Not built",
            "",
            "No tiny model or no truth: sizes with names of their own, or a processor that wants more than images. What such "
            "a family does is checked at start-up.",
            "",
            "| family | reason |",
            "|---|---|",
        ]
        lines += [f"| {x.family} | {_cell(x.not_built or x.broken or x.verdict)} |" for x in others]
    return "\n".join(lines) + "\n"


EXPLAINED = (
    "deepseek_vl_hybrid: its own tower, called in plain transformers for seven images at once and for each alone, "
    "differs by 2e-6 in its features and by 1.4e-5 in its gradients (most in `high_res_vision_alpha`, one number that "
    "sums over all pixels) in fp32, and by 2e-16 in fp64: rounding of larger products, which a pack takes over. "
    "paligemma: its layers as such; a run refuses prompts that see themselves: every token before the answer is one "
    "block, with a start token between image and question and a line break behind it, which the family's processor "
    "writes for one question with one answer and no chat has.\n\n"
    "fast_vlm and gemma3n have small stand-ins of timm for their towers; fuyu's images are cut as its processor does."
)
_GAPS = ("loss", "language", "projector", "tower")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


def exact_of(families: list[str], findings: list[Finding]) -> list[str]:
    """Returns those of `families` that are exact; of a composite, its text part alone does not count."""
    exact = {finding.family for finding in findings if finding.verdict == "exact"}
    return [
        name
        for name in families
        if name in exact or (name not in COMPOSITES and f"{name}_text" in exact)
    ]


def ties(findings: list[Finding]) -> list[str]:
    """Returns a line about mixtures that differed with some random weights and not with others."""
    found = [
        f"{f.family} ({f.near_ties} of {f.near_ties + 1})"
        for f in findings
        if f.near_ties and f.verdict == "exact"
    ]
    if not found:
        return []
    return [
        "A router near a tie sends a token to another expert when a sum is rounded otherwise, and an attention whose "
        "queries are not scaled turns to another key. A family that is exact in fp64, or a mixture, and differs by less "
        f"than {NEAR_TIE:.0e} in fp32, is tried with other random weights. Needed for: {', '.join(found)}.",
        "",
    ]


def unread(findings: list[Finding]) -> list[str]:
    """Returns a line about families whose checkpoints in fp8 are refused."""
    found = [f.family for f in findings if f.steps.get("fp8", "").startswith("refused")]
    return [
        f"Checkpoints in fp8 that transformers cannot read, and that are refused: {', '.join(found)}.",
        "",
    ] * bool(found)


def summary(findings: list[Finding]) -> str:
    counts = {
        verdict: sum(f.verdict == verdict for f in findings) for verdict in ("exact", "refused")
    }
    return f"{counts['exact']} exact end to end, {counts['refused']} refused"


def table(findings: list[Finding]) -> list[str]:
    rows = [
        "| family | packed | trees | step | cp 4 | LoRA | export | transformers' own packing |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for finding in findings:
        if finding.verdict == "exact":
            names = "packed", "trees", "step", "cp 4", "LoRA", "export"
            cells = [finding.steps.get(name, "not run").removeprefix("exact, ") for name in names]
            rows.append(f"| {finding.family} | {' | '.join(cells)} | {finding.native} |")
    return rows


def section(title: str, findings: list[Finding], text: object) -> list[str]:
    if not findings:
        return []
    assert callable(text)
    rows = [
        f"| {f.family} | {' '.join(str(text(f)).split()).replace('|', '/')} | {f.native} |"
        for f in findings
    ]
    return [
        "",
        f"## {title}",
        "",
        "| family | error message | transformers' own packing |",
        "|---|---|---|",
        *rows,
    ]


def words(finding: Finding) -> str:
    return "; ".join(
        f"{name}: {word}" for name, word in finding.steps.items() if not word.startswith("exact")
    )
