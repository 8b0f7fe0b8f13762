"""torchao's fp8 (emulated), bitsandbytes' 4 bits and 8-bit moments through the recipe, saved and resumed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.graphs import compiled_graphs
from automodel_lite.models.layers import (
    cast_weights,
    compile_layers,
    decoder_layers,
    recompute_layers,
)
from automodel_lite.models.loss import FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.parts.optimizers.adamw import adamw, codebook, param_groups
from recipes import export_hf
from tests.models.test_layers import pack_of
from tests.runs import losses_by_step, train_quick

pytestmark = pytest.mark.slow
WIDE = [
    "model.config.hidden_size=64",
    "model.config.intermediate_size=128",
    "packed_sequence.packed_sequence_size=256",
]


def resumed(folder: Path, *options: str) -> dict[int, tuple[float, float]]:
    """A run that is told to stop in step 4 and goes on: bit for bit the run in one go."""
    options = ("training.log_every_steps=1", *options)
    assert train_quick(folder / "whole", *options)[0] == 0
    assert train_quick(folder / "cut", *options, stop_at=4)[0] == 75
    code, screen = train_quick(folder / "cut", *options)
    assert code == 0, screen
    assert "continues from step_00000004" in screen
    assert losses_by_step(folder / "cut") == losses_by_step(folder / "whole")
    return losses_by_step(folder / "whole")


# ------------------------------------------------------------------------------------------------------------ 8 bits
def test_8_bit_steps_are_torchaos() -> None:
    """Two steps, before roundings to other codes have grown; blocks of 256 in rows of 256 and 512. torchao compiles a
    graph for each shape, which is left out here: its numbers are what counts.
    """
    optim = pytest.importorskip("torchao.optim")
    quantization = pytest.importorskip("torchao.optim.quant_utils")
    for is_signed in (True, False):
        want = torch.tensor(quantization.create_dynamic_map(signed=is_signed))
        torch.testing.assert_close(codebook(is_signed, torch.device("cpu")).values, want)
    models = []
    for make in (
        partial(adamw, moments="8bit"),
        lambda m, **kw: optim.AdamW8bit(param_groups(m, 0.01), **kw),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
        optimizer = make(model, lr=1e-2, betas=(0.9, 0.95))
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(8, 256)
            (model(x) - x.roll(1, 1)).square().mean().backward()
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


# --------------------------------------------------------------------------------------------------------------- fp8
@pytest.fixture
def emulated_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    from automodel_lite.models import fp8

    monkeypatch.setattr(fp8, "use_fp8", partial(fp8.use_fp8, emulate=True))


@pytest.mark.usefixtures("emulated_fp8")
def test_fp8_trains_resumes_and_exports(tmp_path: Path) -> None:
    ends = resumed(tmp_path, "training.fp8=tensorwise", "checkpoint.export_hf=true", *WIDE)
    assert (tmp_path / "whole/hf/model.safetensors").is_file()
    assert train_quick(tmp_path / "fp32", "training.log_every_steps=1", *WIDE)[0] == 0
    plain = losses_by_step(tmp_path / "fp32")
    assert ends != plain  # it did round
    assert ends[6][0] == pytest.approx(plain[6][0], rel=0.05)


@pytest.mark.usefixtures("emulated_fp8")
def test_adapters_stay_out_of_fp8(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert train_quick(base, *WIDE, "checkpoint.export_hf=true")[0] == 0
    options = [
        "training.fp8=rowwise",
        "peft=lora",
        "packed_sequence.packed_sequence_size=256",
        "tokenizer=pretrained",
    ]
    loaded = [f"tokenizer.path={base}/hf", "~model.config", f"model.pretrained={base}/hf"]
    code, screen = train_quick(tmp_path / "lora", *options, *loaded)
    assert code == 0, screen
    from automodel_lite.models.fp8 import fits_fp8

    assert not fits_fp8(nn.Linear(64, 16), "self_attn.q_proj.lora_A.default")
    assert fits_fp8(nn.Linear(64, 64), "self_attn.q_proj.base_layer")


# ----------------------------------------------------------------------------------------------------------- compiled
@pytest.mark.parametrize(
    ("quantized", "fp8"),
    [(True, ""), (False, "tensorwise"), (False, "rowwise")],
    ids=["qlora", "fp8", "lora, fp8"],
)
def test_compiled_layers_have_the_gradients_of_plain_ones(
    quantized: bool, fp8: str, tmp_path: Path
) -> None:
    """As training.compile=auto makes them on a GPU, recomputed; packs of other documents need no graph of their own."""
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("torchao")
    from automodel_lite.models.fp8 import use_fp8
    from automodel_lite.parts.adapters.lora import Lora, QLora
    from tests.models.test_lora import give_the_adapter_weight

    save_small_llama(tmp_path)
    gradients = []
    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        peft = QLora(r=4) if quantized else Lora(r=4)
        lm = LlamaForCausalLM.from_pretrained(tmp_path, **peft.load_arguments(torch.device("cpu")))
        if fp8 != "tensorwise":
            peft.adapt(lm, str(tmp_path))
            give_the_adapter_weight(lm)
            cast_weights(lm, torch.bfloat16, are_trained=False)
        layers = decoder_layers(lm)
        if fp8:
            use_fp8(layers, fp8, emulate=True)
        install(lm, ReferenceAttention())
        model = LossModel(lm.train(), FusedLinearCrossEntropy())
        if is_compiled:
            compile_layers(layers, backend="aot_eager")
            recompute_layers(layers, "full", 1)
        counts = [compiled_graphs()]
        for lengths in ((40, 20, 36), (96,), (48, 48)):
            torch.manual_seed(len(lengths))
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(pack_of(*lengths)).sum
            loss.backward()
            counts.append(compiled_graphs())
        assert counts[1] == counts[3]
        assert (counts[1] > counts[0]) == is_compiled
        gradients.append(
            torch.cat([p.grad.flatten().float() for p in lm.parameters() if p.grad is not None])
        )
    assert (gradients[0] - gradients[1]).norm() < 1e-3 * gradients[0].norm()


# ------------------------------------------------------------------------------------------------------------ 4 bits
def save_small_llama(folder: Path) -> None:
    """Of sizes that 4-bit blocks and fp8 products divide."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    }
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes)).save_pretrained(folder)


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 0.03), (torch.float32, 1e-5)], ids=["bf16", "fp32"]
)
def test_4_bit_weights_have_the_gradients_of_what_they_stand_for(
    dtype: torch.dtype, limit: float, tmp_path: Path
) -> None:
    """With products in the dtype of the run. After a forward in eval(), as the checks at the start make it: bitsandbytes packs weights there on some CPUs."""
    functional = pytest.importorskip("bitsandbytes").functional
    from automodel_lite.parts.adapters.lora import QLora
    from tests.models.test_lora import IDS, give_the_adapter_weight

    save_small_llama(tmp_path)
    peft = QLora(r=4)
    quantized = peft.load_arguments(torch.device("cpu"), dtype)
    lm = LlamaForCausalLM.from_pretrained(tmp_path, **quantized)
    peft.adapt(lm, str(tmp_path))
    give_the_adapter_weight(lm)
    layers = {name: module for name, module in lm.named_modules() if name.endswith("base_layer")}
    meant = {
        name: functional.dequantize_4bit(m.weight.data, m.weight.quant_state)
        for name, m in layers.items()
    }

    def gradients() -> torch.Tensor:
        lm.zero_grad()
        with torch.no_grad():
            lm.eval()(IDS, use_cache=False)
        lm.train()(IDS, use_cache=False).logits.float().square().sum().backward()
        return torch.cat([p.grad.flatten() for p in lm.parameters() if p.grad is not None])

    got = gradients()
    for name, layer in layers.items():
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.float32)
        plain.weight.data = meant[name].float()
        lm.set_submodule(name, plain.requires_grad_(False))
    want = gradients()
    assert len(layers) == 14
    assert (got - want).norm() < limit * want.norm()


def test_4_bit_weights_train_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base = tmp_path / "base"
    assert train_quick(base, *WIDE, "checkpoint.export_hf=true")[0] == 0
    loaded = [
        "tokenizer=pretrained",
        f"tokenizer.path={base}/hf",
        "~model.config",
        f"model.pretrained={base}/hf",
    ]
    ends = resumed(
        tmp_path,
        "peft=qlora",
        "packed_sequence.packed_sequence_size=256",
        *loaded,
        "optimizer.lr=0.01",
    )
    assert export_hf.main([str(tmp_path / "whole")]) == 0  # merged into the weights of the files
    assert ends[6][0] < ends[1][0]
    rows = [
        json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    ]
    assert rows
