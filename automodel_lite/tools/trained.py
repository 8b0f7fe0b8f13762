"""A run's trained model: built from its checkpoint, sharded over the ranks, an adapter merged into its base; its model
card (README.md of the exported folder), and the upload to the Hugging Face hub.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import disable_progress_bars
from omegaconf import OmegaConf
from torch.optim.swa_utils import get_swa_multi_avg_fn
from transformers import PreTrainedTokenizerBase

from automodel_lite.attention.interface import Logits
from automodel_lite.config.check import check_config
from automodel_lite.config.components import build, build_with
from automodel_lite.config.rules import looks_local
from automodel_lite.config.schema import Config, HubConfig, MeshConfig
from automodel_lite.data.tokens.tokenizer import load_tokenizer
from automodel_lite.errors import ConfigError, one_line
from automodel_lite.models.layers import local
from automodel_lite.models.loss import CrossEntropy, LossModel
from automodel_lite.parallel.mesh import Mesh, MeshShape, init_mesh, world_size
from automodel_lite.progress import activity
from automodel_lite.redact import scrub
from automodel_lite.run.checkpoint import load_weights
from automodel_lite.run.checkpoint_folder import broken_files, step_of, survey
from automodel_lite.run.export import export_hf, probe_logits
from automodel_lite.run.folder import RunFolder, saved_config
from automodel_lite.tools.report import facts_of, packing_of, read_run
from automodel_lite.training.build import assemble
from automodel_lite.training.plan import build_parts
from automodel_lite.version import __version__


@dataclass(frozen=True)
class Trained:
    """A model in the dtype it came in, with its tokenizer."""

    model: LossModel
    tokenizer: PreTrainedTokenizerBase
    dtype: torch.dtype
    checkpoint: Path  # the newest of those that were averaged
    was_merged: bool
    logits: Logits  # of the model before it was merged
    mesh: Mesh | None  # over which it is sharded, when torchrun started several ranks

    def export(self, to: Path, is_text_only: bool = False) -> None:
        """Writes it as a Hugging Face folder; every rank calls it. Raises ConfigError when `to` cannot be written."""
        step = step_of(self.checkpoint) or 0
        try:
            with activity("exporting"):
                export_hf(
                    to, self.model, self.tokenizer, self.dtype, self.logits, step, self.mesh, is_text_only=is_text_only
                )
        except OSError as error:
            raise ConfigError(f"{to} cannot be written ({error.strerror or error}).") from error


def load_trained(
    run: Path,
    checkpoint_name: str | None = None,
    *,
    averaged_with: Sequence[Path] = (),
    allow_targets: Sequence[str] = (),
    trust_remote_code: bool = False,
) -> Trained:
    """Builds the model of a run's config.yaml and loads a checkpoint into it, the newest by default.

    A run's folder may come from a stranger: code outside the project is run only when the caller allows it again.

    averaged_with   more checkpoints of the run: the weights are the mean over all of them

    Raises ConfigError when the folder is not a run's, has no such checkpoint, or asks for code that is not allowed.
    """
    folder = RunFolder(run)
    config = load_run_config(folder, allow_targets, trust_remote_code)
    checkpoint = find_checkpoint(folder, checkpoint_name)
    check_unharmed(checkpoint)
    tokenizer = _tokenizer(folder, config)
    parts = build_parts(replace(config, attention={}))
    alone = Mesh(MeshShape(1, 1, 1), torch.device("cpu"), None)
    mesh = init_mesh(MeshConfig()) if world_size() > 1 else alone  # of torchrun's ranks, whatever mesh the run had
    plain = replace(parts, loss=CrossEntropy(), training=replace(parts.training, fp8="none"), mesh=MeshConfig())
    model, adapter = assemble(plain, tokenizer, mesh, "fsdp" if mesh.root else "none", torch.float32)
    load_weights(checkpoint, model.loss_model)
    if averaged_with:
        _average(model.loss_model, averaged_with, is_adapter=adapter is not None)
    logits: Logits = lambda batch: model.loss_model.plain_logits(batch.input_ids)  # noqa: E731 - of one document
    if adapter:
        adapted_TV = probe_logits(model.loss_model, logits, mesh.device)  # to be those of the merged one
        logits = lambda _: adapted_TV  # noqa: E731
        model.free_gathered()
        adapter.merge()
    was_merged = adapter is not None
    return Trained(model.loss_model, tokenizer, parts.model.dtype, checkpoint, was_merged, logits, model.sharded_over)


def _average(model: LossModel, checkpoints: Sequence[Path], is_adapter: bool) -> None:
    """Leaves the mean of the model's weights and those of the checkpoints in it; on each rank its part."""
    if is_adapter:
        raise ConfigError(
            "the mean of an adapter's two factors is not the mean of the models: average runs that train all weights, "
            "or keep an average while training, training.ema_decay=0.999."
        )
    update = get_swa_multi_avg_fn()
    weights = [local(parameter.detach()) for parameter in model.parameters()]
    means = [weight.clone() for weight in weights]
    for number, checkpoint in enumerate(checkpoints, start=1):
        check_unharmed(checkpoint)
        load_weights(checkpoint, model)
        update(means, weights, torch.tensor(number))
    for weight, mean in zip(weights, means):
        weight.copy_(mean)


def load_run_config(folder: RunFolder, allow_targets: Sequence[str] = (), trust_remote_code: bool = False) -> Config:
    """A run's config.yaml, checked; it allows itself nothing."""
    if not folder.config.is_file():
        raise ConfigError(f"{folder.path} is not the folder of a run: it has no config.yaml.")
    raw = OmegaConf.create(saved_config(folder.config))
    wanted = OmegaConf.select(raw, "security.allow_targets") or []
    if foreign := [package for package in wanted if package not in allow_targets]:
        raise ConfigError(
            f"{folder.config} needs code of {', '.join(foreign)}: if you trust this run, allow it with "
            f"--allow-targets {' '.join(foreign)}."
        )
    if OmegaConf.select(raw, "model.trust_remote_code") and not trust_remote_code:
        raise ConfigError(
            f"{folder.config} runs code of its model's repository: if you trust this run, allow it with "
            "--trust-remote-code."
        )
    try:
        return check_config(raw, extra=dict)
    except ConfigError as error:
        raise ConfigError(
            f"{folder.config} does not match this version: use the version that the run was started with, or fix the "
            f"file:\n{error}"
        ) from None


def find_checkpoint(folder: RunFolder, name: str | None) -> Path:
    """A complete checkpoint by its name, or the newest; nothing is cleaned up, as the run may be going on."""
    found, skipped = survey(folder.checkpoints)
    if not found:
        raise ConfigError("\n".join([f"{folder.path} has no complete checkpoint.", *skipped]))
    by_name = {path.name: path for path in found}
    if name is None and (newer := [text for text in skipped if text > found[0].name]):
        raise ConfigError("\n".join([*newer, f"To use the one before it, choose --checkpoint {found[0].name}."]))
    if name and name not in by_name:
        raise ConfigError(f"{folder.path} has no complete checkpoint {name}: there are {', '.join(by_name)}.")
    return by_name[name] if name else found[0]


def check_unharmed(checkpoint: Path) -> None:
    """Raises ConfigError when a file of the checkpoint has other bytes than were written."""
    try:
        broken = broken_files(checkpoint, 0, 1)
    except OSError as error:
        broken = [f"{error.filename} ({error.strerror})"]
    if not broken:
        return
    others = [path.name for path in survey(checkpoint.parent)[0] if path != checkpoint]
    cure = f"choose --checkpoint {others[0]}" if others else "restore it from a backup"
    raise ConfigError(
        f"{checkpoint}: {broken[0]} does not match its checksum, so its weights are not the trained ones: {cure}."
    )


def _tokenizer(folder: RunFolder, config: Config) -> PreTrainedTokenizerBase:
    """The exported one, or the one that the configuration makes."""
    for exported in (folder.path / "adapter", folder.hf):
        if exported.is_dir():
            return load_tokenizer(str(exported))
    tokenizer: PreTrainedTokenizerBase = build_with(
        config.tokenizer, documents=build(config.dataset), cache_dir=config.cache_dir
    )
    return tokenizer


_MARK = "<!-- Written by automodel_lite: without this line, your changes to this file stay. -->"
_TEMPLATE = """\
---
{{ card_data }}
---

{{ mark }}

# {{ name }}

{{ base }} on packed sequences with automodel_lite {{ version }}.

## Use

```python
{{ use }}
```

## Data

{% for line in data %}- {{ line }}
{% endfor %}
## Results

| | |
|---|---|
{% for name, value in results %}| {{ name }} | {{ value }} |
{% endfor %}
## Training

```
{{ command }}
```

<details><summary>All settings</summary>

```yaml
{{ settings }}```

</details>
"""
_USE = {
    "hf": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
    "adapter": """\
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")""",
}


def write_card(run: Path, folder: Path, repo: str | None = None) -> None:
    """README.md of an exported folder, from the run's data, settings, results and command. A user's own stays."""
    path = folder / "README.md"
    if not RunFolder(run).metrics.is_file():
        return
    if path.is_file() and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    record = read_run(run)
    kind = "adapter" if (folder / "adapter_config.json").is_file() else "hf"
    pretrained = record.config.get("model", {}).get("pretrained")
    lines = {topic: text for topic, text in reversed(record.facts.get("lines", []))}
    data = [line for line in lines.get("data", "").splitlines() if line]
    of_this_machine = ("output_dir", "cache_dir")
    settings = {k: v for k, v in record.config.items() if v not in ({}, None, []) and k not in of_this_machine}
    card = ModelCard.from_template(
        _card_data(kind, pretrained, record.config),
        template_str=_TEMPLATE,
        mark=_MARK,
        name=record.name,
        version=__version__,
        base=_base_text(pretrained),
        use=_USE[kind].format(name=repo or folder),
        data=[*data, *(f"{name}: {value}" for name, value in packing_of(record))],
        results=[
            ("method", str(record.config.get("loss", {}).get("_target_", "")).rpartition(".")[2]),
            *facts_of(record),
        ],
        command=record.facts.get("command", ""),
        settings=OmegaConf.to_yaml(OmegaConf.create(settings)),
    )
    path.write_text(scrub(str(card)), encoding="utf-8")


def _card_data(kind: str, pretrained: str | None, config: dict[str, Any]) -> ModelCardData:
    dataset = config.get("dataset", {}).get("path")
    return ModelCardData(
        base_model=pretrained if _is_hub_name(pretrained) else None,
        library_name="peft" if kind == "adapter" else "transformers",
        pipeline_tag="text-generation",
        datasets=[dataset] if _is_hub_name(dataset) else None,
        tags=["automodel_lite", "sft"],
    )


def _base_text(pretrained: str | None) -> str:
    if pretrained is None:
        return "Trained from scratch"
    is_public = _is_hub_name(pretrained)
    return f"[{pretrained}](https://huggingface.co/{pretrained}), trained" if is_public else "A local model, trained"


def _is_hub_name(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not looks_local(name)


def publish(run: Path, folder: Path, hub: HubConfig, say: Callable[[str, str], None]) -> None:
    """Writes the model card, and uploads the export if that is configured; an upload that fails is a warning."""
    write_card(run, folder, hub.push)
    if hub.push:
        try:
            say("uploaded", push(run, folder, hub.push, hub.private))
        except ConfigError as error:
            say("uploaded", f"WARNING: {error}")


def push(run: Path, folder: Path, repo: str, is_private: bool) -> str:
    """Uploads an exported folder, the repository made if there is none; returns its address.

    What the hub holds already is not sent again. Raises ConfigError, with the cure, when it refuses or is not reached.
    """
    if not sys.stderr.isatty():  # the hub's bars are for a terminal; a log gets a line every 30 seconds
        disable_progress_bars()
        logging.getLogger("huggingface_hub._upload_pipeline").setLevel(logging.INFO)
    cure = f"python recipes/export_hf.py {run} --push {repo}"
    try:
        api = HfApi()
        address = api.create_repo(repo, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=f"Trained by automodel_lite: {run.name}")
        return str(address)
    except Exception as error:  # the hub's refusals, the network's errors, no token
        reason = scrub(one_line(error))
        raise ConfigError(
            f"hub.push={repo}: {folder} is not uploaded ({reason}): log in with `hf auth login` or HF_TOKEN, see "
            f"that the network reaches the hub, then {cure}."
        ) from error
