"""The bytes that a step really moves and holds are those of docs/planning.md, "Formulas"."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_lite.config.check import check_config
from automodel_lite.models.flops import model_size
from automodel_lite.parallel import exchange
from recipes.train_ft import TrainFinetuneRecipe
from tests.ranks import run_ranks
from tests.runs import composed

PACK = 256
LARGEST_NUMBERS = 256
"""Bytes of counts, flags and norms; the gradients that HSDP sums over its replicas are more."""
RECOMPUTED = "training.activation_checkpointing=full"


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank receives: gather, reduce, exchange (of context parallelism), other.

    Of n ranks each receives (n - 1) / n of what it gathers, or of what it reduces and scatters, and twice
    that of what is all-reduced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[str] = Counter()
        self.is_exchange = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            objects = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            (group,) = (one for one in objects if "ProcessGroup" in str(one._type()))
            num_ranks = ProcessGroup.unbox(group).size()
            kind, num_bytes = _whole(func._schema.name.removeprefix("c10d::"), args)
            if self.is_exchange:
                kind = "exchange"
            self.received[kind] += num_bytes * (num_ranks - 1) / num_ranks
        return func(*args, **(kwargs or {}))

    @contextmanager
    def of_exchanges(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Tells the collectives of context parallelism from FSDP's, whose operations are the same."""

        def marked(collective: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.is_exchange = True
                try:
                    return collective(*args, **kwargs)
                finally:
                    self.is_exchange = False

            return call

        for name in ("all_gather_rows", "reduce_scatter_rows"):
            patch.setattr(exchange, name, marked(getattr(exchange, name)))
        yield


def _whole(name: str, args: Any) -> tuple[str, float]:
    """Returns what a collective is for, and its bytes with those of the own rank."""
    if name == "_allgather_base_":
        return "gather", args[0].nbytes
    if name == "broadcast_":  # of each rank's part in turn: an all-gather
        return "gather", sum(tensor.nbytes for tensor in args[0])
    if name == "_reduce_scatter_base_":
        return "reduce", args[1].nbytes
    assert name == "allreduce_", name
    size = sum(tensor.nbytes for tensor in args[0])
    return ("reduce" if size > LARGEST_NUMBERS else "other"), 2 * size


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Counts weights, gradients and moments on this rank, without the step counters."""
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            states = optimizer.state[parameter]
            tensors = [parameter, parameter.grad, states["exp_avg"], states["exp_avg_sq"]]
            for tensor in tensors:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                total += local.nbytes
    return total


def measured(rank: int, world_size: int, folder: str, overrides: list[str]) -> dict[str, float]:
    """Runs two steps of the recipe; returns the bytes of the second one, and the sizes of its model."""
    settings = [
        "training.precision=bf16",
        "training.max_steps=8",
        f"packed_sequence.packed_sequence_size={PACK}",
        "packed_sequence.overlong=drop",
        "dataset.num_chats=200",
        "training.num_threads=1",
        f"output_dir={folder}/run",
        f"cache_dir={folder}/cache",
    ]
    config = check_config(composed("llama_packed", "model=llama_smoke", *settings, *overrides))
    recipe = TrainFinetuneRecipe(config)
    recipe.setup()
    recipe.open_feed()
    states: list[int] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        states.append(state_bytes(optimizer))

    recipe.step(next(recipe.feed))
    ready = next(recipe.feed)
    recipe.engine.optimizer.register_step_pre_hook(note)
    traffic = Traffic()
    with pytest.MonkeyPatch.context() as patch, traffic.of_exchanges(patch), traffic:
        recipe.step(ready)
    size = model_size(recipe.model.loss_model.lm.config)
    found = {"parameters": size.parameters, "embedding": size.embedding, "state": states[-1]}
    return found | dict(traffic.received)


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "micro_batches", "passes"),
    [
        (["training.global_batch_size=4"], 2, 2, 0),
        pytest.param(
            ["training.global_batch_size=1", "mesh.cp=2"], 2, 1, 2, marks=pytest.mark.system
        ),
        (["training.global_batch_size=1", "mesh.cp=2", RECOMPUTED], 2, 1, 3),
        pytest.param(
            ["training.global_batch_size=4", "mesh.dp_replicate=2"], 4, 1, 0, marks=pytest.mark.slow
        ),
    ],
    ids=["fsdp, 2 micro-batches", "cp", "cp, recomputed", "hsdp"],
)
def test_a_step_moves_the_bytes_of_the_formulas(
    tmp_path: Any, overrides: list[str], num_ranks: int, micro_batches: int, passes: int
) -> None:
    """The model has 2 layers of 2 key heads of dim 8: 32 values a token and layer, keys and values together."""
    replicas = 2 if "mesh.dp_replicate=2" in overrides else 1
    others = 1 / 2  # of the 2 ranks that shard a model, and of the 2 that replicate it
    for found in run_ranks(measured, num_ranks, str(tmp_path), overrides):
        parameters, embedding = found["parameters"], found["embedding"]
        gathered = 2 * micro_batches * (2 * parameters - embedding) * others
        assert found["gather"] == pytest.approx(gathered, rel=0.01)
        reduced = 4 * parameters * others
        if replicas == 2:
            reduced += 2 * 4 * (parameters / 2) * others
        assert found["reduce"] == pytest.approx(reduced, rel=0.01)
        assert found.get("exchange", 0) == passes * 2 * PACK * 32 * 2 * others
        assert found["other"] < 500
        # with several micro-batches, their unsharded sum has been freed when the optimizer steps
        assert found["state"] == pytest.approx(16 * parameters / 2, rel=0.01)
