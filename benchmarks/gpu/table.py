"""The one table that `gpu_check.py` ends with."""

from __future__ import annotations

from typing import Any

Results = dict[str, dict[str, Any]]
NOTES = {
    "forward_backward_ms": " {:.1f} ms of a stream of 32,768 tokens",
    "apart_frac": " largest distance of a loss from fp32: {}",
    "gradient_error_frac": " relative error of all gradients {:.1e}",
    "gb": " {:.1f} GB",
    "saving_s": " saved in {} s",
    "first_s": ", {:.0f} s until two steps are saved",
    "resumed_s": ", {:.0f} s until two more are",
}


def table(names: list[str], results: Results, machine: dict[str, Any]) -> str:
    """Markdown: ceilings, pass or fail, speeds with their ratios, what is missing."""
    sections = [
        f"# {machine['device']}, torch {machine['torch']}",
        _header(results.get("header", {})),
        _ceilings(results.get("ceilings", {})),
        _verdicts(names, results),
        _speeds(names, results),
        _published(names, results),
        _tax(results),
        _missing(names, results),
        "One GPU: NCCL, FSDP's traffic and context parallelism were not run.",
    ]
    return "\n\n".join(section for section in sections if section)


def _header(found: dict[str, Any]) -> str:
    """By what the table is judged: the code, the driver, the documents."""
    if not found.get("documents"):
        return ""
    documents, card = found["documents"], ""
    if found.get("driver"):
        card = f", driver {found['driver']}, CUDA {found['cuda']}, power limit {found['power_limit']} W"
    text = (
        f"Commit {found['commit']}, transformers {found['versions']['transformers']}{card}. Documents: seed "
        f"{found['seed']}, mean {documents['mean_tokens']:.0f} tokens, median {documents['median_tokens']:.0f}, longest "
        f"{documents['longest']}. Batches are drawn before the clock starts; tokens are those of documents."
    )
    if not found.get("computes", True):
        text += "\n\n**This card computes nothing: no number below is one of a GPU.**"
    return text


def _ceilings(found: dict[str, Any]) -> str:
    if not found.get("bf16_tflops"):
        return ""
    sheet, of_sheet = found["data_sheet_tflops"], ""
    if sheet:
        of_sheet = f", {found['bf16_tflops'] / sheet:.0%} of the data sheet's {sheet:.0f}"
    return (
        f"Ceilings: a product of square matrices at {found['bf16_tflops']:.3g} TFLOP/s{of_sheet}; a copy at "
        f"{found['memory_tb_per_s']:.3g} TB/s read and written{_clocks(found)}."
    )


def _clocks(found: dict[str, Any]) -> str:
    if not found.get("clock_mhz"):
        return ""
    return f" (at {found['clock_mhz']:.0f} MHz, {found['power_w']:.0f} W)"


def _verdicts(names: list[str], results: Results) -> str:
    rows = ["| part | verdict | seconds | |", "|---|---|---|---|"]
    for name in names:
        found = results.get(name, {"verdict": "missing"})
        has_rate = found.get("tokens_per_s") or name.startswith("step-")
        if has_rate or found["verdict"] in ("missing", "no time"):
            continue
        note = last_words(found.get("why")) or ", ".join(found.get("failed") or [])
        if found.get("largest_error") is not None:
            note = f"largest error {found['largest_error']:.1e}, {found['graphs']} graphs {note}"
        for key, sentence in NOTES.items():
            if key in found:
                note += sentence.format(found[key])
        if found.get("idle_frac") is not None:
            note = f"idle {found['idle_frac']:.1%} of the time over 6 steps"
        rows.append(f"| {name} | {found['verdict']} | {found.get('seconds', 0):.0f} | {note} |")
    return "\n".join(rows)


def last_words(screen: str | None) -> str:
    """Where a screen ends, as it fits into a cell: in a traceback, the error."""
    return " ".join((screen or "").replace("|", "/").split())[-160:]


def _speeds(names: list[str], results: Results) -> str:
    base = results.get("step-packed", {}).get("tokens_per_s")
    head = (
        "step | tokens/s | spread | of packed | MFU, data sheet | of the product | GiB | "
        "reserved, warm to end | 1st step s | MHz, W"
    )
    rows = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    for name in names:
        found = results.get(name, {})
        if not found.get("tokens_per_s"):
            if name.startswith("step-") and found.get("verdict") in ("FAIL", "timeout"):
                rows.append(f"| {name} | {found['verdict']}" + " |" * head.count("|"))
            continue
        rate = found["tokens_per_s"]
        reserved = f"{_number(found.get('reserved_gib_warm'))} {_number(found.get('reserved_gib'))}"
        cells = [
            f"{rate:,.0f}",
            _percent(found.get("spread_frac")),
            f"{rate / base:.2f}" if base and "8b" not in name else "",
            _percent(found.get("mfu_frac")),
            _percent(found.get("of_ceiling_frac")),
            _number(found.get("peak_gib")),
            reserved.strip(),
            _number(found.get("first_step_s")),
            f"{found['clock_mhz']:.0f}, {found['power_w']:.0f}" if found.get("clock_mhz") else "",
        ]
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _published(names: list[str], results: Results) -> str:
    """What others report for the job of a row, each with its own card, data and batch."""
    rows = ["| row | tokens/s | published | ratio | by |", "|---|---|---|---|---|"]
    for name in names:
        found = results.get(name, {})
        if not (found.get("tokens_per_s") and found.get("published")):
            continue
        number, by = found["published"].split(", ", 1)
        ratio = found["tokens_per_s"] / float(number.replace(",", ""))
        rows.append(f"| {name} | {found['tokens_per_s']:,.0f} | {number} | {ratio:.2f} | {by} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _tax(results: Results) -> str:
    sentences = []
    for bare, recipe in (("step-packed", "recipe-1b"), ("step-compiled", "recipe-1b-compiled")):
        # by the work of their documents, which are not the same: longer ones have more of it a token
        rates = [results.get(name, {}).get("tflops_per_s") or 0.0 for name in (bare, recipe)]
        if all(rates):
            sentences.append(f"{recipe} reaches {rates[1] / rates[0]:.1%} of {bare}'s TFLOP/s")
    ways = "on a GPU the bare step computes under autocast, the recipe in bf16 copies of its weights, without FSDP"
    return f"Recipe tax ({ways}): " + "; ".join(sentences) + "." if sentences else ""


def _missing(names: list[str], results: Results) -> str:
    lines = []
    for name in names:
        found = results.get(name, {"verdict": "missing", "why": "not asked for"})
        if found["verdict"] in ("missing", "no time"):
            lines.append(f"- {name}: {last_words(found.get('why')) or 'no time was left'}")
    return "Not run:\n" + "\n".join(lines) if lines else ""


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
