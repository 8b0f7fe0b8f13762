"""A run's trained model: built from its checkpoint, sharded over the ranks, an adapter merged into
its base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn
from transformers import PreTrainedTokenizerBase

from automodel_lite.attention.isolation import Logits
from automodel_lite.config.check import check_config
from automodel_lite.config.components import build_with, flatten
from automodel_lite.config.permissions import environment_problems
from automodel_lite.config.schema import Config, MeshConfig
from automodel_lite.data.prepare import build_documents
from automodel_lite.data.tokens.stop_tokens import use_stop_ids
from automodel_lite.data.tokens.tokenizer import load_tokenizer
from automodel_lite.errors import ConfigError, IdleSettingError, explained
from automodel_lite.models.layers import local
from automodel_lite.models.loss import CrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.mesh import Mesh, MeshShape, init_mesh, world_size
from automodel_lite.progress import activity
from automodel_lite.run.checkpoint import load_weights
from automodel_lite.run.checkpoint_folder import (
    broken_files,
    named_checkpoint,
    step_of,
    survey,
)
from automodel_lite.run.export import export_hf, probe_logits
from automodel_lite.run.folder import RunFolder, existing_run, json_object, saved_config
from automodel_lite.thd import ThdBatch
from automodel_lite.training.build import assemble
from automodel_lite.training.settings import build_parts


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
    dataset: dict[str, Any]  # of the run, which names the processor of its images

    def export(self, to: Path) -> None:
        """Writes it as a Hugging Face folder; every rank calls it. Raises ConfigError when `to`
        cannot be written.
        """
        step = step_of(self.checkpoint) or 0
        with activity("exporting"), explained(f"{to} cannot be written"):
            export_hf(
                to,
                self.model,
                self.tokenizer,
                self.dtype,
                self.logits,
                step,
                self.mesh,
                self.dataset,
            )


def load_trained(
    run: Path,
    checkpoint_name: str | None = None,
    *,
    averaged_with: Sequence[str] = (),
    allow_targets: Sequence[str] = (),
    trust_remote_code: bool = False,
    is_alone: bool = False,
) -> Trained:
    """Builds the model of a run's config.yaml, which may be a stranger's, with a checkpoint, the
    newest by default (see `named_checkpoint`); or with the mean over it and others, by their names.
    `is_alone`: whole, on a rank that no other one joins.

    Raises ConfigError when the folder is not a run's, has no such checkpoint, or asks for code that
    is not allowed.
    """
    folder = existing_run(run)
    config = load_run_config(folder, allow_targets, trust_remote_code)
    checkpoint = find_checkpoint(folder, checkpoint_name)
    tokenizer = _tokenizer_of(folder, config)
    parts = build_parts(replace(config, attention={}))
    parts.model.use_head_facts(json_object(folder.facts).get("head", {}))
    alone = Mesh(MeshShape(1, 1, 1), torch.device("cpu"), None)
    # of torchrun's ranks, whatever mesh the run had
    mesh = init_mesh(MeshConfig()) if world_size() > 1 and not is_alone else alone
    plain = replace(
        parts,
        loss=CrossEntropy(),
        training=replace(parts.training, fp8="none"),
        mesh=MeshConfig(),
        peft=parts.peft and parts.peft.unquantized(),  # merged into what is exported
    )
    model, adapter = assemble(
        plain, tokenizer, mesh, "fsdp" if mesh.root else "none", torch.float32
    )
    # what an export of it stops at
    use_stop_ids(model.loss_model.lm, tokenizer, parts.template_kwargs)
    load_weights(checkpoint, model.loss_model)
    if averaged_with and adapter:
        raise ConfigError(
            "the mean of an adapter's two factors is not the mean of the models: average runs "
            "that train all weights, or keep an average while training, training.ema_decay=0.999."
        )
    if averaged_with:
        others = [find_checkpoint(folder, name) for name in averaged_with]
        _average(model.loss_model, others)

    adapted_TV: Tensor | None = None

    def logits(batch: ThdBatch) -> Tensor:
        """Of one document; those of an adapter are kept from before it was merged."""
        if adapted_TV is not None:
            return adapted_TV
        return model.loss_model.plain_logits(batch.input_ids)

    if adapter:
        adapted_TV = probe_logits(model.loss_model, logits, mesh.device)
        model.free_gathered()
        adapter.merge()
    return Trained(
        model.loss_model,
        tokenizer,
        parts.model.dtype,
        checkpoint,
        was_merged=adapter is not None,
        logits=logits,
        mesh=model.sharded_over,
        dataset=config.dataset,
    )


def _tokenizer_of(folder: RunFolder, config: Config) -> PreTrainedTokenizerBase:
    """The exported one, or the one that the configuration makes."""
    for exported in (folder.path / "adapter", folder.hf):
        if exported.is_dir():
            return load_tokenizer(str(exported))
    documents = build_documents(config)
    return build_with(config.tokenizer, documents=documents, cache_dir=config.cache_dir)


def _average(model: LossModel, checkpoints: Sequence[Path]) -> None:
    """Gives the model the mean over its own weights and those of the checkpoints: each is loaded
    over the weights, and goes into the mean; on each rank its part.
    """
    weights = [local(parameter.detach()) for parameter in model.parameters()]
    means = [weight.clone() for weight in weights]
    for number, checkpoint in enumerate(checkpoints, start=1):
        load_weights(checkpoint, model)
        get_swa_multi_avg_fn()(means, weights, torch.tensor(number))
    for weight, mean in zip(weights, means):
        weight.copy_(mean)


def load_run_config(
    folder: RunFolder, allow_targets: Sequence[str] = (), trust_remote_code: bool = False
) -> Config:
    """Returns a run's config.yaml, checked; it allows itself nothing."""
    raw = OmegaConf.create(saved_config(folder.config))
    wanted = OmegaConf.select(raw, "security.allow_targets") or []
    if foreign := [package for package in wanted if package not in allow_targets]:
        raise ConfigError(
            f"{folder.config} needs code of {', '.join(foreign)}: if you trust this run, allow it "
            f"with --allow-targets {' '.join(foreign)}."
        )
    permissions = [key for key, value in flatten(OmegaConf.to_container(raw)) if value]
    if any(key.endswith(".trust_remote_code") for key in permissions) and not trust_remote_code:
        raise ConfigError(
            f"{folder.config} runs code of its model's repository: if you trust this run, allow it "
            "with --trust-remote-code."
        )
    OmegaConf.update(raw, "security.allow_env", [])
    for key in permissions:  # of who trained, not of who loads
        if key.rpartition(".")[2] == "allow_remote":
            OmegaConf.update(raw, key, False)
    if problems := [*environment_problems(raw, lambda key: False)]:
        raise ConfigError("\n".join(problems))
    try:
        return _checked(raw)
    except ConfigError as error:
        raise ConfigError(
            f"{folder.config} does not match this version: use the version that the run was "
            f"started with, or fix the file:\n{error}"
        ) from None


def _checked(raw: DictConfig) -> Config:
    """Checks a run's configuration, without the settings that do nothing beside others: it may have
    begun before they were refused, and has its model all the same.
    """
    try:
        return check_config(raw, extra=dict)
    except ConfigError as error:
        idle = [each.key for each in error.problems if isinstance(each, IdleSettingError)]
        if not idle:
            raise
    for key in idle:
        group, _, name = key.rpartition(".")
        OmegaConf.select(raw, group).pop(name)
    return check_config(raw, extra=dict)


def find_checkpoint(folder: RunFolder, name: str | None) -> Path:
    """Returns a complete checkpoint by its name, `best`, or the newest.

    Raises ConfigError without one, and when a file of it has other bytes than were written.
    """
    checkpoint = named_checkpoint(folder.path, name)
    try:
        broken = broken_files(checkpoint, 0, 1)
    except OSError as error:
        broken = [f"{error.filename} ({error.strerror})"]
    if broken:
        others = [path.name for path in survey(folder.checkpoints)[0] if path != checkpoint]
        cure = f"choose --checkpoint {others[0]}" if others else "restore it from a backup"
        raise ConfigError(
            f"{checkpoint}: {broken[0]} does not match its checksum, so its weights are not the "
            f"trained ones: {cure}."
        )
    return checkpoint
