"""torchao's fp8 (emulated), bitsandbytes' 4 bits and 8-bit moments through the recipe, saved and resumed."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from automodel_lite.training.optimizers import adamw_8bit, codebook, param_groups
from tests.run.small_run import losses, train

pytestmark = pytest.mark.slow
WIDE = ["model.config.hidden_size=64", "model.config.intermediate_size=128", "packed_sequence.packed_sequence_size=256"]


def resumed(folder: Path, *options: str) -> dict[int, tuple[float, float]]:
    """A run that is told to stop in step 4 and goes on: bit for bit the run in one go."""
    options = ("training.log_every_steps=1", *options)
    assert train(folder / "whole", *options)[0] == 0
    assert train(folder / "cut", *options, term_at=4)[0] == 75
    code, screen = train(folder / "cut", *options)
    assert code == 0, screen
    assert "continues from step_00000004" in screen
    assert losses(folder / "cut") == losses(folder / "whole")
    return losses(folder / "whole")


# ------------------------------------------------------------------------------------------------------------ 8 bits
def test_8_bit_steps_are_torchaos() -> None:
    """Two steps, before roundings to other codes have grown; blocks of 256 in rows of 256 and 512."""
    optim = pytest.importorskip("torchao.optim")
    quantization = pytest.importorskip("torchao.optim.quant_utils")
    for is_signed in (True, False):
        want = torch.tensor(quantization.create_dynamic_map(signed=is_signed))
        torch.testing.assert_close(codebook(is_signed, torch.device("cpu")), want)
    models = []
    for make in (adamw_8bit, lambda m, lr: optim.AdamW8bit(param_groups(m, 0.01), lr=lr)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256))
        optimizer = make(model, lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(8, 256)
            (model(x) - x.roll(1, 1)).square().mean().backward()
            optimizer.step()
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


# --------------------------------------------------------------------------------------------------------------- fp8
@pytest.fixture
def emulated_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = pytest.importorskip("automodel_lite.models.fp8")
    monkeypatch.setattr(fp8, "use_fp8", partial(fp8.use_fp8, emulate=True))


@pytest.mark.usefixtures("emulated_fp8")
def test_fp8_trains_resumes_and_exports(tmp_path: Path) -> None:
    ends = resumed(tmp_path, "training.fp8=tensorwise", *WIDE)
    assert train(tmp_path / "fp32", "training.log_every_steps=1", *WIDE)[0] == 0
    plain = losses(tmp_path / "fp32")
    assert ends != plain  # it did round
    assert ends[6][0] == pytest.approx(plain[6][0], rel=0.05)
    assert train(tmp_path / "exported", "training.fp8=tensorwise", *WIDE, "checkpoint.export_hf=true")[0] == 0
    assert (tmp_path / "exported/hf/model.safetensors").is_file()


@pytest.mark.usefixtures("emulated_fp8")
def test_adapters_stay_out_of_fp8(tmp_path: Path) -> None:
    base = tmp_path / "base"
    assert train(base, *WIDE, "checkpoint.export_hf=true")[0] == 0
    options = [
        "training.fp8=tensorwise",
        "peft=lora",
        "packed_sequence.packed_sequence_size=256",
        "tokenizer=pretrained",
    ]
    loaded = [f"tokenizer.path={base}/hf", "~model.config", f"model.pretrained={base}/hf"]
    code, screen = train(tmp_path / "lora", *options, *loaded)
    assert code == 0, screen
    from automodel_lite.models.fp8 import _fits

    assert not _fits(nn.Linear(64, 16), "self_attn.q_proj.lora_A.default")
    assert _fits(nn.Linear(64, 64), "self_attn.q_proj.base_layer")


# ------------------------------------------------------------------------------------------------------------ 4 bits
def test_4_bit_weights_train_and_resume(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base = tmp_path / "base"
    assert train(base, *WIDE, "checkpoint.export_hf=true")[0] == 0
    loaded = ["tokenizer=pretrained", f"tokenizer.path={base}/hf", "~model.config", f"model.pretrained={base}/hf"]
    ends = resumed(tmp_path, "peft=qlora", "packed_sequence.packed_sequence_size=256", *loaded, "optimizer.lr=0.01")
    assert ends[6][0] < ends[1][0]
    rows = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert rows
