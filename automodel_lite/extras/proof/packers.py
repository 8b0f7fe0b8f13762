"""Packers of peers beside ours on the same lengths, and the tokens that a run computes."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import numpy as np

from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.extras.proof import data
from automodel_lite.extras.proof.work import MissingError, Seen, Work

SIZE = 2048
_TRL = """
import json, sys, time
import datasets
from trl import pack_dataset
lengths, size = json.load(open(sys.argv[1])), int(sys.argv[2])
table = datasets.Dataset.from_dict({"input_ids": [[n] * k for n, k in enumerate(lengths)]})
began = time.process_time()
packed = pack_dataset(table, seq_length=size, strategy="bfd")
spent = time.process_time() - began
print(json.dumps({"rows": packed["input_ids"][:], "seconds": spent}))
"""


def tokens_of(run: Path) -> int:
    """Returns the tokens of a run's last recorded step."""
    rows = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    return next(int(row["num_tokens"]) for row in reversed(rows) if "num_tokens" in row)


def next_fit(lengths: np.ndarray, size: int) -> int:
    """Counts the bins of NeMo AutoModel's reference packer and torchtune's: a document that does
    not fit begins the next one.
    """
    bins, free = 0, 0
    for length in lengths.tolist():
        if length > free:
            bins += 1
            free = size
        free -= length
    return bins


def compare(work: Work) -> Seen:
    """Packs the lengths of chats between people, bytes / 4, with every packer that is there."""
    chats = data.chitchat(work)
    sizes = [sum(len(m["content"].encode()) // 4 + 4 for m in json.loads(line)["messages"])
             for line in chats.read_text(encoding="utf-8").splitlines()]  # fmt: skip
    lengths = np.minimum(np.array(sizes), SIZE)
    began = time.process_time()
    plan = plan_packs(lengths, SIZE, strategy="best_fit")
    spent = time.process_time() - began
    # a document that does not follow the one before it in the file
    moved = int((np.diff(plan.doc_ids) != 1).sum())
    lower = -(-int(lengths.sum()) // SIZE)
    parts = [
        f"ours {len(plan):,} bins ({moved:,} of {len(lengths):,} documents moved, "
        f"{spent:.2f} CPU-s)"
    ]
    bins = [next_fit(lengths, SIZE)]
    parts.append(f"next-fit {bins[0]:,}")
    is_whole = len(plan.doc_ids) == len(lengths)
    try:
        theirs, lost, seconds = of_trl(work, lengths)
        bins.append(theirs)
        parts.append(f"TRL bfd {theirs:,} ({lost} documents lost, {seconds:.2f} CPU-s)")
    except MissingError as error:
        parts.append(f"missing: {error}")
    parts.append(f"lower bound {lower:,}")
    return Seen("; ".join(parts), is_whole and len(plan) <= min(bins))


def of_trl(work: Work, lengths: np.ndarray) -> tuple[int, int, float]:
    """Returns bins, lost documents and CPU seconds of TRL's `pack_dataset`."""
    if work.peers is None:
        raise MissingError("TRL (--peers PYTHON of an environment that has it)")
    path = work.folder / "lengths.json"
    path.write_text(json.dumps(lengths.tolist()))
    out = work.python(["-c", _TRL, str(path), str(SIZE)], interpreter=work.peers)
    found = json.loads(out.splitlines()[-1])
    seen = Counter(token for row in found["rows"] for token in row)
    lost = sum(seen[n] != length for n, length in enumerate(lengths.tolist()))
    return len(found["rows"]), lost, float(found["seconds"])
