"""Scripts of tinker-cookbook, as they are in the package, on one and on two ranks."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from automodel_lite.tinker.cookbook import own_arguments

ROOT = Path(__file__).resolve().parents[2]
BASE, TEACHER = "Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"
STUDENT = [f"model_name={BASE}", "lora_rank=4"]
PLAIN = [f"model_name={BASE}", "renderer_name=role_colon"]
SHORT = ["batch_size=4", "max_length=256"]
DRAWN = ["group_size=2", "max_tokens=6"]
SCRIPTS: dict[str, list[str]] = {
    "sl_loop": [*STUDENT, "batch_size=4", "max_steps=2", "save_every=1", "learning_rate=1e-2"],
    "rl_loop": [
        *STUDENT,
        *DRAWN,
        "batch_size=2",
        "max_steps=2",
        "save_every=1",
        "loss_fn=importance_sampling",
    ],
    "chat_sl.train": [*STUDENT, *SHORT, "max_steps=2", "save_every=1", "eval_every=1"],
    "preference.dpo.train": [*PLAIN, *SHORT, "max_steps=2", "dataset=hhh"],
    "preference.shorter.train": [*PLAIN, *DRAWN, "batch_size=2", "max_steps=2", "eval_every=0"],
    "distillation.on_policy_distillation": [
        *STUDENT,
        *DRAWN,
        f"teacher_model={TEACHER}",
        "groups_per_batch=2",
        "max_steps=2",
    ],
    "distillation.on_policy_multi_teacher": [
        *STUDENT,
        *DRAWN,
        f"deepmath_teacher_model={TEACHER}",
        f"tulu3_teacher_model={BASE}",
        "deepmath_groups_per_batch=2",
        "tulu3_groups_per_batch=2",
        "max_steps=2",
    ],
    "distillation.off_policy_reasoning": [*STUDENT, *SHORT, "max_steps=2"],
    "prompt_distillation.train": [
        *STUDENT,
        *SHORT,
        "file_path=chats.jsonl",
        "renderer_name=role_colon",
        "max_steps=2",
    ],
    "math_rl.train": [
        *PLAIN,
        "lora_rank=4",
        "env=arithmetic",
        "group_size=4",
        "groups_per_batch=2",
        "max_steps=2",
        "loss_fn=importance_sampling",
    ],
    "decisions.forecasting": [
        *STUDENT,
        "data_path=markets.csv",
        "batch_size=2",
        "max_steps=2",
        "eval_every=1",
        "learning_rate=1e-2",
    ],
}


def save_model(folder: Path) -> None:
    """A tiny model with a token for each byte."""
    words = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def save_data(folder: Path) -> None:
    """What the scripts read from files."""
    chat = [{"role": "user", "content": "guten tag"}, {"role": "assistant", "content": "de"}]
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': chat})}\n" * 8)
    rows = [
        {
            "submission_id": f"s{number}",
            "event_ticker": f"e{number}",
            "title": f"Event {number}",
            "snapshot_time": f"{month}-01T00:00:00Z",
            "close_time": f"{month}-02T00:00:00Z",
            "market_outcome": json.dumps({"up": number % 2}),
            "category": "any",
            "markets": '["up"]',
            "sources": '[{"title": "t", "summary": "s"}]',
        }
        for number, month in enumerate(["2025-09"] * 4 + ["2025-11"] * 2)
    ]
    with (folder / "markets.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def run_scripts(folder: Path, num_ranks: int, lines: list[list[str]]) -> str:
    (folder / "lines.json").write_text(json.dumps(lines))
    model = f"model.pretrained={folder}/model training.num_threads=1"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    command = [
        sys.executable,
        *(launcher if num_ranks > 1 else []),
        *("-m", "automodel_lite.tinker"),
        *("--model", f"{BASE}={model}"),
        *("--model", f"{TEACHER}={model} seed=3"),
        *("--set", f"mesh.dp_shard={num_ranks}"),
        *(f"{ROOT}/tests/tinker/offline.py", "lines.json"),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def metrics_of(folder: Path, script: str) -> list[dict[str, float]]:
    lines = (folder / "logs" / script / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def likelihoods_of(folder: Path, script: str) -> list[float]:
    return [found["train_mean_nll"] for found in metrics_of(folder, script)]


@pytest.fixture(scope="module")
def on_one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_all(tmp_path_factory.mktemp("one"), 1)


def run_all(folder: Path, num_ranks: int) -> Path:
    pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed")
    save_model(folder / "model")
    save_data(folder)
    lines = [
        [f"tinker_cookbook.recipes.{name}", f"log_path=logs/{name}", *arguments]
        for name, arguments in SCRIPTS.items()
    ]
    # once more: it goes on from its last checkpoint, which is its end
    lines.append(lines[0])
    lines.append(["tinker_cookbook.recipes.decisions.demo", f"model_name={BASE}"])
    printed = run_scripts(folder, num_ranks, lines)
    for module, *_ in lines:
        assert printed.count(f"ran {module}\n") == num_ranks * (1 + module.endswith("sl_loop"))
    return folder


@pytest.mark.slow
def test_scripts_run_unchanged(on_one_rank: Path) -> None:
    likelihoods = likelihoods_of(on_one_rank, "sl_loop")
    assert len(likelihoods) == 2
    assert likelihoods[1] < likelihoods[0]
    log = (on_one_rank / "logs" / "sl_loop" / "logs.log").read_text()
    assert "Resuming from batch 64" in log
    assert len(metrics_of(on_one_rank, "math_rl.train")) >= 2
    scores = [
        x["test/brier_reward"]
        for x in metrics_of(on_one_rank, "decisions.forecasting")
        if "test/brier_reward" in x
    ]
    assert scores[-1] > scores[0]


@pytest.mark.slow
def test_two_ranks_write_what_one_does(on_one_rank: Path, tmp_path: Path) -> None:
    both = run_all(tmp_path, 2)
    for script in ("sl_loop", "chat_sl.train"):
        assert likelihoods_of(both, script) == pytest.approx(
            likelihoods_of(on_one_rank, script), abs=2e-4
        )
    for script in SCRIPTS:
        names = [(x / "logs" / script / "checkpoints.jsonl") for x in (on_one_rank, both)]
        one, two = (path.read_text() if path.is_file() else "" for path in names)
        assert two == one, script


def test_logs_are_the_first_rank_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["log_path=/tmp/x/y", "--log-path=z", "loss_fn=ppo", "catalog_path=a"]
    monkeypatch.setenv("RANK", "0")
    assert own_arguments(given, tmp_path) == given
    monkeypatch.setenv("RANK", "1")
    assert own_arguments(given, tmp_path) == [
        f"log_path={tmp_path}/ranks/1/logs/tmp/x/y",
        f"--log-path={tmp_path}/ranks/1/logs/z",
        "loss_fn=ppo",
        "catalog_path=a",
    ]
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == f"tinker     rank 1 writes its logs to {tmp_path}/ranks/1/logs/tmp/x/y"
