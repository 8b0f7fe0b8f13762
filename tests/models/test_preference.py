"""Preference losses on packs against the textbook: plain transformers, one answer at a time, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import CHOSEN, REJECTED
from automodel_lite.data.packing.packs import PackedDataset, join_packs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.parts.losses.preference import Dpo, OrPo, PreferenceLoss, SimPo
from automodel_lite.thd import ThdBatch, to_thd
from tests.attention.families import VOCAB, build
from tests.attention.hybrids import HYBRIDS, InFloat64, build_hybrid
from tests.ranks import run_ranks

Row = dict[str, Any]
Pair = tuple[Row, Row]
NUM_PAIRS = 4
LARGEST_ERROR = 1e-9
"""fp64, of a loss and, relative to the largest, of gradients. AdamW's eps makes those that are nearly 0 matter less."""
LOSSES = {
    "dpo": Dpo(beta=0.3),
    "smoothed": Dpo(beta=0.3, label_smoothing=0.2),
    "ipo": Dpo(beta=0.3, kind="ipo"),
    "hinge": Dpo(beta=0.3, kind="hinge"),
    "with cross-entropy": Dpo(cross_entropy=0.5),
    "simpo": SimPo(),
    "orpo": OrPo(),
}


def make_pairs() -> list[Pair]:
    """Pairs with a shared prompt; the reference's log-probabilities are drawn."""
    generator = torch.Generator().manual_seed(3)

    def answer(prompt: list[int], which: int) -> Row:
        given = torch.randint(
            0, VOCAB, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator
        )
        ids = [*prompt, *given.tolist()]
        labels = [-100] * (len(prompt) - 1) + ids[len(prompt) :] + [-100]
        answers = [0 if label == -100 else which for label in labels]
        reference = torch.randn(len(ids), generator=generator).tolist()
        return {
            "input_ids": ids,
            "labels": labels,
            "answers": answers,
            "reference_log_probs": reference,
        }

    prompts = [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in (5, 12, 3, 7)]
    return [(answer(prompt, CHOSEN), answer(prompt, REJECTED)) for prompt in prompts]


def model_of(family: str) -> Any:
    model = build_hybrid(family) if family in HYBRIDS else build(family)
    model.set_experts_implementation("eager")  # the grouped product has no fp64
    return model.double()


def batch_of(pairs: list[Pair], slot_multiple: int = 1) -> ThdBatch:
    rows = flatten([row for pair in pairs for row in pair])
    plan = plan_packs(rows.lengths, 160, strategy="next_fit", slot_multiple=slot_multiple)
    packs = PackedDataset(rows, plan)
    return to_thd(join_packs([packs[i] for i in range(len(packs))]))


def textbook(lm: Any, pair: Pair, loss: PreferenceLoss) -> Tensor:
    """The formulas of the papers, of one pair."""
    sums, references, counts = [], [], []
    for row in pair:
        logits = lm(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
        labels = torch.tensor(row["labels"])
        real = labels != -100
        sums.append(F.log_softmax(logits, -1)[real].gather(1, labels[real][:, None]).sum())
        references.append(torch.tensor(row["reference_log_probs"]).double()[real].sum())
        counts.append(real.sum())
    (c, r), (ref_c, ref_r), (n_c, n_r) = sums, references, counts
    nll = -c / n_c
    if isinstance(loss, SimPo):
        return -F.logsigmoid(loss.beta * (c / n_c - r / n_r) - loss.gamma)
    if isinstance(loss, OrPo):
        odds = [mean - torch.log1p(-mean.exp()) for mean in (c / n_c, r / n_r)]
        return nll - loss.beta * F.logsigmoid(odds[0] - odds[1])
    assert isinstance(loss, Dpo)
    margin = loss.beta * ((c - ref_c) - (r - ref_r))
    if loss.kind == "ipo":
        value = ((c - ref_c) / n_c - (r - ref_r) / n_r - 1 / (2 * loss.beta)) ** 2
    elif loss.kind == "hinge":
        value = F.relu(1 - margin)
    else:
        s = loss.label_smoothing
        value = -(1 - s) * F.logsigmoid(margin) - s * F.logsigmoid(-margin)
    return value + loss.cross_entropy * nll


def train(lm: Any, losses: Any, num_steps: int = 3) -> tuple[list[float], list[Tensor]]:
    """Losses of some AdamW steps, and the gradients of the first."""
    optimizer, values, first = torch.optim.AdamW(lm.parameters(), lr=1e-3), [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = losses()
        loss.backward()
        values.append(float(loss.detach()))
        if step == 0:
            first = [p.grad.clone() for p in lm.parameters() if p.grad is not None]
        optimizer.step()
    return values, first


# A loss sees a family by its log-probabilities alone: all losses of one, and of others a sum, a mean and the odds of one.
BY_FAMILY = [
    *(("llama", name) for name in LOSSES),
    *(("qwen3_moe", name) for name in ("dpo", "orpo")),
    *(("qwen3_5_text", name) for name in ("with cross-entropy", "simpo")),
]


@pytest.mark.parametrize(("family", "name"), BY_FAMILY)
def test_a_pack_of_pairs_equals_the_textbook(family: str, name: str) -> None:
    loss, pairs = LOSSES[name], make_pairs()
    plain = model_of(family)
    lm = model_of(family)
    install(lm, ReferenceAttention())
    model = LossModel(lm, loss).train()
    batch = batch_of(pairs)
    assert loss.num_items(batch) == NUM_PAIRS
    with InFloat64():
        want, want_grads = train(
            plain, lambda: sum(textbook(plain, pair, loss) for pair in pairs) / NUM_PAIRS
        )
        got, got_grads = train(lm, lambda: model(batch).sum / NUM_PAIRS)
    assert got == pytest.approx(want, abs=LARGEST_ERROR)
    largest = max(float(grad.abs().max()) for grad in want_grads)
    errors = [float((a - b).abs().max()) for a, b in zip(got_grads, want_grads, strict=True)]
    assert max(errors) < LARGEST_ERROR * largest


def test_the_first_loss_is_ln_2_and_the_parts_say_why() -> None:
    pairs, lm = make_pairs(), build("llama")
    install(lm, ReferenceAttention())
    batch = batch_of(pairs)
    model = LossModel(lm, Dpo())
    with torch.no_grad():
        logits_RV = lm(**batch.model_inputs(), logits_to_keep=batch.label_rows).logits[0].float()
        own_R = -F.cross_entropy(logits_RV, batch.labels[batch.label_rows], reduction="none")
        own_T = torch.zeros(len(batch.labels)).index_add(0, batch.label_rows, own_R)
        columns = {**batch.columns, "reference_log_probs": own_T}
        total, parts = model(replace(batch, columns=columns))
    assert float(total) / NUM_PAIRS == pytest.approx(0.69314718, abs=1e-6)
    assert float(parts["reward_margin"]) == pytest.approx(0, abs=1e-5)
    assert float(parts["kl"]) == pytest.approx(0, abs=1e-4)
    chosen = batch.columns["answers"][batch.label_rows] == CHOSEN
    assert float(parts["chosen_log_prob"]) == pytest.approx(float(own_R[chosen].sum()), abs=1e-4)


def test_packs_of_any_size_give_one_loss() -> None:
    pairs, lm = make_pairs(), build("llama")
    install(lm, ReferenceAttention())
    model = LossModel(lm, Dpo(kind="ipo"))
    with torch.no_grad():
        whole = float(model(batch_of(pairs)).sum)
        alone = sum(float(model(batch_of([pair])).sum) for pair in pairs)
        nothing = float(
            model(replace(batch_of(pairs[:1]), label_rows=torch.zeros(0, dtype=torch.long))).sum
        )
    assert alone == pytest.approx(whole, rel=1e-6)
    assert nothing == 0.0


def spread(
    rank: int, world: int, shape: tuple[int, int, int], strategy: str, family: str, kind: Any
) -> list[float]:
    """Differences of loss, margin and gradients from one process."""
    mesh = open_mesh(MeshShape(*shape), torch.device("cpu"))
    loss, pairs = Dpo(beta=0.3, kind=kind), make_pairs()
    one = model_of(family)
    install(one, ReferenceAttention())
    alone = LossModel(one, loss)
    with InFloat64():
        want, want_parts = alone(batch_of(pairs))
    want = want / NUM_PAIRS
    want.backward()
    lm = model_of(family)
    install(lm, ReferenceAttention())
    model = parallelize(LossModel(lm, loss), mesh, strategy, torch.float64)
    per_rank = NUM_PAIRS // mesh.shape.dp
    batch = batch_of(
        pairs[mesh.dp_rank * per_rank : (mesh.dp_rank + 1) * per_rank], 2 * mesh.shape.cp
    )
    with InFloat64():
        output = model(cp_shard(batch, mesh.cp, "all_gather"))
    total = output.sum / NUM_PAIRS
    (total * model.mean_ranks).backward()
    margins = mesh.sum(output.parts["reward_margin"])
    grads = {n: p.grad for n, p in model.loss_model.named_parameters() if p.grad is not None}
    largest = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
    of_grads = [
        float(((g.full_tensor() if hasattr(g, "full_tensor") else g) - p.grad).abs().max())
        / max(1.0, largest)
        for (name, p), g in zip(alone.named_parameters(), grads.values())
    ]
    size = max(1.0, abs(float(want)))  # ipo's loss is a square: of 10 to 30 here
    return [
        abs(float(mesh.sum(total) - want)) / size,
        abs(float(margins - want_parts["reward_margin"])),
        max(of_grads),
    ]


OVER_RANKS = {
    "dp 2": ((2, 1, 1), "ddp"),
    "cp 2": ((1, 1, 2), "fsdp"),
    "fsdp 2": ((1, 2, 1), "fsdp"),
}
# each layout with each family; the kinds in turns
SPREAD = [
    pytest.param(*layout, family, ("sigmoid", "ipo")[(row + column) % 2], id=f"{name}-{family}")
    for row, (name, layout) in enumerate(OVER_RANKS.items())
    for column, family in enumerate(["llama", "qwen3_moe", "qwen3_5_text"])
]


@pytest.mark.parametrize(("shape", "strategy", "family", "kind"), SPREAD)
def test_two_ranks_equal_one(
    shape: tuple[int, int, int], strategy: str, family: str, kind: str
) -> None:
    for of_loss, of_margin, of_grads in run_ranks(spread, 2, shape, strategy, family, kind):
        assert max(of_loss, of_margin) < 1e-9
        assert of_grads < 1e-6  # of the largest: they are summed over ranks in fp32
