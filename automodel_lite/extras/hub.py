"""The model card of an exported folder (README.md), and its upload to the Hugging Face hub."""

from __future__ import annotations

import logging
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import disable_progress_bars
from omegaconf import OmegaConf

from automodel_lite.config.rules import REPO_NAME, looks_local
from automodel_lite.errors import ConfigError, counted, one_line
from automodel_lite.extras.report import facts_of, packing_of, read_run
from automodel_lite.redact import scrub
from automodel_lite.run.checkpoint_folder import exported_step
from automodel_lite.run.folder import RunFolder, json_object
from automodel_lite.telemetry.ledger import NAME as LEDGER
from automodel_lite.telemetry.ledger import last_line
from automodel_lite.version import __version__

_TEMPLATE = Path(__file__).with_name("card.md.j2")
_MARK = "<!-- Written by automodel_lite"
_NOBODY_WROTE = "[More Information Needed]"  # peft's card of an adapter, empty
_FOLDERS = re.compile(r"(?<![\w:/.])(?:~|\.{1,2})?/(?:[\w.@+-]+/)+(?=[\w.@+-])")
"""Of a path on this machine, all but its last name; no part of an address."""


def write_card(run: Path, folder: Path, repo: str | None = None) -> None:
    """README.md of an exported folder, from the run's data, settings, results and command. A user's
    own stays.
    """
    path = folder / "README.md"
    if not RunFolder(run).metrics.is_file():
        return
    before = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else _MARK
    if _MARK not in before and _NOBODY_WROTE not in before:
        return
    record = read_run(run)
    config = record.config
    is_adapter = (folder / "adapter_config.json").is_file()
    pretrained, dataset = (
        config.get(part, {}).get(key)
        for part, key in (("model", "pretrained"), ("dataset", "path"))
    )
    lines = {topic: text for topic, text in reversed(record.facts.get("lines", []))}
    of_this_machine = ("output_dir", "cache_dir")
    settings = {
        k: v for k, v in config.items() if v not in ({}, None, []) and k not in of_this_machine
    }
    results = [("method", _method(config))]
    head = dict(record.facts.get("head") or {})
    if head:
        head["id2label"] = dict(enumerate(head["names"] or ("LABEL_0",)))
    step = exported_step(folder)
    last = record.rows[-1]["step"]
    if 0 < step < last:  # the best one: what was logged last is of another
        results.append(("exported", f"step {step:,}; the numbers are of step {last:,}"))
    card = ModelCard.from_template(
        ModelCardData(
            base_model=pretrained if _is_hub_name(pretrained) else None,
            library_name="peft" if is_adapter else "transformers",
            pipeline_tag="text-classification" if head else "text-generation",
            datasets=[dataset] if _is_hub_name(dataset) else None,
            tags=["automodel_lite", _method(config)],
        ),
        template_path=str(_TEMPLATE),
        record=record,
        version=__version__,
        pretrained=pretrained,
        is_adapter=is_adapter,
        used_as=repo or folder,
        data=lines.get("data", "").splitlines(),
        packing=packing_of(record),
        results=[*results, *facts_of(record), *_ledger_of(run)],
        settings=OmegaConf.to_yaml(OmegaConf.create(settings)),
        head=head,
        certificate=json_object(folder / "certificate.json"),
        decisions=json_object(folder / "decisions.json"),
    )
    path.write_text(_FOLDERS.sub("", scrub(str(card))), encoding="utf-8")


def _ledger_of(run: Path) -> list[tuple[str, str]]:
    """Returns the head of a run's ledger, which stands for every step that it has recorded."""
    steps, head = last_line(run / LEDGER)
    return [("ledger", f"{counted(steps, 'step')}, head `{head}`")] if head else []


def _method(config: dict[str, Any]) -> str:
    """Returns sft, distillation, decisions, or the name of a loss of answers or of policies: dpo,
    kto, ppo.
    """
    module, _, name = str(config.get("loss", {}).get("_target_", "")).rpartition(".")
    kind = module.rpartition(".")[2]
    if kind in ("preference", "unpaired", "policy", "scores"):
        return name.lower()
    return kind if kind in ("distillation", "decisions") else "sft"


def _is_hub_name(name: object) -> bool:
    return isinstance(name, str) and not REPO_NAME.problem(name) and not looks_local(name)


def push(run: Path, folder: Path, repo: str, is_private: bool) -> str:
    """Uploads what the hub does not hold of an exported folder, to a repository that is made if
    there is none; returns its address. Raises ConfigError, with the cure, when it refuses or is not
    reached.
    """
    # the hub's bars are for a terminal; a log gets a line every 30 seconds
    if not sys.stderr.isatty():
        disable_progress_bars()
        logging.getLogger("huggingface_hub._upload_pipeline").setLevel(logging.INFO)
    cure = f"automodel-lite export {shlex.quote(str(run))} --push {repo}"
    try:
        api = HfApi()
        address = api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            commit_message=f"Trained by automodel_lite: {run.name}",
        )
        return str(address)
    except Exception as error:  # the hub's refusals, the network's errors, no token
        reason = scrub(one_line(error))
        raise ConfigError(
            f"hub.push={repo}: {folder} is not uploaded ({reason}): log in with `hf auth login` or "
            f"HF_TOKEN, see that the network reaches the hub, then {cure}."
        ) from error
