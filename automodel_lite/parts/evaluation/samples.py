"""Answers of the model in training to fixed prompts, without leaving the mesh.

Greedily, one forward per token. Sharded weights require every rank to run every forward, and all
ranks take rank 0's token.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_lite.config.schema import SamplesConfig
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.parts.evaluation.generator import prompt_ids
from automodel_lite.thd import stream_of


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
