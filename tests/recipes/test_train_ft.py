"""The recipe end to end: the built-in job, equal numbers on every layout, export, restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_lite.data.feeding.feed import DeviceStep
from automodel_lite.errors import ConfigError
from automodel_lite.run.folder import saved_config
from automodel_lite.telemetry.metrics import StepResult
from recipes.train_ft import TrainFinetuneRecipe, main
from tests.ranks import run_ranks
from tests.runs import config_of, losses, rows_of, train

NO_EXPORT = "checkpoint.export_hf=false"
LAYOUT = (
    "training.global_batch_size=8",
    "packed_sequence.slot_multiple=8",
    "training.max_steps=2",
    NO_EXPORT,
)
EVERY_2_LAYERS = ("advanced.recompute_every_layers=2",)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[float, float]]:
    """Losses and gradient norms of two steps on one process, micro-batches of one pack."""
    return losses(train("smoke", tmp_path_factory.mktemp("one") / "run", *LAYOUT))


def assert_same(got: list[tuple[float, float]], expected: list[tuple[float, float]]) -> None:
    """Equal up to the order of summation in fp32."""
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=3e-6, atol=0)


@pytest.mark.system
def test_the_built_in_job_learns_to_answer_held_out_questions(tmp_path: Path) -> None:
    rows = train("llama_packed", tmp_path / "run")
    curve = losses(rows)
    assert 5.5 < curve[0][0] < 6.5
    assert curve[-1][0] < 0.05
    assert next(row["answers_right"] for row in rows if "answers_right" in row) >= 20
    assert [row["answers"] for row in rows if "answers" in row] == [24]


@pytest.mark.parametrize(
    ("world_size", "overrides"),
    [
        pytest.param(1, ["training.micro_batch_size=4"], id="micro-batch-4"),
        pytest.param(2, [], id="fsdp-2"),
        pytest.param(
            2,
            ["mesh.strategy=ddp", "training.micro_batch_size=2"],
            id="ddp-2",
            marks=pytest.mark.system,
        ),
        pytest.param(2, ["mesh.cp=2"], id="cp-2", marks=pytest.mark.system),
        pytest.param(4, ["mesh.cp=2"], id="dp-2-cp-2", marks=pytest.mark.system),
        pytest.param(4, ["mesh.dp_replicate=2"], id="hsdp-2x2", marks=pytest.mark.system),
        pytest.param(
            4,
            ["mesh.cp=4", "mesh.cp_exchange=all_to_all"],
            id="cp-4-all-to-all",
            marks=pytest.mark.system,
        ),
        pytest.param(1, ["loss=cross_entropy"], id="plain-loss"),
        pytest.param(1, ["training.activation_checkpointing=full"], id="recompute"),
        pytest.param(
            2,
            ["training.activation_checkpointing=full", *EVERY_2_LAYERS],
            id="recompute-2",
            marks=pytest.mark.system,
        ),
        pytest.param(
            2,
            ["training.activation_checkpointing=selective", *EVERY_2_LAYERS],
            id="recompute-selective-2",
            marks=pytest.mark.system,
        ),
        pytest.param(1, ["dataloader.num_workers=2"], id="workers"),
    ],
)
def test_every_layout_gives_the_same_loss_and_gradient_norm(
    tmp_path: Path, one_process: list[tuple[float, float]], world_size: int, overrides: list[str]
) -> None:
    got = losses(train("smoke", tmp_path / "run", *LAYOUT, *overrides, world_size=world_size))
    assert_same(got, one_process)


def test_packed_and_unpacked_documents_give_the_same_loss_and_gradient_norm(tmp_path: Path) -> None:
    whole_set = ["dataset.num_chats=40", "training.global_batch_size=64", "training.max_steps=2"]
    whole_set.append(NO_EXPORT)
    packed = losses(train("smoke", tmp_path / "packed", *whole_set))
    unpacked = losses(train("smoke", tmp_path / "unpacked", *whole_set, "packed_sequence=none"))
    padded = ["packed_sequence=none", "training.micro_batch_size=8"]
    assert_same(unpacked, packed)
    assert_same(losses(train("smoke", tmp_path / "padded", *whole_set, *padded)), packed)


def test_a_short_last_step_counts_every_document_once(tmp_path: Path) -> None:
    epoch = [
        "dataset.num_chats=60",
        "training.max_steps=null",
        "training.num_epochs=1",
        "training.global_batch_size=12",
        "training.allow_few_steps=true",
        NO_EXPORT,
    ]
    alone = train("smoke", tmp_path / "alone", *epoch)
    pair = train("smoke", tmp_path / "pair", *epoch, "training.micro_batch_size=3", world_size=2)
    assert sum(row["num_tokens"] for row in alone if "loss" in row) == sum(
        r["num_tokens"] for r in pair if "loss" in r
    )
    assert_same(losses(pair), losses(alone))
    val = [
        [row["val_loss/held_out"] for row in rows if "val_loss/held_out" in row]
        for rows in (alone, pair)
    ]
    assert val[0] == pytest.approx(val[1], rel=2e-6)


class StopsAt(TrainFinetuneRecipe):
    """Dies at a step, as a killed process does: nothing is cleaned up."""

    stop_at = 4

    def step(self, ready: DeviceStep) -> StepResult:
        if self.num_steps == self.stop_at:
            raise KeyboardInterrupt
        return super().step(ready)


def _run_until_stopped(
    rank: int, world_size: int, folder: Path, overrides: tuple[str, ...]
) -> None:
    recipe = StopsAt(config_of("smoke", folder, *overrides))
    recipe.setup()
    with pytest.raises(KeyboardInterrupt):
        recipe.run()


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.system)])
def test_a_stopped_run_continues_bit_for_bit(tmp_path: Path, world_size: int) -> None:
    # several epochs in six steps
    overrides = ("packed_sequence.repack_each_epoch=true", "dataset.num_chats=30", NO_EXPORT)
    whole = losses(train("smoke", tmp_path / "whole", *overrides, world_size=world_size))
    folder = tmp_path / "stopped"
    run_ranks(_run_until_stopped, world_size, folder, overrides)
    assert losses(rows_of(folder)) == whole[:4]
    assert losses(train("smoke", folder, *overrides, world_size=world_size)) == whole


def test_the_exported_folder_is_the_trained_model(tmp_path: Path) -> None:
    config = config_of("smoke", tmp_path / "run")
    recipe = TrainFinetuneRecipe(config)
    recipe.setup()
    recipe.run()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "hf")
    chat = [{"role": "user", "content": "Which city is the capital of Peru?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    trained = recipe.model.loss_model.lm.eval()
    trained.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(
            exported(**ids).logits, trained(**ids, use_cache=False).logits, rtol=0, atol=2e-6
        )
    assert tokenizer.chat_template == recipe.data.tokenizer.chat_template
    assert exported.generation_config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) == exported.config.vocab_size


@pytest.mark.system
def test_an_exported_folder_is_fine_tuned_further(tmp_path: Path) -> None:
    train("smoke", tmp_path / "first", "training.max_steps=1")
    csv = tmp_path / "sums.csv"
    csv.write_text(
        "question,answer\n" + "".join(f"What is {a} plus one?,{a + 1}\n" for a in range(200))
    )
    source = [
        f"model.pretrained={tmp_path / 'first' / 'hf'}",
        f"dataset.path={csv}",
        "dataset.val_frac=0.1",
    ]
    steps = [
        "training.max_steps=8",
        "training.num_epochs=null",
        "training.global_batch_size=2",
        "optimizer.lr=3e-3",
    ]
    rows = train("finetune", tmp_path / "second", "name=second", *source, *steps, "training.log_every_steps=1",
                 "packed_sequence.packed_sequence_size=128", "lr_scheduler.warmup_steps=2")  # fmt: skip
    curve = losses(rows)
    assert curve[-1][0] < curve[0][0]
    assert any(key.startswith("val_loss/") for row in rows for key in row)


@pytest.mark.parametrize(
    "option", ["packed_sequence=best_fit", "packed_sequence=next_fit", "logger=jsonl"]
)
def test_options_that_no_preset_chooses_train(option: str, tmp_path: Path) -> None:
    size = ["packed_sequence.packed_sequence_size=128"] if option.startswith("packed") else []
    rows = train(
        "smoke",
        tmp_path / "run",
        option,
        *size,
        "training.max_steps=1",
        NO_EXPORT,
    )
    assert rows[-1]["step"] == 1
    if size:
        packing = json.loads((tmp_path / "run" / "packing.json").read_text())
        assert option.partition("=")[2] in json.dumps(packing)


def test_a_finished_run_says_so_and_a_changed_setting_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    train("smoke", folder, "training.max_steps=2")
    assert main(config_of("smoke", folder, "training.max_steps=2")) == 0
    said = capsys.readouterr().out
    assert f"{folder} is finished (step 2): nothing to do." in said
    assert "continue with a larger training.max_steps and checkpoint.accept_changes=true" in said
    assert f"automodel-lite export {folder}" in said
    free = [
        "dataloader.num_workers=1",
        "tokenize.num_proc=2",
        "hub.private=false",
        "checkpoint.keep_last=9",
    ]
    with pytest.raises(ConfigError) as refused:
        main(config_of("smoke", folder, "optimizer.lr=0.5", "training.max_steps=3", *free))
    assert str(refused.value) == (
        f"{folder} was started with different settings:\n  optimizer.lr: was 0.003, now 0.5\n"
        "  training.max_steps: was 2, now 3\n"
        "Start a new run with name=..., or continue this one with checkpoint.accept_changes=true."
    )
    longer = train("smoke", folder, "training.max_steps=3", "checkpoint.accept_changes=true")
    assert [row["step"] for row in longer if "loss" in row] == [1, 2, 3]
    # steps that are left were counted to the zero that a run behind it never meets
    with pytest.raises(
        ConfigError,
        match=r"the run is at step 3, and these settings end it at step 1: raise training.max_steps",
    ):
        main(config_of("smoke", folder, "training.max_steps=1", "checkpoint.accept_changes=true"))
    # what was refused is not kept as the run's own
    assert saved_config(folder / "config.yaml")["training"]["max_steps"] == 3


def test_a_finished_run_of_epochs_goes_on_with_more_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A larger max_steps would change nothing where epochs end the run."""
    options = [
        "training.max_steps=null",
        "training.num_epochs=1",
        "training.allow_few_steps=true",
        "dataset.num_chats=8",
        NO_EXPORT,
    ]
    steps = [row["step"] for row in train("smoke", tmp_path, *options) if "loss" in row]
    assert main(config_of("smoke", tmp_path, *options)) == 0
    assert "continue with a larger training.num_epochs and" in capsys.readouterr().out
    more = ["training.num_epochs=2", "checkpoint.accept_changes=true"]
    longer = [row["step"] for row in train("smoke", tmp_path, *options, *more) if "loss" in row]
    assert len(longer) == 2 * len(steps)
