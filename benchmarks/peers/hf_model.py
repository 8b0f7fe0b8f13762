"""The Hugging Face model of a job, as contestants that know nothing of our kernels get it."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.peers.job import Job


def llama(job: Job) -> LlamaForCausalLM:
    """fp32 weights, SDPA attention, the same seed for all."""
    torch.manual_seed(0)
    config = LlamaConfig(**job.model_settings(), use_cache=False, attn_implementation="sdpa")
    return LlamaForCausalLM(config).train()
