"""The most likely mistakes, typed as a user would: all that the screen shows at the end, word for word.

Each is a process of its own, from a fork server (tests/ranks.py); docs/troubleshooting.md lists them by message.
"""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.ranks import in_a_process

ABSENT = (
    "wandb",
    "transformer_engine",
    "flash_attn",
    "torchao",
)  # as in an environment without the extras
PRESETS = "finetune, lora, dpo, pretrain, policy (automodel-lite ls lists all presets)"
KNOWN_COLUMNS = (
    "input_ids + labels + seq_lens, input_ids, state + questions, state + question, messages, conversations, instruction + output, prompt + completion, "
    "prompt + responses, question + answer, text, chosen + rejected"
)


@dataclass(frozen=True)
class Mistake:
    typed: str  # after `torchrun recipes/train_ft.py`
    shown: str  # the end of the screen; {folder} is where the command is typed, {host} this machine
    code: int = 2
    environment: dict[str, str] = field(default_factory=dict)
    # memory that the process may take beyond what it has at the start
    more_gib: float | None = None


MISTAKES = {
    "misspelt key": Mistake(
        "--config-name smoke training.max_stepz=3",
        "training.max_stepz=3: unknown key; did you mean training.max_steps?",
    ),
    "misspelt preset": Mistake(
        "--config-name lama_packed",
        f"--config-name lama_packed: no such preset; did you mean llama_packed? The usual ones are {PRESETS}.",
    ),
    "missing dataset file": Mistake(
        "--config-name llama_packed dataset=files dataset.path=chat.jsonl",
        "dataset.path=chat.jsonl does not exist (looked in {folder}); did you mean chats.jsonl?",
    ),
    "unknown columns": Mistake(
        "--config-name llama_packed dataset=files dataset.path=faq.csv",
        "the columns Frage, Antwort match no known format: name them, for instance dataset.columns.prompt=Frage "
        f"dataset.columns.completion=Antwort. Known formats are {KNOWN_COLUMNS}.",
    ),
    "wrong column name": Mistake(
        "--config-name llama_packed dataset=files dataset.path=faq.csv dataset.columns.prompt=Farge "
        "dataset.columns.completion=Antwort",
        "dataset.columns.prompt=Farge is not a column of the data, which has Frage, Antwort.",
    ),
    "no chat template": Mistake(
        "--config-name finetune name=x model.pretrained=./base_model dataset.path=chats.jsonl",
        "the data are chats, and the tokenizer base_model has no chat template: set "
        "tokenizer.chat_template=template.jinja, or tokenizer.path to a chat model's tokenizer.",
    ),
    "documents over the model's positions": Mistake(
        "--config-name smoke packed_sequence.packed_sequence_size=256 model.config.max_position_embeddings=128",
        "the longest document has 255 tokens, the model max_position_embeddings=128: set "
        "packed_sequence.packed_sequence_size=128 (packed_sequence.overlong drops, truncates or splits longer ones), or "
        "scale its positions by model.config.",
    ),
    "mesh over the processes": Mistake(
        "--config-name smoke mesh.cp=4",
        "mesh.dp_replicate=1 x mesh.cp=4 = 4 must divide the number of processes, 1: start 4 (--nproc), "
        "or lower these.",
    ),
    "mesh of another size": Mistake(
        "--config-name smoke mesh.dp_shard=2",
        "mesh.dp_replicate=1 x mesh.dp_shard=2 x mesh.cp=1 = 2 must equal the number of processes, 1: set "
        "mesh.dp_shard=-1, or start 2.",
    ),
    "half of a launcher's variables": Mistake(
        "--config-name smoke mesh.cp=2",
        "the environment has WORLD_SIZE=3 and no RANK and no MASTER_ADDR and no MASTER_PORT: start with torchrun or "
        "automodel-lite train --nproc, which set them; for one process, unset WORLD_SIZE.",
        environment={"WORLD_SIZE": "3"},
    ),
    "no transformer engine": Mistake(
        "--config-name smoke attention=te",
        "attention=te needs Transformer Engine: pip install --no-build-isolation 'automodel-lite[te]'.",
    ),
    "no flash-attn": Mistake(
        "--config-name smoke attention=flash",
        "attention=flash needs flash-attn: pip install --no-build-isolation 'automodel-lite[flash]', or, "
        "on Hopper and Blackwell, pip install --pre flash-attn-4.",
    ),
    "no wandb": Mistake(
        "--config-name smoke logger=wandb",
        "logger.wandb needs the package wandb: pip install 'automodel-lite[wandb]'.",
    ),
    "no torchao": Mistake(
        "--config-name smoke training.fp8=tensorwise",
        "training.fp8 needs the package torchao: pip install 'automodel-lite[ao]'.",
    ),
    "token ids beyond the vocabulary": Mistake(
        "--config-name smoke model.config.vocab_size=50",
        "the tokenizer has 384 tokens, the model's embedding 50 rows: use the model's own tokenizer; for tokens "
        "that you have added set model.resize_embeddings=true, for a model from scratch model.config.vocab_size=384.",
    ),
    "given token ids beyond the vocabulary": Mistake(
        "--config-name llama_packed dataset=files dataset.path=ids.jsonl tokenizer=pretrained tokenizer.path=./base_model",
        "ids.jsonl:1: column input_ids holds ids from 1 to 99999, and the tokenizer has ids from 0 to 383: they were "
        "made with another tokenizer: set tokenizer.path to it.",
    ),
    "a run of other settings": Mistake(
        "--config-name smoke name=mine optimizer.lr=1e-4 training.max_steps=2",
        "{folder}/runs/mine was started with different settings:\n"
        "  optimizer.lr: was 0.003, now 0.0001\n"
        "  training.max_steps: was 1, now 2\n"
        "Start a new run with name=..., or continue this one with checkpoint.accept_changes=true.",
    ),
    "another preset's key": Mistake(
        "--config-name smoke dataset=files dataset.path=chats.jsonl",
        "dataset.num_chats=200 is an option of dataset=toy_chat: choose that, or remove it, ~dataset.num_chats.",
    ),
    "out of memory": Mistake(
        "--config-name smoke packed_sequence.packed_sequence_size=16384 packed_sequence.overlong=error "
        "training.global_batch_size=1 loss=cross_entropy model.config.vocab_size=400000",
        "out of memory on rank 0 on {host}, in step 1: tried to allocate 8.15 GiB.\n"
        "The run is estimated to need about 73.7 GiB per rank: weights 97.7 MiB, gradients 97.7 MiB, "
        "optimizer 195.5 MiB, activations 71.2 MiB, logits 73.2 GiB.\n"
        "Try, in this order:\n"
        "  1. loss=fused_linear_cross_entropy (never holds the logits of the whole stream)\n"
        "  2. training.activation_checkpointing=full (about a third slower)\n"
        "  3. optimizer=adamw_8bit (moments of 2 bytes per weight instead of 8)",
        code=1,
        more_gib=2.0,
    ),
}


def type_it(folder: Path, mistake: Mistake) -> tuple[int, str]:
    """The exit code, and what the screen shows."""
    return in_a_process(_typed, folder, mistake)


def _typed(mistake: Mistake) -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", **mistake.environment}
    sys.modules |= dict.fromkeys(ABSENT)  # type: ignore[arg-type]
    if mistake.more_gib is not None:
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = taken + int(mistake.more_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    from automodel_lite.cli import run_recipe

    run_recipe("recipes.train_ft:main", shlex.split(mistake.typed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A desk: some data, a run that is done, and its model without the chat template."""
    desk = tmp_path_factory.mktemp("desk")
    chats = [[("user", f"what is {n}?"), ("assistant", f"it is {n}.")] for n in range(30)]
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats
    ]
    (desk / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (desk / "faq.csv").write_text(
        "Frage,Antwort\n" + "\n".join(f"was ist {n}?,das ist {n}." for n in range(30))
    )
    (desk / "ids.jsonl").write_text(
        "\n".join(json.dumps({"input_ids": [1, 2, 3, 99_999]}) for _ in range(30))
    )
    code, screen = type_it(
        desk, Mistake("--config-name smoke name=mine training.max_steps=1 report=false", "")
    )
    assert code == 0, screen
    shutil.copytree(desk / "runs/mine/hf", desk / "base_model")
    (desk / "base_model/chat_template.jinja").unlink()
    return desk


@pytest.mark.parametrize("case", MISTAKES)
def test_the_screen_ends_with(case: str, folder: Path) -> None:
    mistake = MISTAKES[case]
    code, screen = type_it(folder, mistake)
    shown = mistake.shown.format(folder=folder, host=socket.gethostname())
    assert screen.split("\n\n")[-1].strip() == shown
    assert code == mistake.code
    assert "Traceback" not in screen
