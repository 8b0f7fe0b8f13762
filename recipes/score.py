"""Compute values per label beforehand: a teacher's likeliest tokens, or the reference of a
preference loss.

    torchrun recipes/score.py --config-name finetune model.pretrained=student \\
        dataset.path=chats.jsonl loss=distill_topk loss.teacher=teacher loss.top_k=64
    torchrun recipes/score.py --config-name dpo model.pretrained=start dataset.path=pairs.jsonl

Takes the arguments of train_ft.py, and any mesh. What is stored goes beside the token cache, for
every label of the training and validation documents. loss=distill_topk learns from the teacher's
tokens without the teacher in memory; references are computed by training itself where they are
missing. A run that is stopped goes on where it was.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.score:main")


from automodel_lite.config.components import build
from automodel_lite.config.rules import check_folder
from automodel_lite.config.schema import Config
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.errors import ConfigError, counted
from automodel_lite.launched import rank, world_size
from automodel_lite.models.source import CausalLM
from automodel_lite.parts.losses.distillation import DistillTopK
from automodel_lite.parts.losses.label_values import check_loss, reference_values, teacher_values
from automodel_lite.results import RESULTS
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.training.build import build_model
from automodel_lite.training.decide import check_positions, check_same_vocabulary, decide
from automodel_lite.training.engine import Engine
from automodel_lite.training.launch import watch_ranks
from automodel_lite.training.resolve import resolve_auto
from automodel_lite.training.rules import checked_parts
from automodel_lite.training.settings import as_teacher
from automodel_lite.training.world import open_world


def main(config: Config) -> int:
    """Computes the values of every set of the data."""
    quiet_libraries()
    with watch_ranks():
        return compute_values(config)


def compute_values(config: Config) -> int:
    """Scores on the ranks of this job, of which none is left alone."""
    console = Console(is_silent=rank() != 0)
    check_computed(config)
    config = resolve_auto(config, console)
    parts = checked_parts(config)
    loss = parts.loss
    data = prepare_data(config, check_sizes(config, world_size()), parts.packer).planned
    if data is None:
        raise ConfigError(
            "automodel-lite score computes values beforehand, when a stream is not known: use "
            "dataset=files or images."
        )
    check_loss(data, loss)
    mesh = open_world(config)
    if isinstance(loss, DistillTopK):
        check_folder("loss.teacher", loss.teacher)
        parts = as_teacher(parts, CausalLM(loss.teacher))
        check_same_vocabulary(parts, data.tokenizer)
        check_positions(data, parts.model)
        decided = decide(parts, data.tokenizer, mesh.shape, mesh.device, trains=False)
        built = build_model(decided, data.tokenizer, mesh, trains=False, seed=config.seed)
        num_ids = min(len(data.tokenizer), decided.config.get_text_config().vocab_size)
        if loss.top_k > num_ids:
            raise ConfigError(
                f"loss.top_k={loss.top_k}: the teacher has {num_ids} tokens: use at most as many."
            )
        values = teacher_values(loss, data.packer, config.cache_dir, len(data.tokenizer))
    else:
        decided = decide(parts, data.tokenizer, mesh.shape, mesh.device, trains=False)
        built = build_model(decided, data.tokenizer, mesh, seed=config.seed)
        values = reference_values(built, data.packer, config.cache_dir, config.seed)
    console.say("model", f"{parts.model.pretrained}, attention {built.attention}")
    engine = Engine(mesh, built.model, decided)
    sets = {"train": data.packs_of(0).rows}
    sets |= {name: packs.rows for name, packs in data.val_packs.items()}
    for name, rows in sets.items():
        values.computed(name, rows, engine)
        folder = values.folder(name, rows)
        RESULTS[name] = {"values": values.name, "documents": len(rows), "folder": folder}
        console.say(
            "scored",
            f"{name}: {values.name} for {counted(len(rows), 'document')}: {folder}",
        )
    mesh.close()
    return 0


def check_computed(config: Config) -> None:
    """Raises ConfigError for a loss that asks for no values ahead, whatever its data are."""
    loss = build(config.loss)
    if loss.needs_reference or isinstance(loss, DistillTopK):
        return
    what = "automodel-lite score computes values per token ahead of a training"
    if loss.head == "score":
        raise ConfigError(
            what,
            key="loss",
            cure="automodel-lite evaluate with the same arguments compares a trained score head "
            "with the labels or pairs of a file",
        )
    raise ConfigError(
        what,
        key="loss",
        cure="loss=distill_topk loss.teacher=... for a teacher's likeliest tokens, --config-name "
        "dpo or kto for a reference; automodel-lite evaluate with the same arguments measures a "
        "model on a file",
    )
