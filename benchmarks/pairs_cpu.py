"""Pairs with long prompts, and distilled chats, per CPU-second: our recipe beside TRL's padded trainers, in one run.

    python -m benchmarks.pairs_cpu --peers /path/to/environments
    python -m benchmarks.pairs_cpu --peers P --method distill

Prompts are some solved problems of GSM8K and one that is not solved; the answer of another problem is the rejected one.
Contestants are processes that take turns on one core, as in `benchmarks.peers_cpu`, whose --peers has the environment
`trl`. The time of references that are computed before training is not counted, neither ours nor TRL's.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from benchmarks.peers.job import SHAPES, Job
from benchmarks.peers_cpu import ROOT, Contestant, contest, print_table

PAIRS = {
    "recipe": Contestant("pairs", "recipe"),
    "trl": Contestant("pairs", "trl", "trl"),
    "trl_precomputed": Contestant("pairs", "trl_precomputed", "trl"),
}
DISTILL = {
    "recipe": Contestant("pairs", "distill_recipe"),
    "gkd": Contestant("pairs", "distill_gkd", "trl"),
}


def write_rows(path: Path, is_pairs: bool, num_solved: int, num_rows: int) -> None:
    """Writes pairs, or the chats that their chosen answers are."""
    rows = [
        json.loads(line)
        for line in (ROOT / "examples/data/gsm8k_train.jsonl").read_text().splitlines()
    ]
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            *solved, asked, other = draw.sample(rows, num_solved + 2)
            shown = "\n\n".join(
                f"Question: {row['question']}\nAnswer: {row['answer']}" for row in solved
            )
            prompt = [
                {"role": "user", "content": f"{shown}\n\nQuestion: {asked['question']}\nAnswer:"}
            ]
            chosen, rejected = (
                [{"role": "assistant", "content": row["answer"]}] for row in (asked, other)
            )
            row: dict[str, Any] = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
            file.write(json.dumps(row if is_pairs else {"messages": prompt + chosen}) + "\n")


def write_model(folder: Path, shape: str, seed: int, tokenizer: Any) -> None:
    """A Llama with random weights, and the tokenizer."""
    torch.manual_seed(seed)
    sizes = SHAPES[shape] | {
        "intermediate_size": -(-SHAPES[shape]["hidden_size"] * 8 // 3 // 64) * 64
    }
    config = LlamaConfig(
        **sizes, vocab_size=len(tokenizer), max_position_embeddings=8192, tie_word_embeddings=True
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    args = parser().parse_args()
    is_pairs = args.method == "dpo"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "rows.jsonl"
        write_rows(data, is_pairs, args.solved, 10 * (args.steps + args.warmup_steps))
        documents = FilesDataset(str(ROOT / "examples/data/gsm8k_train.jsonl"))
        tokenizer = train_bpe_tokenizer(documents, 8192, cache_dir=folder / "tokenizer")
        for seed, which in enumerate(("model", "teacher")):
            write_model(folder / which, args.shape, seed, tokenizer)
        job = Job(name, args.shape, "fp32", args.steps, args.warmup_steps, str(data), name)
        results = contest(PAIRS if is_pairs else DISTILL, job, args.peers)
    print_table(results, "pairs" if is_pairs else "chats")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--peers", required=True, help="folder with the environment trl")
    found.add_argument("--method", default="dpo", choices=["dpo", "distill"])
    found.add_argument("--shape", default="small", choices=list(SHAPES))
    found.add_argument("--solved", type=int, default=8, help="solved problems in each prompt")
    found.add_argument("--steps", type=int, default=8, help="turns that are timed")
    found.add_argument("--warmup-steps", type=int, default=2)
    return found


if __name__ == "__main__":
    main()
