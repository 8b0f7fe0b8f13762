"""Answer questions with fixed choices: a probability for each choice, calibrated by the temperature
that was fitted on held-out questions.

python recipes/decide.py runs/mine questions.jsonl                      (prints the answers)
python recipes/decide.py runs/mine questions.jsonl --out answers.jsonl
python recipes/decide.py Qwen/Qwen3-0.6B questions.jsonl                (a model as it is)
python recipes/decide.py runs/mine questions.jsonl mesh.cp=2            (settings of a run)

A row has a state and its questions, `{"state", "questions"}` or `{"state", "question", "options"}`;
answers that it brings are compared with the model's. The state is read once for all of its
questions. Choices are asked in the order that the seed gives them, and answered in that of the
file. On several GPUs by torchrun.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_lite.cli import argument_parser, compose_config, job, run_tool
from automodel_lite.cli.line import split
from automodel_lite.config.check import check_config
from automodel_lite.config.model_files import base_of, check_writes
from automodel_lite.config.rules import PATH, Range, argument
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, DataError, printable
from automodel_lite.results import RESULTS
from automodel_lite.run.checkpoint_folder import exported_folder, older_export
from automodel_lite.run.durable import write_atomically

if TYPE_CHECKING:
    from automodel_lite.data.formats.decisions import Decision
    from automodel_lite.evaluation.decisions import Answered

PACK_TOKENS = 4096
IMAGES = "dataset=images"  # of rows that have any


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError."""
    args = parser().parse_args(argv)
    if args.out and args.out.exists():
        raise ConfigError(f"--out {args.out} exists already: choose another file.")
    if not Path(args.file).exists():
        raise ConfigError(f"{args.file} does not exist: name a file of questions.")
    folder = exported_folder(args.model, args.checkpoint)
    if not args.checkpoint and (note := older_export(Path(folder))):
        print(note, file=sys.stderr)
    check_writes(folder)
    check_asks(args)

    from automodel_lite.launched import rank
    from automodel_lite.telemetry.console import Console, quiet_libraries  # --help needs no torch
    from automodel_lite.tools.decisions import read_decisions
    from automodel_lite.training.launch import watch_ranks

    quiet_libraries()
    style = read_decisions(Path(folder))
    config = config_of(folder, args, style.get("written", {}))
    console = Console(is_silent=rank() != 0)
    with watch_ranks():
        found = answer(config, Console(is_silent=rank() != 0 or args.out is None))
    temperature = args.temperature or style.get("temperature", 1.0)
    if rank() == 0:
        show(found, temperature, args.out, console)
    return 0


def parser() -> argparse.ArgumentParser:
    found = argument_parser(__doc__)
    found.add_argument(
        "model", type=argument(str, PATH), help="a run, a model or adapter folder, or a hub name"
    )
    found.add_argument("file", type=argument(str, PATH), help="the questions")
    found.add_argument("settings", nargs="*", default=(), help="settings of a run, mesh.cp=2")
    found.add_argument("--out", type=argument(Path), help="the file to write, a line per row")
    found.add_argument(
        "--checkpoint",
        help="which one the run's export must be of: latest, best, or step_00000500",
    )
    found.add_argument(
        "--temperature",
        type=argument(float, Range(0.01, 100)),
        help="that of probabilities (default: the model's, which decisions.json holds; else 1)",
    )
    return found


def check_asks(args: argparse.Namespace) -> None:
    """Raises ConfigError for a file whose rows are no questions with fixed choices."""
    typed = {key: value or "" for key, value in map(split, args.settings)}
    with suppress(ConfigError):  # columns of no format are no questions either
        if job.rows_of([args.file], typed).preset == "decisions":
            return
    run = shlex.quote(args.model)
    file = shlex.quote(args.file)
    raise ConfigError(
        f"{args.file}: its rows are no questions with fixed choices, "
        '{"state": ..., "question": ..., "options": [...]}',
        key="file",
        cure="name their columns, dataset.columns.state=... dataset.columns.question=... "
        f"dataset.columns.options=...; automodel-lite generate {run} --prompts {file} --out "
        "answers.jsonl answers questions freely",
    )


def config_of(folder: str, args: argparse.Namespace, written: dict[str, Any]) -> Config:
    """Returns the settings that read the file with the model, as its training wrote questions.

    written  of decisions.json
    """
    from automodel_lite.run.folder import json_object

    pretrained = folder
    more = []
    adapter = json_object(Path(folder) / "adapter_config.json")
    if adapter:  # on its base, as training would go on with it
        pretrained = base_of(Path(folder))
        more = ["peft=lora"]
    typed = {key: value or "" for key, value in map(split, args.settings)}
    if "dataset" not in typed:
        with suppress(ConfigError, DataError):  # the file is read below, and named there
            more += [text for text in job.rows_of([args.file], typed).options if text == IMAGES]
    plain = [
        "name=decide",
        f"packed_sequence.packed_sequence_size={PACK_TOKENS}",
        "packed_sequence.overlong=error",
        "training.global_batch_size=null",
        "optimizer.lr=1e-4",  # of no step
        "tokenize.unanswered=ask",
        *more,
    ]
    raw = compose_config("decisions", [*plain, *args.settings])
    raw.model.pretrained = pretrained
    raw.tokenizer.path = folder
    raw.dataset.path = args.file
    if adapter:
        raw.peft.adapter = folder
    if "processor" in raw.dataset and raw.dataset.processor is None:
        raw.dataset.processor = folder
    config = check_config(raw)
    of_model = {
        name: written[name]
        for name in ("choice_prefix", "permute_choices", "template_kwargs")
        if name in written and not any(x.startswith(f"tokenize.{name}") for x in args.settings)
    }
    seed = written.get("seed", config.seed)
    if any(setting.startswith("seed=") for setting in args.settings):
        seed = config.seed
    return replace(config, tokenize=replace(config.tokenize, **of_model), seed=seed)


@dataclass(frozen=True)
class Found:
    """The answers to a file: of each question, in the order of its rows."""

    answered: Answered
    documents: Any
    choice_orders: list[list[int]]
    decisions: list[Decision]


def answer(config: Config, console: Any) -> Found:
    """Answers on the ranks of this job, of which none is left alone."""
    import numpy as np

    from automodel_lite.data.formats.decisions import asked
    from automodel_lite.data.prepare import check_sizes, prepare_data
    from automodel_lite.data.tokens.decisions import order_of
    from automodel_lite.data.tokens.tokenize import style_of
    from automodel_lite.evaluation.decisions import Answered
    from automodel_lite.launched import world_size
    from automodel_lite.progress import activity
    from automodel_lite.training.build import build_model
    from automodel_lite.training.decide import check_positions, decide
    from automodel_lite.training.engine import Engine
    from automodel_lite.training.evaluation import validation_losses
    from automodel_lite.training.resolve import resolve_auto
    from automodel_lite.training.rules import checked_parts
    from automodel_lite.training.summary import data_lines
    from automodel_lite.training.world import open_world

    config = resolve_auto(config, console)
    batches = check_sizes(config, world_size())
    parts = checked_parts(config)
    data = prepare_data(config, batches, parts.packer)
    console.show(data_lines(data))
    check_positions(data, parts.model, parts.teacher)
    mesh = open_world(config)
    with activity("loading the model"):
        decided = decide(parts, data.tokenizer, mesh.shape, mesh.device, trains=False)
        built = build_model(decided, data.tokenizer, mesh)
    console.say("model", f"{parts.model.pretrained}, attention {built.attention}")
    engine = Engine(mesh, built.model, decided)
    (packs,) = data.held_out.values()
    rows: list[np.ndarray] = []
    validation_losses(engine, packs, data, lambda: False, rows)
    mesh.barrier()
    mesh.close()
    answered = Answered.of(rows)
    documents = data.documents.train
    decisions = [*asked(answered.numbers.tolist(), documents)]
    style = style_of(config)
    orders = [order_of(decision, style) for decision in decisions]
    return Found(answered, documents, orders, decisions)


def rows_of(found: Found, temperature: float) -> Iterator[dict[str, Any]]:
    """Yields a row of the file with its answers and probabilities, by question."""
    from automodel_lite.data.formats.decisions import record_of

    probs = found.answered.probs(temperature)
    last = -1
    row: dict[str, Any] = {}
    for number, decision, order, own in zip(
        found.answered.numbers.tolist(), found.decisions, found.choice_orders, probs
    ):
        if record_of(number) != last:
            if row:
                yield row
            last = record_of(number)
            row = {"row": found.documents.where(last), "answers": {}, "probabilities": {}}
            document = found.documents[last]
            if "id" in document:
                row = {"id": document["id"], **row}
        of_choice = {place: float(own[at]) for at, place in enumerate(order)}
        chosen = max(of_choice, key=of_choice.__getitem__)
        row["answers"][decision.name] = decision.value_of(chosen)
        row["probabilities"][decision.name] = {
            name: of_choice[place] for place, (name, _) in enumerate(decision.choices)
        }
    if row:
        yield row


def show(found: Found, temperature: float, out: Path | None, console: Any) -> None:
    """Writes or prints the answers, and how many of those that are known are right."""
    lines = []
    num_rows = 0
    for row in rows_of(found, temperature):
        num_rows += 1
        if out:
            lines.append(json.dumps(row, ensure_ascii=False))
            continue
        print(printable(str(row.get("id", row["row"]))))
        for name, chosen in row["answers"].items():
            probs = row["probabilities"][name]
            said = ", ".join(f"{choice} {p:.3f}" for choice, p in probs.items())
            print(f"  {printable(name)}: {printable(json.dumps(chosen))}  ({printable(said)})")
    if out:
        write_atomically(out, "".join(f"{line}\n" for line in lines))
        console.say("written", f"{num_rows:,} rows, {len(found.decisions):,} answers: {out}")
    known = found.answered.known()
    RESULTS.update({"questions": len(found.decisions), "temperature": temperature})
    if len(known):
        numbers = known.metrics(temperature)
        RESULTS.update(numbers | {"known": len(known)})
        said = ", ".join(f"{name} {value:.4f}" for name, value in numbers.items())
        console.say("compared", f"{len(known):,} answers are known: {said}")


if __name__ == "__main__":
    run_tool(main)
