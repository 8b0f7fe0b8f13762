"""Questions about one state, as a record that is one tree against a row per question: tokens and the step's time.

    OMP_NUM_THREADS=1 python -m benchmarks.decisions [--turns 5] [--state-words 400]

Both are read by the program's own reader and tokenizer, and packed into one stream; a step is forward and backward of
`loss=decisions`, in turns in one process. The loss and the largest difference of a gradient are compared, too.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from automodel_lite import install_attention
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.decisions import DecisionStyle
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.losses.decisions import Decisions
from automodel_lite.thd import ThdBatch
from benchmarks.trees import MODELS, VOCAB, batch_of, build
from benchmarks.turns import ratio, take_turns

NUM_QUESTIONS = (4, 8, 16, 32)
LOSS = Decisions()


def record(num_questions: int, num_words: int) -> dict[str, Any]:
    """A state of random words, and questions with two to five choices."""
    draw = random.Random(num_questions)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=5)) for _ in range(300)]

    def said(count: int) -> str:
        return " ".join(draw.choices(words, k=count))

    questions = {}
    answers = {}
    for number in range(num_questions):
        names = draw.sample(words, draw.randint(2, 5))
        asked = {"type": "choice", "instructions": f"{said(8)}?"}
        questions[f"q{number}"] = {**asked, "criteria": {name: said(4) for name in names}}
        answers[f"q{number}"] = names[0]
    return {"state": said(num_words), "questions": questions, "answers": answers}


def batches(num_questions: int, num_words: int, folder: Path) -> dict[str, ThdBatch]:
    """The record as rows and as a tree."""
    path = folder / f"{num_questions}.jsonl"
    path.write_text(json.dumps(record(num_questions, num_words)))
    documents = FilesDataset(str(path))
    tokenizer = train_bpe_tokenizer(documents, vocab_size=VOCAB, cache_dir=str(folder))
    found = {}
    for name, tree in {"rows": "off", "tree": "auto"}.items():
        job = TokenizeJob(tokenizer, tree=tree, decisions=DecisionStyle())
        rows = tokenize_documents(documents, job, folder / "cache").train
        found[name] = LOSS.prepare(batch_of([rows[i] for i in range(len(rows))]))
    return found


def step(model: LossModel, batch: ThdBatch) -> float:
    """Returns the loss."""
    model.zero_grad()
    loss = model(batch).sum
    loss.backward()
    return loss.item()


def gradients(model: LossModel) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def compare(name: str, num_questions: int, num_words: int, turns: int, folder: Path) -> None:
    lm = build(name)
    install_attention(lm)
    model = LossModel(lm, LOSS).train()
    ways = batches(num_questions, num_words, folder)
    steps = {way: partial(step, model, batch) for way, batch in ways.items()}
    times, losses = take_turns(steps, turns)
    grads = {}
    for way, run in steps.items():
        run()
        grads[way] = gradients(model).clone()
    off = (grads["rows"] - grads["tree"]).abs().max() / grads["rows"].abs().max()
    tokens = {way: batch.num_tokens for way, batch in ways.items()}
    print(
        f"{name:8s} {num_questions:2d} questions  {tokens['rows']:6,} -> {tokens['tree']:6,} tokens "
        f"({tokens['rows'] / tokens['tree']:.2f} x)  CPU-s {min(times['rows']):.2f} -> "
        f"{min(times['tree']):.2f}  {ratio(times['rows'], times['tree'])}  loss differs "
        f"{abs(losses['rows'] / losses['tree'] - 1):.0e}, gradient {off:.0e}",
        flush=True,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--state-words", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where:
        for model_name in MODELS:
            for count in NUM_QUESTIONS:
                compare(model_name, count, arguments.state_words, arguments.turns, Path(where))
