"""A bare loop over the Hugging Face model on padded batches of documents of nearly one length: almost no padding, so the
honest rival of packing.

python -m benchmarks.peers.loops JOB sorted | random
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.peers.job import LR, PACK_TOKENS, Clock, Job
from benchmarks.peers.plain import Rows, documents_per_step, llama, read_rows

# model inputs, labels (unshifted), real tokens
Batch = tuple[dict[str, torch.Tensor], torch.Tensor, int]


def numbers_of_batches(lengths: np.ndarray, size: int, is_sorted: bool) -> list[np.ndarray]:
    """Returns the documents of each batch, in a random order of batches, as samplers by length give them.

    size  documents of a batch that is not sorted
    """
    rng = np.random.default_rng(0)
    if is_sorted:
        order = np.argsort(lengths, kind="stable")
        # by tokens, so that batches of short documents are as large as those of long ones
        cuts = np.flatnonzero(np.diff(np.cumsum(lengths[order]) // PACK_TOKENS)) + 1
        batches = np.split(order, cuts)
    else:
        order = rng.permutation(len(lengths))
        batches = np.array_split(order, max(1, len(order) // size))
    return [batches[number] for number in rng.permutation(len(batches))]


def padded(rows: Rows, batches: list[np.ndarray]) -> Iterator[Batch]:
    """Yields right-padded batches, over and over."""
    while True:
        for numbers in batches:
            documents = [torch.tensor(rows["input_ids"][number]) for number in numbers]
            masks = [torch.tensor(rows["completion_mask"][number]).bool() for number in numbers]
            targets = [ids.where(mask, -100) for ids, mask in zip(documents, masks)]
            pad = torch.nn.utils.rnn.pad_sequence
            ids = pad(documents, batch_first=True)
            labels = pad(targets, batch_first=True, padding_value=-100)
            mask = pad([torch.ones_like(each) for each in documents], batch_first=True)
            yield {"input_ids": ids, "attention_mask": mask}, labels, int(mask.sum())


def main(job: Job, variant: str) -> None:
    torch.set_num_threads(1)
    model = llama(job)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    rows = read_rows(job)
    lengths = np.array([len(ids) for ids in rows["input_ids"]])
    batches = numbers_of_batches(lengths, documents_per_step(rows), variant == "sorted")
    source = padded(rows, batches)
    clock = Clock()
    tokens = []
    for _ in range(job.all_steps):
        inputs, labels, num_tokens = next(source)
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
