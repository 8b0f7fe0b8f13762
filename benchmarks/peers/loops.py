"""Three bare loops over the Hugging Face model, for rivals that are ideas and no packages.

    python -m benchmarks.peers.loops JOB sorted | sorted_compiled | mask | random

sorted  padded batches of documents of nearly one length (the honest rival of packing: almost no padding)
        (sorted_compiled: with torch.compile on every layer, for any shape)
random  padded batches in random order
mask    packed, with a [T, T] mask that keeps documents apart
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job, llama, use_one_thread

# model inputs, labels (unshifted), real tokens
Batch = tuple[dict[str, torch.Tensor], torch.Tensor, int]
Rows = list[tuple[np.ndarray, np.ndarray]]


def padded(rows: Rows, size: int, is_sorted: bool) -> Iterator[Batch]:
    """Batches of about PACK_TOKENS real tokens; sorted ones in random order, as samplers by length give them."""
    rng = np.random.default_rng(0)
    lengths = np.array([len(ids) for ids, _ in rows])
    order = np.argsort(lengths, kind="stable") if is_sorted else rng.permutation(len(rows))
    # by tokens, so that batches of short documents are as large as those of long ones
    if is_sorted:
        cuts = np.flatnonzero(np.diff(np.cumsum(lengths[order]) // PACK_TOKENS)) + 1
        batches = np.split(order, cuts)
    else:
        batches = np.array_split(order, len(order) // size)
    for number in rng.permutation(len(batches)):
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


def masked(rows: Rows) -> Iterator[Batch]:
    """Documents in order of the files until the pack is full; a boolean [1, 1, T, T] mask."""
    pack: Rows = []
    for row in rows:
        if sum(len(ids) for ids, _ in pack) + len(row[0]) > PACK_TOKENS:
            lens = torch.tensor([len(ids) for ids, _ in pack])
            document = torch.repeat_interleave(torch.arange(len(lens)), lens)
            mask = (document[:, None] == document[None]).tril()[None, None]
            positions = torch.cat([torch.arange(n) for n in lens.tolist()])[None]
            ids = torch.from_numpy(np.concatenate([ids for ids, _ in pack]))[None]
            labels = torch.from_numpy(np.concatenate([labels for _, labels in pack]))[None]
            yield (
                {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
                labels,
                ids.numel(),
            )
            pack = []
        pack.append(row)


def main(job: Job, variant: str) -> None:
    use_one_thread()
    model = llama(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    if variant == "sorted_compiled":
        for layer in model.model.layers:
            layer.compile(dynamic=True)
    rows = job.rows()
    batches = (
        masked(rows)
        if variant == "mask"
        else padded(rows, job.documents_a_step(), variant.startswith("sorted"))
    )
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
    main(Job.from_argv(), sys.argv[2])
