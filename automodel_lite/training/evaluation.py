"""Validation: the loss over held-out packs, answers to fixed prompts, and held-out questions.

The loss is (sum, count): every document is counted once, on any layout of ranks. Prompts are
answered by the model in training, without leaving the mesh: greedily, one forward per token.
Sharded weights require every rank to run every forward, and all ranks take rank 0's token. Held-out
questions are answered by the exported model and scored.
"""

from __future__ import annotations

import math
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean as mean
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_lite.config.rules import Count, Size
from automodel_lite.config.schema import SamplesConfig
from automodel_lite.data.feeding.feed import DeviceFeed, validation_steps
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.data.reading.documents import Documents, Question, question_of
from automodel_lite.errors import DataError, one_line
from automodel_lite.models.generate import Generator, prompt_ids
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.progress import Progress
from automodel_lite.thd import ThdBatch, stream_of


@torch.no_grad()
def validation_losses(
    model: ParallelModel,
    packs: PackedDataset,
    source: PackSource,
    mesh: Mesh,
    shard: Callable[[ThdBatch], ThdBatch],
    must_stop: Callable[[], bool],
) -> dict[str, float] | None:
    """Returns `loss` and its parts, means over what the loss counts in all packs; the
    `token_accuracy` 0..1 and, where it is not the loss, the plain `cross_entropy`, means over all
    label tokens, by their weights; and the `perplexity` of that. By these, runs of different losses
    compare. Every rank calls it.

    `shard` takes this rank's part of a stream. `must_stop` is called after every batch, on all
    ranks; None when it is true.
    """
    model.module.eval()
    loss_model = model.loss_model
    sums = {"loss": torch.zeros((), device=mesh.device)}
    counts = torch.zeros(2, dtype=torch.float64)  # of what the loss counts, and of label tokens
    steps = validation_steps(packs, source.shape, mesh.dp_rank, source.dataloader)
    feed = DeviceFeed(steps, shard, mesh.device, model.loss_model.needs_mixer_metadata)
    packs_per_forward = source.shape.dp_size * source.shape.micro_batch_size
    with Progress("validating", -(-len(packs) // packs_per_forward), "batches") as progress:
        for ready in feed:
            output = model(ready.inputs[0])
            # Sums and counts stay apart to the end: means of batches would weigh short ones too
            # much.
            for name, value in {"loss": output.sum, **output.parts}.items():
                sums[name] = sums[name] + value if name in sums else value.float()
            whole = ready.micro_batches[0]
            counts += torch.tensor([loss_model.loss.num_items(whole), whole.num_label_tokens])
            feed.stage()
            progress.add(1)
            if must_stop():
                model.module.train()
                return None
    model.module.train()
    # Ranks of cp count the same streams; what they sum is their own tokens' share.
    num_items, num_labels = (mesh.sum(counts) / mesh.shape.cp).tolist()
    totals = {name: mesh.sum(value).item() for name, value in sums.items()}
    counted = {
        name: num_labels if name in ("token_accuracy", "cross_entropy") else num_items
        for name in totals
    }
    means = {name: total / (counted[name] or 1) for name, total in totals.items()}
    return means | {"perplexity": math.exp(min(means.get("cross_entropy", means["loss"]), 700.0))}


@torch.no_grad()
def sample_answers(
    config: SamplesConfig, model: ParallelModel, mesh: Mesh, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, str]]:
    """Returns (prompt, answer) of each configured prompt. Every rank calls it."""
    model.module.eval()
    answers = []
    for prompt in config.prompts:
        ids = prompt_ids(tokenizer, [{"role": "user", "content": prompt}])
        start = len(ids)
        while len(ids) < start + config.max_new_tokens:
            # Every rank runs the forward, for the gathered weights; rank 0's choice is all ranks'
            # next token.
            token = model.logits(stream_of(torch.tensor([ids]), mesh.device), num_last=1)[
                -1
            ].argmax()
            if mesh.root:
                dist.broadcast(token, src=0)
            if token.item() == tokenizer.eos_token_id:
                break
            ids.append(int(token.item()))
        answers.append(
            (prompt, str(tokenizer.decode(ids[start:], skip_special_tokens=True)).strip())
        )
    model.module.train()
    return answers


def f1(given: str, expected: str) -> float:
    """Scores the words that the answer shares with the expected one, as in SQuAD: case, punctuation
    and articles do not count.
    """
    spaces = str.maketrans(string.punctuation, " " * len(string.punctuation))
    words = [text.lower().translate(spaces).split() for text in (given, expected)]
    found, wanted = (
        Counter(word for word in each if word not in ("a", "an", "the")) for each in words
    )
    num_shared = (found & wanted).total()
    return 2 * num_shared / max(found.total() + wanted.total(), 1) if wanted else float(not found)


@dataclass(frozen=True)
class ExactMatch:
    """The config node `evaluation`: asks held-out questions at the end of the run, and scores the
    answers.

    metrics   name -> a further score of each answer, such as `f1`: (given, expected) -> float;
              logged as score/<name>
    """

    num_questions: Count = 24  # asked, the first ones
    max_new_tokens: Size = 64  # of an answer
    num_shown: Count = 3  # answers printed
    batch_size: Size = 8  # questions answered at a time
    metrics: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, generator: Generator, held_out: Iterable[Question]) -> tuple[str, dict[str, Any]]:
        """Answers the first of the questions greedily; returns lines to print, and scores and
        answers for metrics.jsonl.
        """
        questions = list(islice(held_out, self.num_questions))
        if not questions:
            return "held-out questions: the data has none", {"answers_right": 0, "answers": 0}
        # One that the model cannot be asked ends no run, and is not counted as wrong.
        refusals = [generator.refusal(q.messages, q.is_chat, q.tools) for q in questions]
        refused = [
            f"  not asked: question {number}, {one_line(str(question.messages[-1]['content']), 60)}"
            f" ({reason})"
            for number, (question, reason) in enumerate(zip(questions, refusals), start=1)
            if reason
        ]
        questions = [question for question, reason in zip(questions, refusals) if not reason]
        if not questions:
            head = f"held-out questions: none of {len(refused)} can be asked"
            return "\n".join([head, *refused]), {"answers_right": 0, "answers": 0}
        texts = answers_to(questions, generator, self.batch_size, self.max_new_tokens)
        given = [text.strip() for text in texts]
        expected = [str(question.answer) for question in questions]
        is_right = [one == other.strip() for one, other in zip(given, expected)]
        scores = {name: mean(map(metric, given, expected)) for name, metric in self.metrics.items()}
        shown = "".join(f", {name} {score:.3f}" for name, score in scores.items())
        lines = [f"held-out questions: {sum(is_right)} of {len(questions)} exactly right{shown}"]
        lines += refused
        for number, question in enumerate(questions[: self.num_shown]):
            mark = "right" if is_right[number] else f"wrong, expected {expected[number]!r}"
            lines.append(
                f"  Q: {question.messages[-1]['content']}\n  A: {given[number]}   ({mark})"
            )
        row: dict[str, Any] = {"answers_right": sum(is_right), "answers": len(questions)}
        row |= {"answers_refused": len(refused)} if refused else {}
        row |= {f"score/{name}": score for name, score in scores.items()}
        # for the report
        for question, answer, wanted, right in zip(questions, given, expected, is_right):
            row[f"text/{question.messages[-1]['content']}"] = (
                answer if right else f"{answer}  (expected: {wanted})"
            )
        return "\n".join(lines), row


def answers_to(
    questions: Sequence[Question],
    generator: Generator,
    batch_size: int,
    max_new_tokens: int,
    temperature: float = 0.0,
    progress: Progress | None = None,  # of all questions, when these are a part of them
) -> list[str]:
    """Returns the model's answers, in the order of the questions; those of like length share a
    batch.
    """
    lengths = [
        sum(len(str(turn["content"])) for turn in question.messages) for question in questions
    ]
    order = sorted(range(len(questions)), key=lengths.__getitem__)
    answers = [""] * len(questions)
    with (
        nullcontext(progress)
        if progress
        else Progress("answering", len(questions), "questions") as shown
    ):
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            asked = [questions[place] for place in places]
            texts = generator.answers(
                [question.messages for question in asked],
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                is_chat=asked[0].is_chat,
                tools=[question.tools for question in asked],
            )
            for place, text in zip(places, texts):
                answers[place] = text
            shown.add(len(places))
    return answers


def questions_of(documents: Documents) -> Iterator[Question]:
    """Yields the dataset's own; where it has none, what its validation documents ask; without any,
    its documents.
    """
    if documents.questions:
        yield from documents.questions
        return
    for rows in documents.val.values() or [documents.train]:
        for index in range(len(rows)):
            try:
                question = question_of(rows[index])
            except DataError:  # counted where the documents were tokenized
                continue
            if question and question.answer is not None:
                yield question
