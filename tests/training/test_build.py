"""training.compile: tried out before the first step, the same numbers, and uncompiled where auto cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from automodel_lite.config.check import check_config
from automodel_lite.config.schema import TrainingConfig
from automodel_lite.errors import ConfigError
from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.fused_head import linear_cross_entropy
from automodel_lite.training import build, compiling
from automodel_lite.training.compiling import compiles
from automodel_lite.training.settings import build_parts
from tests.runs import composed, losses_by_step, train_quick
from tests.tiers import rarely


def test_auto_compiles_on_a_gpu() -> None:
    assert compiles(TrainingConfig(), is_gpu=True)
    assert not compiles(TrainingConfig(), is_gpu=False)
    assert not compiles(TrainingConfig(activation_checkpointing="selective"), is_gpu=True)
    assert not compiles(TrainingConfig(compile=False), is_gpu=True)
    assert compiles(TrainingConfig(compile=True), is_gpu=False)


@pytest.mark.parametrize(
    ("size", "cp", "lengths"), [(63, 1, [63]), (2049, 1, [683] * 3), (2080, 2, [520] * 4)]
)
def test_the_batch_that_is_tried_has_whole_documents(
    size: int, cp: int, lengths: list[int]
) -> None:
    """Of at most 1,024 tokens, in multiples of 2 x cp where ranks share them; a pack may have an odd number of tokens."""
    overrides = [f"packed_sequence.packed_sequence_size={size}", f"mesh.cp={cp}"]
    batch = compiling.worst_case_batch(
        build_parts(check_config(composed("smoke", *overrides))), num_ids=7
    )
    assert batch.cu_seqlens.diff().tolist() == lengths
    assert batch.num_label_tokens == size
    assert int(batch.input_ids.max()) == 6


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced as on a GPU, and run uncompiled."""
    torch._dynamo.reset()
    real = compiling.compile_model
    monkeypatch.setattr(
        build, "compile_model", lambda parts, model, mesh: real(parts, model, mesh, "aot_eager")
    )


@pytest.mark.system
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("how", ["full", *rarely("none")])
def test_a_compiled_run_has_the_numbers_of_an_uncompiled_one(how: str, tmp_path: Path) -> None:
    """The layers and the loss's chunk; all graphs are made before the first step."""
    options = [f"training.activation_checkpointing={how}", "training.log_every_steps=1"]
    assert train_quick(tmp_path / "plain", *options)[0] == 0
    code, screen = train_quick(
        tmp_path / "compiled", *options, "training.compile=true", "training.val_every_steps=0"
    )
    assert code == 0
    made = next(line for line in screen.splitlines() if line.startswith("compile"))
    assert "graphs in" in made
    for step, values in losses_by_step(tmp_path / "compiled").items():
        assert values == pytest.approx(losses_by_step(tmp_path / "plain")[step], rel=1e-5)


@pytest.mark.system
def test_auto_trains_uncompiled_what_cannot_be_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so; training.compile=true is an error then."""

    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no such instruction")

    torch._dynamo.reset()
    real = compiling.compile_model
    monkeypatch.setattr(
        build, "compile_model", lambda parts, model, mesh: real(parts, model, mesh, broken)
    )
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
        train_quick(tmp_path / "asked", "training.compile=true")
    monkeypatch.setattr(compiling, "compiles", lambda training, is_gpu: True)
    code, screen = train_quick(tmp_path / "auto", "training.log_every_steps=1")
    assert code == 0
    assert "no such instruction" in next(
        line for line in screen.splitlines() if line.startswith("compile")
    )
    assert (
        train_quick(tmp_path / "plain", "training.compile=false", "training.log_every_steps=1")[0]
        == 0
    )
    assert losses_by_step(tmp_path / "auto") == losses_by_step(tmp_path / "plain")


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_compiled_chunk_is_the_uncompiled_one(softcap: float | None) -> None:
    """Gradients too; other numbers of labeled rows need no other graph."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    graphs = []
    for rows in (40, 33, 17, 73, 64, 50, 29, 71):  # 24 and 16, 9, alone, 1: then nothing is new
        results = []
        for backend in (None, "aot_eager"):
            torch.manual_seed(rows)
            hidden, weight = (torch.randn(n, 16).bfloat16().requires_grad_() for n in (rows, 50))
            labels = torch.randint(0, 50, (rows,))
            loss = linear_cross_entropy(hidden, weight, labels, 24, softcap, backend)
            (loss * 0.5).backward()
            results.append((loss.detach(), hidden.grad, weight.grad))
        for plain, compiled in zip(*results):
            # bf16: both are 0.01 from fp64, and padded rows are summed in another order
            torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=1e-2)
        graphs.append(compiled_graphs())
    assert graphs[-1] == graphs[3]


def test_a_family_that_mixes_fp32_into_bf16_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Its sums stay in fp32, and FSDP computes with weights in bf16: it ended in a traceback."""
    minimax = [
        "model.config.model_type=minimax",
        "model.config.num_hidden_layers=2",
        "model.config.layer_types=[full_attention,linear_attention]",
        "model.config.head_dim=8",
        "model.config.num_local_experts=2",
        "model.config.block_size=16",
        "training.precision=bf16",
    ]
    with pytest.raises(
        ConfigError, match=r"MiniMax.* does not run with weights in bf16 .* set mesh"
    ):
        train_quick(tmp_path / "fsdp", *minimax, "mesh.strategy=fsdp")
    assert train_quick(tmp_path / "ddp", *minimax, "mesh.strategy=ddp")[0] == 0
