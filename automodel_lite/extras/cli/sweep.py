"""`--multirun`: Hydra's sweepers choose the jobs and its launchers start them. Ours is a process
group and a folder for each job, the table of their results, and that the same command again goes on
with what is not finished.

    automodel-lite train --config-name llama_packed --multirun optimizer.lr=1e-3,3e-3 seed=0,1

    runs/llama_packed/0_optimizer.lr-0.001-seed-0/ ...      sweep.json, sweep.md: the results of all
                                                            jobs

Every job starts ranks of its own, as `--nproc` does (by default one for each GPU), and notes how it
ended in the folder jobs/.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf

from automodel_lite.cli.compose import Loader, check_overrides
from automodel_lite.cli.exit_codes import hide_secrets
from automodel_lite.cli.line import is_sweep, split
from automodel_lite.compat import HydraCallbacks
from automodel_lite.config.permissions import register_resolver
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.launched import check_alone
from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.run.durable import write_atomically
from automodel_lite.run.folder import SWEEP_COMMAND, RunFolder, command_line
from automodel_lite.run.stopping import PREEMPTED_EXIT, StoppedEarly

_SHOWN = ("step", "loss", "tokens_per_s", "answers_right")

# for the folder of a job, from what Hydra says of its overrides
register_resolver(
    "file_name", lambda text: re.sub(r"[^\w.-]+", "-", scrub(text))[:120].strip("-"), replace=True
)


def run_sweep(loader: Loader, main: str, line: Namespace) -> int:
    """Runs all jobs and prints their table. Raises ConfigError; RunStoppedError when jobs have
    failed.
    """
    check_alone()
    check_overrides(loader, line.overrides, is_multirun=True)
    os.environ[SWEEP_COMMAND] = command_line()
    # what is the same for all jobs is not part of a job's name; no copies of the settings, with
    # their secrets
    fixed = ",".join(split(text)[0] for text in line.overrides if not is_sweep(text))
    own = [f"hydra.job.config.override_dirname.exclude_keys=[{fixed}]", "hydra.output_subdir=null"]
    load = partial(loader.load_configuration, line.config_name, run_mode=RunMode.MULTIRUN)
    config = load([*line.overrides, *own])
    # Hydra composes each job anew, with the overrides, and 1.4 refuses a sweeper of other settings.
    sampler = OmegaConf.select(config, "hydra.sweeper.sampler")
    if sampler is not None and "seed" in sampler and sampler.seed is None:
        # the same points again when the sweep goes on
        own.append(f"hydra.sweeper.sampler.seed={config.seed}")
    if config.hydra.launcher.get("max_num_timeout") == 0:
        # a SLURM job at its time limit goes back into the queue
        own.append("hydra.launcher.max_num_timeout=100")
    config = load([*line.overrides, *own])
    folder = Path(str(config.hydra.sweep.dir)).resolve()
    launcher = config.hydra.launcher
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is the folder of a run: give the sweep another name=... .")
    if launcher.get("nodes", 1) * launcher.get("tasks_per_node", 1) > 1:
        raise ConfigError(
            "hydra.launcher.nodes and tasks_per_node must be 1: --nproc ranks of one node run a "
            "job; launch/slurm_array.sbatch starts jobs of several nodes."
        )
    # the table is of this sweep; finished jobs report again
    shutil.rmtree(folder / "jobs", ignore_errors=True)
    named = {name: vars(line)[f"config_{name}"] for name in ("name", "dir", "path")}
    flags = [f"--config-{name}={value}" for name, value in named.items() if value]
    sweeper = Plugins.instance().instantiate_sweeper(
        config=config,
        hydra_context=HydraContext(config_loader=loader, callbacks=HydraCallbacks(config)),
        task_function=partial(run_job, main, line.nproc or "auto", flags),
    )
    try:
        sweeper.sweep(arguments=[str(text) for text in config.hydra.overrides.task])
    finally:
        # its idle workers would be waited for, and this process exits without a clean-up:
        if "joblib" in sys.modules:
            sys.modules["joblib.externals.loky"].get_reusable_executor().shutdown()
            atexit._run_exitfuncs()  # joblib's tracker would name leaks
        _scrub_yaml(folder)
        _report(folder)  # its error, which names the jobs that failed, is the last word
    return 0


def run_job(main: str, nproc: str, flags: Sequence[str], raw: DictConfig) -> float | None:
    """Runs one job, in a process that Hydra's launcher chose; returns the validation loss at its
    end, for sweepers that look for the best. `flags` are --config-name and the folders of presets.
    """
    from automodel_lite.extras.cli.launcher import launch  # imports torch

    hide_secrets()
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    base = Path(str(hydra.sweep.dir)).resolve()
    _scrub_yaml(base)
    name = os.path.relpath(folder, base).replace("/", "+")
    # + marks a new key
    settings = scrub(re.sub(r"(^|,)\++", r"\1", hydra.job.override_dirname)) or "as given"
    note: dict[str, Any] = {"job": int(hydra.job.num), "settings": settings, "state": "preempted"}
    print(f"\njob {note['job']}: {settings}", flush=True)
    # where submitit saves its job and puts it back into the queue
    requeue = signal.getsignal(signal.SIGUSR2)
    try:
        run = [f"name={raw.name}+{name}", f"output_dir={folder}"]
        code = launch(main, nproc, [*flags, *hydra.overrides.task, *run])
        if code == PREEMPTED_EXIT and callable(requeue):
            requeue(signal.SIGUSR2, None)
        if code:
            raise StoppedEarly(signal.SIGTERM if code == PREEMPTED_EXIT else signal.SIGINT)
        note |= {**results_of(folder), "state": "finished"}
        return note.get("val_loss")
    except Exception as error:
        note["state"] = "failed"
        print(f"\njob {note['job']} failed: {error}", file=sys.stderr, flush=True)
        raise
    finally:
        path = base / "jobs" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(note, indent=1) + "\n")


def _scrub_yaml(folder: Path) -> None:
    """Removes secrets from what Hydra itself writes, which holds the command line as
    it was typed.
    """
    for path in filter(
        Path.is_file, (folder / "multirun.yaml", folder / "optimization_results.yaml")
    ):
        clean = scrub_tree(OmegaConf.to_container(OmegaConf.load(path), resolve=False))
        write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(clean)))


def _report(folder: Path) -> None:
    """Prints the table and writes it to the sweep's folder. Raises RunStoppedError when jobs have
    failed.
    """
    notes = [(json.loads(path.read_text()), path.stem) for path in (folder / "jobs").glob("*.json")]
    if not notes:
        return
    results = sorted((note for note, _ in notes), key=lambda note: note["job"])
    text = table(results)
    (folder / "sweep.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / "sweep.md").write_text(text)
    print(f"\n{text}\n{folder / 'sweep.md'}", flush=True)
    if failed := sorted(name for note, name in notes if note["state"] == "failed"):
        raise RunStoppedError(
            f"{len(failed)} of {len(results)} jobs failed: {', '.join(failed)} in {folder}"
        )


def results_of(folder: Path) -> dict[str, float]:
    """Returns the last values of a run for the table; `val_loss` is the mean over the validation
    sets.
    """
    last = {key: value for row in RunFolder(folder).rows() for key, value in row.items()}
    losses = {key: value for key, value in last.items() if key.startswith("val_loss/")}
    mean = {"val_loss": sum(losses.values()) / len(losses)} if losses else {}
    return {key: last[key] for key in _SHOWN if key in last} | losses | mean


def table(results: list[dict[str, Any]]) -> str:
    """Returns the results as Markdown; the job with the lowest validation loss is marked."""
    columns = [
        key for key in dict.fromkeys(key for result in results for key in result) if key != "job"
    ]
    scored = [
        result for result in results if "val_loss" in result and result["state"] == "finished"
    ]
    best = min(scored, key=lambda result: float(result["val_loss"]), default=None)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for result in results:
        cells = [result.get(key, "") for key in columns]
        cells = [f"{cell:,.4f}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append(f"| {result['job']}{' *' if result is best else ''} | {' | '.join(cells)} |")
    if best:
        lines += ["", "marked *: the lowest val_loss"]
    return "\n".join(lines) + "\n"
