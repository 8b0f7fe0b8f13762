"""The same tokens in peers' loops: each document of a step alone in plain transformers with torch's
AdamW, and padded in TRL's SFTTrainer. Nothing of this project takes part but the packs, which say
which documents a step has, and the ledger, which says with which rate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.config.schema import Config
from automodel_lite.data.prepare import batch_shape, build_packer, prepare_data
from automodel_lite.extras.load_run import load_run_config
from automodel_lite.extras.proof.work import Curve, MissingError, Work
from automodel_lite.run.folder import RunFolder
from automodel_lite.telemetry.ledger import NAME, read_ledger

Document = tuple[Tensor, Tensor]  # tokens, and labels[i], the target of token i

_TRL = """
import json, sys
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

job = json.load(open(sys.argv[1]))
torch.set_num_threads(job["threads"])
model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
tokenizer = AutoTokenizer.from_pretrained(job["model"])
rows, places = [], []
for step in job["steps"]:
    places.append(list(range(len(rows), len(rows) + len(step))))
    rows += step
curve = []

class Trainer(SFTTrainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_sampler=places, collate_fn=self.data_collator)

    def compute_loss(self, *args, **kwargs):
        out = super().compute_loss(*args, **kwargs)
        curve.append(float((out[0] if isinstance(out, tuple) else out).detach()))
        return out

optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, **job["adamw"])
rates = job["rates"] + [0.0]
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rates[step])
arguments = SFTConfig(
    output_dir=job["out"], max_steps=len(places), per_device_train_batch_size=1,
    gradient_accumulation_steps=1, max_grad_norm=job["max_norm"], report_to="none", use_cpu=True,
    save_strategy="no", bf16=False, max_length=None, gradient_checkpointing=False,
    dataset_kwargs={"skip_prepare_dataset": True}, disable_tqdm=True, remove_unused_columns=False,
)
Trainer(
    model=model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    optimizers=(optimizer, schedule),
).train()
print("\\n" + json.dumps(curve))
"""


class PlainStep(NamedTuple):
    """A step of a run as other trainers can take it."""

    number: int
    rate: float
    documents: list[Document]


def steps_of(run: Path, config: Config) -> Iterator[PlainStep]:
    """Yields the documents of each recorded step of a run."""
    data = prepare_data(config, batch_shape(config.training, 1), build_packer(config)).planned
    assert data is not None
    size = len(data.packs_of(0))
    done = 0
    for line in read_ledger(run / NAME):
        if line.step is None:
            continue
        packs = data.packs_of(done // size)
        documents = [one for pack in line.row["packs"] for one in split(packs[pack])]
        done += len(line.row["packs"])
        yield PlainStep(line.step, line.row["rate"], documents)


def split(pack: dict[str, Any]) -> list[Document]:
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


def adamw_of(config: Config) -> dict[str, Any]:
    """Returns the run's settings of AdamW, as torch takes them; without weight decay."""
    options = config.optimizer
    betas = options.get("betas", (0.9, 0.95))
    return {"betas": tuple(betas), "eps": float(options.get("eps", 1e-8)), "weight_decay": 0.0}


def curve(run: Path, model: Path) -> Curve:
    """Trains a model as a run did, each document alone, in plain transformers."""
    config = load_run_config(RunFolder(run))
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.train()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=0.0, **adamw_of(config))
    found: Curve = {}
    for step in steps_of(run, config):
        num_labels = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in step.documents)
        loss = 0.0
        for ids, labels in step.documents:
            logits = lm(input_ids=ids[None], use_cache=False).logits[0]
            part = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
            (part / num_labels).backward()
            loss += float(part.detach()) / num_labels
        norm = torch.nn.utils.clip_grad_norm_(lm.parameters(), config.training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = step.rate
        optimizer.step()
        optimizer.zero_grad()
        found[step.number] = (loss, float(norm))
    return found


def unshifted(document: Document) -> dict[str, list[int]]:
    """Returns a document as TRL takes it: labels[i] belongs to token i.

    >>> unshifted((tensor([5, 6, 7]), tensor([-100, 7, -100])))
    {'input_ids': [5, 6, 7], 'labels': [-100, -100, 7]}
    """
    ids, labels = document
    return {"input_ids": ids.tolist(), "labels": [IGNORE_INDEX, *labels.tolist()[:-1]]}


def trl_curve(work: Work, run: Path, model: Path) -> Curve:
    """Trains a model as a run did in TRL's SFTTrainer, the documents of a step as padded rows of
    one batch. Raises MissingError without an environment that has TRL.
    """
    if work.peers is None:
        raise MissingError("TRL (--peers PYTHON of an environment that has it)")
    config = load_run_config(RunFolder(run))
    steps = list(steps_of(run, config))
    job = {
        "model": str(model),
        "out": str(work.folder / "trl"),
        "steps": [[*map(unshifted, step.documents)] for step in steps],
        "rates": [step.rate for step in steps],
        "adamw": adamw_of(config),
        "max_norm": config.training.max_grad_norm,
        "threads": torch.get_num_threads(),
    }
    path = work.folder / "trl-steps.json"
    path.write_text(json.dumps(job))
    out = work.python(["-c", _TRL, str(path)], interpreter=work.peers)
    losses = json.loads(out.strip().splitlines()[-1])
    return {step.number: (loss, 0.0) for step, loss in zip(steps, losses)}
