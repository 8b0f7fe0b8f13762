"""Answers of the model in training to fixed prompts, without leaving the mesh.

Greedily, one forward per token. Sharded weights require every rank to run every forward, and all
ranks take rank 0's token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from automodel_lite.config.schema import SamplesConfig
from automodel_lite.data.feeding.source import PackSource
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.stop_tokens import stop_ids
from automodel_lite.evaluation.generator import prompt_ids
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.thd import ThdBatch, stream_of

Prompt = tuple[list[int], Callable[[list[int]], ThdBatch]]
"""The tokens of a chat that asks something, and what makes a stream of them and of the answer so
far.
"""


@runtime_checkable
class PromptPacker(Protocol):
    """A packer whose prompts may hold more than text: images."""

    def prompt(self, job: TokenizeJob, text: str) -> Prompt: ...


def text_prompt(job: TokenizeJob, text: str) -> Prompt:
    """Returns a prompt of text."""
    chat = [{"role": "user", "content": text}]
    ids = prompt_ids(job.tokenizer, chat, template_kwargs=job.settings.template_kwargs)
    return ids, lambda ids: stream_of([torch.tensor(ids)])


@torch.no_grad()
def sample_answers(
    config: SamplesConfig, model: ParallelModel, mesh: Mesh, source: PackSource
) -> list[tuple[str, str]]:
    """Returns (prompt, answer) of each configured prompt. Every rank calls it."""
    model.module.eval()
    answers = []
    tokenizer = source.tokenizer
    variables = source.job.settings.template_kwargs
    ends = stop_ids(model.loss_model.lm, tokenizer, variables)
    for prompt in config.prompts:
        if isinstance(source.packer, PromptPacker):
            ids, stream = source.packer.prompt(source.job, prompt)
        else:
            ids, stream = text_prompt(source.job, prompt)
        start = len(ids)
        while len(ids) < start + config.max_new_tokens:
            # Every rank runs the forward, for the gathered weights; rank 0's choice is all ranks'
            # next token.
            token = model.logits(stream(ids).to(mesh.device), num_last=1)[-1].argmax()
            if mesh.root:
                dist.broadcast(token, src=0)
            if token.item() in ends:
                break
            ids.append(int(token.item()))
        answers.append(
            (prompt, str(tokenizer.decode(ids[start:], skip_special_tokens=True)).strip())
        )
    model.module.train()
    return answers
