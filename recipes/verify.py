"""Prove on your own model, data and mesh that packing and parallelism do not change the numbers.

    torchrun recipes/verify.py --config-name llama_packed            (the same arguments as
                                                                     train_ft.py)
    automodel-lite verify --nproc 4 --config-name llama_packed mesh.cp=2

A small sample of the packs that training would read goes through the program's own path in several
ways; loss and every gradient must agree with the truth: each document alone, through the model's
own eager attention, in fp32, in one process. Then the step is broken on purpose, to show what a
fault would look like. Exit code 1 on a FAIL. With `--card runs/mine` the numbers, and the export
against its checkpoint, are written to runs/mine/hf/certificate.json and the model card.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.verify:main")

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.config.schema import Config
from automodel_lite.data.packing.packs import packed_sequence_thd_collater
from automodel_lite.extras.certificate import check_export, write_certificate
from automodel_lite.extras.verify import (
    Check,
    Sample,
    Step,
    difference,
    draw_sample,
    first_layers,
    table,
    take_gradients,
)
from automodel_lite.models.loss import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import (
    Mesh,
    MeshShape,
    init_mesh,
    mesh_shape,
    rank,
    threads_of,
    world_size,
)
from automodel_lite.parallel.sharding import ParallelModel
from automodel_lite.seed import seed_all
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.thd import IGNORE_INDEX, AttentionPlan, Segments, ThdBatch, labeled_rows, to_thd
from automodel_lite.training.auto import resolve_auto
from automodel_lite.training.build import assemble, check_model
from automodel_lite.training.decide import decide_layout
from automodel_lite.training.plan import build_parts
from automodel_lite.training.resume import watch_ranks
from automodel_lite.training.start import try_settings

EXACT = 1e-5
"""Relative limit in fp32; measured differences are 1e-7 to 1e-6."""
NOISE_FACTOR = 3.0
"""The configured kernel and precision may be so many times further from fp32 than the reference
kernel in it.
"""


def main(config: Config, card: Path | None = None) -> int:
    """Prints the table, and writes a certificate beside the export of the run `card`; returns the
    exit code.
    """
    quiet_libraries()
    if card:
        check_export(card)
    with watch_ranks():
        return Verification(config, card).run()


class Verification:
    """One model in one process, and again spread over the mesh."""

    def __init__(self, config: Config, card: Path | None = None) -> None:
        self.card = card
        config = resolve_auto(config)
        self.config = config
        self.console = Console(is_silent=rank() != 0)
        shape = mesh_shape(config.mesh, world_size())
        parts = build_parts(config)
        try_settings(config, parts)
        self.sample: Sample = draw_sample(config, shape)
        self.mesh: Mesh = init_mesh(config.mesh)
        torch.set_num_threads(threads_of(config.training.num_threads)[0])
        source, self.layers_text = first_layers(
            parts.model, self.sample.tokenizer, self.mesh.device
        )
        self.batches = [self.stream([pack]) for pack in self.sample.packs]
        model_config = source.config(self.sample.tokenizer)
        parts = replace(parts, model=source)
        self.decided = decide_layout(parts, model_config, shape, self.mesh.device)
        self.kernel = self.decided.kernel
        self.dtype = self.decided.dtype
        self.kernel_name = (
            f"{self.kernel.name.removeprefix('thd_')} kernel, "
            f"{str(self.dtype).removeprefix('torch.')}"
        )
        self.noise_limit = EXACT

    def run(self) -> int:
        self.say_what_is_checked()
        checks = []
        is_first = self.mesh.rank == 0  # computes alone what needs no other rank
        if is_first:
            self.truth = self.compute_truth()
            checks += self.in_one_process()
        if self.mesh.root:
            checks += self.over_the_mesh()
        if is_first:
            checks += self.faults()
            self.console.print("\nrelative differences from the truth\n" + table(checks))
            if self.card:
                path = write_certificate(self.card, checks, self.sample)
                self.console.print(f"\ncertificate   {path}")
        num_failed = sum(not check.passed for check in checks)
        self.console.print(
            f"\nFAIL: {num_failed} of {len(checks)}"
            if num_failed
            else f"\nPASS: {len(checks)} checks"
        )
        self.mesh.barrier()
        self.mesh.close()
        return int(num_failed > 0)

    # ----------------------------------------------------------------------------------
    # in one process
    def compute_truth(self) -> Step:
        """Each document alone, through the model's own attention and head; no packing, no kernel,
        no loss of ours.
        """
        lm = self.model(self.alone, "none").loss_model.lm
        total = 0.0
        lm.set_attn_implementation("eager")
        documents = list(self.sample.each_document())
        num_label_tokens = sum(
            float(weights[labels != IGNORE_INDEX].sum()) for _, labels, weights in documents
        )
        for ids, labels, weights in documents:
            logits = lm(input_ids=ids[None].to(self.mesh.device), use_cache=False).logits[0].float()
            losses = F.cross_entropy(
                logits, labels.to(logits.device), reduction="none", ignore_index=IGNORE_INDEX
            )
            loss = (losses * weights.to(logits.device)).sum() / num_label_tokens
            loss.backward()
            total += float(loss.detach())
        return Step(total, take_gradients(lm.named_parameters()))

    def in_one_process(self) -> Iterator[Check]:
        """Packing, accumulation, layout, and the configured kernel in its precision."""
        model = self.loss_model()
        counts = f"{len(self.sample.documents)} documents, {len(self.batches)} packs"
        yield self.check(f"packed = each document alone ({counts})", self.step(model, self.batches))
        whole = self.stream(self.sample.packs)
        yield self.check("one micro-batch of all packs = one per pack", self.step(model, [whole]))
        other = [self.stream([pack]) for pack in self.sample.packed_otherwise()]
        yield self.check(f"packed otherwise ({len(other)} packs)", self.step(model, other))
        yield from self.configured_kernel(model)

    def configured_kernel(self, model: LossModel) -> Iterator[Check]:
        """What training runs, against fp32: no further off than the reference kernel is in the same
        precision.
        """
        if self.trains_like_the_exact_checks():
            return
        noise = max(self.check("", self.step(model, self.batches, self.dtype)).difference)
        self.noise_limit = max(EXACT, NOISE_FACTOR * noise)
        install(model.lm, self.kernel)
        yield self.check(
            self.kernel_name, self.step(model, self.batches, self.dtype), self.noise_limit
        )

    def faults(self) -> Iterator[Check]:
        """Three classical bugs, made on purpose where the sample allows it: checks that miss them
        prove nothing.
        """
        model = self.loss_model()
        if len(self.sample.documents) > len(self.batches):
            leaking = [replace(batch, attention=one_segment(batch)) for batch in self.batches]
            yield self.check(
                "fault: documents of a pack see each other",
                self.step(model, leaking),
                is_fault=True,
            )
        if any(batch.attention.tree is not None for batch in self.batches):
            straight = [replace(batch, attention=without_branches(batch)) for batch in self.batches]
            yield self.check(
                "fault: branches of a tree see each other",
                self.step(model, straight),
                is_fault=True,
            )
        shifted = [shifted_once_more(batch) for batch in self.batches]
        yield self.check(
            "fault: labels shifted once more", self.step(model, shifted), is_fault=True
        )
        if len({batch.num_label_tokens for batch in self.batches}) == 1:
            return
        means = [
            self.step(model, [batch], num_label_tokens=batch.num_label_tokens)
            for batch in self.batches
        ]
        yield self.check("fault: mean of the micro-batches' means", mean_of(means), is_fault=True)

    # ---------------------------------------------- over the mesh
    def over_the_mesh(self) -> list[Check]:
        """All ranks compute; rank 0 compares."""
        shape = self.mesh.shape
        checks = []
        if shape.cp > 1:
            model = self.loss_model()
            name = f"context parallel over {shape.cp} ranks, {self.decided.mesh.cp_exchange}"
            checks.append(
                (name, self.cp_step(model, self.decided.mesh.cp_exchange, torch.float32), EXACT)
            )
            if not self.trains_like_the_exact_checks():
                install(model.lm, self.kernel)
                exchange = self.decided.mesh.cp_exchange
                name = f"{self.kernel_name}, cp {shape.cp}, {exchange}"
                checks.append((name, self.cp_step(model, exchange, self.dtype), self.noise_limit))
        more = f", tp {shape.tp}, ep {shape.ep}" if shape.tp * shape.ep > 1 else ""
        sizes = f"dp {shape.dp_replicate} x {shape.dp_shard}, cp {shape.cp}{more}"
        axes = f"{sizes}, {self.decided.strategy}"
        checks.append((f"the whole mesh: {axes}", self.mesh_step(), EXACT))
        return [self.check(*check) for check in checks] if self.mesh.rank == 0 else []

    def cp_step(self, model: LossModel, exchange: str, dtype: torch.dtype) -> Step:
        """The whole model on each rank, tokens shared by the context-parallel ranks; gradients
        summed over them.
        """
        device = self.mesh.device
        total = torch.zeros((), device=self.mesh.device)
        for batch in self.batches:
            with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
                own = cp_shard(batch, self.mesh.cp, exchange).to(device)
                loss = model(own).sum / self.num_label_tokens
            loss.backward()
            total += loss.detach()
        assert self.mesh.cp is not None
        group = self.mesh.cp.get_group()
        for tensor in (total, *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(tensor, group=group)
        return Step(float(total), take_gradients(model.lm.named_parameters()))

    def mesh_step(self) -> Step:
        """The step of training: weights read or drawn shard by shard, packs distributed to the
        data-parallel ranks, accumulation, reduction; in fp32.
        """
        model = self.model(self.mesh, self.decided.strategy)
        mine = self.batches[self.mesh.dp_rank :: self.mesh.shape.dp]
        total = torch.zeros((), device=self.mesh.device)
        for number, batch in enumerate(mine, start=1):
            with model.accumulate(is_last=number == len(mine)):
                part = cp_shard(batch, self.mesh.cp, self.decided.mesh.cp_exchange).to(
                    self.mesh.device
                )
                loss = model(part).sum / self.num_label_tokens
                (loss * model.mean_ranks).backward()
            total += loss.detach()
        return Step(
            float(self.mesh.sum(total)), take_gradients(model.loss_model.lm.named_parameters())
        )

    # ---------------------------------------------- the pieces
    @property
    def alone(self) -> Mesh:
        """The mesh of one process."""
        return Mesh(MeshShape(1, 1, 1), self.mesh.device, None)

    def model(self, mesh: Mesh, strategy: str) -> ParallelModel:
        """The same weights each time, fp32, on the reference kernel, without dropout."""
        seed_all(self.config.seed, "model")
        model, _ = assemble(self.decided, self.sample.tokenizer, mesh, strategy, torch.float32)
        install(model.loss_model.lm, ReferenceAttention())
        check_model(self.decided.mesh.cp_exchange, model, mesh)
        model.loss_model.eval()
        return model

    def loss_model(self) -> LossModel:
        return self.model(self.alone, "none").loss_model

    def stream(self, packs: list[dict[str, Tensor]]) -> ThdBatch:
        return to_thd(packed_sequence_thd_collater(packs))

    @property
    def num_label_tokens(self) -> float:
        return sum(batch.num_label_tokens for batch in self.batches)

    def step(
        self,
        model: LossModel,
        batches: list[ThdBatch],
        dtype: torch.dtype = torch.float32,
        num_label_tokens: float | None = None,
    ) -> Step:
        """Micro-batches one after the other in this process."""
        device = self.mesh.device
        total = 0.0
        for batch in batches:
            with torch.autocast(device.type, dtype) if dtype != torch.float32 else nullcontext():
                summed = model(batch.to(device)).sum
                loss = summed / (num_label_tokens or self.num_label_tokens)
            loss.backward()
            total += float(loss.detach())
        return Step(total, take_gradients(model.lm.named_parameters()))

    def check(self, name: str, step: Step, limit: float = EXACT, is_fault: bool = False) -> Check:
        return Check(name, difference(step, self.truth), limit, is_fault)

    def trains_like_the_exact_checks(self) -> bool:
        """Then there is no other kernel or precision to check."""
        return self.kernel.name == ReferenceAttention.name and self.dtype == torch.float32

    def say_what_is_checked(self) -> None:
        self.console.say("model", f"{self.decided.config.model_type}, {self.layers_text}")
        size = self.sample.packer.packed_sequence_size
        training_size = self.sample.training_size
        text = f"{len(self.sample.documents)} documents in {len(self.sample.packs)} packs of {size}"
        cut = (
            f" (training packs {training_size}; longer documents are cut here)"
            if size < training_size
            else ""
        )
        self.console.say("sample", text + cut)
        self.console.say(
            "data",
            f"ids and labels of all {len(self.sample.documents)} documents are those of the data",
        )
        alone = "one process: start it like the training run (--nproc ...) to check its mesh"
        shape = self.mesh.shape
        axes = f"dp_replicate {shape.dp_replicate} x dp_shard {shape.dp_shard} x cp {shape.cp}"
        self.console.say("mesh", axes if self.mesh.root and shape.world_size > 1 else alone)


def shifted_once_more(batch: ThdBatch) -> ThdBatch:
    """The stream with each label one place too early: the classical mistake."""
    labels = F.pad(batch.labels, (0, 1), value=IGNORE_INDEX)[1:]
    return replace(batch, labels=labels, label_rows=labeled_rows(labels))


def one_segment(batch: ThdBatch) -> AttentionPlan:
    """The fault of a lost boundary: the pack is one document."""
    cu = torch.tensor([0, len(batch.input_ids)], dtype=torch.int32)
    return AttentionPlan(Segments(cu, cu, len(batch.input_ids), len(batch.input_ids)))


def without_branches(batch: ThdBatch) -> AttentionPlan:
    """The fault of a tree that is taken for one row."""
    cu = batch.cu_seqlens_padded
    longest = batch.max_seqlen
    return AttentionPlan(Segments(cu, cu, longest, longest))


def mean_of(steps: list[Step]) -> Step:
    """The fault of averaging per micro-batch."""
    gradients = {
        name: torch.stack([s.gradients[name] for s in steps]).mean(0) for name in steps[0].gradients
    }
    return Step(sum(step.loss for step in steps) / len(steps), gradients)
