"""`--multirun`: Hydra's sweepers choose the jobs and its launchers start them. Ours is a process group and a folder for
each job, the table of their results, and that the same command again goes on with what is not finished.

    automodel-lite train --config-name llama_packed --multirun optimizer.lr=1e-3,3e-3 seed=0,1

    runs/llama_packed/0_lr-0.001_seed-0/ ...      sweep.json, sweep.md: the results of all jobs

Every job starts ranks of its own, as `--nproc` does (one by default), and leaves a note of what it is and how it ended
in the folder jobs/.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from automodel_lite.cli.compose import Loader, check_overrides
from automodel_lite.cli.exit_codes import hide_secrets
from automodel_lite.cli.line import Line, is_sweep, split
from automodel_lite.cli.recipes import Recipe
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.launched import world_size
from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.run.durable import write_atomically
from automodel_lite.run.folder import SWEEP_COMMAND, RunFolder, typed_command
from automodel_lite.run.stopping import PREEMPTED_EXIT, StoppedEarly

_MAX_TIMEOUTS = 100  # times that a SLURM job which has reached its time limit goes back into the queue
_SHOWN = ("step", "loss", "tokens_per_s", "answers_right")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # of a torchrun with one process
_UNTIL_KILLED_S = 300.0


def run_sweep(loader: Loader, recipe: Recipe, line: Line) -> int:
    """Runs all jobs and prints their table. Raises ConfigError; RunStoppedError when jobs have failed."""
    check_overrides(loader, line.overrides, is_multirun=True)
    if world_size() > 1:
        raise ConfigError(
            "--multirun starts the ranks of each job itself: start it in one process, automodel-lite train "
            f"--nproc {world_size()} ... --multirun, without torchrun."
        )
    for name in _OF_A_RANK:
        os.environ.pop(name, None)
    os.environ[SWEEP_COMMAND] = typed_command()
    # what is the same for all jobs is not part of a job's name
    fixed = ",".join(split(text)[0] for text in line.overrides if not is_sweep(text))
    own = [f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]", "hydra.mode=MULTIRUN"]
    config = loader.load_configuration(line.config_name, [*line.overrides, *own], RunMode.MULTIRUN)
    folder = Path(str(config.hydra.sweep.dir)).resolve()
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is the folder of a run: give the sweep another name=... .")
    for note in (folder / "jobs").glob("*.json"):  # the table is of this sweep; finished jobs say so again
        note.unlink()
    with read_write(config), open_dict(config):
        sampler = OmegaConf.select(config, "hydra.sweeper.sampler")
        if sampler is not None and "seed" in sampler and sampler.seed is None:
            sampler.seed = config.seed  # the same points again when the sweep goes on
        if config.hydra.launcher.get("max_num_timeout") == 0:
            config.hydra.launcher.max_num_timeout = _MAX_TIMEOUTS
    named = {name: vars(line)[f"config_{name}"] for name in ("name", "dir", "path")}
    flags = [f"--config-{name}={value}" for name, value in named.items() if value]
    job = SweepJob(recipe, line.launch, tuple(flags))
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    sweeper = Plugins.instance().instantiate_sweeper(config=config, hydra_context=context, task_function=job)
    try:
        sweeper.sweep(arguments=[str(text) for text in config.hydra.overrides.task])
    finally:
        _report(folder, config)  # its error, which names the jobs that failed, is the last word
    return 0


def _report(folder: Path, config: DictConfig) -> None:
    """Prints the table and writes it to the sweep's folder. Raises RunStoppedError when jobs have failed."""
    if "joblib" in sys.modules:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)
        atexit._run_exitfuncs()  # this process will exit without its clean-up: joblib's tracker would name leaks
    _scrub_yaml(folder, "multirun.yaml", "optimization_results.yaml")
    metric = str(config.sweep.metric)
    notes = [json.loads(path.read_text()) for path in (folder / "jobs").glob("*.json")]
    results = []
    for note in sorted(notes, key=lambda note: (note["job"], note["folder"])):
        result = {key: note[key] for key in ("job", "settings", "state")}
        for row in RunFolder(folder / note["folder"]).rows():
            result |= {k: v for k, v in row.items() if k in (*_SHOWN, metric) or k.startswith("val_loss/")}
        with suppress(ConfigError):
            value = metric_of(folder / note["folder"], metric)
            result |= {} if value is None else {metric: value}
        results.append(result)
    if not results:
        return
    is_highest_best = str(OmegaConf.select(config, "hydra.sweeper.direction")).endswith("maximize")
    text = table(results, metric, is_highest_best)
    (folder / "sweep.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "sweep.md").write_text(text)
    print(f"\n{text}\n{folder / 'sweep.md'}", flush=True)
    if failed := sorted(note["folder"] for note in notes if note["state"] == "failed"):
        raise RunStoppedError(f"{len(failed)} of {len(results)} jobs failed: {', '.join(failed)} in {folder}")


@dataclass(frozen=True)
class SweepJob:
    """Hydra's task function: one job of a sweep. Launchers send it to other processes."""

    recipe: Recipe
    launch: dict[str, Any]
    flags: tuple[str, ...]  # --config-name and the folders of presets

    def __call__(self, raw: DictConfig) -> float | None:
        """Returns the value of `sweep.metric` at its end, for sweepers that look for the best."""
        hide_secrets()
        hydra: Any = HydraConfig.get()
        folder, base = Path(hydra.runtime.output_dir), Path(str(hydra.sweep.dir)).resolve()
        _scrub_yaml(base, "multirun.yaml")
        if hydra.output_subdir:
            _scrub_yaml(folder / hydra.output_subdir, "config.yaml", "hydra.yaml", "overrides.yaml")
        name = os.path.relpath(folder, base)
        settings = scrub(", ".join(varied(hydra))) or "as given"
        note = {"job": int(hydra.job.num), "folder": name, "settings": settings, "state": "preempted", "error": ""}
        launch, is_first = _across_nodes(self.launch)
        if is_first:
            print(f"\njob {note['job']}: {settings}", flush=True)
        requeue = signal.getsignal(signal.SIGUSR2)  # where submitit saves its job and puts it back into the queue
        run = [f"name={raw.name}+{name.replace('/', '+')}", f"output_dir={folder}"]
        try:
            code = self.recipe.launch(launch, [*self.flags, *hydra.overrides.task, *run])
            if code:
                if code == PREEMPTED_EXIT and callable(requeue):
                    requeue(signal.SIGUSR2, None)
                    time.sleep(_UNTIL_KILLED_S)  # not the first node: the scheduler ends it
                raise StoppedEarly(signal.SIGTERM if code == PREEMPTED_EXIT else signal.SIGINT)
            note["state"] = "finished"
            return metric_of(folder, str(raw.sweep.metric))
        except Exception as error:
            note |= {"state": "failed", "error": scrub(str(error))}
            if is_first:
                print(f"\njob {note['job']} failed: {error}", file=sys.stderr, flush=True)
            raise
        finally:
            if is_first:
                path = base / "jobs" / f"{name.replace('/', '_')}.json"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(note, indent=1) + "\n")


def _across_nodes(launch: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns the launcher's flags on this node of a submitit job, and whether it is the first. Raises ConfigError."""
    if "SUBMITIT_EXECUTOR" not in os.environ:
        return launch, True
    import submitit

    task = submitit.JobEnvironment()
    if task.num_tasks > task.num_nodes:
        raise ConfigError("hydra.launcher.tasks_per_node must be 1: each task starts the ranks of its node, --nproc.")
    if task.num_nodes > 1:
        port = 20000 + int(re.sub(r"\D", "", task.raw_job_id)) % 20000
        host = os.environ.get("MASTER_ADDR", task.hostnames[0])
        launch = launch | {"nnodes": task.num_nodes, "rdzv": f"{host}:{port}", "rdzv_id": task.raw_job_id}
    return launch, task.global_rank == 0


def _scrub_yaml(folder: Path, *names: str) -> None:
    """Removes secrets from what Hydra itself writes, which holds the command line as it was typed."""
    for path in filter(Path.is_file, (folder / name for name in names)):
        written = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if written != (clean := scrub_tree(written)):
            write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(clean)))


def varied(hydra: Any) -> list[str]:
    """Returns the overrides of this job that differ between jobs."""
    fixed = set(hydra.job.config.override_dirname.exclude_keys)
    texts = [text.lstrip("+") for text in hydra.overrides.task]
    return [text for text in texts if split(text)[0] not in fixed]


def folder_name(number: int, settings: Sequence[str]) -> str:
    """`0_lr-0.001_seed-0`"""
    texts = map(scrub, settings)
    short = "_".join(text.split("=", 1)[0].split(".")[-1] + "-" + text.split("=", 1)[-1] for text in texts)
    return "_".join([str(number), re.sub(r"[^A-Za-z0-9_.-]+", "-", short)])[:120].rstrip("_")


OmegaConf.register_new_resolver(
    "sweep_folder", lambda: folder_name(HydraConfig.get().job.num, varied(HydraConfig.get())), replace=True
)


def metric_of(folder: Path, metric: str) -> float | None:
    """Returns the last value of a key of metrics.jsonl; `val_loss` is the mean over the validation sets.

    None for a recipe that trains nothing. Raises ConfigError for a key that the run does not log.
    """
    from automodel_lite.telemetry.callbacks import value_of  # imports torch

    rows = RunFolder(folder).rows()
    if not rows:
        return None
    last = {key: float(value) for row in rows for key, value in row.items() if isinstance(value, (int, float))}
    if (value := value_of(last, metric)) is None:
        raise ConfigError(f"sweep.metric={metric}: the run does not log it; it logs {', '.join(sorted(last))}.")
    return value


def table(results: list[dict[str, Any]], metric: str = "val_loss", is_highest_best: bool = False) -> str:
    """Returns the results as Markdown; the job with the best value of the metric is marked."""

    def show(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
        return str(value)

    columns = [key for key in dict.fromkeys(key for result in results for key in result) if key != "job"]
    scored = [result for result in results if isinstance(result.get(metric), float) and result["state"] == "finished"]
    choose = max if is_highest_best else min
    best = choose(scored, key=lambda result: float(result[metric]), default=None)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for result in results:
        mark = f"{result['job']}{' *' if result is best else ''}"
        lines.append(f"| {mark} | {' | '.join(show(result.get(key, '')) for key in columns)} |")
    note = f"\nmarked *: the {'highest' if is_highest_best else 'lowest'} {metric}\n" if best else ""
    return "\n".join(lines) + "\n" + note
