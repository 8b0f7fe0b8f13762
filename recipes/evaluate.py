"""Loss of a model on held-out files, and how well it answers what they ask; nothing is trained.

    python recipes/evaluate.py --config-name finetune model.pretrained=runs/mine \\
        dataset.path=held_out.jsonl

Takes the arguments of train_ft.py. Validation sets are evaluated (dataset.val_path={easy: a.jsonl,
hard: b.jsonl}), or all of dataset.path where there is none. Of a run, --checkpoint latest, best or
step_00000500 says which one its export must be of. `evaluation=exact_match` asks their
questions too. On several GPUs by torchrun.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.evaluate:main")

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from automodel_lite.config.components import build, option
from automodel_lite.config.model_files import base_of, run_beside, scores_documents
from automodel_lite.config.schema import Config
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.prepare import check_sizes, prepare_data
from automodel_lite.errors import ConfigError, counted
from automodel_lite.evaluation.questions import questions_of
from automodel_lite.extras.asking import ask_tasks, open_tasks
from automodel_lite.models.loss import FusedLinearCrossEntropy, Loss
from automodel_lite.parallel.mesh import Mesh, rank, world_size
from automodel_lite.parts.evaluation.tasks import OpenTasks
from automodel_lite.progress import activity
from automodel_lite.results import RESULTS
from automodel_lite.run.checkpoint_folder import exported_folder, older_export
from automodel_lite.run.folder import json_object
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.tools.load_generator import load_generator
from automodel_lite.training.build import build_model
from automodel_lite.training.classes import with_classes
from automodel_lite.training.decide import check_positions, decide
from automodel_lite.training.engine import Engine
from automodel_lite.training.evaluation import validation_losses
from automodel_lite.training.launch import watch_ranks
from automodel_lite.training.resolve import resolve_auto
from automodel_lite.training.rules import checked_parts
from automodel_lite.training.settings import RunParts
from automodel_lite.training.summary import data_lines
from automodel_lite.training.world import open_world

_OF_TOKENS = ("loss", "cross_entropy", "perplexity", "token_accuracy")


def main(config: Config, checkpoint: str | None = None) -> int:
    """Prints a line per set, and the scores of the answers."""
    quiet_libraries()
    with watch_ranks():
        return evaluate_sets(config, checkpoint)


def evaluate_sets(config: Config, checkpoint: str | None) -> int:
    """Evaluates on the ranks of this job, of which none is left alone."""
    console = Console(is_silent=rank() != 0)
    config = of_folder(config, checkpoint)
    if not checkpoint and (note := older_export(Path(config.model["pretrained"]))):
        console.say("model", note)
    config = resolve_auto(config, console)
    batches = check_sizes(config, world_size())
    parts = checked_parts(config)
    data = prepare_data(config, batches, parts.packer)
    for topic, text in data_lines(data):
        console.say(topic, text)
    parts = with_classes(parts, data)
    mesh = open_world(config)
    tasks = open_tasks(config, data.tokenizer, parts.model.config(data.tokenizer))
    print_losses(parts, data, mesh, console, config, tasks)
    if config.evaluation and rank() == 0:
        generator = load_generator(
            str(parts.model.pretrained),
            parts.model.source["trust_remote_code"],
            template_kwargs=config.tokenize.template_kwargs,
        )
        text, scores = build(config.evaluation).ask(generator, questions_of(data.documents))
        RESULTS.update(scores)
        console.say("answers", text)
    mesh.barrier()
    mesh.close()
    return 0


def print_losses(
    parts: RunParts,
    data: PackSource,
    mesh: Mesh,
    console: Console,
    config: Config,
    tasks: OpenTasks | None,
) -> None:
    """The scores of tasks, and the mean loss over the label tokens of each set; every rank calls
    it.
    """
    sets = data.held_out
    check_positions(data, parts.model, parts.teacher)
    brought = data.columns
    if brought is not None and parts.loss.required - brought:
        name = type(parts.loss).__name__
        console.say("loss", f"next-token cross-entropy, in place of {name}")
        parts = replace(parts, loss=plain_loss_beside(brought))
    with activity("loading the model"):
        decided = decide(parts, data.tokenizer, mesh.shape, mesh.device, trains=False)
        built = build_model(decided, data.tokenizer, mesh)
    console.say("model", f"{parts.model.pretrained}, attention {built.attention}")
    engine = Engine(mesh, built.model, decided)
    if tasks:
        asked = ask_tasks(tasks, engine, config)
        assert asked is not None  # nobody stops it
        RESULTS.update(asked.numbers)
        for line in asked.lines:
            console.say("task", line)
    for name, packs in sets.items():
        losses = validation_losses(engine, packs, data, lambda: False)
        assert losses is not None  # nobody stops it
        documents = packs.plan.counts.packed_documents
        RESULTS[name] = losses | {"documents": documents}
        if not parts.loss.of_text:
            measures = f"{name}: {measures_text(losses)}, of {counted(documents, 'document')}"
            console.say("scores" if parts.loss.head == "score" else "answers", measures)
            continue
        shown = (
            f"{losses.get('cross_entropy', losses['loss']):.4f}, perplexity "
            f"{losses['perplexity']:,.2f}"
        )
        right = losses["token_accuracy"]
        console.say(
            "loss",
            f"{name}: {shown}, {right:.2%} of the tokens right, of "
            f"{counted(documents, 'document')}",
        )
        # what another loss than that of tokens finds: of decisions their accuracy
        own = {key: value for key, value in losses.items() if key not in _OF_TOKENS}
        if own:
            console.say("measures", f"{name}: {measures_text({'loss': losses['loss'], **own})}")


def measures_text(measures: Mapping[str, float]) -> str:
    """Returns the measures of a loss that is not of text, as they are printed: `loss 0.0295,
    accuracy 97.90%`.
    """
    shares = ("accuracy", "f1", "ece", "calibrated_ece", "records_right")
    shown = [
        f"{name} {value:.2%}" if name in shares else f"{name} {value:.4f}"
        for name, value in measures.items()
    ]
    return ", ".join(shown)


def plain_loss_beside(brought: set[str]) -> Loss:
    """Returns next-token cross-entropy of rows that bring these columns, which it does not use:
    they are another loss's, which asks for more. Training makes that of its start model or of a
    teacher, and none of them is known here.
    """

    class NextToken(FusedLinearCrossEntropy):
        columns = FusedLinearCrossEntropy.columns | brought

    return NextToken()


def of_folder(config: Config, checkpoint: str | None) -> Config:
    """With the exported model, of this checkpoint, where model.pretrained is a run's folder; with
    an adapter on its base.
    """
    pretrained = config.model["pretrained"]
    if pretrained is None:
        raise ConfigError(
            "model.pretrained=null is a model from scratch: name a run, a model's folder or a hub "
            "name."
        )
    folder = exported_folder(pretrained, checkpoint)
    source = folder
    peft = config.peft
    adapter = json_object(Path(folder) / "adapter_config.json")
    if adapter and scores_documents(Path(folder)):  # its head would begin anew
        run = shlex.quote(str(run_beside(folder)))
        raise ConfigError(
            f"model.pretrained={pretrained} is an adapter with a score head of its own",
            key="model.pretrained",
            cure=f"automodel-lite export {run} merges both into the base: then name {run}",
        )
    if adapter:  # on its base, as training would go on with it
        source = base_of(Path(folder))
        peft = (peft or option("peft", "lora")) | {"adapter": folder}
    tokenizer = {
        key: folder if value == pretrained else value for key, value in config.tokenizer.items()
    }
    model = config.model | {"pretrained": source}
    # Training would begin a head at random; here its numbers would be those of chance.
    is_new = not scores_documents(Path(folder)) and not build(model).has_score_head()
    if model.get("head") == "score" and is_new:
        raise ConfigError(
            f"model.pretrained={pretrained} has no score head, and model.head=score evaluates one",
            key="model.pretrained",
            cure="train one, automodel-lite train --config-name classify (or reward), or evaluate "
            "the loss of its tokens, --config-name finetune",
        )
    return replace(config, model=model, tokenizer=tokenizer, peft=peft)
