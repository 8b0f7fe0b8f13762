"""Every layout of ranks gives the loss and the gradients of a single process, in fp32, through the program's own path.

collate -> to_thd -> cp_shard -> parallel model (FSDP2, HSDP or DDP) -> sum over micro-batches, divided by the label
tokens of the whole step. Micro-batches have very different numbers of documents and of labels, so averaging anywhere
shows.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX, labeled_rows
from automodel_lite.models.layers import decoder_layers, recompute_layers
from automodel_lite.models.loss import (
    CrossEntropy,
    FusedLinearCrossEntropy,
    Loss,
    LossInputs,
    LossOutput,
)
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parallel import context_parallel
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import ParallelModel, parallelize
from automodel_lite.thd import ThdBatch
from benchmarks.image_families import image_config, image_model, image_processor
from benchmarks.survey_images import Document, packed
from tests.attention.families import FAMILIES, build, documents, stream
from tests.attention.hybrids import HYBRIDS, ONE_OF_EACH_KIND, build_hybrid
from tests.ranks import run_ranks
from tests.tiers import rarely

pytestmark = pytest.mark.numbers

LARGEST_ERROR = 1e-6
REFUSED = {"inkling2_text", "minimax", "openai-gpt", "xglm"}


MICRO_BATCHES = 2


AXIS_NAMES = ("dp_replicate", "dp_shard", "cp", "tp")


LENGTHS = [[37, 5, 64, 1], [3, 90, 2, 23], [8, 8, 8], [120]]
"""Documents of each micro-batch of the step, distributed to the data-parallel ranks two by two."""


def micro_batch(number: int, cp: int) -> ThdBatch:
    """One pack of 160 tokens; the later, the fewer labels."""
    docs = documents(LENGTHS[number % len(LENGTHS)], seed=number)
    batch = stream(docs, 2 * cp, 160)
    labels = batch.labels.clone()
    labels[torch.arange(len(labels)) % (number + 1) > 0] = IGNORE_INDEX
    rows = labeled_rows(labels)
    return replace(batch, labels=labels, label_rows=rows, num_label_tokens=len(rows))


def loss_model(family: str) -> LossModel:
    model = build_hybrid(family) if family in HYBRIDS else build(family)
    install(model, ReferenceAttention())
    fused = family not in HYBRIDS and family != "gemma2_softcap_window"
    return LossModel(model, FusedLinearCrossEntropy(chunk_tokens=16) if fused else CrossEntropy())


def one_process(family: str, num_micro_batches: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss over the label tokens of the step, and its gradients."""
    model = loss_model(family)
    batches = [micro_batch(number, 1) for number in range(num_micro_batches)]
    num_label_tokens = sum(batch.num_label_tokens for batch in batches)
    total = torch.zeros(())
    for batch in batches:
        loss = model(batch).sum / num_label_tokens
        loss.backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def spread(
    rank: int,
    world: int,
    shape: tuple[int, ...],
    strategy: str,
    exchange: str,
    families: list,
    offloads: bool = False,
    reduces_every: bool = False,
    reshards: bool = True,
) -> dict:
    """For each family the largest differences of loss and gradients from one process."""
    shape, ep = (*shape, 1)[:4], shape[4] if len(shape) == 5 else 1
    mesh = open_mesh(MeshShape(*shape, ep), torch.device("cpu"))
    num_micro_batches = mesh.shape.dp * MICRO_BATCHES
    errors = {}
    for family in families:
        model = parallelize(loss_model(family), mesh, strategy, torch.float32, offloads, reshards)
        model = replace(model, reduces_every=reduces_every)
        mine = [mesh.dp_rank * MICRO_BATCHES + i for i in range(MICRO_BATCHES)]
        batches = [micro_batch(number, mesh.shape.cp) for number in mine]
        num_label_tokens = (
            mesh.sum(torch.tensor(sum(batch.num_label_tokens for batch in batches)))
            // mesh.shape.cp
        )
        total = torch.zeros(())
        for number, batch in enumerate(batches, start=1):
            with model.accumulate(is_last=number == len(batches)):
                loss = model(cp_shard(batch, mesh.cp, exchange)).sum / num_label_tokens
                (loss * model.mean_ranks).backward()
            total += loss.detach()
        total = mesh.sum(total)
        want, want_grads = one_process(family, num_micro_batches)
        grads = {
            name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in model.loss_model.named_parameters()
            if p.grad is not None
        }
        assert grads.keys() == want_grads.keys()
        largest = max(1.0, *(float(grad.abs().max()) for grad in want_grads.values()))
        of_grads = max(
            float((grads[name] - grad).abs().max()) / largest for name, grad in want_grads.items()
        )
        errors[family] = (float(abs(total - want)), of_grads)
    return errors


def assert_equal(
    shape: tuple[int, ...], strategy: str, exchange: str, families: list[str], *more: bool
) -> None:
    world = math.prod(shape[:4])
    for errors in run_ranks(spread, world, shape, strategy, exchange, families, *more):
        for family, (of_loss, of_grads) in errors.items():
            assert of_loss < LARGEST_ERROR * 5, (family, of_loss)  # of a loss near 5
            assert of_grads < LARGEST_ERROR, (family, of_grads)


FAST_LAYOUTS = [
    ((1, 1, 2), "ddp", "all_to_all"),
    ((1, 2, 2), "fsdp", "all_gather"),
    ((2, 1, 2), "fsdp", "ring"),
]


LAYOUTS = [
    *FAST_LAYOUTS,
    ((1, 2, 1), "fsdp", "all_gather"),
    ((1, 1, 2), "fsdp", "all_gather"),
    ((1, 2, 2), "fsdp", "all_to_all"),
    ((1, 2, 2), "ddp", "all_gather"),
    ((2, 2, 1), "fsdp", "all_gather"),
    ((1, 1, 4), "fsdp", "all_gather"),
    ((1, 1, 4), "ddp", "all_to_all"),
    ((1, 1, 4), "fsdp", "ring"),
    ((1, 1, 2), "ddp", "ring"),
]


def name_of(layout: tuple[tuple[int, int, int], str, str]) -> str:
    (replicate, shard, cp), strategy, exchange = layout
    return f"replicate{replicate}-shard{shard}-cp{cp}-{strategy}-{exchange}"


@pytest.mark.parametrize("layout", FAST_LAYOUTS, ids=name_of)
def test_llama_and_gpt_oss(layout: tuple[tuple[int, int, int], str, str]) -> None:
    assert_equal(*layout, ["llama", "gpt_oss_sinks_window"])


@pytest.mark.parametrize(
    ("shape", "how"),
    [((1, 2, 2), (True, False)), ((2, 2, 1), (False, True)), ((2, 2, 1), (False, False, False))],
    ids=["offloaded", "hsdp reduced every micro-batch", "hsdp gathered once"],
)
def test_how_weights_are_held_changes_no_number(
    shape: tuple[int, int, int], how: tuple[bool, ...]
) -> None:
    assert_equal(shape, "fsdp", "all_gather", ["llama"], *how)


def fsdp_parameters(model: ParallelModel) -> list[Any]:
    """FSDP's own records of the parameters."""
    units = [module for module in model.module.modules() if isinstance(module, FSDPModule)]
    groups = {
        id(group): group for unit in units if (group := unit._get_fsdp_state()._fsdp_param_group)
    }
    return [fsdp_param for group in groups.values() for fsdp_param in group.fsdp_params]


def held_between_micro_batches(rank: int, world: int, reduces_every: bool) -> float:
    """Elements of gradients that a rank holds after the first of two micro-batches, over those of its shards."""
    mesh = open_mesh(MeshShape(1, 2, 1), torch.device("cpu"))
    model = replace(
        parallelize(loss_model("llama"), mesh, "fsdp", torch.float32), reduces_every=reduces_every
    )
    with model.accumulate(is_last=False):
        model(micro_batch(rank, 1)).sum.backward()
    states = fsdp_parameters(model)
    sharded = [p.grad.to_local().numel() for p in model.parameters() if p.grad is not None]
    # from torch 2.15 on two names of one tensor
    named = [x for s in states for x in (s._unsharded_param.grad, s.unsharded_accumulated_grad)]
    whole = {id(grad): grad.numel() for grad in named if grad is not None}
    return (sum(sharded) + sum(whole.values())) / sum(
        p.to_local().numel() for p in model.parameters()
    )


@pytest.mark.same_on_every_cpu
def test_reducing_every_micro_batch_holds_shards_alone() -> None:
    assert run_ranks(held_between_micro_batches, 2, False) == [2.0, 2.0]
    assert run_ranks(held_between_micro_batches, 2, True) == [1.0, 1.0]


def gathers_of_micro_batches(rank: int, world: int, reshards: bool) -> list[int]:
    """How many gathers each of two steps of two micro-batches takes, forward and backward."""
    mesh = open_mesh(MeshShape(1, 2, 1), torch.device("cpu"))
    model = parallelize(loss_model("llama"), mesh, "fsdp", torch.float32, reshards=reshards)
    gathers = []
    for step in range(4):
        with CommDebugMode() as seen, model.accumulate(is_last=step % 2 == 1):
            model(micro_batch(rank, 1)).sum.backward()
        gathers.append(sum(n for op, n in seen.comm_counts.items() if "gather" in str(op)))
    return gathers


@pytest.mark.same_on_every_cpu
def test_weights_that_stay_gathered_are_so_between_micro_batches() -> None:
    freed = run_ranks(gathers_of_micro_batches, 2, True)[0]
    assert freed[0] == freed[1] == freed[2] == freed[3]
    kept = run_ranks(gathers_of_micro_batches, 2, False)[0]
    assert 0 < kept[0] == kept[2] < freed[0]
    # the embedding alone, which the backward pass does not need, and what lies beside the layers
    assert kept[1] == kept[3] < kept[0]


class LargestWeight(Loss):
    columns = frozenset({"loss_weights"})

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput(inputs.columns["loss_weights"].max(), {})


def largest_weight_in_bf16(rank: int, world: int, weight: float) -> float:
    mesh = open_mesh(MeshShape(1, world, 1), torch.device("cpu"))
    lm = build("llama")
    install(lm, ReferenceAttention())
    model = parallelize(LossModel(lm, LargestWeight()), mesh, "fsdp", torch.bfloat16)
    batch = micro_batch(0, 1)
    weights = torch.full(batch.labels.shape, weight)
    return float(model(replace(batch, columns={"loss_weights": weights})).sum)


def test_columns_are_not_rounded_to_the_compute_dtype() -> None:
    """FSDP rounds what it finds in the arguments of a forward, dataclasses included."""
    weight = 1 + 2**-20
    assert run_ranks(largest_weight_in_bf16, 1, weight) == [weight]


def rotations_in_bf16(rank: int, world: int, family: str) -> list[torch.dtype]:
    """What a layer is given, behind FSDP."""
    mesh = open_mesh(MeshShape(1, world, 1), torch.device("cpu"))
    model = parallelize(loss_model(family), mesh, "fsdp", torch.bfloat16)
    found = []
    decoder_layers(model.loss_model.lm)[0].register_forward_pre_hook(
        lambda layer, args, kwargs: found.extend([args[0], *kwargs["position_embeddings"]]),
        with_kwargs=True,
    )
    model(micro_batch(0, 1))
    return [x.dtype for x in found]


@pytest.mark.same_on_every_cpu
def test_layers_are_given_fp32_where_the_family_does() -> None:
    assert run_ranks(rotations_in_bf16, 1, "olmo2") == [
        [torch.bfloat16, torch.float32, torch.float32]
    ]


def losses_of_images(rank: int, world: int, family: str, strategy: str) -> tuple[float, float]:
    """Of a pack with images: in bf16, and of plain transformers, document by document in fp32."""
    plain = image_model(family, image_config(family))
    processor = image_processor(family, plain.config)
    draws = random.Random(0)
    layouts = ("t4 i t5", "t6")
    given = [Document(plain, processor, x, draws, False, torch.float32) for x in layouts]
    want = sum(float(document.loss(plain)) for document in given)
    batch = packed(plain, processor, given, {}, torch.float32)
    install(plain, ReferenceAttention())
    mesh = open_mesh(MeshShape(1, world, 1), torch.device("cpu"))
    model = parallelize(LossModel(plain, CrossEntropy()), mesh, strategy, torch.bfloat16)
    return float(model(batch).sum), want


@pytest.mark.parametrize("family", ["lfm3_vl", "smolvlm", *rarely("chameleon", "idefics3")])
def test_pixels_have_the_dtype_of_what_they_meet(family: str) -> None:
    """Pixels are fp32, and weights bf16, also of a tower whose layers are given fp32 (Lfm3-VL), or that is a part of the
    language model (Chameleon), and features where a family looks up its own dtype (SmolVLM): all ended in a traceback.
    """
    ((got, want),) = run_ranks(losses_of_images, 1, family, "fsdp")
    assert got == pytest.approx(want, rel=2e-2)
    # without FSDP one process has the same bits
    assert run_ranks(losses_of_images, 1, family, "none") == [(got, want)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_family_on_every_layout(layout: tuple[tuple[int, int, int], str, str]) -> None:
    assert_equal(*layout, list(FAMILIES))


@pytest.mark.slow
@pytest.mark.parametrize("layout", FAST_LAYOUTS, ids=name_of)
def test_hybrids_on_layouts(layout: tuple[tuple[int, int, int], str, str]) -> None:
    assert_equal(*layout, ONE_OF_EACH_KIND)


def test_a_shifted_label_is_noticed() -> None:
    """Shifting once more after sharding, as a model that is given `labels=` does."""
    for errors in run_ranks(spread_with_shifted_labels, 2):
        assert errors["llama"][1] > 1e-3


def spread_with_shifted_labels(rank: int, world: int) -> dict:
    from tests.parallel import test_sharding

    def shifted(batch: ThdBatch, *rest: object) -> ThdBatch:
        mine = context_parallel.cp_shard(batch, *rest)  # type: ignore[arg-type]
        labels = torch.nn.functional.pad(mine.labels, (0, 1), value=IGNORE_INDEX)[1:]
        return replace(mine, labels=labels, label_rows=labeled_rows(labels))

    test_sharding.cp_shard = shifted  # type: ignore[assignment]
    return test_sharding.spread(rank, world, (1, 1, 2), "fsdp", "all_gather", ["llama"])


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 1, 1, 2)], ids=["fsdp", "tp"])
def test_offloaded_layers_that_are_sharded(shape: tuple[int, ...]) -> None:
    for errors in run_ranks(spread_offloaded, 2, shape):
        assert max(errors["llama"]) < LARGEST_ERROR * 5


def spread_offloaded(rank: int, world: int, shape: tuple[int, ...]) -> dict:
    from tests.parallel import test_sharding

    whole = test_sharding.loss_model

    def offloaded(family: str) -> LossModel:
        model = whole(family)
        recompute_layers(decoder_layers(model.lm), "offload", 1)
        return model

    num_data_ranks = 1 if len(shape) == 4 else 2
    one = test_sharding.one_process("llama", num_data_ranks * MICRO_BATCHES)
    test_sharding.one_process, test_sharding.loss_model = lambda *_: one, offloaded  # type: ignore[assignment]
    return test_sharding.spread(rank, world, shape, "fsdp", "all_gather", ["llama"])


def test_averaging_over_micro_batches_is_noticed() -> None:
    """The mean of the micro-batches' means is not the mean over the step's label tokens."""
    model = loss_model("llama")
    batches = [micro_batch(number, 1) for number in range(2)]
    means = [float(model(batch).sum.detach()) / batch.num_label_tokens for batch in batches]
    assert abs(sum(means) / 2 - float(one_process("llama", 2)[0])) > 1e-3
