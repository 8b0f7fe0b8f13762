"""What a plan costs and gains, on one screen and as data (packing.json)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from automodel_lite.config.sizes import round_up
from automodel_lite.data.packing.plan import PackPlan, PlanCounts, pack_blocks
from automodel_lite.errors import counted
from automodel_lite.seed import BLOCK, seeded_order


@dataclass(frozen=True, kw_only=True)
class PackingReport(PlanCounts):
    """All counts are of the plan; fractions are 0..1 of the positions that a model would compute.

    padded_fill_frac: the same documents in a random order, batches of as many documents as a pack
    holds padded to their longest. speedup_over_padding: positions of those batches over positions
    of the packs; attention is left out, so with long documents it is more. slot_padding_tokens is
    what rounding to slot_multiple costs, apart from the packing.
    imbalance_before / after: see `order.plan_imbalance`; None without a cost model or with one
    rank.
    """

    strategy: str
    packed_sequence_size: int
    slot_multiple: int
    seed: int
    epoch: int
    packs: int
    packs_before_max_packs: int
    lower_bound_packs: int
    fill_frac: float
    slot_padding_tokens: int
    tail_padding_tokens: int
    padded_fill_frac: float
    speedup_over_padding: float
    documents_per_pack_mean: float
    documents_per_pack_min: int
    documents_per_pack_max: int
    longest_tokens: int
    median_tokens: int
    mean_tokens: float
    balance: str
    imbalance_before: float | None
    imbalance_after: float | None
    note: str

    def __str__(self) -> str:
        lengths = (
            f"median {self.median_tokens:,}, mean {self.mean_tokens:,.1f}, longest "
            f"{self.longest_tokens:,} tokens"
        )
        per_pack = f"from {self.documents_per_pack_min:,} to {self.documents_per_pack_max:,}"
        lines = [
            ("documents", f"{self.documents:,} with {counted(self.tokens, 'token')}"),
            ("length", lengths),
            (
                "strategy",
                f"{self.strategy}, {self.packed_sequence_size:,} tokens per pack, seed {self.seed}",
            ),
            (
                "packs",
                f"{self.packs_before_max_packs:,}; no plan has fewer than "
                f"{self.lower_bound_packs:,}",
            ),
            ("documents per pack", f"{self.documents_per_pack_mean:.1f} ({per_pack})"),
            ("fill", f"{self.fill_frac:.2%}; padded batches {self.padded_fill_frac:.2%}"),
            (
                "speed-up",
                f"about {self.speedup_over_padding:.2f} x fewer positions than padded batches",
            ),
        ]
        if self.slot_padding_tokens:
            cost = (
                f"{self.slot_padding_tokens:,} tokens "
                f"({self.slot_padding_tokens / self.packed_tokens:.2%})"
            )
            lines.append(("rounding", f"slots of {self.slot_multiple} cost {cost}"))
        return "\n".join(f"  {name:<20}{text}" for name, text in [*lines, *self.remarks()])

    def remarks(self) -> list[tuple[str, str]]:
        """Returns what became of documents that are in no pack, and how packs are shared, as
        (topic, text).
        """
        sample = (
            f"keeps a random sample of {counted(self.packs, 'pack')}; left out "
            f"{counted(self.left_out_documents, 'document')}"
        )
        remarks = [
            (self.left_out_tokens, "max_packs", sample),
            (self.dropped_tokens, "dropped", counted(self.dropped_documents, "over-long document")),
            (self.cut_tokens, "truncated", counted(self.truncated_documents, "document")),
            (
                self.masked_tokens,
                "masked",
                f"{counted(self.masked_documents, 'document')} without a label after cutting",
            ),
        ]
        lines = [
            (topic, f"{text}, {counted(tokens, 'token')}")
            for tokens, topic, text in remarks
            if tokens
        ]
        if self.split_documents:
            pieces = self.pieces - self.packed_documents + self.split_documents
            lines.append(
                ("split", f"{counted(self.split_documents, 'document')} into {pieces:,} pieces")
            )
        if self.unlabeled_pieces:
            lines.append(
                ("unlabeled", f"{self.unlabeled_pieces:,} pieces of cut documents train nothing")
            )
        if self.imbalance_before is not None:
            pace = (
                f"slowest rank {self.imbalance_before:.3f} x the mean, {self.imbalance_after:.3f} "
                "x balanced"
            )
            lines.append(("balance", f"{self.balance}: {pace}"))
        return [*lines, ("note", self.note)] if self.note else lines


def packing_report(
    plan: PackPlan,
    lengths: Sequence[int] | np.ndarray,
    balance: str = "none",
    imbalance: tuple[float, float] | None = None,
    micro_batch_size: int = 1,
) -> PackingReport:
    """Describes a plan made from `lengths`; `imbalance` of its packs over the ranks, before and
    after balancing.
    """
    lengths = np.asarray(lengths)
    counts = plan.counts
    (before, after) = imbalance or (None, None)
    slot_tokens = sum(
        int(plan.slots(lengths, part).sum()) for _, part, _ in pack_blocks(plan.offsets)
    )
    batch = micro_batch_size if plan.ragged else max(1, round(counts.pieces / len(plan)))
    padded = _padded_positions(plan, lengths, batch)
    positions = padded if plan.ragged else len(plan) * plan.packed_sequence_size
    return PackingReport(
        **asdict(counts),
        strategy=plan.strategy,
        packed_sequence_size=plan.packed_sequence_size,
        slot_multiple=plan.slot_multiple,
        seed=plan.seed,
        epoch=plan.epoch,
        packs=len(plan),
        packs_before_max_packs=plan.num_packs_made,
        lower_bound_packs=plan.lower_bound,
        fill_frac=counts.packed_tokens / positions,
        slot_padding_tokens=slot_tokens - counts.packed_tokens,
        tail_padding_tokens=positions - slot_tokens,
        padded_fill_frac=counts.packed_tokens / padded,
        speedup_over_padding=padded / positions,
        documents_per_pack_mean=counts.pieces / len(plan),
        documents_per_pack_min=int(np.diff(plan.offsets).min()),
        documents_per_pack_max=int(np.diff(plan.offsets).max()),
        longest_tokens=int(lengths.max()),
        median_tokens=int(np.median(lengths)),
        mean_tokens=counts.tokens / counts.documents,
        balance=balance,
        imbalance_before=before,
        imbalance_after=after,
        note=plan.note,
    )


def _padded_positions(plan: PackPlan, lengths: np.ndarray, batch: int) -> int:
    """Counts positions of the plan's documents in a seeded order, `batch` at a time padded to the
    longest.
    """
    # Blocks of whole batches: none is padded to the longest of a part of it.
    order = seeded_order(len(plan.doc_ids), plan.seed, plan.epoch)
    block = round_up(BLOCK, batch)
    positions = 0
    for first in range(0, len(order), block):
        slots = plan.slots(lengths, order[first : first + block])
        starts = np.arange(0, len(slots), batch)
        positions += int(
            (np.maximum.reduceat(slots, starts) * np.diff(starts, append=len(slots))).sum()
        )
    return positions
