"""report.html, one self-contained page of one screen, and report.png, the same panels as a picture."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from automodel_lite.tools.report.panels import PANELS, SERIES, Panel, draw_on, style
from automodel_lite.tools.report.record import RunRecord, differences, read_run

_INK, _LINE = "#010203", "#040506"  # stand for the page's colours, light or dark

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
:root {{ color-scheme: light dark; --paper: #fff; --ink: #1d2430; --soft: #5c6675; --line: #d9dee6; --card: #f6f7f9 }}
@media (prefers-color-scheme: dark) {{
  :root {{ --paper: #12161c; --ink: #e4e8ee; --soft: #98a3b3; --line: #333c48; --card: #1a2029 }} }}
* {{ box-sizing: border-box }}
body {{ margin: 0; padding: 12px 16px; background: var(--paper); color: var(--ink);
  font: 14px/1.4 system-ui, -apple-system, "Segoe UI", sans-serif }}
header {{ display: flex; flex-wrap: wrap; gap: 4px 20px; align-items: baseline; margin-bottom: 8px }}
h1 {{ font-size: 18px; margin: 0; overflow-wrap: anywhere }}
header span {{ color: var(--soft) }}
header b {{ color: var(--ink); font-variant-numeric: tabular-nums }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 280px), 1fr)); gap: 8px }}
@media (min-width: 1200px) {{ main {{ grid-template-columns: repeat(4, 1fr) }} section {{ grid-column: span 3 }} }}
figure, section {{ margin: 0; padding: 6px; background: var(--card); border-radius: 6px; min-width: 0 }}
figure svg {{ display: block; width: 100%; height: auto; color: var(--ink) }}
section {{ overflow: auto }}
dl {{ margin: 0; columns: 3 230px; column-gap: 20px; font-size: 12px }}
dl div {{ display: flex; justify-content: space-between; gap: 10px; padding: 1px 4px; break-inside: avoid;
  border-bottom: 1px solid var(--line) }}
dt {{ color: var(--soft); overflow-wrap: anywhere }}
dd {{ margin: 0; text-align: right; overflow-wrap: anywhere }}
h2 {{ font-size: 12.5px; margin: 2px 4px 6px }}
table {{ border-collapse: collapse; font-size: 12px; width: 100% }}
td, th {{ text-align: left; padding: 1px 12px 1px 4px; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: break-word }}
th {{ font-weight: 600 }}
td:first-child {{ color: var(--soft) }}
@media (max-width: 600px) {{ tr {{ display: grid; grid-template-columns: repeat(var(--runs), minmax(0, 1fr));
  border-bottom: 1px solid var(--line); padding: 2px 0 }} td, th {{ border: 0 }}
  td:first-child {{ grid-column: 1 / -1 }} th:first-child {{ display: none }} }}
i {{ display: inline-block; width: 9px; height: 9px; border-radius: 2px; margin-right: 5px }}
</style></head><body>
{header}
<main>
{panels}
{table}
</main></body></html>
"""


def write_report(runs: list[Path], to: Path) -> tuple[Path, Path]:
    """Writes `to`/report.html and `to`/report.png of one run or several; returns their paths.

    Raises ConfigError when a folder is no run's.
    """
    records = [read_run(path) for path in runs]
    to.mkdir(parents=True, exist_ok=True)
    page, picture = to / "report.html", to / "report.png"
    page.write_text(page_of(records))
    write_picture(records, picture)
    return page, picture


def page_of(records: list[RunRecord]) -> str:
    """The whole page as text."""
    drawn = [svg for panel in PANELS if (svg := _svg(panel, records))]
    panels = "\n".join(f"<figure>{svg}</figure>" for svg in drawn)
    title = " · ".join(record.name for record in records)
    return _PAGE.format(title=html.escape(title), header=_header(records), panels=panels, table=_table(records))


def write_picture(records: list[RunRecord], path: Path) -> None:
    """All panels on white."""
    with plt.rc_context(style("#1d2430", "#d9dee6")):
        figure, grid = plt.subplots(3, 3, figsize=(13, 8), layout="constrained")
        for axes, panel in zip(grid.flat, PANELS):
            if not draw_on(axes, panel, records):
                axes.set_visible(False)
        figure.suptitle(" · ".join(record.name for record in records), fontsize=11)
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def _svg(panel: Panel, records: list[RunRecord]) -> str | None:
    """One panel as an SVG element that takes the page's colours and font."""
    with plt.rc_context({**style(_INK, _LINE), "svg.hashsalt": panel.key}):
        figure, axes = plt.subplots(figsize=(3.3, 2.15), layout="constrained")
        is_drawn = draw_on(axes, panel, records)
        figure.suptitle(axes.get_title(loc="left"), x=0.02, ha="left", fontsize=9, fontweight="bold")
        axes.set_title("", loc="left")
        out = io.StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    if not is_drawn:
        return None
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(<svg[^>]*?) (?:width|height)=\"[^\"]*\"", r"\1", svg)
    svg = re.sub(r"(<svg[^>]*?) (?:width|height)=\"[^\"]*\"", r"\1", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(panel.title)}" ', 1)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", svg)
    return svg.replace(_INK, "currentColor").replace(_LINE, "var(--line)")


def _header(records: list[RunRecord]) -> str:
    if len(records) > 1:
        dots = (f'<i style="background:{SERIES[number % len(SERIES)]}"></i>' for number in range(len(records)))
        names = (f"{dot}<b>{html.escape(record.name)}</b> {_summary(record)}" for dot, record in zip(dots, records))
        spans = "".join(f"<span>{name}</span>" for name in names)
        return f"<header><h1>{len(records)} runs</h1>{spans}</header>"
    record = records[0]
    facts = "".join(f"<span>{name} <b>{value}</b></span>" for name, value in facts_of(record))
    state = html.escape(str(record.status.get("state", "")))
    return f"<header><h1>{html.escape(record.name)}</h1><span>{state}</span>{facts}</header>"


def facts_of(record: RunRecord) -> list[tuple[str, str]]:
    """The numbers that one looks for first."""
    facts = [("step", f"{record.rows[-1]['step']:,}")]
    if (loss := record.last("loss")) is not None:
        facts.append(("loss", f"{loss:.4f}"))
    for key in record.validation_keys():
        facts.append((f"validation ({key.removeprefix('val_loss/').replace('_', ' ')})", f"{record.last(key):.4f}"))
    if (right := record.last("answers_right")) is not None:
        facts.append(("answers right", f"{right:.0f} of {record.last('answers'):.0f}"))
    if (rate := record.typical("tokens_per_s")) is not None:
        facts.append(("tokens/s", f"{rate:,.0f}"))
    if (mfu := record.typical("mfu_frac")) is not None:
        facts.append(("MFU", f"{mfu:.1%}"))
    if record.packing:
        facts.append(("fill", f"{record.packing['fill_frac']:.1%}"))
    return facts


def _summary(record: RunRecord) -> str:
    return html.escape(", ".join(f"{name} {value}" for name, value in facts_of(record)[:3]))


def _table(records: list[RunRecord]) -> str:
    """What differs between the runs; of one run, the settings that are looked up most."""
    if len(records) == 1:
        return f"<section>{_list('Settings', _settings(records[0]))}{_list('Data', _data(records[0]))}</section>"
    head = "".join(f"<th>{_breakable(record.name)}</th>" for record in records)
    rows = (
        f"<tr><td>{_breakable(key)}</td>{''.join(f'<td>{html.escape(value)}</td>' for value in values)}</tr>"
        for key, values in differences(records)
    )
    body = "".join(rows) or "<tr><td>none</td></tr>"
    table = f'<table style="--runs: {len(records)}"><tr><th></th>{head}</tr>{body}</table>'
    return f"<section><h2>Settings that differ</h2>{table}</section>"


def _list(title: str, pairs: list[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{_breakable(key)}</dt><dd>{html.escape(value)}</dd></div>" for key, value in pairs)
    return f"<h2>{title}</h2><dl>{items}</dl>" if items else ""


def _breakable(key: str) -> str:
    """A narrow screen breaks a key after its dots and underscores."""
    return re.sub(r"([._])", r"\1<wbr>", html.escape(key))


_SHOWN = (
    "seed",
    "model.pretrained",
    "packed_sequence.packed_sequence_size",
    "packed_sequence.strategy",
    "training.global_batch_size",
    "training.micro_batch_size",
    "training.max_steps",
    "training.num_epochs",
    "training.precision",
    "optimizer.lr",
    "optimizer.weight_decay",
    "lr_scheduler.warmup_steps",
    "mesh.dp_shard",
    "mesh.cp",
    "peft.r",
)


def _settings(record: RunRecord) -> list[tuple[str, str]]:
    found = []
    for key in _SHOWN:
        node: Any = record.config
        for step in key.split("."):
            node = node.get(step) if isinstance(node, dict) else None
        if node is not None:
            found.append((key, str(node)))
    return found


def _data(record: RunRecord) -> list[tuple[str, str]]:
    """Of packing.json, what says how much there is and what was left out."""
    packing = record.packing
    shown = {
        "documents": "documents",
        "tokens": "tokens",
        "longest_tokens": "longest document, tokens",
        "median_tokens": "median document, tokens",
        "packs": "packs",
        "documents_per_pack_mean": "documents a pack",
        "speedup_over_padding": "fewer slots than padded, times",
        "dropped_documents": "dropped documents",
        "truncated_documents": "truncated documents",
    }
    return [(name, _number(packing[key])) for key, name in shown.items() if packing.get(key)]


def _number(value: float) -> str:
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
