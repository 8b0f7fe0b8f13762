"""Weights & Biases: one run over all restarts of ours, online when there is a key and a network, else offline."""

from __future__ import annotations

import netrc
import os
from pathlib import Path
from secrets import token_hex
from typing import Any

import wandb

from automodel_lite.config.rules import Positive
from automodel_lite.errors import one_line
from automodel_lite.redact import scrub_tree
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo, numbers

_HOST = "api.wandb.ai"


class WandbTracker(Callback):
    """The config node `logger.wandb`.

    The run id goes into the checkpoint and is resumed. Our step is an ordinary metric, and the axis of the others: a
    continued run logs steps again, which wandb's own step would drop. Code, git and command lines are not uploaded:
    the configuration is there, without its secrets.
    """

    def __init__(
        self,
        run: RunInfo,
        project: str = "automodel_lite",  # made where there is none
        entity: str | None = None,  # a user or a team; null = the account's default
        group: str | None = None,  # runs of a group are shown together
        tags: list[str] | None = None,  # labels of the run
        mode: str = "auto",  # online | offline | auto (online with a key, offline when that fails)
        timeout_s: Positive = 30,  # seconds for its start, and for its end
        artifact: bool = False,  # upload the exported model as an artifact of the run
    ) -> None:
        mode = os.environ.get("WANDB_MODE", mode)
        is_online = mode == "online" or (mode == "auto" and _has_key())
        run_id = run.state.get("id") or token_hex(4)
        settings = wandb.Settings(
            silent=True,
            console="off",
            save_code=False,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,
            x_save_requirements=False,
            init_timeout=timeout_s,
            login_timeout=timeout_s,
            finish_timeout=timeout_s,
            finish_timeout_raises=False,
        )
        arguments: dict[str, Any] = {
            **scrub_tree({"project": project, "entity": entity, "group": group, "tags": tags}),
            "name": run.name,
            "id": run_id,
            "resume": "allow",
            "dir": str(run.folder),
            "config": run.config,
            "settings": settings,
        }
        self.run = _start(arguments, is_online)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        for falling in ("loss", "val_loss/*"):
            self.run.define_metric(falling, step_metric="step", summary="min,last")
        for rising in ("answers_right", "score/*"):
            self.run.define_metric(rising, step_metric="step", summary="max,last")
        self.artifact = artifact
        self.samples = wandb.Table(columns=["step", "prompt", "answer"], log_mode="INCREMENTAL")

    def log(self, row: Row) -> None:
        self.run.log({"step": row["step"], **numbers(row)})

    def text(self, step: int, name: str, value: str) -> None:
        self.samples.add_data(step, name, value)
        self.run.log({"step": step, "samples": self.samples})

    def exported(self, folder: Path) -> None:
        if self.artifact:
            model = wandb.Artifact(f"{self.run.id}-model", type="model")
            model.add_dir(str(folder))
            self.run.log_artifact(model)

    def state(self) -> dict[str, Any]:
        return {"id": self.run.id}

    def close(self) -> None:
        self.run.finish()


def _start(arguments: dict[str, Any], is_online: bool) -> wandb.Run:
    """Online if it can be, offline if not; `wandb sync` uploads an offline run later."""
    if is_online:
        try:
            return wandb.init(**arguments, mode="online")
        except (wandb.Error, OSError, TimeoutError) as error:
            print(f"WARNING: wandb is offline: {one_line(error, 200)}", flush=True)
            wandb.teardown()
    return wandb.init(**arguments, mode="offline")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC", Path.home() / ".netrc")).authenticators(_HOST) is not None
    except (OSError, netrc.NetrcParseError):
        return False
