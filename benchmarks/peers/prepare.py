"""Tokenizes the raw JSON lines once, with our own tokenizer, for contestants that are given token rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from automodel_lite.config.components import build
from automodel_lite.data.tokens.tokenize import job_of, tokenize_documents
from benchmarks.peers.job import Job
from benchmarks.peers.recipe import recipe_config


def main(job: Job) -> None:
    config = recipe_config(job)
    documents = build(config.dataset)
    tokenizing = job_of(config, documents)
    rows = tokenize_documents(documents, tokenizing, config.cache_dir).train
    folder = Path(job.folder)
    tokenizing.tokenizer.save_pretrained(folder / "tokenizer")
    np.savez(
        folder / "rows.npz",
        input_ids=rows.columns["input_ids"],
        labels=rows.columns["labels"],
        offsets=rows.offsets,
    )
    share = (np.asarray(rows.columns["labels"]) != -100).mean()
    print(
        f"{len(rows)} documents, {len(rows.columns['input_ids'])} tokens, {share:.1%} of the positions carry a label"
    )


if __name__ == "__main__":
    main(Job.from_argv())
