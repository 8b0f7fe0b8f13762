"""Prove on your own model, data and mesh that packing and parallelism do not change the numbers.

    torchrun recipes/verify.py --config-name llama_packed             (the arguments of train_ft.py)
    automodel-lite verify --nproc 4 --config-name llama_packed mesh.cp=2
    automodel-lite verify runs/mine --replay 130      (a run's record, and a step computed again)

A small sample of the packs that training would read goes through the program's own path in several
ways; loss and every gradient must agree with the truth: each document alone, through the model's
own eager attention, in fp32, in one process. Then the step is broken on purpose, to show what a
fault would look like. Exit code 1 on a FAIL. With `--card runs/mine` the numbers, and the export
against its checkpoint, are written to runs/mine/hf/certificate.json and the model card.
"""

from __future__ import annotations

from automodel_lite.cli import run_recipe
from automodel_lite.errors import ConfigError, counted

# --help, --cfg and mistakes are answered before torch is imported; this does not return
if __name__ == "__main__":
    run_recipe("recipes.verify:main")

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import COLUMNS, IGNORE_INDEX, labeled_rows
from automodel_lite.config.schema import Config
from automodel_lite.extras.certificate import NAME, as_json, check_export, write_certificate
from automodel_lite.extras.choices import Choices, differing_frac
from automodel_lite.extras.verify import (
    Check,
    Pack,
    Sample,
    Step,
    difference,
    draw_sample,
    first_layers,
    table,
    take_gradients,
)
from automodel_lite.models.loss import FusedLinearCrossEntropy, PlainLoss
from automodel_lite.models.settings import number_of_experts
from automodel_lite.models.source import CausalLM
from automodel_lite.parallel.mesh import (
    Mesh,
    MeshShape,
    mesh_shape,
    rank,
    world_size,
)
from automodel_lite.results import RESULTS
from automodel_lite.seed import seed_all
from automodel_lite.telemetry.console import Console, quiet_libraries
from automodel_lite.thd import AttentionPlan, Segments, ThdBatch, to_thd
from automodel_lite.training.build import assemble
from automodel_lite.training.checks import check_model
from automodel_lite.training.decide import decide_layout
from automodel_lite.training.engine import Engine
from automodel_lite.training.launch import watch_ranks
from automodel_lite.training.resolve import resolve_auto
from automodel_lite.training.rules import checked_parts
from automodel_lite.training.world import open_world

EXACT = 1e-5
"""Relative limit in fp32; measured differences are 1e-7 to 1e-6."""
NOISE_FACTOR = 3.0
"""The configured kernel and precision may be so many times further from fp32 than the reference
kernel in it.
"""


def check_has_no_scores(model: CausalLM) -> None:
    """Raises ConfigError for a model whose head is not one over tokens, through which losses are
    compared.
    """
    if model.has_score_head():
        raise ConfigError(
            f"model.pretrained={model.pretrained} has a score head, and automodel-lite verify "
            "compares losses of tokens",
            key="model.pretrained",
            cure="name the model that it began as, or a run alone, automodel-lite verify RUN, "
            "which is compared with its own records",
        )


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
        parts = checked_parts(config)
        # next-token cross-entropy in place of what compares or averages rows, or asks another model
        is_plain = isinstance(parts.loss, PlainLoss) and parts.loss.is_plain
        self.replaced = None if is_plain else type(parts.loss).__name__
        if self.replaced:
            if parts.loss.head == "score":
                check_has_no_scores(parts.model)
                parts.model.head = "lm"  # the layers below it are those of its base
            parts = replace(parts, loss=FusedLinearCrossEntropy(), teacher=None)
        self.sample: Sample = draw_sample(config, shape)
        # weights in fp32, and products of it: what rounds would hide what is compared
        exact = replace(config.training, tf32=False, fp8="none", master_weights="fp32")
        self.mesh: Mesh = open_world(replace(config, training=exact))
        source, self.layers_text = first_layers(
            parts.model, self.sample.tokenizer, self.mesh.device
        )
        self.batches = [self.stream([pack]) for pack in self.sample.packs]
        model_config = source.config(self.sample.tokenizer)
        peft = parts.peft and parts.peft.unquantized()
        parts = replace(parts, model=source, training=exact, peft=peft)
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
        rows = [*map(as_json, checks)]
        if is_first and self.card:
            exported = write_certificate(self.card, checks, self.sample)
            rows.append(exported)
            verdict = "PASS" if exported["passed"] else "FAIL"
            said = f"loss {exported['loss']:.0e}, limit {exported['limit']:.0e}  {verdict}"
            self.console.print(f"{exported['what']}: {said}")
            self.console.print(f"\ncertificate   {self.card / 'hf' / NAME}")
        num_failed = sum(not row["passed"] for row in rows)
        RESULTS.update(checks=rows, num_failed=num_failed)
        self.console.print(
            f"\nFAIL: {num_failed} of {len(rows)}" if num_failed else f"\nPASS: {len(rows)} checks"
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
        lm = self.engine(self.alone, "none").model.loss_model.lm
        total = 0.0
        lm.set_attn_implementation("eager")
        documents = list(self.sample.each_document())
        num_label_tokens = sum(
            float(weights[labels != IGNORE_INDEX].sum()) for _, labels, weights in documents
        )
        for inputs, labels, weights in documents:
            placed = {name: x.to(self.mesh.device) for name, x in inputs.items()}
            logits = lm(**placed, use_cache=False).logits[0].float()
            losses = F.cross_entropy(
                logits, labels.to(logits.device), reduction="none", ignore_index=IGNORE_INDEX
            )
            loss = (losses * weights.to(logits.device)).sum() / num_label_tokens
            loss.backward()
            total += float(loss.detach())
        return Step(total, take_gradients(lm.named_parameters()))

    def in_one_process(self) -> Iterator[Check]:
        """Packing, accumulation, layout, and the configured kernel in its precision."""
        engine = self.engine(self.alone, "none")
        documents = counted(len(self.sample.documents), "document")
        counts = f"{documents}, {counted(len(self.batches), 'pack')}"
        yield self.check(
            f"packed = each document alone ({counts})", self.step(engine, self.batches)
        )
        whole = self.stream(self.sample.packs)
        yield self.check("one micro-batch of all packs = one per pack", self.step(engine, [whole]))
        other = [self.stream([pack]) for pack in self.sample.packed_otherwise()]
        yield self.check(
            f"packed otherwise ({counted(len(other), 'pack')})", self.step(engine, other)
        )
        yield from self.configured_kernel(engine)

    def configured_kernel(self, engine: Engine) -> Iterator[Check]:
        """What training runs, against fp32: no further off than the reference kernel is in the same
        precision. Where tokens choose other experts in it, all take those of fp32.
        """
        if self.trains_like_the_exact_checks():
            return
        wanted = Choices()
        if number_of_experts(self.decided.config.get_text_config()):
            with wanted:
                self.step(engine, self.batches)
        engine = in_precision(engine, self.dtype)
        # No fused kernel of torch's: with attention.implementation=FA3, FA4 or cuDNN the reference
        # would be what it judges, and a kernel that is far off would widen its own limit.
        with sdpa_kernel(SDPBackend.MATH), Choices() as chosen:
            noise = self.noise_of(engine)
        # the mesh's rows choose for themselves
        self.noise_limit = limit = max(EXACT, NOISE_FACTOR * noise)
        name = self.kernel_name
        pinned = None
        if self.say_who_chooses_otherwise(chosen, wanted):
            pinned = wanted
            name += ", experts pinned"
            with sdpa_kernel(SDPBackend.MATH), Choices(pinned):
                limit = max(EXACT, NOISE_FACTOR * self.noise_of(engine))
        install(engine.model.loss_model.lm, self.kernel)
        with Choices(pinned):
            step = self.step(engine, self.batches)
        yield self.check(name, step, limit)

    def noise_of(self, engine: Engine) -> float:
        return max(self.check("", self.step(engine, self.batches)).difference)

    def say_who_chooses_otherwise(self, chosen: Choices, wanted: Choices) -> bool:
        """Prints how many tokens choose other experts in the precision of training than in fp32;
        returns whether any do.
        """
        differing = differing_frac(chosen, wanted, self.decided.config, self.batches)
        if differing is None:
            return False
        RESULTS.update(other_experts_frac=differing)
        precision = str(self.dtype).removeprefix("torch.")
        self.console.say(
            "experts",
            f"{differing:.1%} of tokens, counted in each layer, choose others in {precision} than "
            "in fp32",
        )
        return differing > 0

    def faults(self) -> Iterator[Check]:
        """Three classical bugs, made on purpose where the sample allows it: checks that miss them
        prove nothing.
        """
        engine = self.engine(self.alone, "none")
        if len(self.sample.documents) > len(self.batches):
            leaking = [replace(batch, attention=one_segment(batch)) for batch in self.batches]
            yield self.check(
                "fault: documents of a pack see each other",
                self.step(engine, leaking),
                is_fault=True,
            )
        if any(batch.attention.tree is not None for batch in self.batches):
            straight = [replace(batch, attention=without_branches(batch)) for batch in self.batches]
            yield self.check(
                "fault: branches of a tree see each other",
                self.step(engine, straight),
                is_fault=True,
            )
        if self.sample.reader is not None:
            exchanged = [exchanged_images(batch) for batch in self.batches]
            yield self.check(
                "fault: images change places", self.step(engine, exchanged), is_fault=True
            )
        shifted = [shifted_once_more(batch) for batch in self.batches]
        yield self.check(
            "fault: labels shifted once more", self.step(engine, shifted), is_fault=True
        )
        if len({batch.num_label_tokens for batch in self.batches}) == 1:
            return
        means = [
            self.step(engine, [batch], divisor=batch.num_label_tokens) for batch in self.batches
        ]
        yield self.check("fault: mean of the micro-batches' means", mean_of(means), is_fault=True)

    # ---------------------------------------------- over the mesh
    def over_the_mesh(self) -> list[Check]:
        """All ranks compute; rank 0 compares."""
        shape = self.mesh.shape
        checks = []
        if shape.cp > 1:
            # the whole model on each rank, tokens shared by the context-parallel ranks
            engine = self.engine(replace(self.alone, cp=self.mesh.cp), "none")
            exchange = self.decided.mesh.cp_exchange
            name = f"context parallel over {shape.cp} ranks, {exchange}"
            checks.append((name, self.cp_step(engine), EXACT))
            if not self.trains_like_the_exact_checks():
                install(engine.model.loss_model.lm, self.kernel)
                name = f"{self.kernel_name}, cp {shape.cp}, {exchange}"
                step = self.cp_step(in_precision(engine, self.dtype))
                checks.append((name, step, self.noise_limit))
        more = f", tp {shape.tp}, ep {shape.ep}" if shape.tp * shape.ep > 1 else ""
        sizes = f"dp {shape.dp_replicate} x {shape.dp_shard}, cp {shape.cp}{more}"
        axes = f"{sizes}, {self.decided.strategy}"
        # the step of training: weights read or drawn shard by shard, packs distributed to the
        # data-parallel ranks, accumulation, reduction
        engine = self.engine(self.mesh, self.decided.strategy)
        packs = self.sample.packs[self.mesh.dp_rank :: shape.dp]
        mine = [self.stream([pack], is_shared=True) for pack in packs]
        checks.append((f"the whole mesh: {axes}", self.step(engine, mine), EXACT))
        return [self.check(*check) for check in checks] if self.mesh.rank == 0 else []

    def cp_step(self, engine: Engine) -> Step:
        """A step of tokens that the context-parallel ranks share, gradients summed over them."""
        own = self.step(engine, self.batches, takes=False)
        assert self.mesh.cp is not None
        group = self.mesh.cp.get_group()
        total = torch.tensor(own.loss, dtype=torch.float64, device=self.mesh.device)
        parameters = list(engine.model.parameters())
        for tensor in (total, *(p.grad for p in parameters if p.grad is not None)):
            dist.all_reduce(tensor, group=group)
        return Step(float(total), take_gradients(engine.model.loss_model.lm.named_parameters()))

    # ---------------------------------------------- the pieces
    @property
    def alone(self) -> Mesh:
        """The mesh of one process."""
        return Mesh(MeshShape(1, 1, 1), self.mesh.device, None)

    def engine(self, mesh: Mesh, strategy: str) -> Engine:
        """The same weights each time, fp32, on the reference kernel, without dropout."""
        seed_all(self.config.seed, "model")
        model, _ = assemble(self.decided, self.sample.tokenizer, mesh, strategy, torch.float32)
        install(model.loss_model.lm, ReferenceAttention())
        check_model(self.decided.mesh.cp_exchange, model, mesh)
        model.loss_model.eval()
        return Engine(mesh, model, self.decided)

    def stream(self, packs: list[Pack], is_shared: bool = False) -> ThdBatch:
        """Returns packs as a micro-batch; `is_shared`: with this rank's images."""
        batch = to_thd(self.sample.row(packs, is_shared))
        if self.replaced is None:
            return batch
        kept = {
            name: column
            for name, column in batch.columns.items()
            if name in PlainLoss.columns or not COLUMNS[name].is_for_loss
        }
        return replace(batch, columns=kept)

    @property
    def num_label_tokens(self) -> float:
        return sum(batch.num_label_tokens for batch in self.batches)

    def step(
        self, engine: Engine, batches: list[ThdBatch], divisor: float = 0.0, takes: bool = True
    ) -> Step:
        """Micro-batches one after the other, as training has them.

        divisor  0 = the label tokens of the whole sample
        takes    False: the gradients stay where they are
        """
        divisor = divisor or self.num_label_tokens
        placed = [engine.place(batch).to(self.mesh.device) for batch in batches]
        sums = engine.forward_backward(placed, divisor)
        loss = float(engine.total(sums)["loss"]) / divisor
        named = engine.model.loss_model.lm.named_parameters()
        return Step(loss, take_gradients(named) if takes else {})

    def check(self, name: str, step: Step, limit: float = EXACT, is_fault: bool = False) -> Check:
        return Check(name, difference(step, self.truth), limit, is_fault)

    def trains_like_the_exact_checks(self) -> bool:
        """Then there is no other kernel or precision to check."""
        return self.kernel.name == ReferenceAttention.name and self.dtype == torch.float32

    def say_what_is_checked(self) -> None:
        self.console.say("model", f"{self.decided.config.model_type}, {self.layers_text}")
        if self.replaced:
            self.console.say("loss", f"next-token cross-entropy, in place of {self.replaced}")
        size = self.sample.packer.packed_sequence_size
        training_size = self.sample.training_size
        documents = counted(len(self.sample.documents), "document")
        text = f"{documents} in {counted(len(self.sample.packs), 'pack')} of {size}"
        cut = (
            f" (training packs {training_size}; longer documents are cut here)"
            if size < training_size
            else ""
        )
        self.console.say("sample", text + cut)
        alone = "one process: start it like the training run (--nproc ...) to check its mesh"
        shape = self.mesh.shape
        axes = f"dp_replicate {shape.dp_replicate} x dp_shard {shape.dp_shard} x cp {shape.cp}"
        self.console.say("mesh", axes if self.mesh.root and shape.world_size > 1 else alone)


def in_precision(engine: Engine, dtype: torch.dtype) -> Engine:
    """The same weights in another compute dtype."""
    return replace(engine, model=replace(engine.model, compute_dtype=dtype))


def shifted_once_more(batch: ThdBatch) -> ThdBatch:
    """The stream with each label one place too early: the classical mistake."""
    labels = F.pad(batch.labels, (0, 1), value=IGNORE_INDEX)[1:]
    return replace(batch, labels=labels, label_rows=labeled_rows(labels))


def exchanged_images(batch: ThdBatch) -> ThdBatch:
    """The fault of features that go to the places of others."""
    images: Any = batch.images
    return replace(batch, images=replace(images, rows=images.rows.flip(0)))


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
