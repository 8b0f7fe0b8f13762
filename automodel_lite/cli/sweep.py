"""`--multirun`: Hydra's sweepers choose the jobs and its launchers start them. Ours is a folder for each job, the table
of their results, and that the same command again goes on with what is not finished.

    automodel-lite train --config-name llama_packed --multirun optimizer.lr=1e-3,3e-3 seed=0,1

    runs/llama_packed/0_lr-0.001_seed-0/ ...      sweep.json, sweep.md: the results of all jobs

Hydra's basic launcher runs the jobs one after another; with `--nproc 4` each of them starts its own four ranks. Each
job leaves a note of what it is and how it ended in the folder jobs/.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from automodel_lite.cli.line import split
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.launched import world_size
from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.run.durable import write_atomically
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.stopping import INTERRUPTED_EXIT, PREEMPTED_EXIT, SIGNALS, StoppedEarly

if TYPE_CHECKING:
    from automodel_lite.cli.hydra_app import Job

_MAX_TIMEOUTS = 100  # times that a SLURM job which has reached its time limit goes back into the queue
_SHOWN = ("step", "loss", "tokens_per_s", "answers_right")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Sweep:
    """What this process knows of the sweep that it has started."""

    folder: Path
    metric: str
    is_highest_best: bool

    @classmethod
    def started(cls, config: DictConfig) -> Sweep:
        """Checks and completes the composed settings of a sweep, before its sweeper is built. Raises ConfigError."""
        folder = Path(str(config.hydra.sweep.dir)).resolve()
        if (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder} is the folder of a run: give the sweep another name=... .")
        # One process group per job: ranks that outlive a job would find its keys in the launcher's store, and hang.
        if world_size() > 1:
            raise ConfigError(
                "--multirun starts the ranks of each job itself: start it in one process, automodel-lite train "
                f"--nproc {world_size()} ... --multirun, without torchrun."
            )
        for name in _OF_A_RANK:
            os.environ.pop(name, None)
        for note in (folder / "jobs").glob("*.json"):  # the table is of this sweep; finished jobs say so again
            note.unlink()
        with read_write(config), open_dict(config):
            sampler = OmegaConf.select(config, "hydra.sweeper.sampler")
            if sampler is not None and "seed" in sampler and sampler.seed is None:
                sampler.seed = config.seed  # the same points again when the sweep goes on
            if config.hydra.launcher.get("max_num_timeout") == 0:
                config.hydra.launcher.max_num_timeout = _MAX_TIMEOUTS
        direction = str(OmegaConf.select(config, "hydra.sweeper.direction") or "").rpartition(".")[2]
        return cls(folder, str(config.sweep.metric), direction == "maximize")

    def close(self) -> None:
        """Prints the table and writes it to the sweep's folder. Raises RunStoppedError when jobs have failed."""
        if "joblib" in sys.modules:
            from joblib.externals.loky import get_reusable_executor

            get_reusable_executor().shutdown(wait=True)
            atexit._run_exitfuncs()  # this process will exit without its clean-up: joblib's tracker would name leaks
        scrub_yaml([self.folder / name for name in ("multirun.yaml", "optimization_results.yaml")])
        notes = [json.loads(path.read_text()) for path in (self.folder / "jobs").glob("*.json")]
        results = [self._result(note) for note in sorted(notes, key=lambda note: (note["job"], note["folder"]))]
        if not results:
            return
        text = table(results, self.metric, self.is_highest_best)
        (self.folder / "sweep.json").write_text(json.dumps(results, indent=1) + "\n")
        (self.folder / "sweep.md").write_text(text)
        print(f"\n{text}\n{self.folder / 'sweep.md'}", flush=True)
        if failed := [note["folder"] for note in notes if note["state"] == "failed"]:
            names = ", ".join(sorted(failed))
            raise RunStoppedError(f"{len(failed)} of {len(results)} jobs failed: {names} in {self.folder}")

    def _result(self, note: dict[str, Any]) -> dict[str, Any]:
        """What the table says of a job."""
        result = {key: note[key] for key in ("job", "settings", "state")}
        folder = self.folder / note["folder"]
        for row in RunFolder(folder).rows():
            result |= {k: v for k, v in row.items() if k in (*_SHOWN, self.metric) or k.startswith("val_loss/")}
        with suppress(ConfigError):
            value = metric_of(folder, self.metric)
            return result if value is None else {**result, self.metric: value}
        return result


def run_job(job: Job, raw: DictConfig) -> float | None:
    """Runs one job of a sweep; returns the value of `sweep.metric` at its end, for sweepers that look for the best.

    Raises what the job raised.
    """
    hydra: Any = HydraConfig.get()
    _join_submitit()
    requeue = SIGNALS.renew()
    folder, base = Path(hydra.runtime.output_dir), Path(str(hydra.sweep.dir)).resolve()
    name = os.path.relpath(folder, base)
    settings = scrub(", ".join(varied(hydra))) or "as given"
    note = {"job": int(hydra.job.num), "folder": name, "settings": settings, "state": "running", "error": ""}
    is_first = os.environ.get("RANK", "0") == "0"
    path = base / "jobs" / f"{name.replace('/', '_')}.json"
    if is_first:
        print(f"\njob {note['job']}: {settings}", flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        note["state"] = "preempted"
        code = _run(job, raw, f"{raw.name}+{name.replace('/', '+')}", folder)
        if code == PREEMPTED_EXIT:
            requeue()
        if code in (PREEMPTED_EXIT, INTERRUPTED_EXIT):
            raise StoppedEarly(SIGNALS.received or signal.SIGTERM)
        if code:
            raise RunStoppedError(f"exit code {code}")
        metric = metric_of(folder, str(raw.sweep.metric))
        note["state"] = "finished"
        return metric
    except StoppedEarly:
        requeue()  # before the first step
        raise
    except Exception as error:
        note |= {"state": "failed", "error": scrub(str(error))}
        if is_first:
            print(f"\njob {note['job']} failed: {error}", file=sys.stderr, flush=True)
        raise
    finally:
        if is_first:
            path.write_text(json.dumps(note, indent=1) + "\n")


def _run(job: Job, raw: DictConfig, name: str, folder: Path) -> int:
    """Runs the recipe in this process, or in ranks of its own; returns the exit code."""
    overrides = list(HydraConfig.get().overrides.task)
    if job.line.launch:
        from automodel_lite.cli.hydra_app import launch_ranks

        flags = [*job.line.folders, "--config-name", str(job.line.preset)]
        return launch_ranks(job.recipe, job.line.launch, [*flags, *overrides, f"name={name}", f"output_dir={folder}"])
    with read_write(raw):
        raw.name, raw.output_dir = name, str(folder)
    try:
        return job.run(raw, overrides)
    finally:
        if "torch" in sys.modules:  # a job that failed has left its process group open
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()


def scrub_files_of_hydra() -> None:
    """Removes secrets from what Hydra itself writes, which holds the command line as it was typed: multirun.yaml in the
    folder of a sweep, and hydra.output_subdir where that is set.
    """
    hydra: Any = HydraConfig.get()
    # without a sweep its folder may have no name
    paths = [Path(str(hydra.sweep.dir)) / "multirun.yaml"] if hydra.mode == RunMode.MULTIRUN else []
    if hydra.output_subdir:
        paths += (Path(str(hydra.runtime.output_dir)) / hydra.output_subdir).glob("*.yaml")
    scrub_yaml(paths)


def scrub_yaml(paths: Sequence[Path]) -> None:
    """Removes secrets from YAML files, on the first rank."""
    for path in filter(Path.is_file, paths if os.environ.get("RANK", "0") == "0" else ()):
        written = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if written != (clean := scrub_tree(written)):
            write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(clean)))


def varied(hydra: Any) -> list[str]:
    """The overrides of this job that differ between jobs."""
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
    """The last value of a key of metrics.jsonl; `val_loss` is the mean over the validation sets.

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
    """Markdown; the job with the best value of the metric is marked."""
    columns = [key for key in dict.fromkeys(key for result in results for key in result) if key != "job"]
    scored = [result for result in results if isinstance(result.get(metric), float) and result["state"] == "finished"]
    choose = max if is_highest_best else min
    best = choose(scored, key=lambda result: float(result[metric]), default=None)
    lines = [f"| | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for result in results:
        mark = f"{result['job']}{' *' if result is best else ''}"
        lines.append(f"| {mark} | {' | '.join(_show(result.get(key, '')) for key in columns)} |")
    note = f"\nmarked *: the {'highest' if is_highest_best else 'lowest'} {metric}\n" if best else ""
    return "\n".join(lines) + "\n" + note


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _join_submitit() -> None:
    """Gives the ranks of a submitit job the names that PyTorch reads."""
    if "SUBMITIT_EXECUTOR" not in os.environ or "RANK" in os.environ:
        return
    import submitit

    task = submitit.JobEnvironment()
    if task.num_tasks == 1:
        return
    port = 20000 + int(re.sub(r"\D", "", task.raw_job_id)) % 20000
    os.environ |= {
        "RANK": str(task.global_rank),
        "LOCAL_RANK": str(task.local_rank),
        "WORLD_SIZE": str(task.num_tasks),
        "LOCAL_WORLD_SIZE": str(task.num_tasks // task.num_nodes),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", task.hostnames[0]),
        "MASTER_PORT": os.environ.get("MASTER_PORT", str(port)),
    }
