"""Trees, pairs, teachers, policies, images, streams and the training client on one GPU, fake or not, and what is made of a run."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from automodel_lite import TrainingClient
from automodel_lite.extras.client.rows import PackedRows
from tests.gpu_paths.fake.jobs import COMPILED, EAGER, ON_FAKE_GPU, only_on_gpu, rows_of, train

pytestmark = only_on_gpu
# heads of 16 and more, which every kernel takes
SMALL = (
    "~model.config",
    "model.config.model_type=llama",
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
    "model.config.max_position_embeddings=2048",
    "tokenizer=bpe",
    "tokenizer.vocab_size=300",
)
STEPS = (
    "training.max_steps=6",
    "training.global_batch_size=4",
    "training.num_threads=1",
    "training.log_every_steps=100",
    "training.val_every_steps=0",
    "lr_scheduler.warmup_steps=0",
    "packed_sequence.packed_sequence_size=256",
)
HOWS = pytest.mark.parametrize("how", [EAGER, COMPILED], ids=["eager", "compiled"])


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"dataset.path={path}"


def pairs(path: Path) -> str:
    """Two answers to each question, of several lengths."""
    return written(
        path,
        [
            {
                "prompt": f"What is {number} and {number}? " * (1 + number % 3),
                "chosen": f"It is {2 * number}.",
                "rejected": f"I believe it is {number}, or so.",
            }
            for number in range(60)
        ],
    )


def answers(path: Path) -> str:
    """Four answers to each long prompt."""
    rows = []
    for number in range(40):
        prompt = " ".join(f"word{(number * place) % 17}" for place in range(60))
        responses = [f"answer {number} number {place}" for place in range(4)]
        rows.append({"prompt": prompt, "responses": responses})
    return written(path, rows)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of this machine and its tokenizer, in a folder."""
    folder = tmp_path_factory.mktemp("base")
    train(folder / "run", EAGER, *SMALL, *STEPS, "training.max_steps=1")
    return str(folder / "run/hf")


@HOWS
def test_trees(how: str, tmp_path: Path) -> None:
    options = ("dataset=files", "~dataset.num_chats", answers(tmp_path / "answers.jsonl"))
    sized = (*SMALL, *STEPS, "packed_sequence.packed_sequence_size=1024")
    screen = train(tmp_path / "run", how, *options, *sized, strict_from=4)
    assert "40 trees of rows that begin alike" in screen


@HOWS
@pytest.mark.parametrize("loss", ["dpo", "simpo", "orpo"])
def test_pairs(loss: str, how: str, base: str, tmp_path: Path) -> None:
    where = (f"loss={loss}", "name=x", f"model.pretrained={base}", pairs(tmp_path / "pairs.jsonl"))
    train(tmp_path / "run", how, *where, *STEPS, preset="dpo", strict_from=4)
    assert "loss/reward_margin" in rows_of(tmp_path / "run")[-2]


@HOWS
@pytest.mark.parametrize("kind", ["forward", "jsd"])
def test_a_teacher(kind: str, how: str, base: str, tmp_path: Path) -> None:
    models = (f"model.pretrained={base}", f"teacher.pretrained={base}", f"loss.kind={kind}")
    data = ("name=x", "dataset=toy_chat", "dataset.num_chats=60")
    train(tmp_path / "run", how, *models, *data, *STEPS, preset="distill", strict_from=4)


def test_a_stored_teacher(base: str, tmp_path: Path) -> None:
    data = ("name=x", "dataset=toy_chat", "dataset.num_chats=60", f"model.pretrained={base}")
    stored = ("loss=distill_topk", f"loss.teacher={base}", "loss.top_k=8")
    both = (*data, *stored, *STEPS)
    train(tmp_path / "run", *both, preset="finetune", recipe="score")
    train(tmp_path / "run", EAGER, *both, preset="finetune", strict_from=4)


@HOWS
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
def test_a_policy(loss: str, how: str, tmp_path: Path) -> None:
    from tests.models.test_policy import make_groups, save_model

    columns = ("input_ids", "labels", "advantages", "old_log_probs")
    rows = [{name: row[name] for name in columns} for group in make_groups() for row in group]
    model = save_model("llama", tmp_path / "model")
    where = (f"loss={loss}", "name=x", f"model.pretrained={model}")
    data = written(tmp_path / "rows.jsonl", rows)
    train(tmp_path / "run", how, *where, data, *STEPS, preset="policy", strict_from=4)


@pytest.mark.parametrize("towers", ["false", "true"])
@HOWS
def test_images(how: str, towers: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a family whose tower takes tiles of one size: others read the sizes of images back from the device."""
    from transformers import InternVLForConditionalGeneration

    from automodel_lite.parts.images import probe
    from tests.images.families import write_chats, write_model

    if "mm_encoder_outputs" not in signature(InternVLForConditionalGeneration.forward).parameters:
        pytest.skip("this transformers packs no images")
    if ON_FAKE_GPU:  # compares logits, which are made up
        monkeypatch.setattr(probe, "check_images_apart", lambda *_: None)
    folder = tmp_path / "model"
    folder.mkdir()
    write_chats(folder, num=12)
    write_model("internvl", folder)
    where = ("name=x", "dataset=images", f"dataset.path={folder}/chats.jsonl")
    model = (f"model.pretrained={folder}", f"model.train_towers={towers}", "attention=varlen")
    # not strict: transformers counts the placeholders of each micro-batch on the device, and reads the count
    train(tmp_path / "run", how, *where, *model, *STEPS, preset="finetune")


def test_a_stream(tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {i}?", "completion": f"It is {i % 7}."} for i in range(400)]
    source = ("dataset=streaming", "~dataset.num_chats", "dataset.num_shards=4")
    data = written(tmp_path / "rows.jsonl", rows)
    train(tmp_path / "run", EAGER, *source, data, *SMALL, *STEPS, strict_from=4)


@pytest.mark.parametrize("peft", ["none", "lora"])
def test_the_training_client(peft: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.models.test_policy import make_groups, save_model

    columns = ("input_ids", "labels", "advantages", "old_log_probs")
    groups = [[{name: row[name] for name in columns} for row in group] for group in make_groups()]
    model = save_model("llama", tmp_path / "model")
    options = ("packed_sequence.packed_sequence_size=256", f"peft={peft}", EAGER)
    where = (f"model.pretrained={model}", f"output_dir={tmp_path / 'client'}")

    def of_rows(self: TrainingClient, packed: PackedRows, found: Any) -> list[np.ndarray]:
        """Stands for what is read from the device: where each log-probability belongs."""
        assert all(values.is_cuda for pair in found for values in pair)
        return packed.of_rows(np.zeros(packed.num_tokens, np.float32))

    count = TrainingClient._count_items

    def count_items(self: Any, *arguments: Any) -> float:
        """Counts, and stands for the number, which is read from the device."""
        assert count(self, *arguments) == 0
        return 1.0

    if ON_FAKE_GPU:
        monkeypatch.setattr(TrainingClient, "_of_rows", of_rows)
        monkeypatch.setattr(TrainingClient, "_count_items", count_items)
    with TrainingClient("policy", *where, *options) as client:
        for number in range(1, 3):
            out = client.forward_backward(groups)
            assert len(out.log_probs) == sum(map(len, groups))
            assert client.optim_step(lr=1e-6).num_steps == number
        client.forward(groups)


def test_what_is_made_of_a_run(base: str, tmp_path: Path) -> None:
    """Exports, means of checkpoints and evaluations; answers are numbers, of which there are none."""
    from recipes import average, export_hf

    adapter = ("peft=lora", "name=x", f"model.pretrained={base}", "dataset=toy_chat")
    few = ("dataset.num_chats=60", "checkpoint.every_steps=3", "checkpoint.keep_last=2")
    run = tmp_path / "run"
    train(run, EAGER, *adapter, *few, *STEPS, preset="finetune")
    assert export_hf.main([str(run), "--to", str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged/model.safetensors").is_file()
    whole = tmp_path / "whole"
    train(whole, EAGER, "name=y", *adapter[2:], *few, *STEPS, preset="finetune")
    assert average.main([str(whole), "--to", str(tmp_path / "mean")]) == 0
    asked = ("name=z", f"model.pretrained={tmp_path / 'merged'}", "dataset=toy_chat", *few[:1])
    train(tmp_path / "z", *asked, *STEPS, preset="finetune", recipe="evaluate")
