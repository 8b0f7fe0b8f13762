"""The panels of a report, drawn by matplotlib: each takes axes and the runs, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from automodel_lite.tools.report.record import RunRecord

matplotlib.use("Agg")

SERIES = ("#2f7ed8", "#e0741b", "#1f9d6b", "#b4519d", "#8a72d4", "#9a7b4f")  # readable on white and on near-black
PHASE_COLOURS = {
    "data": "#e0741b",
    "forward": "#2f7ed8",
    "backward": "#1f9d6b",
    "optimizer": "#8a72d4",
    "validation": "#b4519d",
    "checkpoint": "#9a7b4f",
    "other": "#8b8f98",
}


@dataclass(frozen=True)
class Panel:
    """A titled drawing; `draw` returns False when the runs hold nothing for it."""

    key: str
    title: str
    draw: Callable[[Axes, list[RunRecord]], bool]


def draw_loss(axes: Axes, runs: list[RunRecord]) -> bool:
    """Training loss as a line, validation as dots on a broken line of the same colour."""
    for run, colour in zip(runs, _colours(len(runs))):
        axes.plot(*run.curve("loss"), color=colour, linewidth=1.2, label=run.name if len(runs) > 1 else "training")
        for key in run.validation_keys():
            steps, values = run.curve(key)
            name = key.removeprefix("val_loss/").replace("_", " ")
            label, dots = (f"validation ({name})", SERIES[1]) if len(runs) == 1 else (None, colour)
            axes.plot(steps, values, "--o", color=dots, linewidth=0.8, markersize=3, label=label)
    axes.legend(frameon=False)
    return True


def line_panel(key: str, scale: float = 1.0) -> Callable[[Axes, list[RunRecord]], bool]:
    """A draw function of one logged value."""

    def draw(axes: Axes, runs: list[RunRecord]) -> bool:
        curves = [run.curve(key) for run in runs]
        for (steps, values), colour in zip(curves, _colours(len(runs))):
            axes.plot(steps, [value * scale for value in values], color=colour, linewidth=1.2)
        return any(steps for steps, _ in curves)

    return draw


def draw_grad_norm(axes: Axes, runs: list[RunRecord]) -> bool:
    """On a logarithmic scale when a spike would flatten all the rest."""
    values = sorted(value for run in runs for value in run.curve("grad_norm")[1])
    if values and values[0] > 0 and values[-1] > 15 * values[len(values) // 2]:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
    return line_panel("grad_norm")(axes, runs)


def draw_rates(axes: Axes, runs: list[RunRecord]) -> bool:
    """One run: slots, tokens and label tokens a second. Several: tokens a second of each."""
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if len(runs) > 1:
        is_drawn = line_panel("tokens_per_s")(axes, runs)
        axes.set_ylim(bottom=0)
        return is_drawn
    names = (("slots_per_s", "slots"), ("tokens_per_s", "tokens"), ("label_tokens_per_s", "label tokens"))
    for (key, label), colour in zip(names, (SERIES[5], SERIES[0], SERIES[2])):
        axes.plot(*runs[0].curve(key), color=colour, linewidth=1.2, label=label)
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.legend(frameon=False, ncols=3, loc="upper right", handlelength=1.0, columnspacing=1.0)
    return True


def draw_utilisation(axes: Axes, runs: list[RunRecord]) -> bool:
    """MFU in percent where the device's peak is known, else useful FLOP/s."""
    if all(run.curve("mfu_frac")[0] for run in runs):
        axes.set_title("MFU (%)", loc="left")
        return line_panel("mfu_frac", 100)(axes, runs)
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    is_drawn = line_panel("tflops_per_s", 1e12)(axes, runs)
    axes.set_ylim(bottom=0)
    return is_drawn


def draw_fill(axes: Axes, runs: list[RunRecord]) -> bool:
    """Real tokens in each step's slots; what padded batches would have had as a broken line."""
    drawn = line_panel("fill_frac", 100)(axes, runs)
    padded = [run.packing["padded_fill_frac"] * 100 for run in runs if run.packing]
    if padded:
        axes.axhline(padded[0], color=PHASE_COLOURS["other"], linestyle="--", linewidth=0.9)
        axes.annotate("padded batches", (0.98, padded[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set_ylim(0, 105)
    return drawn


def draw_lengths(axes: Axes, runs: list[RunRecord]) -> bool:
    """Documents by their length."""
    found = [run for run in runs if run.lengths]
    for run, colour in zip(found, _colours(len(found))):
        edges, counts = run.lengths["edges"], run.lengths["documents"]
        axes.stairs(counts, edges, color=colour, fill=len(found) == 1, alpha=0.85 if len(found) == 1 else 1)
    if found:
        size = found[0].packing.get("packed_sequence_size")
        if size and size <= found[0].lengths["edges"][-1]:
            axes.axvline(size, color=PHASE_COLOURS["other"], linestyle="--", linewidth=0.9)
            axes.annotate(" pack", (size, 0.96), xycoords=("data", "axes fraction"), va="top")
        axes.set_xlabel("tokens")
    return bool(found)


def draw_mask(axes: Axes, runs: list[RunRecord]) -> bool:
    """Who sees whom in one pack of the first run: a triangle for each document, nothing between them."""
    found = next((run for run in runs if run.lengths.get("pack")), None)
    if found is None:
        return False
    lengths, size = found.lengths["pack"], found.packing["packed_sequence_size"]
    if len(runs) > 1:
        axes.set_title(f"Mask of one pack of {found.name}", loc="left")
    start = 0
    for number, length in enumerate(lengths):
        corners = [(start, start), (start, start + length), (start + length, start + length)]
        axes.fill(*zip(*corners), color=SERIES[number % 3], linewidth=0)
        start += length
    axes.set_xlim(0, size)
    axes.set_ylim(size, 0)
    axes.set_aspect("equal", adjustable="box")
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    return True


def draw_time(axes: Axes, runs: list[RunRecord]) -> bool:
    """Where the time went, in percent: a bar for each phase of one run, or one divided bar for each of several."""
    spent = [run.time_s() for run in runs]
    if not all(sum(phases.values()) for phases in spent):
        return False
    shares = [{phase: 100 * s / sum(phases.values()) for phase, s in phases.items()} for phases in spent]
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    if len(runs) == 1:
        _draw_phases(axes, shares[0])
    else:
        _draw_divided(axes, shares, [run.name for run in runs])
    return True


def _draw_phases(axes: Axes, shares: dict[str, float]) -> None:
    phases = [phase for phase in PHASE_COLOURS if phase in shares]
    bars = axes.barh(phases, [shares[phase] for phase in phases], color=[PHASE_COLOURS[phase] for phase in phases])
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xlim(0, 1.12 * max(shares.values()))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)


def _draw_divided(axes: Axes, shares: list[dict[str, float]], names: list[str]) -> None:
    for row, phases in enumerate(shares):
        left = 0.0
        for phase, colour in PHASE_COLOURS.items():
            share = phases.get(phase, 0.0)
            axes.barh(row, share, left=left, color=colour, height=0.6, label=phase if row == 0 else None)
            left += share
    axes.set_xlim(0, 100)
    axes.set_ylim(len(names) + 0.4 + 1.5, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.grid(False)
    axes.legend(frameon=False, ncols=3, loc="lower center", handlelength=0.8, columnspacing=1.0)


PANELS = (
    Panel("loss", "Loss", draw_loss),
    Panel("lr", "Learning rate", line_panel("lr")),
    Panel("grad_norm", "Gradient norm", draw_grad_norm),
    Panel("rates", "Tokens a second", draw_rates),
    Panel("mfu", "Useful FLOP a second", draw_utilisation),
    Panel("fill", "Pack fill (%)", draw_fill),
    Panel("lengths", "Documents by length", draw_lengths),
    Panel("mask", "Mask of one pack", draw_mask),
    Panel("time", "Where the time went (%)", draw_time),
)


def style(ink: str, line: str) -> dict[Any, Any]:
    """matplotlib settings: `ink` for words and axes, `line` for the grid."""
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": line,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": ink,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": ink,
        "axes.titlesize": 9,
        "axes.titleweight": "bold",
        "font.size": 7.5,
        "grid.color": line,
        "grid.linewidth": 0.6,
        "legend.fontsize": 7,
        "svg.fonttype": "none",
        "text.color": ink,
        "xtick.color": line,
        "xtick.labelcolor": ink,
        "ytick.color": line,
        "ytick.labelcolor": ink,
    }


def draw_on(axes: Axes, panel: Panel, runs: list[RunRecord]) -> bool:
    """Title and panel; False when there was nothing to draw."""
    axes.set_title(panel.title, loc="left")
    axes.locator_params(nbins=5)
    if panel.key not in ("time", "mask"):
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    if panel.key not in ("time", "mask", "lengths"):
        axes.set_xlabel("step", loc="right")
    return panel.draw(axes, runs)


def _colours(number: int) -> list[str]:
    return [SERIES[index % len(SERIES)] for index in range(number)]


def _short(value: float, _: object = None) -> str:
    """12k, 3.4M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:g}"
