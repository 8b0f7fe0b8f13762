"""Settings of the compiler for the whole process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config

from automodel_lite.graphs import backend_of, graph_breaks, strict_graphs
from automodel_lite.models.layers import compile_layers


@pytest.mark.parametrize(
    ("num_ranks", "chosen", "threads"),
    [("1", None, 8), ("4", None, 2), ("16", None, 1), ("4", "7", 8)],
)
def test_ranks_of_a_host_share_its_cores(
    num_ranks: str, chosen: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 cores; 8 processes stand for torch's own choice, and a choice of the user's stays."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_ranks)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", chosen)
    with inductor_config.patch(compile_threads=8):
        strict_graphs()
        assert inductor_config.compile_threads == threads


@pytest.fixture
def loop_over_experts() -> Iterator[None]:
    """An operation as transformers has it for experts in fp32: its backward reads how many tokens
    each of them has, which a compiler cannot know.
    """
    with torch.library._scoped_library("automodel_lite_tests", "DEF") as library:
        library.define("experts(Tensor x, Tensor counts) -> Tensor")
        library.impl("experts", lambda x, counts: x * 2, "CompositeExplicitAutograd")
        library.impl("experts", lambda x, counts: torch.empty_like(x), "Meta")
        torch.library.register_autograd(
            "automodel_lite_tests::experts",
            lambda ctx, grad: (grad * ctx.saved_tensors[0].tolist()[0], None),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
            lib=library,
        )
        yield


class Layer(torch.nn.Module):
    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        return torch.ops.automodel_lite_tests.experts(x.sin(), counts).cos()  # type: ignore[no-any-return]


@pytest.mark.usefixtures("loop_over_experts")
def test_a_layer_that_the_backend_cannot_compile_is_an_error() -> None:
    """dynamo itself would run the layer uncompiled, and wait for the device at each call."""
    torch._dynamo.reset()
    given = torch.ones(3, requires_grad=True), torch.ones(2, dtype=torch.int64)
    torch.compile(Layer(), backend="aot_eager")(*given).sum().backward()  # dynamo alone
    torch._dynamo.reset()
    layer = Layer()
    compile_layers([layer], "aot_eager")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="DataDependentOutput"):
        layer(*given)


def test_a_break_in_a_graph_is_named_and_a_disabled_call_is_not() -> None:
    torch._dynamo.reset()
    disabled = torch.compiler.disable(lambda x: x + 1)

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = disabled(x.sin())
        return x.cos() * x.sum().item()

    before = graph_breaks()
    torch.compile(layer, backend=backend_of("eager"))(torch.ones(2))
    reasons = " ".join(graph_breaks() - before)
    assert "item" in reasons
    assert "disable" not in reasons
