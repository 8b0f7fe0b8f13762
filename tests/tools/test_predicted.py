"""The planner's count still gives the three steps of the one H100 to which its rates were fitted (benchmarks/RESULTS.md)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from automodel_lite.attention.interface import install
from automodel_lite.compat import FakeTensorMode
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.plan.by_layers import layer_pattern, simulate_by_layers
from automodel_lite.extras.plan.fake_world import CountedAttention, as_on_a_gpu, fake_world
from automodel_lite.extras.plan.measured import MEASURED, MeasuredRates
from automodel_lite.extras.plan.planner import GPUS, Gpu, computing_s
from automodel_lite.extras.plan.tracker import GPU, MemoryTracker, Work, gpu_tensors
from automodel_lite.models.layers import decoder_layers
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import model_class
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.parts.optimizers.adamw import adamw
from automodel_lite.thd import stream_of
from automodel_lite.training.optimizers import apply_gradients
from automodel_lite.training.settings import build_parts
from recipes.plan import calibrated, predicted_text
from tests.runs import composed

H100 = GPUS["h100-80"]
PACK = 8192
LAYERS = 16
# keys that a query sees in the chats of that run: E[s^2] / 2 E[s] of lengths of median 420, spread 0.85
VISIBLE: dict[int | None, float] = {None: 621.0}
LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
}
ALONE = MeshShape(1, 1, 1)


def llama(layers: int) -> PretrainedConfig:
    return AutoConfig.for_model("llama", num_hidden_layers=layers, use_cache=False, **LLAMA_1B)


@cache
def recipe() -> dict[str, Work]:
    """The recipe on one GPU, with FSDP, as it was when it was measured."""
    shape = [f"model.config.{key}={str(value).lower()}" for key, value in LLAMA_1B.items()]
    settings = [f"model.config.num_hidden_layers={LAYERS}", "training.precision=bf16"]
    run = ["name=x", "dataset.path=any", "model=llama_smoke", "optimizer.lr=1e-5"]
    batch = [f"packed_sequence.packed_sequence_size={PACK}", "training.global_batch_size=1"]
    alone = ["mesh.strategy=fsdp", "training.activation_checkpointing=none"]
    config = check_config(composed("finetune", *run, *shape, *settings, *batch, *alone))
    parts = build_parts(replace(config, attention={}))
    model = parts.model.resolve_model_config({})
    return simulate_by_layers(parts, model, ALONE, layer_pattern(model)).work


def bare_step(layers: int) -> dict[str, Work]:
    """A loop of the same parts without the recipe: fp32 weights under autocast, and no FSDP."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    held = MemoryTracker(ALONE, 0, LLAMA_1B["vocab_size"], tells_layers=False)
    on_host = stream_of([torch.zeros(PACK, dtype=torch.long)])

    def enter(layer: nn.Module, inputs: object) -> None:
        held.is_in_layer = True

    def leave(number: int, layer: nn.Module, inputs: object, output: Tensor) -> None:
        held.is_in_layer = False
        for hidden in gpu_tensors(output):
            hidden.register_hook(lambda _: held.enter("backward", number))

    with fake_world(ALONE), as_on_a_gpu(held), fake, held:
        config = llama(layers)
        with torch.device(GPU):
            lm = model_class(config).from_config(config, dtype=torch.float32).train()
        install(lm, CountedAttention())
        model = LossModel(lm, FusedLinearCrossEntropy())
        optimizer = adamw(model, lr=1e-5)
        held.knows(model.parameters())
        for number, layer in enumerate(decoder_layers(lm)):
            layer.register_forward_pre_hook(enter)
            layer.register_forward_hook(partial(leave, number))
        batch = on_host.map_tensors(lambda tensor: fake.from_tensor(tensor).to(GPU))
        for _ in range(2):  # the first one makes the moments
            held.forget(held.phase)
            held.part = "last"
            held.enter("forward")
            with torch.autocast("cpu", torch.bfloat16):  # as the fake GPU is called
                loss = model(batch).sum
            held.enter("backward")
            (loss / PACK).backward()
            held.enter("optimizer")
            held.part = "update"
            apply_gradients(optimizer, model.parameters(), loss.detach(), 1.0)
            optimizer.zero_grad()
    return held.work


@cache
def bare() -> dict[str, Work]:
    """Of all layers, from steps of one and of two."""
    one = bare_step(1)
    two = bare_step(2)
    found: dict[str, Work] = {}
    for part in one:
        names = {*one[part], *two[part]}
        more = {name: two[part][name] - one[part][name] for name in names}
        found[part] = Counter({name: one[part][name] + (LAYERS - 1) * more[name] for name in names})
    return found


def milliseconds(work: dict[str, Work], is_compiled: bool, gpu: Gpu = H100) -> float:
    parts = [computing_s(part, gpu, gpu.measured, VISIBLE, is_compiled) for part in work.values()]
    return 1e3 * sum(sum(part.values()) for part in parts)


@pytest.mark.parametrize(
    ("work", "is_compiled", "measured_ms"),
    [
        pytest.param(bare, False, 209.4, id="a bare step, eager"),
        pytest.param(bare, True, 146.8, id="a bare step, compiled"),
        pytest.param(recipe, True, 151.0, id="the recipe, compiled"),
    ],
)
def test_the_three_rows_that_rates_were_fitted_to_come_out(
    work: Callable[[], dict[str, Work]], is_compiled: bool, measured_ms: float
) -> None:
    assert milliseconds(work(), is_compiled) == pytest.approx(measured_ms, rel=0.05)
    # the data sheet's rates are a bound
    assert milliseconds(work(), is_compiled, replace(H100, measured=None)) < measured_ms


def test_attention_is_slower_on_short_documents() -> None:
    rates = MeasuredRates(1e15, {100.0: 1e14, 10_000.0: 3e14}, 1e12, "")
    keys = (1, 100, 1000, 10_000, 10**6)
    found = [rates.attention(each) for each in keys]
    assert found == pytest.approx([1e14, 1e14, 2e14, 3e14, 3e14])


def test_a_card_without_measured_rates_gets_the_bound_alone(tmp_path: Path) -> None:
    assert [name for name, gpu in GPUS.items() if gpu.measured] == list(MEASURED)
    text = predicted_text(GPUS["l40s-48"], 1)
    assert text.startswith("predicted: no, as this card has no measured rates: ")
    assert "gpu_check.py --only ceilings rates" in text
    assert predicted_text(H100, 8).endswith(", links by the data sheet")

    path = tmp_path / "gpu_calibration.json"
    found = {"bf16_tflops": 100, "product_tflops": 90, "step_tb_per_s": 0.5}
    path.write_text(json.dumps(found))  # of a card that is not the one of the table
    assert calibrated(H100, path).measured is None
    path.write_text(json.dumps(found | {"attention_tflops": {"240": 30, "620": 40}}))
    assert calibrated(GPUS["l40s-48"], path).measured == MeasuredRates(
        90e12, {240.0: 30e12, 620.0: 40e12}, 0.5e12, str(path)
    )
    for wrong in ([30], {"many": 30}, {"0": 30}, {"240": None}):
        path.write_text(json.dumps(found | {"attention_tflops": wrong}))
        with pytest.raises(ConfigError, match=r'attention_tflops is .*such as \{"620": 230\}'):
            calibrated(H100, path)
