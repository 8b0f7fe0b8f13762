"""A bare loop over the Hugging Face model on padded batches of documents of nearly one length, which waste almost
nothing: the honest rival of packing, an idea and no package.

python -m benchmarks.peers.sorted JOB
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job, llama

# model inputs, labels (unshifted), real tokens
Batch = tuple[dict[str, torch.Tensor], torch.Tensor, int]


def batches_of(rows: list[tuple[np.ndarray, np.ndarray]]) -> Iterator[Batch]:
    """Batches of about PACK_TOKENS real tokens in random order, as samplers by length give them."""
    lengths = np.array([len(ids) for ids, _ in rows])
    order = np.argsort(lengths, kind="stable")
    # by tokens, so that batches of short documents are as large as those of long ones
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths[order]) // PACK_TOKENS)) + 1
    batches = np.split(order, cuts)
    for number in np.random.default_rng(0).permutation(len(batches)):
        chosen = [rows[i] for i in batches[number]]
        width = max(len(ids) for ids, _ in chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        labels = torch.full((len(chosen), width), -100)
        mask = torch.zeros(len(chosen), width, dtype=torch.long)
        for row, (document, targets) in enumerate(chosen):
            ids[row, : len(document)] = torch.from_numpy(document)
            labels[row, : len(document)] = torch.from_numpy(targets)
            mask[row, : len(document)] = 1
        yield {"input_ids": ids, "attention_mask": mask}, labels, int(mask.sum())


def main(job: Job) -> None:
    model = llama(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    batches = batches_of(job.rows())
    clock, tokens = Clock(), []
    for _ in range(job.all_steps):
        inputs, labels, num_tokens = next(batches)
        with torch.autocast("cpu", torch.bfloat16, enabled=job.precision == "bf16"):
            logits = model(**inputs).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done()
        tokens.append(num_tokens)
    clock.report(job, tokens)


if __name__ == "__main__":
    main(Job.from_argv())
