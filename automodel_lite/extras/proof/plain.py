"""The same tokens in plain transformers: each document of a step alone, its own attention and head,
torch's AdamW; nothing of this project but the packs that say which documents a step has.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.prepare import batch_shape, build_packer, prepare_data
from automodel_lite.extras.load_run import load_run_config
from automodel_lite.extras.proof.work import Curve, MissingError, Seen, Work
from automodel_lite.run.folder import RunFolder
from automodel_lite.telemetry.ledger import NAME, read_ledger


def curve(run: Path, model: Path) -> Curve:
    """Trains a model as a run did, on the packs and with the rates that its ledger names."""
    config = load_run_config(RunFolder(run))
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.train()
    options = config.optimizer
    optimizer = torch.optim.AdamW(
        lm.parameters(),
        lr=0.0,
        betas=tuple(options.get("betas", (0.9, 0.95))),
        eps=float(options.get("eps", 1e-8)),
        weight_decay=0.0,
    )
    packs = prepare_data(config, batch_shape(config.training, 1), build_packer(config)).planned
    assert packs is not None
    found: Curve = {}
    for line in read_ledger(run / NAME):
        if line.step is None:
            continue
        documents = [
            document for pack in line.row["packs"] for document in split(packs.packs_of(0)[pack])
        ]
        num_labels = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in documents)
        loss = 0.0
        for ids, labels in documents:
            logits = lm(input_ids=ids[None], use_cache=False).logits[0]
            part = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
            (part / num_labels).backward()
            loss += float(part.detach()) / num_labels
        norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), config.training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = line.row["rate"]
        optimizer.step()
        optimizer.zero_grad()
        found[line.step] = (loss, float(norm))
    return found


def split(pack: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Returns tokens and labels of each document in a pack."""
    found = []
    start = 0
    for length, slot in zip(pack["seq_lens"].tolist(), pack["seq_lens_padded"].tolist()):
        if length:
            ids, labels = (
                torch.as_tensor(pack[name][start : start + length]).long()
                for name in ("input_ids", "labels")
            )
            found.append((ids, labels))
        start += slot
    return found


def trl(work: Work) -> Seen:
    """Names TRL as missing: its trainer has no way to be given a step's documents as they are."""
    raise MissingError(
        "TRL's trainer packs and shuffles by itself, so its steps hold other documents"
    )
