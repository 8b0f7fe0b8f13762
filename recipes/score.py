"""Store a teacher's likeliest tokens for a data set; loss=distill_topk learns from them without the teacher in memory.

    torchrun recipes/score.py --config-name finetune name=mine model.pretrained=student dataset.path=chats.jsonl \\
        loss=distill_topk loss.teacher=teacher loss.top_k=64

Takes the arguments of train_ft.py, and any mesh. What is stored goes beside the token cache, for every label of the
training and validation documents: ids and log-probabilities of the top_k tokens. A run that is stopped goes on where it
was.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

if __name__ == "__main__":  # --help, --cfg and mistakes are answered before torch is imported; this does not return
    run_recipe("recipes.score:main")

from dataclasses import replace

from automodel_lite.config.schema import Config
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.errors import ConfigError
from automodel_lite.launched import rank, world_size
from automodel_lite.models.distillation import DistillTopK
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.training.build import as_teacher, build_model, check_same_vocabulary
from automodel_lite.training.label_values import teacher_values
from automodel_lite.training.plan import build_parts


def main(config: Config) -> int:
    """Scores every set of the data."""
    quiet_libraries()
    console = Console(is_silent=rank() != 0)
    parts = build_parts(config)
    loss = parts.loss
    if not isinstance(loss, DistillTopK):
        raise ConfigError("recipes/score.py stores what loss=distill_topk learns from: add loss=distill_topk.")
    data = prepare_data(config, check_sizes(config, world_size()))
    mesh = init_mesh(config.mesh)
    teacher = as_teacher(replace(parts, teacher=CausalLM(loss.teacher)))
    check_same_vocabulary(teacher, data.tokenizer)
    built = build_model(teacher, data.tokenizer, mesh, trains=False)
    num_ids = built.plan.config.get_text_config().vocab_size
    if loss.top_k > num_ids:
        raise ConfigError(f"loss.top_k={loss.top_k}: the teacher has {num_ids} tokens: use at most as many.")
    console.say("teacher", f"{loss.teacher}, attention {built.plan.attention}")
    values = teacher_values(loss, data.packer, config.cache_dir)
    sets = {"train": data.packs_of(0).rows} | {name: packs.rows for name, packs in data.val_packs.items()}
    for name, rows in sets.items():
        values.computed(name, rows, built, mesh)
        found = f"{loss.top_k} tokens for each label of {len(rows):,} documents: {values.folder(name, rows)}"
        console.say("scored", f"{name}: {found}")
    mesh.close()
    return 0
