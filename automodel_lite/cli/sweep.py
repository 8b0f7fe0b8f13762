"""`--multirun`: Hydra's sweepers choose the jobs and its launchers start them. Ours is a folder for each job, the table
of their results, and that the same command again goes on with what is not finished.

    torchrun recipes/train_ft.py --config-name llama_packed --multirun optimizer.lr=1e-3,3e-3 seed=0,1

    runs/llama_packed/0_lr-0.001_seed-0/ ...      sweep.json, sweep.md: the results of all jobs

Hydra's basic launcher runs the jobs one after the other in the same ranks, each with process groups of its own. joblib
and submitit start processes. Each job leaves a note of what it is and how it ended in the folder jobs/.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from automodel_lite.cli.line import split
from automodel_lite.config.schema import Config
from automodel_lite.errors import ConfigError, RunStoppedError
from automodel_lite.progress import is_shown
from automodel_lite.redact import scrub, scrub_tree
from automodel_lite.run.durable import write_atomically
from automodel_lite.run.folder import RunFolder
from automodel_lite.run.stopping import INTERRUPTED_EXIT, PREEMPTED_EXIT, SIGNALS, StoppedEarly
from automodel_lite.telemetry.callbacks import value_of

_BASIC_LAUNCHER = "hydra._internal.core_plugins.basic_launcher.BasicLauncher"
_MAX_TIMEOUTS = 100  # times that a SLURM job which has reached its time limit goes back into the queue
STOPPED_EXITS = (PREEMPTED_EXIT, INTERRUPTED_EXIT)
_SHOWN = ("step", "loss", "tokens_per_s", "answers_right")


@dataclass
class Record:
    """jobs/<job>.json in the folder of the sweep."""

    job: int
    folder: str
    settings: str
    state: str = "running"  # running | finished | failed | preempted
    error: str = ""

    @contextmanager
    def kept_in(self, sweep: Path) -> Iterator[None]:
        """While the job runs; says how it ended, on the first rank."""
        if is_shown():
            print(f"\njob {self.job}: {self.settings}", flush=True)
        self._write(sweep)
        try:
            yield
            self.state = "finished"
        except Exception as error:
            self.state, self.error = "failed", scrub(str(error))
            if is_shown():
                print(f"\njob {self.job} failed: {error}", file=sys.stderr, flush=True)
            raise
        except BaseException:
            self.state = "preempted"
            raise
        finally:
            self._write(sweep)

    def _write(self, sweep: Path) -> None:
        if not is_shown():
            return
        path = sweep / "jobs" / f"{self.folder.replace('/', '_')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass
class Sweep:
    """What this process knows of the sweep that it has started."""

    folder: Path
    metric: str
    is_highest_best: bool


_OPEN: list[Sweep] = []


class Start(Callback):
    """Hydra's callback at the start of a sweep, named in conf/base.yaml."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        from automodel_lite.cli.app import Ended  # Hydra turns every Exception of a callback into a warning

        try:
            _OPEN.append(_start(config))
        except Exception as error:
            raise Ended(error=error) from None


def _start(config: DictConfig) -> Sweep:
    folder = Path(str(config.hydra.sweep.dir)).resolve()
    if (folder / "config.yaml").is_file():
        raise ConfigError(f"{folder} is the folder of a run: give the sweep another name=... .")
    if is_shown():
        for note in (folder / "jobs").glob("*.json"):  # the table is of this sweep; jobs that are finished say so again
            note.unlink()
    launcher = str(config.hydra.launcher._target_)
    if launcher != _BASIC_LAUNCHER and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        name = config.hydra.runtime.choices["hydra/launcher"]
        raise ConfigError(f"hydra/launcher={name} starts its own processes: start the sweep without torchrun.")
    with read_write(config), open_dict(config):
        sampler = OmegaConf.select(config, "hydra.sweeper.sampler")
        if sampler is not None and "seed" in sampler and sampler.seed is None:
            sampler.seed = config.seed  # the same points on every rank, and again when the sweep goes on
        if config.hydra.launcher.get("max_num_timeout") == 0:
            config.hydra.launcher.max_num_timeout = _MAX_TIMEOUTS
    direction = str(OmegaConf.select(config, "hydra.sweeper.direction") or "").rpartition(".")[2]
    return Sweep(folder, str(config.sweep.metric), direction == "maximize")


def forget() -> None:
    """Before a command line is run."""
    _OPEN.clear()


def close() -> None:
    """Prints the table of a sweep and writes it to its folder, on the first rank.

    Raises RunStoppedError when jobs have failed.
    """
    if "joblib" in sys.modules:
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor().shutdown(wait=True)
        atexit._run_exitfuncs()  # this process will leave without its clean-up: joblib's tracker would name leaks
    if not _OPEN or not is_shown():
        return
    sweep = _OPEN.pop()
    _scrub_yaml([sweep.folder / name for name in ("multirun.yaml", "optimization_results.yaml")])
    records = [Record(**json.loads(path.read_text())) for path in (sweep.folder / "jobs").glob("*.json")]
    records.sort(key=lambda record: (record.job, record.folder))
    results = [result_of(record, sweep.folder / record.folder, sweep.metric) for record in records]
    if not results:
        return
    text = table(results, sweep.metric, sweep.is_highest_best)
    (sweep.folder / "sweep.json").write_text(json.dumps(results, indent=1) + "\n")
    (sweep.folder / "sweep.md").write_text(text)
    print(f"\n{text}\n{sweep.folder / 'sweep.md'}", flush=True)
    if failed := [record.folder for record in records if record.state == "failed"]:
        raise RunStoppedError(f"{len(failed)} of {len(results)} jobs failed: {', '.join(failed)} in {sweep.folder}")


def scrub_files_of_hydra() -> None:
    """What Hydra itself writes holds the command line as it was typed: multirun.yaml in the folder of a sweep, and
    hydra.output_subdir where that is set.
    """
    hydra: Any = HydraConfig.get()
    # without a sweep its folder may have no name
    paths = [Path(str(hydra.sweep.dir)) / "multirun.yaml"] if hydra.mode == RunMode.MULTIRUN else []
    if hydra.output_subdir:
        paths += (Path(str(hydra.runtime.output_dir)) / hydra.output_subdir).glob("*.yaml")
    _scrub_yaml(paths)


def _scrub_yaml(paths: Sequence[Path]) -> None:
    for path in filter(Path.is_file, paths if is_shown() else ()):
        written = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if written != (clean := scrub_tree(written)):
            write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(clean)))


def run_job(
    config_of: Callable[[DictConfig, Sequence[str]], Config],
    raw: DictConfig,
    recipe: Callable[[], Callable[[Config], int | None]],
) -> float | None:
    """One job of a sweep; the value of `sweep.metric` at its end, for sweepers that look for the best.

    Raises what the job raised, on all ranks.
    """
    hydra: Any = HydraConfig.get()
    _join_submitit()
    requeue = SIGNALS.renew()
    folder, base = Path(hydra.runtime.output_dir), Path(str(hydra.sweep.dir)).resolve()
    name = os.path.relpath(folder, base)
    record = Record(int(hydra.job.num), name, scrub(", ".join(varied(hydra))) or "as given")
    with read_write(raw):
        raw.name, raw.output_dir = f"{raw.name}+{name.replace('/', '+')}", str(folder)
    with record.kept_in(base):
        try:
            config = config_of(raw, list(hydra.overrides.task))
            metric, code = _outcome(config, record.job, folder, recipe)
        except StoppedEarly:  # before the first step
            requeue()
            raise
        if code == PREEMPTED_EXIT:
            requeue()
        if code in STOPPED_EXITS:
            raise StoppedEarly(SIGNALS.received or signal.SIGTERM)
        if code:
            raise RunStoppedError(f"exit code {code}")
        return metric


def _outcome(
    config: Config, job: int, folder: Path, recipe: Callable[[], Callable[[Config], int | None]]
) -> tuple[float | None, int]:
    """(metric, exit code) of the recipe; all ranks agree on them, and on an error of any of them."""
    from automodel_lite.parallel.mesh import RENDEZVOUS  # imports torch

    ranks = RENDEZVOUS.of_job(job)
    failure, metric, code = None, None, 0
    try:
        code = recipe()(config) or 0
        if code == 0 and is_shown():
            metric = metric_of(folder, config.sweep.metric)
    except Exception as error:
        failure = error
    outcomes = ranks.agree({"failed": str(failure) if failure else "", "code": code, "metric": metric})
    if failure:
        raise failure
    if told := next((outcome["failed"] for outcome in outcomes if outcome["failed"]), None):
        raise RunStoppedError(told)
    return outcomes[0]["metric"], max(outcome["code"] for outcome in outcomes)


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


def result_of(record: Record, folder: Path, metric: str) -> dict[str, Any]:
    """What the table says of a job."""
    result: dict[str, Any] = {"job": record.job, "settings": record.settings, "state": record.state}
    for row in RunFolder(folder).rows():
        for key, value in row.items():
            if key in (*_SHOWN, metric) or key.startswith("val_loss/"):
                result[key] = value
    with suppress(ConfigError):
        value = metric_of(folder, metric)
        return result if value is None else {**result, metric: value}
    return result


def metric_of(folder: Path, metric: str) -> float | None:
    """The last value of a key of metrics.jsonl; `val_loss` is the mean over the validation sets.

    None for a recipe that trains nothing. Raises ConfigError for a key that the run does not log.
    """
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
    """The ranks of a submitit job under the names that PyTorch reads."""
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
