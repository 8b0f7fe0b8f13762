"""CPU seconds of starting: `--help`, imports, raw JSON lines to the end of the first step, and the second start.

    python -m benchmarks.start_up --data gsm8k_train.jsonl --peers /path/to/environments

`--peers` as for benchmarks.peers_cpu (trl and nemo are used, if they are there). The tokenizer is given to all; a start
includes reading, tokenizing and packing all documents, building the small model of benchmarks.peers_cpu and one step of
2,048 tokens. Run it in a plain installation (`pip install .`): what the tests need makes every import longer, for example
scipy, which transformers imports wherever it is installed.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from automodel_lite.telemetry.callbacks import Callback, Row, RunInfo
from benchmarks.peers.job import Job, say_first_step
from benchmarks.peers_cpu import ROOT, environment

IMPORTS = "from automodel_lite.cli import Recipe; Recipe('recipes.train_ft:main').function()"
NEMO_IMPORTS = "import nemo_automodel.recipes.llm.train_ft"
LLAMA = "from transformers import LlamaForCausalLM"
RECIPE = str(ROOT / "recipes" / "train_ft.py")


class FirstStep(Callback):
    """Says how many CPU seconds the run took until its first step was done, before anything is saved."""

    def __init__(self, run: RunInfo) -> None:
        pass

    def log(self, row: Row) -> None:
        if row["step"] == 1:
            say_first_step()


def to_first_step(*command: str) -> float:
    return float(re.findall("first step after ([0-9.]+) CPU-s", run(*command))[0])


def cpu_seconds(*command: str) -> float:
    """Of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(*command)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def run(*command: str) -> str:
    """What it said on stdout; stops with what it said on stderr when it fails."""
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def recipe_command(job: Job, run: str, cache: str) -> list[str]:
    model = job.model_settings()
    del model["vocab_size"]
    return [
        sys.executable,
        RECIPE,
        "--config-name",
        "finetune",
        "name=start",
        "model=llama_smoke",
        *(f"model.config.{key}={value}" for key, value in model.items()),
        f"output_dir={job.scratch}/{run}",
        f"cache_dir={job.scratch}/{cache}",
        f"dataset.path={job.data}",
        f"tokenizer.path={job.folder}/tokenizer",
        "packed_sequence.packed_sequence_size=2048",
        "training.max_steps=1",
        "training.num_epochs=null",
        "training.global_batch_size=1",
        "training.num_threads=1",
        "checkpoint.export_hf=false",
        "tokenize.num_proc=1",
        "lr_scheduler.warmup_steps=0",
        "callbacks.first_step._target_=benchmarks.start_up.FirstStep",
        "security.allow_targets=[benchmarks]",
    ]


def data_seconds(job: Job) -> tuple[float, float]:
    """CPU seconds of tokenizing and packing, cold and from the cache, in this process after a warm-up of imports."""
    import time

    from automodel_lite.config.components import build
    from automodel_lite.data.packing.plan import plan_packs
    from automodel_lite.data.tokens import tokenize
    from automodel_lite.data.tokens.tokenizer import load_tokenizer
    from benchmarks.peers.recipe import recipe_config

    config = recipe_config(job)
    tokenizer = load_tokenizer(f"{job.folder}/tokenizer")
    documents = build(config.dataset)
    tokenizing = tokenize.Job(tokenizer, replace(config.tokenize, num_proc=1))
    seconds = []
    for _ in range(2):
        began = time.process_time()
        rows = tokenize.tokenize_documents(documents, tokenizing, f"{job.scratch}/rows").train
        plan_packs(rows.lengths, 2048)
        seconds.append(time.process_time() - began)
    return seconds[0], seconds[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--peers", required=True)
    args = parser.parse_args()
    trl, nemo = (str(Path(args.peers) / name / "bin" / "python") for name in ("trl", "nemo"))
    with tempfile.TemporaryDirectory() as folder:
        job = Job(folder, "small", "fp32", 1, 0, args.data, folder)
        cpu_seconds(sys.executable, "-m", "benchmarks.peers.prepare", job.to_argv())
        job = replace(job, scratch=f"{folder}/scratch")
        rows = {
            "--help": cpu_seconds(sys.executable, RECIPE, "--help"),
            "--cfg job": cpu_seconds(
                sys.executable, RECIPE, "--config-name", "llama_packed", "--cfg", "job"
            ),
            "imports of our recipe": cpu_seconds(sys.executable, "-c", IMPORTS),
            "the same, and a Llama": cpu_seconds(sys.executable, "-c", f"{IMPORTS}; {LLAMA}"),
            "raw JSONL to first step, recipe": to_first_step(
                *recipe_command(job, "first", "cache")
            ),
            "second start, recipe": to_first_step(*recipe_command(job, "second", "cache")),
        }
        if Path(nemo).exists():
            rows["imports of NeMo AutoModel's recipe"] = cpu_seconds(nemo, "-c", NEMO_IMPORTS)
            rows["NeMo's, and a Llama"] = cpu_seconds(nemo, "-c", f"{NEMO_IMPORTS}; {LLAMA}")
        if Path(trl).exists():
            command = trl, "-m", "benchmarks.peers.trl_from_files", job.to_argv()
            rows["raw JSONL to first step, TRL"] = to_first_step(*command)
        rows["tokenizing and packing"], rows["the same from the cache"] = data_seconds(job)
    for name, seconds in rows.items():
        print(f"{name:36s} {seconds:6.2f} CPU-s")


if __name__ == "__main__":
    main()
