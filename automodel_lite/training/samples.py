"""What the model in training answers to fixed prompts, without leaving the mesh: greedy, one forward a token.

Every rank runs every forward, as sharded weights ask for; rank 0's choice of token is everyone's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from automodel_lite.attention.probe import stream_of
from automodel_lite.config.schema import SamplesConfig
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel


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
