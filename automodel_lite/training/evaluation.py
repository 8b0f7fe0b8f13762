"""Loss over validation packs as (sum, count): every document counted once, on any layout of ranks.

What the model in training answers to fixed prompts, without leaving the mesh: greedy, one forward a token.

Every rank runs every forward, as sharded weights ask for; rank 0's choice of token is everyone's.

Questions held out of the training set, asked by generation and compared word for word.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedTokenizerBase

from automodel_lite.attention.probe import stream_of
from automodel_lite.config.rules import Count, Positive
from automodel_lite.config.schema import SamplesConfig
from automodel_lite.data.loader import DeviceFeed, PackSource, validation_steps
from automodel_lite.data.packing.packs import PackedDataset
from automodel_lite.models.generate import load_model
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.progress import Progress
from automodel_lite.thd import ThdBatch


@torch.no_grad()
def validation_loss(
    model: ParallelModel,
    packs: PackedDataset,
    source: PackSource,
    mesh: Mesh,
    shard: Callable[[ThdBatch], ThdBatch],
    must_stop: Callable[[], bool],
) -> float | None:
    """Mean over all label tokens of the packs; ranks that run short of packs get empty ones. Every rank calls it.

    `shard` takes this rank's part of a stream. `must_stop` is asked after every batch, on all ranks; None when it says
    so.
    """
    model.module.eval()
    loss_sum = torch.zeros((), device=mesh.device)
    num_label_tokens = 0
    feed = DeviceFeed(validation_steps(packs, source.shape, mesh.dp_rank, source.dataloader), shard, mesh.device)
    packs_per_forward = source.shape.dp_size * source.shape.micro_batch_size
    with Progress("validating", -(-len(packs) // packs_per_forward), "batches") as progress:
        for ready in feed:
            loss_sum += model(ready.parts[0])
            num_label_tokens += ready.micro_batches[0].num_label_tokens
            feed.stage()
            progress.add(1)
            if must_stop():
                model.module.train()
                return None
    model.module.train()
    count = mesh.sum(torch.tensor(num_label_tokens)).item() / mesh.shape.cp
    return mesh.sum(loss_sum).item() / max(count, 1)


@torch.no_grad()
def sample_answers(
    config: SamplesConfig, model: ParallelModel, mesh: Mesh, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[str, str]]:
    """(prompt, answer) of each configured prompt. Every rank calls it."""
    model.module.eval()
    answers = []
    for prompt in config.prompts:
        ids = prompt_ids(prompt, tokenizer)
        start = len(ids)
        while len(ids) < start + config.max_new_tokens:
            token = model.logits(stream_of(torch.tensor([ids]), mesh.device), num_last=1)[-1].argmax()
            if mesh.root:
                dist.broadcast(token, src=0)
            if token.item() == tokenizer.eos_token_id:
                break
            ids.append(int(token.item()))
        answers.append((prompt, str(tokenizer.decode(ids[start:], skip_special_tokens=True)).strip()))
    model.module.train()
    return answers


def prompt_ids(prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """As a user's turn of the chat template; as plain text without one."""
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    encoded: Any = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


class Question(Protocol):
    """A chat that ends with the user's turn, and the answer that counts as right."""

    messages: list[dict[str, Any]]
    answer: str


@dataclass(frozen=True)
class Answer:
    question: str
    expected: str
    given: str

    @property
    def is_right(self) -> bool:
        return self.given.strip() == self.expected.strip()


@dataclass(frozen=True)
class ExactMatch:
    """The config node `evaluation`: asks the dataset's held-out questions at the end of the run."""

    num_questions: Count = 24
    max_new_tokens: Positive = 64
    num_shown: Count = 3

    def ask(self, model_folder: Path, questions: Sequence[Question], trust_remote_code: bool = False) -> Answers:
        """Greedy answers of the exported model or adapter, loaded as a user would load it."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False)
        model = load_model(str(model_folder), torch.float32, trust_remote_code)
        answers = [self._ask_one(model, tokenizer, question) for question in questions[: self.num_questions]]
        return Answers(answers, self.num_shown)

    @torch.no_grad()
    def _ask_one(self, model: Any, tokenizer: Any, question: Question) -> Answer:
        prompt = tokenizer.apply_chat_template(
            question.messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=self.max_new_tokens, do_sample=False)
        given = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        return Answer(question.messages[-1]["content"], question.answer, given.strip())


@dataclass(frozen=True)
class Answers:
    """The answers to all questions asked."""

    answers: list[Answer]
    num_shown: int

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def num_right(self) -> int:
        return sum(answer.is_right for answer in self.answers)

    def text(self) -> str:
        """`held-out questions: 24 of 24 exactly right`, and the first answers."""
        if not self.answers:
            return "held-out questions: the data has none"
        lines = [f"held-out questions: {self.num_right} of {len(self)} exactly right"]
        for answer in self.answers[: self.num_shown]:
            mark = "right" if answer.is_right else f"wrong, expected {answer.expected!r}"
            lines.append(f"  Q: {answer.question}\n  A: {answer.given}   ({mark})")
        return "\n".join(lines)
