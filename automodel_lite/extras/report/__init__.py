"""report.html: one self-contained page of a run, or of several, drawn by the browser; live while a
run goes on.

page.html.j2         the page, with page.css and page.js inside; the script draws the charts from
                     the JSON in the page
head.html.j2         the numbers above the charts
sections.html.j2     the tables below them
inspection.html.j2   the data before a run, with inspection_sections.html.j2
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

from automodel_lite.config.components import flatten
from automodel_lite.errors import ConfigError, listed
from automodel_lite.extras.report.hangs import hangs_of
from automodel_lite.progress import duration
from automodel_lite.redact import scrub
from automodel_lite.run.durable import write_named
from automodel_lite.run.folder import RunFolder, existing_run, json_object, saved_config

# What a run's folder holds is read back without trust: its files may be cut by a kill, or be
# another program's.
Curve = tuple[list[int], list[float]]  # steps, values


@dataclass(frozen=True)
class RunRecord:
    """One run: its settings, its rows, what its packs look like and how it ended."""

    path: Path
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    packing: dict[str, Any]  # packing.json; empty when there is none
    lengths: dict[str, Any]  # lengths.json; empty when there is none
    status: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)  # run.json: the command and the start block

    @property
    def loss_unit(self) -> str:
        """Returns what the loss is measured in; empty where the run does not say."""
        unit = self.facts.get("loss_unit")
        return unit if isinstance(unit, str) else ""

    def curve(self, key: str) -> Curve:
        """Returns the finite values of `key` over the steps."""
        points = [(row["step"], float(row[key])) for row in self.rows if key in row]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, key: str) -> float | None:
        values = self.curve(key)[1]
        return values[-1] if values else None

    def last_values(self) -> dict[str, Any]:
        """Returns the newest value of everything that was logged, and how the run ended."""
        found = {key: value for row in self.rows for key, value in row.items()}
        return found | {"name": self.name, "state": self.status.get("state")}

    def typical(self, key: str) -> float | None:
        """Returns the median, which the first slow steps do not move."""
        values = self.curve(key)[1]
        return median_high(values) if values else None

    def validation_keys(self) -> list[str]:
        return sorted({key for row in self.rows for key in row if key.startswith("val_loss/")})

    def task_keys(self) -> list[str]:
        """Returns the scores of tasks."""
        return sorted({key for row in self.rows for key in row if key.startswith("task_")})

    def axes(self) -> dict[str, Curve]:
        """Returns document tokens, tokens with a label and minutes until each logged step;
        validation and saving do not count as time.
        """
        steps = [0]
        tokens = [0.0]
        labels = [0.0]
        minutes = [0.0]
        before = 0
        for row in self.rows:
            # both cover the steps since the row before
            if "step_s" in row and "tokens_per_s" in row:
                seconds = row["step_s"] * (row["step"] - before)
                steps.append(row["step"])
                tokens.append(tokens[-1] + row["tokens_per_s"] * seconds)
                labels.append(labels[-1] + row.get("label_tokens_per_s", 0.0) * seconds)
                minutes.append(minutes[-1] + seconds / 60)
                before = row["step"]
        return {"tokens": (steps, tokens), "labels": (steps, labels), "minutes": (steps, minutes)}

    def time_s(self) -> dict[str, float]:
        """Returns phase -> seconds of the whole run."""
        spent: defaultdict[str, float] = defaultdict(float)
        for row in self.rows:
            for key, value in row.items():
                if key.startswith("time_s/") and math.isfinite(value):
                    spent[key.removeprefix("time_s/")] += value
        return dict(spent)


def read_run(path: Path, logged: Sequence[dict[str, Any]] | None = None) -> RunRecord:
    """Raises ConfigError for a folder that is not a run's, or that has logged nothing yet.
    `logged`: the rows of its metrics.jsonl, where they have been read already.
    """
    folder = existing_run(path)
    rows = [_leaves(row) for row in (folder.rows() if logged is None else logged)]
    if not rows:
        hangs = "".join(f" {text}" for text in hangs_of(folder.logs))
        raise ConfigError(f"{path} has logged no step yet.{hangs}")
    config = saved_config(folder.config)
    facts = json_object(folder.facts)
    printed = facts.get("lines")
    found = printed if isinstance(printed, list) else []
    lines = [line for line in found if isinstance(line, list) and [*map(type, line)] == [str, str]]
    return RunRecord(
        path=path,
        name=str(config.get("name", folder.path.name)),
        config=config,
        rows=rows,
        packing=_leaves(json_object(folder.packing)),
        lengths=json_object(folder.lengths),
        status=_leaves(folder.read_status()),
        facts={**facts, "lines": lines},
    )


def _leaves(found: dict[str, Any]) -> dict[str, Any]:
    """The numbers and texts of a row or a small file; one that is damaged, or another program's,
    may hold anything.
    """
    texts = {key for key in found if key in _TEXTS or key.startswith("text/")}
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, str if key in texts else (int, float))
    }


_TEXTS = ("state", "reason", "checkpoint", "strategy")


def differences(records: list[RunRecord]) -> list[tuple[str, list[str]]]:
    """(key, value of each run) of every setting in which runs differ; names and folders are left
    out.
    """
    # a part that was not chosen and an option that was not set look the same
    flat = [
        {key: str(v) for key, v in flatten(record.config) if v not in (None, {})}
        for record in records
    ]
    keys = sorted({key for values in flat for key in values} - {"name", "output_dir"})
    table = [(key, [values.get(key, "-") for values in flat]) for key in keys]
    return [(key, values) for key, values in table if len(set(values)) > 1]


# around what is trained on: no text has them, as `harmless` escapes control characters
TRAINED = "\x02"
READ = "\x03"
MOST_POINTS = 1500  # of one curve in the page: twice the pixels of a wide chart
_RATES = ("tokens_per_s", "mfu_frac", "tflops_per_s", "data_wait_s")
_PACKED = (
    "packs",
    "packed_sequence_size",
    "strategy",
    "documents_per_pack_mean",
    "speedup_over_padding",
)
_LENGTHS = ("documents", "tokens", "longest_tokens", "median_tokens")
# of packing.json; the page's names
_PACKING = (*_LENGTHS, *_PACKED, "dropped_documents", "truncated_documents")
_VALIDATED = (
    *("val_loss", "val_token_accuracy", "val_perplexity"),
    *("val_accuracy", "val_f1", "val_ece", "val_pearson"),
)
_CURVES = ("loss", "grad_norm", "lr", "fill_frac", "memory_gib", *_RATES)


def draw_run(run: Path, refresh_s: int | None) -> None:
    """Writes the page of one run into its folder."""
    write_report([read_run(run)], run, refresh_s)


def write_report(records: list[RunRecord], to: Path, refresh_s: int | None = None) -> Path:
    """Writes `to`/report.html, which reloads itself every `refresh_s`; returns its path."""
    page = page_of(records, refresh_s)
    write_named(to / "report.html", page)
    return to / "report.html"


def page_of(records: list[RunRecord], refresh_s: int | None = None) -> str:
    """Returns the whole page as text."""
    return _template("page.html.j2").render(_contents_of(records, refresh_s))


def parts_of(records: list[RunRecord]) -> dict[str, Any]:
    """Returns the same in parts, for a page that is open: `head` and `sections` as HTML, and the
    `data` of the charts.
    """
    is_running = any(record.status.get("state") == "running" for record in records)
    contents = _contents_of(records, refresh_s=int(is_running) or None)
    return {
        "head": _template("head.html.j2").render(contents),
        "sections": _template("sections.html.j2").render(contents),
        "data": contents["data"],
    }


def _contents_of(records: list[RunRecord], refresh_s: int | None) -> dict[str, Any]:
    """Returns what the templates show. `refresh_s`: the run goes on, its progress is a bar."""
    facts = [facts_of(record) for record in records]
    names = dict.fromkeys(name for of_run in facts for name, _ in of_run)
    first = records[0]
    # steps done over steps planned, from the rows' own estimate of the time left
    done = first.rows[-1]["step"]
    left = first.last("eta_s") or 0.0
    step_s = first.last("step_s")
    data = []  # of the charts
    for record in records:
        keys = [
            *_CURVES,
            *(f"{kind}{key[8:]}" for kind in _VALIDATED for key in record.validation_keys()),
            *record.task_keys(),
        ]
        about = {
            "name": record.name,
            "curves": {key: curve for key in keys if (curve := _thin(*record.curve(key)))[0]},
            "axes": {name: _thin(*curve) for name, curve in record.axes().items()},
            "phases": record.time_s(),
            "lengths": record.lengths,
            "packSize": record.packing.get("packed_sequence_size", 0),
            "lossUnit": record.loss_unit,
        }
        data.append(about)
    return {
        "runs": records,
        "refresh_s": refresh_s,
        "progress": (
            done / (done + left / step_s) if step_s and done else float(not left and done > 0)
        ),
        "facts": facts,
        "loss_units": list(dict.fromkeys(record.loss_unit for record in records)),
        "results": [(name, [dict(of_run).get(name, "-") for of_run in facts]) for name in names],
        "differences": differences(records),
        "samples": [] if len(records) > 1 else samples_of(first),
        "pieces_of": pieces_of,
        "warnings": [f"{one.name}: {text}" for one in records for text in warnings_of(one)],
        "packing": packing_of(first),
        "decisions": decision_lines(RunFolder(first.path).decisions_of()),
        "settings": [pair for pair in flatten(first.config) if pair[1] not in (None, {}, [])],
        "next": RunFolder(first.path).next_commands(first.status.get("state", "")),
        "data": _finite({"runs": data}),
    }


def _finite(value: Any) -> Any:
    """Returns the same with null for numbers that JSON does not have: infinity, NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class Inspection:
    """What recipes/inspect_data.py shows of the data before a run.

    sections  headings and their lines; what is trained on stands between TRAINED and READ
    pictures  of the samples: captions and data URIs
    """

    name: str
    sections: Sequence[tuple[str, Sequence[str]]]
    lengths: dict[str, Any]
    pictures: Sequence[tuple[str, str]] = ()

    def write(self, to: Path) -> Path:
        """Writes a page of its own."""
        write_named(to, _template("inspection.html.j2").render(self._contents()))
        return to

    def parts(self) -> dict[str, Any]:
        """Returns the same in parts, for a page that is open: `sections` as HTML, and the `data` of
        the charts.
        """
        contents = self._contents()
        sections = _template("inspection_sections.html.j2").render(contents)
        return {"sections": sections, "data": contents["data"]}

    def _contents(self) -> dict[str, Any]:
        """Returns what the templates show: samples first, lengths and the mask as charts."""
        by_kind = sorted(self.sections, key=lambda section: not section[0].startswith("SAMPLES"))
        shown = [
            (heading, scrub("\n".join(lines)))
            for heading, lines in by_kind
            if not heading.startswith("ATTENTION")
        ]
        data = {
            "name": self.name,
            "curves": {},
            "axes": {},
            "phases": {},
            "lengths": self.lengths,
            "packSize": sum(self.lengths["pack"]),
        }
        return {
            "name": self.name,
            "sections": shown,
            "pictures": self.pictures,
            "data": {"runs": [data]},
            "marks": (TRAINED, READ),
        }


def _template(name: str) -> Any:
    from jinja2 import Environment, PackageLoader  # a run without a report does not wait for it

    return Environment(
        loader=PackageLoader(__name__, "."), autoescape=True, trim_blocks=True
    ).get_template(name)


def facts_of(record: RunRecord) -> list[tuple[str, str]]:
    """Returns the numbers that one looks for first."""
    last = record.last
    typical = record.typical
    facts: list[tuple[str, Any, str]] = [
        ("step", record.rows[-1]["step"], "{:,}"),
        ("loss", last("loss"), "{:.4f}"),
    ]
    for key in record.validation_keys():
        _, _, val_set = key.partition("/")
        name = val_set.replace("_", " ")
        facts += [
            (f"validation ({name})", last(key), "{:.4f}"),
            (f"perplexity ({name})", last(f"val_perplexity/{val_set}"), "{:,.2f}"),
            (f"tokens right ({name})", last(f"val_token_accuracy/{val_set}"), "{:.1%}"),
            (f"accuracy ({name})", last(f"val_accuracy/{val_set}"), "{:.1%}"),
            (f"macro F1 ({name})", last(f"val_f1/{val_set}"), "{:.1%}"),
            (f"calibration error ({name})", last(f"val_ece/{val_set}"), "{:.1%}"),
            (f"correlation ({name})", last(f"val_pearson/{val_set}"), "{:.3f}"),
        ]
    facts += [
        ("answers right", last("answers_right"), f"{{:.0f}} of {last('answers') or 0:.0f}"),
        ("tokens", record.axes()["tokens"][1][-1], "{:,.0f}"),
        ("time", duration(sum(record.time_s().values())), "{}"),
        ("tokens/s", typical("tokens_per_s"), "{:,.0f}"),
        ("MFU", typical("mfu_frac"), "{:.1%}"),
        ("memory", last("memory_gib"), "{:.1f} GiB"),
        ("fill", record.packing.get("fill_frac"), "{:.1%}"),
    ]
    if (eta := last("eta_s")) is not None and record.status.get("state") == "running":
        facts.append(("left", duration(eta), "{}"))
    return [(name, form.format(value)) for name, value, form in facts if value is not None]


def decision_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns what a line of decisions.jsonl holds: of each set, and of each of its questions."""
    lines = []
    sets = found.get("held_out")
    for name, numbers in sets.items() if isinstance(sets, dict) else ():
        by_question = numbers.get("by_question", {})
        parts = {f"{name}: {question}": one for question, one in by_question.items()}
        at = "at the temperature"
        for label, one in {name: numbers, f"{name}, {at}": numbers["calibrated"], **parts}.items():
            said = f"accuracy {one['accuracy']:.1%}, Brier {one['brier']:.3f}, ECE {one['ece']:.3f}"
            lines.append((label, said))
        lines.append((f"{name}: records right", f"{numbers['records_right']:.1%}"))
    if lines:
        temperature = found["fitted"]["temperature"]
        lines.append(("temperature", f"{temperature:.3g}, after step {found['step']:,}"))
    return lines


def samples_of(record: RunRecord) -> list[tuple[str, list[tuple[int, str]]]]:
    """Returns (prompt, [(step, answer), ...]) of everything that the model was asked, the newest
    answer first.
    """
    asked: dict[str, list[tuple[int, str]]] = {}
    for row in reversed(record.rows):
        for key in row:
            if key.startswith("text/"):
                asked.setdefault(key.removeprefix("text/"), []).append((row["step"], str(row[key])))
    return list(asked.items())


def pieces_of(prompt: str) -> list[tuple[str, str]]:
    """Returns (words, picture): the texts of a prompt, and its images as data URIs."""
    if "![" not in prompt:
        return [(prompt, "")]
    from automodel_lite.parts.images.sources import ImageLimits, pieces_of_prompt  # with Pillow

    return pieces_of_prompt(prompt, ImageLimits(Path.cwd()))


def warnings_of(record: RunRecord) -> list[str]:
    """Returns what the start block noted, ranks that were slow, and steps that were not finite."""
    lines = (line for _, text in record.facts.get("lines", []) for line in text.splitlines())
    noted = [line for line in lines if line.startswith(("NOTE:", "WARNING:"))]
    bad = [
        str(row["step"]) for row in record.rows if not math.isfinite(float(row.get("loss", 0.0)))
    ]
    # of the ranks; the last of them
    slow = [str(row["warning"]) for row in record.rows if "warning" in row][-3:]
    if bad:
        slow.append(f"the loss was not finite at steps {listed(bad)}")
    return noted + slow + hangs_of(RunFolder(record.path).logs)


def packing_of(record: RunRecord) -> list[tuple[str, str]]:
    """Returns of packing.json how much there is and what was left out, and what trees save."""
    shown = [
        (key.replace("_", " "), record.packing[key]) for key in _PACKING if record.packing.get(key)
    ]
    lines = [
        (name, v if isinstance(v, str) else f"{v:,.1f}".removesuffix(".0")) for name, v in shown
    ]
    saved, of_rows = (
        record.last(f"data/train/{name}") for name in ("num_saved_tokens", "num_tokens")
    )
    if saved and of_rows:
        lines.append(
            ("saved by trees", f"{saved:,.0f} tokens of {of_rows:,.0f}, {saved / of_rows:.0%}")
        )
    return lines


def _thin(steps: list[int], values: list[float]) -> Curve:
    """Returns at most MOST_POINTS points: of every stretch the lowest and the highest, so that no
    spike is lost.
    """
    if len(steps) <= MOST_POINTS:
        return steps, values
    width = math.ceil(len(steps) / (MOST_POINTS // 2))
    kept = []
    for start in range(0, len(steps), width):
        stretch = range(start, min(start + width, len(steps)))
        kept += sorted({min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)})
    kept = sorted({*kept, 0, len(steps) - 1})
    return [steps[i] for i in kept], [values[i] for i in kept]
