"""Score heads on packs against plain transformers, one document at a time, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.classes import Classes
from automodel_lite.columns import CHOSEN, REJECTED
from automodel_lite.data.packing.packs import PackedDataset, join_packs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.data.tokens.trees import grow_trees
from automodel_lite.models.loss import Head, Loss, LossInputs, LossOutput
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.parts.losses.scores import Classify, Reward
from automodel_lite.thd import ThdBatch, to_thd
from tests.attention.families import FAMILIES, VOCAB
from tests.attention.hybrids import HYBRIDS, SETTINGS, InFloat64
from tests.ranks import run_ranks

Row = dict[str, Any]
LARGEST_ERROR = 1e-9
"""fp64, of a loss and, relative to the largest, of gradients."""
ONE = Classes("one", ("bad", "fair", "good"))
MANY = Classes("many", ("red", "round", "new"), ((), (0, 2), (1,), (0, 1, 2)))
LABELS = {
    "one": (ONE, [2, 0, 1, 1, 0]),
    "smoothed": (ONE, [2, 0, 1, 1, 0]),
    "many": (MANY, [1, 0, 3, 2, 1]),
    "number": (Classes("number"), [1.5, -0.5, 0.25, 3.0, 0.0]),
}


def model_of(family: str, num_scores: int) -> Any:
    """A model with the same random weights on every call."""
    torch.manual_seed(0)
    if family in HYBRIDS:
        known = AutoConfig.for_model(family).to_dict()
        settings = {key: value for key, value in SETTINGS.items() if key in known}
        config = AutoConfig.for_model(family, **settings | HYBRIDS[family])
    else:
        config = FAMILIES[family]()
    config.num_labels = num_scores
    lm = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    lm.set_experts_implementation("eager")  # the grouped product has no fp64
    with torch.no_grad():
        for weight in lm.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.2)
    return lm.double().train()


def drawn(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def scored(ids: list[int], label: int, **columns: float) -> Row:
    """A row as the tokenizer makes it: what it has stands at its last token."""
    padding = {"labels": -100, "loss_weights": 1.0}
    values = {"labels": label, **columns}
    at_end = {name: [padding.get(name, 0)] * (len(ids) - 1) + [x] for name, x in values.items()}
    return {"input_ids": ids, **at_end}


def labeled_rows(kind: str, is_weighted: bool) -> list[Row]:
    classes, labels = LABELS[kind]
    rows = []
    for number, (ids, label) in enumerate(zip(drawn(5, 12, 3, 7, 9), labels, strict=True)):
        columns = {"loss_weights": 0.5 * number} if is_weighted else {}
        if classes.kind == "number":
            rows.append(scored(ids, 0, targets=label, **columns))
        else:
            rows.append(scored(ids, int(label), **columns))
    return rows


def batch_of(rows: list[Row], slot_multiple: int = 1, size: int = 64) -> ThdBatch:
    flat = flatten(rows)
    plan = plan_packs(flat.lengths, size, strategy="next_fit", slot_multiple=slot_multiple)
    packs = PackedDataset(flat, plan)
    return to_thd(join_packs([packs[i] for i in range(len(packs))]), with_mixers=True)


def of_transformers(lm: Any, kind: str, rows: list[Row]) -> Tensor:
    """The loss that transformers computes of each row alone, as its `problem_type` says, averaged
    by weights.
    """
    classes, _ = LABELS[kind]
    lm.config.problem_type = classes.problem_type
    losses, weights = [], []
    for row in rows:
        label = row["labels"][-1]
        want = torch.tensor([label])
        if classes.kind == "many":
            want = torch.zeros(1, 3, dtype=torch.float64)
            want[0, list(MANY.sets[label])] = 1
        if classes.kind == "number":
            want = torch.tensor([row["targets"][-1]], dtype=torch.float64)
        output = lm(input_ids=torch.tensor([row["input_ids"]]), labels=want, use_cache=False)
        loss = output.loss
        if kind == "smoothed":
            loss = F.cross_entropy(output.logits, want, label_smoothing=0.2)
        losses.append(loss)
        weights.append(row.get("loss_weights", [1.0])[-1])
    return sum(loss * weight for loss, weight in zip(losses, weights)) / sum(weights)


def gradients(lm: Any, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    return {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}


def assert_equal_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert "score.weight" in want
    largest = max(float(grad.abs().max()) for grad in want.values())
    for name, grad in want.items():
        assert float((got[name] - grad).abs().max()) < LARGEST_ERROR * largest, name


def loss_of(kind: str) -> Loss:
    classes, _ = LABELS[kind]
    return Classify(label_smoothing=0.2 if kind == "smoothed" else 0.0).of_classes(classes)


BY_FAMILY = [
    *(("llama", kind) for kind in LABELS),
    *((family, "one") for family in ("qwen3_moe", "gemma2_softcap_window", "qwen3_5_text")),
]


@pytest.mark.parametrize(("family", "kind"), BY_FAMILY)
@pytest.mark.parametrize("is_weighted", [False, True], ids=["", "weighted"])
def test_packs_equal_transformers_row_by_row(family: str, kind: str, is_weighted: bool) -> None:
    rows = labeled_rows(kind, is_weighted)
    loss = loss_of(kind)
    num_scores = LABELS[kind][0].num_scores
    plain = model_of(family, num_scores)
    lm = model_of(family, num_scores)
    install(lm, ReferenceAttention())
    model = LossModel(lm, loss).train()
    batch = batch_of(rows)
    assert loss.num_items(batch) == (5.0 if is_weighted else 5)
    with InFloat64():
        want = of_transformers(plain, kind, rows)
        got = model(batch).sum / loss.num_items(batch)
    assert float(got.detach()) == pytest.approx(float(want.detach()), abs=LARGEST_ERROR)
    assert_equal_gradients(gradients(lm, got), gradients(plain, want))


def pairs_of(has_margins: bool) -> list[list[Row]]:
    """Pairs with a common prompt; of one pair, an answer begins with the other."""
    found = []
    answers = drawn(3, 6, 4, 1, 2, 5)
    for number, prompt in enumerate(drawn(70, 5, 12)):
        chosen, rejected = answers[2 * number : 2 * number + 2]
        if number == 2:
            rejected = [*chosen, *rejected]
        columns = {"margins": 0.5 * number} if has_margins else {}
        found.append(
            [
                scored([*prompt, *chosen], 0, answers=CHOSEN, **columns),
                scored([*prompt, *rejected], 0, answers=REJECTED, **columns),
            ]
        )
    return found


def as_trees(pairs: list[list[Row]]) -> list[Row]:
    dtypes = {"answers": "int8", "margins": "float32"}
    trees: list[Row] = []
    for pair in pairs:
        rows = [
            {
                name: torch.tensor(x).numpy().astype(dtypes.get(name, "int32"))
                for name, x in r.items()
            }
            for r in pair
        ]
        grown = grow_trees(rows, separates=True)
        assert len(grown) == 1
        trees += grown
    return trees


def bradley_terry(lm: Any, pairs: list[list[Row]], center: float) -> Tensor:
    losses = []
    for pair in pairs:
        chosen, rejected = (
            lm(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0, 0]
            for row in pair
        )
        margin = pair[0].get("margins", [0.0])[-1]
        losses.append(-F.logsigmoid(chosen - rejected - margin) + center * (chosen + rejected) ** 2)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("center", [0.0, 0.01], ids=["", "centered"])
@pytest.mark.parametrize("layout", ["trees", "documents"])
def test_pairs_equal_two_documents_alone(family: str, center: float, layout: str) -> None:
    pairs = pairs_of(has_margins=center == 0)
    rows = as_trees(pairs) if layout == "trees" else [row for pair in pairs for row in pair]
    if layout == "trees":  # each prompt is there once, and its last token in both branches
        assert [len(row["input_ids"]) for row in rows] == [
            70 + 3 + 6 + 1,
            5 + 4 + 1 + 1,
            12 + 2 + 5 + 1,
        ]
    plain = model_of(family, 1)
    lm = model_of(family, 1)
    install(lm, ReferenceAttention())
    loss = Reward(center=center)
    batch = batch_of(rows, size=128)
    assert loss.num_items(batch) == 3
    with InFloat64():
        want = bradley_terry(plain, pairs, center)
        output = LossModel(lm, loss).train()(batch)
    got = output.sum / 3
    assert float(got.detach()) == pytest.approx(float(want.detach()), abs=LARGEST_ERROR)
    assert_equal_gradients(gradients(lm, got), gradients(plain, want))
    with InFloat64(), torch.no_grad():
        of_chosen = [
            float(plain(input_ids=torch.tensor([c["input_ids"]])).logits) for c, _ in pairs
        ]
    if family == "llama":
        assert float(output.parts["chosen_reward"]) == pytest.approx(sum(of_chosen), abs=1e-9)


def spread(rank: int, world: int, shape: tuple[int, int, int], kind: str) -> list[float]:
    """Differences of loss and gradients from one process."""
    mesh = open_mesh(MeshShape(*shape), torch.device("cpu"))
    loss: Loss = Reward() if kind == "pairs" else loss_of(kind)
    rows = as_trees(pairs_of(True)) if kind == "pairs" else labeled_rows(kind, True)
    one = model_of("llama", 1 if kind == "pairs" else 3)
    install(one, ReferenceAttention())
    whole = batch_of(rows, 2 * mesh.shape.cp, 128)
    num_items = loss.num_items(whole)
    want = LossModel(one, loss)(whole).sum / num_items
    want_grads = gradients(one, want)
    lm = model_of("llama", 1 if kind == "pairs" else 3)
    install(lm, ReferenceAttention())
    model = parallelize(LossModel(lm, loss), mesh, "fsdp", torch.float64)
    own = rows if mesh.shape.dp == 1 else rows[mesh.dp_rank :: 2]
    batch = batch_of(own, 2 * mesh.shape.cp, 128)
    output = model(cp_shard(batch, mesh.cp, "all_gather"))
    total = output.sum / num_items
    (total * model.mean_ranks).backward()
    off = [abs(float(mesh.sum(total.detach()) - want))]
    largest = max(float(grad.abs().max()) for grad in want_grads.values())
    for name, weight in model.loss_model.lm.named_parameters():
        grad: Any = weight.grad
        off.append(float((grad.full_tensor() - want_grads[name]).abs().max()) / largest)
    return off


@pytest.mark.parametrize("kind", ["one", "pairs"])
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 1)], ids=["cp 2", "fsdp 2"])
def test_two_ranks_score_as_one(shape: tuple[int, int, int], kind: str) -> None:
    for of_loss, *of_gradients in run_ranks(spread, 2, shape, kind):
        assert of_loss < 1e-9
        assert len(of_gradients) == 21
        assert max(of_gradients) < 1e-6  # they are summed over ranks in fp32


class Distance(Loss):
    """A loss of one's own, which says no more than which head it reads."""

    columns = frozenset({"targets"})
    head = "score"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        scores_R1 = inputs.rows(lambda scores: scores)
        return LossOutput((scores_R1[:, 0] - inputs.columns["targets"]).abs().sum(), {})


def test_a_validation_of_a_loss_of_ones_own_counts_no_tokens() -> None:
    rows = labeled_rows("number", is_weighted=False)
    model = LossModel(model_of("llama", 1), Distance()).eval()
    install(model.lm, ReferenceAttention())
    with torch.no_grad(), InFloat64():
        total, parts = model(batch_of(rows))
    assert total > 0
    assert not parts


def measures(kind: str, scores: list[list[float]], rows: list[Row]) -> dict[str, float]:
    """What validation says of these scores."""
    labels = torch.tensor([row["labels"][-1] for row in rows])
    names = rows[0].keys() - {"input_ids", "labels"}
    columns = {name: torch.tensor([row[name][-1] for row in rows]) for name in names}
    loss = loss_of(kind)
    inputs = LossInputs(Head(torch.tensor(scores)), labels, columns)
    parts = loss(inputs).parts
    found = {name: float(value) / len(rows) for name, value in parts.items()}
    judged = loss.rows_to_judge(inputs)
    assert judged is not None
    return found | loss.judge([judged.numpy()[:1], judged.numpy()[1:]])


def test_measures_of_one_class_by_hand() -> None:
    """Confidences 0.8, 0.6, 0.9 and 0.7, of which the second is wrong."""
    probs = [[0.1, 0.1, 0.8], [0.6, 0.2, 0.2], [0.05, 0.9, 0.05], [0.7, 0.2, 0.1]]
    rows = [scored([1], label) for label in (2, 1, 1, 0)]
    found = measures("one", torch.tensor(probs).log().tolist(), rows)
    assert found["accuracy"] == pytest.approx(0.75)
    # bad: 1 of 2 predicted, 1 true; fair: 1 of 1 and 2; good: 1 of 1 and 1
    assert found["f1"] == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)
    # each alone in its bin of 15
    assert found["ece"] == pytest.approx((0.2 + 0.6 + 0.1 + 0.3) / 4, abs=1e-6)


def test_measures_of_several_classes_and_of_numbers_by_hand() -> None:
    rows = [scored([1], 1), scored([1], 2), scored([1], 0)]  # {red, new}, {round}, none
    found = measures("many", [[1.0, -1.0, 2.0], [1.0, 3.0, -1.0], [-1.0, -1.0, -2.0]], rows)
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["f1"] == pytest.approx((2 / 3 + 1 + 1) / 3)
    numbers = [scored([1], 0, targets=value) for value in (1.0, 2.0, 4.0)]
    found = measures("number", [[2.0], [4.0], [8.0]], numbers)
    assert found["pearson"] == pytest.approx(1.0)
    assert found["absolute_error"] == pytest.approx((1 + 2 + 4) / 3)
