"""Whole runs of drawn settings, each in a process of its own: exit 0, or 2 and a sentence, in a minute."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from automodel_lite.cli import run_recipe
from tests.properties.explore import SEED
from tests.ranks import in_a_process

VALUES = {
    "training.max_steps": ["1", "2"],
    "training.micro_batch_size": ["1", "2", "3", "1000000"],
    "training.global_batch_size": ["1", "4", "7", "1000000"],
    "training.max_grad_norm": ["0", "1e-30", "1e30"],
    "training.val_every_steps": ["0", "1"],
    "training.precision": ["fp32", "bf16", "fp8"],
    "training.activation_checkpointing": ["auto", "none", "full", "selective", "offload"],
    "training.master_weights": ["fp32", "bf16"],
    "training.ema_decay": ["0.5", "0.999", "1"],
    "training.deterministic": ["true"],
    "mesh.strategy": ["fsdp", "none", "ddp"],
    "mesh.cpu_offload": ["true"],
    "advanced.reshard_after_forward": ["true", "false"],
    "advanced.reduce_every_micro_batch": ["true", "false"],
    "optimizer": ["adamw_8bit", "adamw_bf16", "muon"],
    "optimizer.lr": ["0", "1e-3", "1e10", "-1", "nan"],
    "optimizer.betas": ["[0.9,0.95]", "[0,0]", "[0.9]"],
    "optimizer.eps": ["0", "1e-8", "1e300"],
    "lr_scheduler.warmup_steps": ["0", "1", "100000"],
    "packed_sequence.packed_sequence_size": ["1", "2", "64", "128", "300", "0"],
    "packed_sequence.overlong": ["drop", "truncate", "split", "error"],
    "packed_sequence.max_packs": ["1", "3", "null"],
    "model.config.hidden_size": ["32", "33", "8", "0"],
    "model.config.num_attention_heads": ["4", "3", "1"],
    "model.config.num_hidden_layers": ["1", "0"],
    "model.config.max_position_embeddings": ["64", "1", "2048"],
    "model.config.hidden_act": ["silu", "gelu", "nothing"],
    "model.config.vocab_size": ["384", "400", "50"],
    "tokenizer.vocab_size": ["262", "384", "100"],
    "dataset.num_chats": ["1", "2", "50", "-1"],
    "tokenize.train_on": ["assistant", "last_assistant", "completion", "all"],
    "dataloader.num_workers": ["0", "1", "9999"],
    "checkpoint.mode": ["sync", "async"],
    "checkpoint.export_hf": ["true", "false"],
    "loss.chunk_tokens": ["1", "null", "-5"],
    "samples.prompts": ["['Hi']", "[]", "['']"],
    "name": ["ü", "a b", "x" * 300],
}


def drawn(rng: random.Random) -> list[str]:
    """One to three settings; half of the values are wrong, alone or together."""
    return [
        f"{key}={rng.choice(VALUES[key])}" for key in rng.sample(sorted(VALUES), rng.randint(1, 3))
    ]


def _run(overrides: list[str]) -> None:
    quick = [
        "training.num_threads=1",
        "training.max_steps=2",
        "report=false",
        "checkpoint.export_hf=false",
    ]
    run_recipe("recipes.train_ft:main", ["--config-name", "smoke", *quick, *overrides])


@pytest.mark.system
@pytest.mark.parametrize("num_runs", [3, pytest.param(120, marks=pytest.mark.slow)])
def test_runs_end_well_or_in_a_sentence(
    num_runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "cache"))
    print(f"PROPERTY_SEED={SEED}")
    rng = random.Random(SEED)
    codes = []
    for number in range(num_runs):
        overrides = drawn(rng)
        (tmp_path / str(number)).mkdir()
        code, screen = in_a_process(_run, tmp_path / str(number), overrides)
        told = f"{overrides}: exit code {code}\n{screen[-3000:]}"
        assert "Traceback" not in screen, told
        if code == 0:
            assert re.search(r"finished at step \d of \d", screen), told
        elif code == 1:  # the run itself went wrong: its numbers were not finite
            assert "finite" in screen.splitlines()[-1], told
        else:
            assert code == 2, told
            assert len(screen.strip().splitlines()[-1].split()) >= 3, told
        codes.append(code)
    print(
        f"{num_runs} runs: {codes.count(0)} finished, {codes.count(2)} sentences, {codes.count(1)} stopped by themselves"
    )
