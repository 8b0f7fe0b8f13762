"""Weights & Biases: one run over all restarts of ours, online when there is a key and a network,
else offline.
"""

from __future__ import annotations

import netrc
import os
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import wandb

from automodel_lite.config.rules import Positive
from automodel_lite.errors import one_line
from automodel_lite.redact import scrub_tree
from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo, numbers
from automodel_lite.telemetry.directions import rises

# numbers whose best value stands beside the last one
SUMMARIZED = (
    "loss",
    "answers_right",
    "score/*",
    "val_loss/*",
    "val_token_accuracy/*",
    "val_accuracy/*",
    "val_f1/*",
    "val_reward_margin/*",
)


class WandbTracker(Callback):
    """The config node `logger.wandb`.

    The run id goes into the checkpoint and is resumed. Our step is an ordinary metric, and the axis
    of the others: a continued run logs steps again, which wandb's own step would drop. Code, git
    and command lines are not uploaded: the configuration is there, without its secrets.
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
        if mode == "auto":
            mode = "online" if _has_key() else "offline"
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
        start = partial(
            wandb.init,
            **scrub_tree({"project": project, "entity": entity, "group": group, "tags": tags}),
            name=run.name,
            id=run.state.get("id") or token_hex(4),
            resume="allow",
            dir=str(run.folder),
            config=run.config,
            settings=settings,
        )
        try:
            self.run = start(mode=mode)
        except (wandb.Error, OSError, TimeoutError) as error:
            # `wandb sync` uploads an offline run later
            print(f"WARNING: wandb is offline: {one_line(error, 200)}", flush=True)
            wandb.teardown()
            self.run = start(mode="offline")
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        for name in SUMMARIZED:
            best = "max,last" if rises(name) else "min,last"
            self.run.define_metric(name, step_metric="step", summary=best)
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


def _has_key() -> bool:
    try:
        file = netrc.netrc(os.environ.get("NETRC", Path.home() / ".netrc"))
    except (OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY"))
    return bool(os.environ.get("WANDB_API_KEY")) or file.authenticators("api.wandb.ai") is not None
