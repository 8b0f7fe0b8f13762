"""Features of the program, each a change of one small job, and the job's numbers by plain transformers.

A job trains one step on everything. Its loss and gradient norm then depend neither on packs, trees, ranks nor streams,
and are computed here in fp64, one row at a time, from texts, without the program's data, loss or attention.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from omegaconf import DictConfig
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import MtpModel

from automodel_lite.config.check import check_config
from automodel_lite.models.mtp import add_heads, heads_of
from automodel_lite.models.source import model_class
from automodel_lite.run.weight_files import as_saved
from benchmarks.survey_models import InDouble
from benchmarks.tiny_models import random_model, tiny_config
from recipes import score, train_ft
from tests.data.templates import MARKED, byte_tokenizer
from tests.runs import Row, composed, rows_of

NUM_PROMPTS, VAL_PROMPTS = 4, 2
BALANCE, CROSS_ENTROPY, TOP_K, LORA_SCALE = 0.5, 0.25, 5, 2.0
MTP = 0.3  # times the mean loss of the heads
SIMPO = {"beta": 2.0, "gamma": 1.0}
FILES = "automodel_lite.data.reading.files.FilesDataset"
STREAM = "automodel_lite.parts.datasets.streams.StreamingDataset"
ADDED = ["<note>", "<sum>"]
SHARED = "training.micro_batch_size=0"


@dataclass
class Job:
    """What features change."""

    family: str = "llama"
    form: str = "completion"  # completion | responses | pairs
    tree: str = "off"
    loss: str = "fused_linear_cross_entropy"
    is_grouped: bool = False
    is_weighted: bool = False
    has_teacher: bool = False
    balance: float = 0.0
    dataset: str = "files"
    is_mixed: bool = False
    val_frac: float = 0.0
    validates: bool = False
    is_resized: bool = False
    has_lora: bool = False
    trains_tokens: bool = False
    resumes: bool = False
    simulates: bool = False
    has_heads: bool = False
    has_policy: bool = False
    averages_documents: bool = False
    num_ranks: int = 1
    settings: list[str] = field(default_factory=list)


def _trees(job: Job) -> None:
    job.tree = "auto"
    job.form = "responses" if job.form == "completion" else job.form


def _pairs(job: Job) -> None:
    job.form = "pairs"
    if job.loss == "fused_linear_cross_entropy":
        job.loss = "simpo"


def _groups(job: Job) -> None:
    job.is_grouped, job.tree = True, "auto"


def _weights(job: Job) -> None:
    job.is_weighted = True


def _stored_teacher(job: Job) -> None:
    job.loss = "distill_topk"


def _teacher(job: Job) -> None:
    job.has_teacher = True
    job.loss = job.loss if job.loss == "distill_topk" else "distill"


def _balance(job: Job) -> None:
    job.balance = BALANCE
    job.family = "qwen3_moe" if job.family == "llama" else job.family


def _val_frac(job: Job) -> None:
    job.val_frac = 0.25


def _mixture(job: Job) -> None:
    job.is_mixed = True


def _stream(job: Job) -> None:
    job.dataset = "streaming"


def _resize(job: Job) -> None:
    job.is_resized = True


def _lora(job: Job) -> None:
    job.has_lora = True


def _by_rows(job: Job) -> None:
    job.family = "falcon"


def _latent(job: Job) -> None:
    job.family = "deepseek_v3"


def _simulation(job: Job) -> None:
    job.simulates = True


def _validation(job: Job) -> None:
    job.validates = True


def _resume(job: Job) -> None:
    job.resumes = True


def _axis(name: str) -> Callable[[Job], None]:
    def divide(job: Job) -> None:
        job.num_ranks *= 2
        job.settings.append(f"mesh.{name}=2")

    return divide


def _experts(job: Job) -> None:
    job.num_ranks = max(job.num_ranks, 2)  # those of the other axes divide the experts
    job.settings.append("mesh.ep=2")
    if job.family == "llama":
        job.family = "qwen3_moe"


def _heads(job: Job) -> None:
    job.has_heads = True
    if job.family in ("llama", "deepseek_v3"):
        job.family = "deepseek_v3_heads"


def _shared_passes(job: Job) -> None:
    """Packs of a step go through one forward pass, as many as 4,096 tokens hold."""
    job.settings.append(SHARED)


def _reference(job: Job) -> None:
    job.form, job.loss = "pairs", "dpo"


def _policy(job: Job) -> None:
    job.has_policy, job.loss = True, "ppo"
    job.settings.append("loss.average=rows")


FEATURES: dict[str, Callable[[Job], None]] = {
    "trees": _trees,
    "pairs": _pairs,
    "groups": _groups,
    "weights": _weights,
    "stored teacher": _stored_teacher,
    "teacher in memory": _teacher,
    "router balance": _balance,
    "val_frac": _val_frac,
    "mixture": _mixture,
    "stream": _stream,
    "resize": _resize,
    "lora": _lora,
    "by rows": _by_rows,
    "latent attention": _latent,
    "simulation": _simulation,
    "validation": _validation,
    "resume": _resume,
    "fsdp": _axis("dp_shard"),
    "tp": _axis("tp"),
    "cp": _axis("cp"),
    "ep": _experts,
    "heads ahead": _heads,
    "shared passes": _shared_passes,
    "reference": _reference,
    "policy": _policy,
}
"""What is added here is crossed with all others."""
ON_RANKS = ("fsdp", "tp", "cp", "ep")


def _document_means(job: Job) -> None:
    job.averages_documents = True
    job.settings.append("loss.average=documents")


def _turn_means(job: Job) -> None:
    """A row has one turn."""
    job.averages_documents = True
    job.settings.append("loss.average=turns")


def _dft(job: Job) -> None:
    job.loss = "dft"


def _faster(job: Job) -> None:
    job.has_lora = True
    job.settings.append("peft.loraplus_lr_ratio=16")


def _token_rows(job: Job) -> None:
    job.has_lora = job.trains_tokens = True
    job.settings.append("peft.trainable_tokens=['<|end|>']")


OF_TRAINING: dict[str, Callable[[Job], None]] = {
    "document means": _document_means,
    "turn means": _turn_means,
    "dft": _dft,
    "loraplus": _faster,
    "token rows": _token_rows,
}
"""What is crossed with what feeds, divides and continues a run."""
FEEDS = ("mixture", "stream", "trees", "cp", "fsdp", "validation", "resume")


def job_of(*names: str) -> Job:
    """The job with these features, in the order of the list."""
    job = Job()
    for name, change in (FEATURES | OF_TRAINING).items():
        if name in names:
            change(job)
    return job


# ------------------------------------------------------------------------------------------------------------- texts
def prompt(number: int) -> str:
    return f"Letter {number}: tell what ships came over the sea, from which harbor, with what cargo, and why:"


def answer(number: int) -> str:
    return f"Ship {number} came" + " again" * (number % 3) + "."


@dataclass
class Text:
    """A row that is trained on: the answer to a prompt."""

    prompt: str
    answer: str
    group: str

    @property
    def tokens(self) -> tuple[list[int], list[int]]:
        """ids, and labels of the answer and its end, next-token aligned."""
        tokenizer = the_tokenizer()
        before = f"<|user|>{self.prompt}<|end|><|assistant|>"
        num_before = len(tokenizer(before)["input_ids"])
        ids = tokenizer(f"{before}{self.answer}<|end|>")["input_ids"]
        return ids, [-100] * (num_before - 1) + ids[num_before:] + [-100]

    @property
    def weights(self) -> list[float]:
        """Of its labels, different ones for each text."""
        return [0.25 + 0.5 * (i % 3) + 0.125 * len(self.answer) for i in range(len(self.tokens[0]))]

    @property
    def sampled(self) -> dict[str, list[float]]:
        """How good each label was, and how likely when it was sampled: far from both clips and
        beyond them.
        """
        labels = self.tokens[1]
        number = len(self.answer) + len(self.prompt)
        values = {
            "advantages": lambda i: (-1.0) ** number * (0.5 + 0.25 * (i % 3)),
            "old_log_probs": lambda i: -5.5 + 0.25 * (i % 4),
        }
        return {
            name: [0.0 if label == -100 else value(i) for i, label in enumerate(labels)]
            for name, value in values.items()
        }


@cache
def the_tokenizer() -> Any:
    return byte_tokenizer(MARKED)


def texts(numbers: range) -> list[Text]:
    """Two answers to each prompt."""
    return [Text(prompt(n), answer(2 * n + which), f"g{n}") for n in numbers for which in range(2)]


def lines_of(job: Job, numbers: range) -> list[Row]:
    """The file."""
    rows, own = [], texts(numbers)
    pairs = list(zip(own[::2], own[1::2]))
    if job.form == "pairs":
        for one, other in pairs:
            row: Row = {"prompt": one.prompt, "chosen": one.answer, "rejected": other.answer}
            row |= {"loss_weights": one.weights} if job.is_weighted else {}
            rows.append(row | {"group": one.group} if job.is_grouped else row)
        return rows
    if job.form == "responses" and not job.is_weighted and not job.has_policy:
        for one, other in pairs:
            row = {"prompt": one.prompt, "responses": [one.answer, other.answer]}
            rows.append(row | {"group": one.group} if job.is_grouped else row)
        return rows
    for text in own:
        row = {"prompt": text.prompt, "completion": text.answer}
        if job.is_weighted or job.has_policy:
            ids, labels = text.tokens
            row = {"input_ids": ids, "labels": labels}
            row |= {"loss_weights": text.weights} if job.is_weighted else {}
            row |= text.sampled if job.has_policy else {}
        rows.append(row | {"group": text.group} if job.is_grouped else row)
    return rows


# ------------------------------------------------------------------------------------------------------------ models
def save_models(folder: Path) -> None:
    """A student and a teacher of each family, whose vocabularies are padded, each to another size."""
    for family in ("llama", "qwen3_moe", "falcon", "deepseek_v3"):
        for kind, padding in (("student", 3), ("teacher", 11)):
            config = tiny_config(family)
            config.vocab_size = len(the_tokenizer()) + padding
            config.max_position_embeddings = 1024
            model = random_model(config, seed=padding).float()
            model.save_pretrained(folder / family / kind)
            the_tokenizer().save_pretrained(folder / family / kind)
    save_heads(folder / "deepseek_v3", folder / "deepseek_v3_heads")


def save_heads(plain: Path, folder: Path) -> None:
    """The same student with two heads for further tokens, under the names of its family's
    checkpoints, beside the same teacher.
    """
    shutil.copytree(plain, folder)
    student = folder / "student"
    config = transformers.AutoConfig.from_pretrained(student)
    config.num_nextn_predict_layers = 2
    lm = model_class(config).from_pretrained(student, config=config, dtype=torch.float32)
    add_heads(lm)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in (p for head in heads_of(lm) for p in head.parameters()):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    config.save_pretrained(student)
    saved = {name: value.contiguous() for name, value in as_saved(lm, lm.state_dict()).items()}
    save_file(saved, student / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path) -> transformers.PreTrainedModel:
    """By transformers alone, in fp64."""
    config = transformers.AutoConfig.from_pretrained(folder)
    model: transformers.PreTrainedModel = model_class(config).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    model.config.get_text_config()._experts_implementation = "eager"
    return model.double().eval()


# -------------------------------------------------------------------------------------------------------------- runs
@dataclass
class Seen:
    """What a run logged; the weights that it began with, by name; the texts that it trained on."""

    rows: list[Row]
    start: dict[str, Tensor]
    screen: str

    def of_step(self, number: int) -> tuple[float, float]:
        row = next(row for row in self.rows if row.get("step") == number and "loss" in row)
        return row["loss"], row["grad_norm"]

    def value(self, name: str) -> float:
        return next(float(row[name]) for row in self.rows if name in row)


class Watched(train_ft.TrainFinetuneRecipe):
    """The recipe, whose first weights are kept."""

    start: dict[str, Tensor]
    trained: str

    def step(self, ready: Any) -> Any:
        if self.num_steps == 0:
            Watched.start = {
                name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
                for name, p in self.model.loss_model.lm.named_parameters()
            }
            own = [batch.input_ids.flatten().tolist() for batch in ready.micro_batches]
            everyones = self.mesh.gather("".join(map(self.data.tokenizer.decode, own)))
            Watched.trained = "".join(everyones)
        return super().step(ready)


def overrides_of(job: Job, models: Path, folder: Path) -> list[str]:
    """The command line, without the folder of the run. Those that choose an option are few: each
    further one takes longer to compose than a run takes.
    """
    model = models / job.family
    folder.mkdir(parents=True, exist_ok=True)
    files = {"a": range(NUM_PROMPTS)}
    if job.is_mixed:
        half = NUM_PROMPTS // 2
        files = {"a": range(half), "b": range(half, NUM_PROMPTS)}
    if job.validates:
        files["val"] = range(NUM_PROMPTS, NUM_PROMPTS + VAL_PROMPTS)
    for name, numbers in files.items():
        file = folder / f"{name}.jsonl"
        if not file.exists():  # a resumed run has its files
            file.write_text("\n".join(map(json.dumps, lines_of(job, numbers))))

    def source(name: str) -> dict[str, str]:
        keys = {"path": str(folder / f"{name}.jsonl")}
        if job.form == "pairs":
            keys["format"] = "preference"
        if job.dataset == "streaming":
            keys["num_shards"] = "2"
        if job.val_frac:
            keys["val_frac"] = str(job.val_frac)
        if job.validates and name == "a":
            keys["val_path"] = str(folder / "val.jsonl")
        return keys

    if job.is_mixed:
        target = STREAM if job.dataset == "streaming" else FILES
        data = ["dataset=mixture"]
        for name in "ab":
            at = f"dataset.sources.{name}"
            data.append(f"{at}={{dataset:{{_target_:{target}}},repeat:1}}")
            data += [f"{at}.dataset.{key}={value}" for key, value in source(name).items()]
    else:
        data = [f"dataset={job.dataset}"]
        data += [f"dataset.{key}={value}" for key, value in source("a").items()]
    settings = [
        "name=x",
        *data,
        f"model.pretrained={model / 'student'}",
        f"model.router_aux_loss={job.balance}",
        f"model.mtp_loss={MTP if job.has_heads else 0}",
        f"loss={job.loss}",
        "packed_sequence.packed_sequence_size=512",
        f"packed_sequence.tree={job.tree}",
        "training.precision=fp32",
        "training.num_threads=1",
        "training.global_batch_size=32",
        "training.allow_few_steps=true",
        "training.log_every_steps=1",
        "training.val_every_steps=1",
        f"training.max_steps={2 if job.resumes else 1}",
        "lr_scheduler=constant",
        "lr_scheduler.warmup_steps=0",
        f"optimizer.lr={1e-2 if job.resumes else 0}",
        f"checkpoint.every_steps={int(job.resumes)}",
        "checkpoint.export_hf=false",
        "report=false",
        *job.settings,
    ]
    if job.has_teacher:
        settings += ["teacher=pretrained", f"teacher.pretrained={model / 'teacher'}"]
    if job.loss in ("distill", "distill_topk"):
        settings.append(f"loss.cross_entropy={CROSS_ENTROPY}")
    if job.loss == "distill_topk":
        settings += [f"loss.teacher={model / 'teacher'}", f"loss.top_k={TOP_K}"]
    if job.is_resized:
        added = "[" + ",".join(f"'{token}'" for token in [*ADDED, "<a>", "<b>"]) + "]"
        settings += ["model.resize_embeddings=true", f"tokenizer.added_tokens={added}"]
    if job.has_lora:
        settings += ["peft=lora", "peft.r=4", "peft.alpha=8"]
    if job.simulates:
        settings.append("dry_run=true")
        if not {"mesh.dp_shard=2", "mesh.tp=2", "mesh.cp=2"} & {*job.settings}:
            settings.append("mesh.dp_shard=2")
    return settings


def settings_of(job: Job, models: Path, folder: Path) -> DictConfig:
    """Composed once, and not by every rank."""
    own = overrides_of(job, models, folder)
    places = [f"output_dir={folder / 'run'}", f"cache_dir={folder / 'cache'}"]
    return composed("finetune", *own, *places)


def run(job: Job, raw: DictConfig, folder: Path) -> Seen:
    """Trains the job, or counts it; on every rank of a group. Raises ConfigError or DataError as the program does."""
    config, screen = check_config(raw), io.StringIO()
    Watched.start, Watched.trained = {}, ""
    with contextlib.redirect_stdout(screen):
        if job.loss == "distill_topk" and not job.simulates and job.num_ranks == 1:
            assert score.main(config) == 0
        assert Watched.launch(config) == 0
    said = screen.getvalue()
    if said:  # on the first rank; a stream passes its packs one by one
        are_shared = SHARED in job.settings and job.dataset != "streaming"
        assert are_shared == ("share forward passes of 4,096 tokens" in said)
    rows = [] if job.simulates else rows_of(folder / "run")
    return Seen(rows, Watched.start, Watched.trained or screen.getvalue())


def store_teacher(job: Job, raw: DictConfig, folder: Path) -> None:
    """Scores on every rank of a group, before the ranks of another one train."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert score.main(check_config(raw)) == 0


# ------------------------------------------------------------------------------------------------------------- truth
def truth(job: Job, models: Path, seen: Seen, numbers: range) -> tuple[float, float]:
    """Loss and gradient norm of the texts to these prompts, as far as they were trained on."""
    model = load(models / job.family / "student")
    if job.is_resized:
        model.resize_token_embeddings(len(the_tokenizer()) + len(ADDED) + 2, mean_resizing=False)
        own = dict(model.named_parameters())
        for name, value in seen.start.items():
            name = name.replace(".base_layer", "")
            if name in own:
                own[name].data = value.double()
    teacher = load(models / job.family / "teacher") if "distill" in job.loss else None
    own = texts(numbers)
    if job.val_frac and numbers.start == 0:
        # A branch of a tree begins inside its answer; what shares a tree is held out together.
        are_rows = job.form == "completion" or job.is_weighted or job.has_policy
        shares = job.form == "pairs" or not are_rows or job.is_grouped
        own = [x for x in own if (x.prompt if shares else x.answer) in seen.screen]
    heads = None
    if job.has_heads:
        # those of the published size, else
        own_heads = rf"layers\.[{model.config.num_hidden_layers}-9]\."
        model._keys_to_ignore_on_load_unexpected = [own_heads]
        heads = MtpModel.from_pretrained(model).double()
    with InDouble():
        if job.form == "pairs":
            sums = [_of_pair(job, model, *pair) for pair in zip(own[::2], own[1::2])]
        else:
            sums = [_of_text(job, model, teacher, text) for text in own]
        total = torch.stack([value for value, _, _, _ in sums]).sum()
        loss = total / sum(count for _, count, _, _ in sums)
        balanced = loss
        if job.balance:
            of_labels = sum(labels for _, _, _, labels in sums)
            balanced = loss + torch.stack([b for _, _, b, _ in sums]).sum() / of_labels
        if heads is not None:
            ahead = torch.stack([_of_heads(job, model, heads, text) for text in own]).sum()
            balanced = loss + MTP * ahead / sum(count for _, count, _, _ in sums)
    balanced.backward()
    parts = [model] if heads is None else [model, heads.layers]
    return float(loss.detach()), _norm(job, parts, seen.start)


def _of_heads(job: Job, model: Any, heads: MtpModel, text: Text) -> Tensor:
    """The sum over a row's labels of the heads' mean cross-entropy."""
    ids, labels = (torch.tensor(values) for values in text.tokens)
    weights = torch.tensor(text.weights if job.is_weighted else [1.0] * len(ids)).double()
    hidden = model.get_decoder()(input_ids=ids[None], use_cache=False).last_hidden_state
    total = torch.zeros((), dtype=torch.float64)
    for k in range(1, heads.num_mtp_layers + 1):
        positions = torch.arange(k, len(ids))[None]
        hidden = heads.forward_layer(
            k - 1, hidden[:, : len(ids) - k], positions, None, input_ids=ids[None, k:]
        )
        logits = heads._project_to_logits(hidden)[0]
        losses = F.cross_entropy(logits, labels[k:], reduction="none", ignore_index=-100)
        total = total + (losses * weights[k:]).sum() / heads.num_mtp_layers
    return total


def _norm(job: Job, parts: list[Any], start: dict[str, Tensor]) -> float:
    """Of all gradients; of adapters that begin at zero, `scale * dW @ A.T` of B."""
    grads = {
        f"{number} {name}".removeprefix("0 "): p.grad
        for number, part in enumerate(parts)
        for name, p in part.named_parameters()
        if p.grad is not None
    }
    if not job.has_lora:
        return float(torch.stack([grad.norm() for grad in grads.values()]).norm())
    found = []
    for name, matrix in start.items():
        if ".lora_A." in name:
            module = name.split(".lora_A.")[0]
            found.append((grads[f"{module}.weight"] @ matrix.double().T * LORA_SCALE).norm())
    if job.trains_tokens:
        end = the_tokenizer().convert_tokens_to_ids("<|end|>")
        rows = ("embed_tokens.weight", "lm_head.weight")  # of the embedding and the head
        found += [grad[end].norm() for name, grad in grads.items() if name.endswith(rows)]
    return float(torch.stack(found).norm())


def _logits(job: Job, model: Any, text: Text) -> tuple[Tensor, Tensor, Tensor]:
    """Labeled logits [R, V], labels [R], and the balance of the row."""
    ids, labels = text.tokens
    more = {"output_router_logits": True} if job.balance else {}
    out = model(input_ids=torch.tensor([ids]), use_cache=False, **more)
    targets = torch.tensor(labels)
    real = targets != -100
    return out.logits[0][real], targets[real], out.aux_loss if job.balance else torch.zeros(())


def _of_text(job: Job, model: Any, teacher: Any, text: Text) -> tuple[Tensor, float, Tensor, float]:
    """The sum over its labels, what it is divided by, its balance times its labels, and these."""
    logits_RV, labels_R, balance = _logits(job, model, text)
    ce_R = F.cross_entropy(logits_RV, labels_R, reduction="none")
    weights_R = torch.ones(len(labels_R), dtype=torch.float64)
    if job.is_weighted:
        real = [label != -100 for label in text.tokens[1]]
        weights_R = torch.tensor(np.array(text.weights)[real])
    values_R = ce_R
    if job.loss == "dft":
        values_R = (-ce_R).detach().exp() * ce_R
    if teacher is not None:
        with torch.no_grad():
            theirs_RV = _logits(Job(), teacher, text)[0]
        divergence_R = _divergence(job, logits_RV, theirs_RV)
        values_R = (1 - CROSS_ENTROPY) * divergence_R + CROSS_ENTROPY * ce_R
    count = float(weights_R.sum())
    total = (values_R * weights_R).sum()
    if job.has_policy:
        total = (_of_policy(text, -ce_R) * weights_R).sum() / count
        return total, 1, job.balance * balance * len(labels_R), len(labels_R)
    if job.averages_documents:
        return total / count, 1, job.balance * balance * count, count
    return total, count, job.balance * balance * count, count


def _of_policy(text: Text, new_R: Tensor) -> Tensor:
    """PPO: minus the smaller of ratio and clipped ratio, times the advantage."""
    real = [label != -100 for label in text.tokens[1]]
    advantages_R, old_R = (torch.tensor(np.array(values)[real]) for values in text.sampled.values())
    ratio_R = (new_R - old_R).exp()
    return -torch.minimum(ratio_R * advantages_R, ratio_R.clamp(0.8, 1.2) * advantages_R)


def _divergence(job: Job, own_RV: Tensor, theirs_RV: Tensor) -> Tensor:
    if job.loss == "distill":
        num_common = min(own_RV.shape[1], theirs_RV.shape[1])
        p, q = (x[:, :num_common].log_softmax(-1) for x in (theirs_RV, own_RV))
        return (p.exp() * (p - q)).sum(-1)
    num_ids = len(the_tokenizer()) + (len(ADDED) + 2 if job.is_resized else 0)
    p, ids = theirs_RV[:, :num_ids].softmax(-1).topk(TOP_K, -1)
    q = own_RV.softmax(-1).gather(-1, ids)
    rest_p, rest_q = 1 - p.sum(-1), 1 - q.sum(-1)
    return (p * (p / q).log()).sum(-1) + rest_p * (rest_p / rest_q).log()


def _of_pair(job: Job, model: Any, one: Text, other: Text) -> tuple[Tensor, float, Tensor, float]:
    means, counts, balance, num_labels = [], [], torch.zeros(()), 0
    for text in (one, other):
        logits_RV, labels_R, of_row = _logits(job, model, text)
        means.append(-F.cross_entropy(logits_RV, labels_R))
        counts.append(len(labels_R))
        balance = balance + job.balance * of_row * len(labels_R)
        num_labels += len(labels_R)
    if job.loss == "dpo":  # the reference is the model itself, as it begins
        sums = [mean * n for mean, n in zip(means, counts)]
        ratios = [value - value.detach() for value in sums]
        return -F.logsigmoid(0.1 * (ratios[0] - ratios[1])), 1, balance, num_labels
    margin = SIMPO["beta"] * (means[0] - means[1])
    return -F.logsigmoid(margin - SIMPO["gamma"]), 1, balance, num_labels


ALONE = (
    {"by rows", "latent attention"},
    *({"reference", other} for other in ("pairs", "stored teacher", "teacher in memory", "policy")),
    *({"policy", other} for other in ("pairs", "stored teacher", "teacher in memory")),
)
"""A model is of one family, and a job has one loss."""


def crossings() -> Iterator[tuple[str, str]]:
    """Every two features that one job may be asked for."""
    names = list(FEATURES)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            if {one, other} not in ALONE:
                yield one, other
