"""The folder of a run: one for all ranks and every restart, no timestamps; the same command again
continues in it.

runs/<name>/
    config.yaml       resolved, secrets left out      metrics.jsonl     one object per logged step
    checkpoints/      step_00000100/ ...              hf/               the exported model
    packing.json      what the packs cost and gain    lengths.json      documents by length, and one
                      pack
    run.json          the command, the start block    report.html      the run on one page, live
    decisions.jsonl   how well held-out questions with fixed choices were answered, by validation
    ledger.jsonl      one chained line per step: what automodel-lite verify RUN checks
    STATUS.json       running, preempted, interrupted, finished or failed: how the last process of
                      this run ended
    logs/             stacks and errors of each rank    bad_steps/        steps whose numbers were
                      not finite
    profile/          traces of training.profile_steps
    run.lock          who is at work here
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from automodel_lite.config.components import flatten
from automodel_lite.config.permissions import check_yaml
from automodel_lite.config.rules import OneOf
from automodel_lite.config.schema import Config, resumable_settings
from automodel_lite.config.signatures import with_options
from automodel_lite.errors import (
    ConfigError,
    did_you_mean_path,
    explained,
    folders_with,
    format_value,
    one_line,
)
from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.run.checkpoint_folder import is_stale, run_of_checkpoint, survey
from automodel_lite.run.durable import write_atomically

_BEFORE_THE_RUN = re.compile(r"logs|run\.lock.*|STATUS\.json|\..*")
"""What may be in the folder of a run that was killed, or failed, in its first second: before
config.yaml is there.
"""


SWEEP_COMMAND = "AUTOMODEL_LITE_SWEEP"  # in the processes that a sweep starts


class RunFolder:
    """Paths and small files of a run. Everything that is written is written by rank 0."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).resolve()
        self.config = self.path / "config.yaml"
        self.config_text = ""  # what this process wrote there; each checkpoint keeps it
        self.metrics = self.path / "metrics.jsonl"
        self.decisions = self.path / "decisions.jsonl"
        self.packing = self.path / "packing.json"
        self.lengths = self.path / "lengths.json"
        self.facts = self.path / "run.json"
        self.checkpoints = self.path / "checkpoints"
        self.hf = self.path / "hf"
        self.status = self.path / "STATUS.json"
        self.logs = self.path / "logs"
        self.bad_steps = self.path / "bad_steps"
        self.lock = self.path / "run.lock"

    def check_place(self) -> None:
        """Raises ConfigError when the folder belongs to something else than a run."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"output_dir={self.path} is a file.")
        if self.logs.is_symlink():  # a run of a stranger's: nothing is written through it
            raise ConfigError(f"{self.logs} is a link: remove it, or choose another name=... .")
        if not self.config.is_file():
            names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
            if not all(map(_BEFORE_THE_RUN.fullmatch, names)):
                raise ConfigError(
                    f"output_dir={self.path} is not empty and is not the folder of a run: choose "
                    "another name=... ."
                )

    def check(self, config: Config) -> None:
        """Raises ConfigError when the folder belongs to something else, or to a run with other
        settings.
        """
        self.check_place()
        is_run = self.config.is_file() and self.checkpoints.is_dir()
        if config.checkpoint.accept_changes or not is_run:
            return
        if changes := self.changes(config):
            raise ConfigError(
                f"{self.path} was started with different settings:\n  "
                + "\n  ".join(changes)
                + "\nStart a new run with name=..., or continue this one with "
                "checkpoint.accept_changes=true."
            )

    def changes(self, config: Config) -> list[str]:
        """Returns what settings that shape the numbers were and are, of those that differ; one that
        the run's version did not know yet had its default.
        """
        defaults = asdict(Config())
        saved = OmegaConf.to_container(
            OmegaConf.merge(defaults, with_options(saved_config(self.config)))
        )
        old = dict(flatten(saved))
        new = dict(flatten(plain(config)))
        resumable = tuple(f"{key}." for key in resumable_settings())  # keys, and whole groups
        return [
            f"{key}: was {format_value(old.get(key))}, now {format_value(new.get(key))}"
            for key in {**old, **new}
            if old.get(key) != new.get(key) and not f"{key}.".startswith(resumable)
        ]

    def open(self, config: Config) -> None:
        """Makes the folder and writes config.yaml."""
        with self.explain_os_errors():
            self.logs.mkdir(parents=True, exist_ok=True)
            self.config_text = config_yaml(config)
            write_atomically(self.config, self.config_text)
            self.checkpoints.mkdir(exist_ok=True)  # last: it says that a run has begun

    def restore_config(self) -> None:
        """Takes config.yaml from the newest checkpoint, where the folder has none."""
        if self.config.is_file() or not self.checkpoints.is_dir():
            return
        for checkpoint in survey(self.checkpoints)[0][:1]:
            saved = checkpoint / "config.yaml"
            if saved.is_file():
                write_atomically(self.config, saved.read_text(encoding="utf-8"))

    def explain_os_errors(self) -> AbstractContextManager[None]:
        """Raises ConfigError for what the file system refuses: a full disk, a folder that is
        read-only.
        """
        return explained(f"output_dir={self.path} cannot be written")

    @property
    def display_path(self) -> str:
        """Returns the path as one types it: relative to the working directory where it
        is inside.
        """
        with suppress(OSError):  # the working directory may be gone
            if self.path.is_relative_to(Path.cwd()):
                return os.path.relpath(self.path)
        return str(self.path)

    def write_facts(
        self,
        lines: Sequence[tuple[str, str]],
        kind: str = "",
        head: Mapping[str, Any] | None = None,
        loss_unit: str = "",
    ) -> None:
        """run.json: the command line and where it was started, the kind of the documents, the
        classes of a score `head`, what the loss is measured in, and the (topic, text) lines that
        the run printed at its start.
        """
        here = ""
        with suppress(OSError):  # the working directory may be gone
            here = os.getcwd()
        started = {
            "folder": here,
            "host": socket.gethostname(),
            "slurm_job": os.environ.get("SLURM_JOB_ID", ""),
        }
        facts = {
            "command": scrub(command_line()),
            "started": started,
            "kind": kind,
            "head": dict(head or {}),
            "loss_unit": loss_unit,
            "lines": [[topic, scrub(text)] for topic, text in lines],
        }
        write_atomically(self.facts, json.dumps(facts, indent=2) + "\n")

    def next_commands(self, state: str) -> list[str]:
        """What to type next, by how the run ended; `generate` and vLLM get an export of the newest
        checkpoint only.
        """
        facts = json_object(self.facts)
        command = str(facts.get("command", ""))
        if state in ("preempted", "interrupted", "failed") and command:
            checkpoint = self.read_status().get("checkpoint")
            return [
                f"{command}   # {f'continues from {checkpoint}' if checkpoint else 'starts again'}"
            ]
        if state != "finished":
            return []
        script = Path(sys.executable).with_name("automodel-lite")
        words = [_program_name(script)]
        if not script.exists():
            words = [_program_name(Path(sys.executable)), "-m", "automodel_lite"]
        ours = shlex.join(words)
        run = shlex.quote(self.display_path)
        fresh = [
            name
            for name in ("hf", "adapter")
            if (self.path / name).is_dir() and not is_stale(self.path / name)
        ]
        raw = " --raw" if facts.get("kind") == "text" else ""  # no chat template, as it was trained
        generate = f'{ours} generate {run} "..."{raw}'
        if facts.get("kind") == "decisions":
            generate = f"{ours} decide {run} questions.jsonl"
        export = f"{ours} export {run}"
        if facts.get("head"):
            generate = f"{ours} evaluate {run} held_out.jsonl"
        if not fresh:
            return [f"{export}   # writes the newest checkpoint as a Hugging Face folder", generate]
        # an adapter's score head is evaluated once it is merged
        if facts.get("head") and "hf" not in fresh:
            return [f"{export}   # merges the adapter and its head", generate]
        return [
            generate,
            f"vllm serve {run}/hf"
            if "hf" in fresh
            else f"{export}   # the adapter merged, for vLLM",
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Returns those of metrics.jsonl, without lines that a kill has cut, or that
        are not ours.
        """
        text = self.metrics.read_text(errors="replace") if self.metrics.is_file() else ""
        return rows_in(text)

    def decisions_of(self, step: int | None = None) -> dict[str, Any]:
        """Returns the last line of decisions.jsonl, or that of a step; {} without one."""
        text = ""
        if self.decisions.is_file():
            text = self.decisions.read_text(errors="replace")
        found = [row for row in rows_in(text) if step in (None, row["step"])]
        return found[-1] if found else {}

    def note_decisions(self, step: int, found: Mapping[str, Any]) -> None:
        """Adds a validation to decisions.jsonl; nothing where nothing was found."""
        if found:
            with self.decisions.open("a") as file:
                file.write(f"{json.dumps({'step': step, **found})}\n")

    def rewind_metrics(self, step: int, validates_again: bool = False) -> None:
        """Drops the rows after `step`, which a continued run writes again, and a torn last line;
        and those of the validation of `step` where it is made again.
        """
        for file in (self.metrics, self.decisions):
            if not file.is_file():
                continue
            kept = []
            for row in rows_in(file.read_text(errors="replace")):
                of_validation = file == self.decisions or any(
                    name.startswith(("val_", "text/")) for name in row
                )
                is_again = validates_again and of_validation and row["step"] == step
                if row["step"] <= step and not is_again:
                    kept.append(json.dumps(row) + "\n")
            write_atomically(file, "".join(kept))

    def write_status(
        self,
        state: str,
        step: int | None,
        reason: str = "",
        checkpoint: str | None = None,
        is_saved: bool = True,
    ) -> None:
        """state      running | preempted, interrupted (start the same command again) | finished |
        failed
        is_saved   of a finished run: its last step is a checkpoint; else the same command writes it
        """
        facts = {"state": state, "step": step, "reason": scrub(reason), "checkpoint": checkpoint}
        if not is_saved:
            facts["is_saved"] = False
        try:
            write_atomically(self.status, json.dumps(facts) + "\n")
        except OSError:
            if not self.status.is_file():
                raise
            # no room for another file: over the old one
            with open(self.status, "r+", encoding="utf-8") as file:
                file.write(json.dumps(facts) + "\n")
                file.truncate()

    def end(
        self, state: str, reason: str, step: int | None = None, checkpoint: str | None = None
    ) -> None:
        """The same for a run that ends, from any rank: the first cause is kept, and a full disk
        must not hide it.
        """
        now = self.read_status()
        if now.get("state") != "running":
            return
        with suppress(OSError):
            self.write_status(
                state, step or now.get("step"), reason[:2000], checkpoint or now.get("checkpoint")
            )

    def read_status(self) -> dict[str, Any]:
        """Returns the content of STATUS.json; {} when it is missing or damaged."""
        return json_object(self.status)

    def saved_config(self) -> dict[str, Any]:
        """Returns the settings of the run that has begun here, by dotted keys; {} for none."""
        if not self.config.is_file() or not self.checkpoints.is_dir():
            return {}
        return dict(flatten(saved_config(self.config)))

    def finished_message(self, config: Config) -> str | None:
        """Returns the message for a finished run that is started again; None when there is work to
        do.
        """
        self.check(config)
        status = self.read_status()
        has_ended = status.get("state") == "finished" and status.get("is_saved", True)
        if not has_ended or not self.config.is_file() or self.changes(config):
            return None
        length = "max_steps" if config.training.max_steps else "num_epochs"
        return (
            f"{self.path} is finished (step {status.get('step')}): nothing to do. Start another "
            f"run with name=..., continue with a larger training.{length} and "
            "checkpoint.accept_changes=true, or write its model again with automodel-lite export "
            f"{shlex.quote(str(self.path))}."
        )


def existing_run(path: Path, flag: str = "") -> RunFolder:
    """Raises ConfigError, which begins with `flag`, for a folder that is not a run's."""
    folder = RunFolder(path)
    if run := run_of_checkpoint(path):
        raise ConfigError(f"{flag}{path} is a checkpoint of a run: name the run, {run}.")
    if folder.config.is_file():
        return folder
    if path.is_dir():
        why = f"it has no config.yaml{folders_with('config.yaml', path)}"
    elif path.exists():
        why = "it is a file."
    else:
        why = f"there is no such folder{did_you_mean_path(str(path))}"
    raise ConfigError(f"{flag}{path} is not the folder of a run: {why}")


def command_line() -> str:
    """The command line of this run, of the sweep or the launcher where there is one, as it can be
    typed again here.
    """
    if SWEEP_COMMAND in os.environ:
        return os.environ[SWEEP_COMMAND]
    argv = sys.orig_argv
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the launcher is the parent of its ranks
        with suppress(OSError):
            argv = (
                Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")[:-1]
                or argv
            )
    python, *rest = argv
    if rest and "/" in python and Path(rest[0]).absolute().parent == Path(python).absolute().parent:
        python, *rest = rest  # a script that was installed beside its interpreter
    return shlex.join([_program_name(Path(python)), *rest])


def _program_name(program: Path) -> str:
    """Its name, if that is what the shell finds; otherwise its path."""
    found = shutil.which(program.name)
    return program.name if found and Path(found).parent == program.parent else str(program)


def rows_in(text: str) -> list[dict[str, Any]]:
    """Returns the rows among lines of metrics.jsonl; one is a JSON object with a `step`."""
    return [row for row in map(_object, text.splitlines()) if type(row.get("step")) is int]


def json_object(path: Path) -> dict[str, Any]:
    """Returns the content of a small file; {} when it is missing or damaged: none is needed to
    continue.
    """
    try:
        return _object(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def plain(config: Config) -> dict[str, Any]:
    """Returns the configuration as nested dicts of plain values, for dumps, trackers and
    comparisons: no secrets.
    """
    values = asdict(config)
    # what names something of the program stays: a run whose `optimizer._target_` was scrubbed could
    # not be read
    targets = {value for key, value in flatten(values) if key.endswith("_target_")}
    return scrub_tree(values, kept=_choices() | targets)


@lru_cache(maxsize=1)
def _choices() -> frozenset[str]:
    """Returns every value that a rule of the schema lists."""
    return frozenset(
        choice
        for part in [
            Config,
            *(hint for hint in get_type_hints(Config).values() if is_dataclass(hint)),
        ]
        for hint in get_type_hints(part, include_extras=True).values()
        for rule in get_args(hint)[1:]
        if isinstance(rule, OneOf)
        for choice in rule.choices
    )


def config_yaml(config: Config) -> str:
    """Returns the resolved configuration as it is kept beside results."""
    return OmegaConf.to_yaml(plain(config))


def saved_config(path: Path) -> dict[str, Any]:
    """Returns a run's config.yaml as nested dicts; raises ConfigError when it is damaged."""
    check_yaml(path)
    try:
        saved = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        saved = None
        reason = one_line(error, 200)
    else:
        reason = "it contains no settings"
    if not isinstance(saved, dict) or "name" not in saved:
        raise ConfigError(
            f"{path} cannot be read ({reason}): restore it, for instance from the newest "
            "checkpoint's folder, or start a new run with name=... ."
        )
    return {str(key): value for key, value in saved.items()}
