"""Tokenize and plan the packs of a run beforehand, on any machine without a GPU; training then
finds them in the cache.

    python recipes/prepare_data.py --config-name llama_packed \\
        packed_sequence.packed_sequence_size=512

Takes the arguments of train_ft.py. Training does the same by itself where it is missing. A corpus
that takes one machine too long is tokenized by many, each a task of some documents, in any order;
then, once, all of them are merged. Rows and plan are those of one process, bit for bit:

    automodel-lite prepare --config-name finetune dataset.path=... --task 7 --tasks 100  # 1 to 100
    automodel-lite prepare --config-name finetune dataset.path=... --tasks 100           # then

A task that was killed is begun again; one that has ended is found.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.prepare_data:main")

from dataclasses import asdict

from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.order import batch_shape
from automodel_lite.data.prepare import build_packer, prepare_data
from automodel_lite.errors import ConfigError, counted
from automodel_lite.launched import check_alone
from automodel_lite.results import RESULTS
from automodel_lite.training.resolve import resolve_auto


def parse_task(task: str, tasks: str) -> tuple[int, int]:
    """Returns the number of a task, from 1 on, and how many there are; raises ConfigError."""
    if not (task.isdecimal() and tasks.isdecimal() and 1 <= int(task) <= int(tasks)):
        raise ConfigError(
            f"--task {task} --tasks {tasks or '(missing)'}: a task is one of 1 to the number of "
            "tasks, such as --task 1 --tasks 8."
        )
    return int(task), int(tasks)


def main(config: Config, task: str = "", tasks: str = "") -> int:
    """Fills the cache and prints what is in it; with `tasks`, by one of them, or from all."""
    check_alone()
    if tasks or task:
        from automodel_lite.extras.tasks import merge_tasks, tokenize_task

        if task:
            print(tokenize_task(config, *parse_task(task, tasks)))
            return 0
        merge_tasks(config, parse_task("1", tasks)[1])
    config = resolve_auto(config)
    data = prepare_data(config, batch_shape(config.training, dp_size=1), build_packer(config))
    print(data.documents.description)
    for note in data.notes:
        print(f"  {note}")
    report = data.report()
    RESULTS.update(data.counts, packing=report and asdict(report))
    print(
        report
        or "a stream is tokenized and packed while it is trained on; nothing else is prepared"
    )
    for name, val_packs in data.val_packs.items():
        RESULTS[f"packs/{name}"] = len(val_packs)
        print(f"validation ({name}): {counted(len(val_packs), 'pack')}")
    return 0
