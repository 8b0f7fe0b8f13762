"""What would fail late is refused at the start: models that cannot be built or run, optimizers that refuse a value; and
what a run prints before its first step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automodel_lite.config.check import check_config
from automodel_lite.config.schema import TrainingConfig
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
from automodel_lite.training.rules import build_on_meta, try_settings
from automodel_lite.training.settings import build_parts
from automodel_lite.training.world import prepare_process
from tests.attention.families import FAMILIES
from tests.data.templates import MARKED, byte_tokenizer
from tests.runs import composed, rows_of, train_quick


def tried(*overrides: str) -> str:
    config = check_config(composed("smoke", *overrides))
    try:
        try_settings(config, build_parts(config))
    except ConfigError as error:
        return str(error)
    return ""


def test_all_at_once_and_the_right_ones_pass() -> None:
    assert tried() == ""
    assert tried("model.config.hidden_size=64", "lr_scheduler=wsd", "training.max_steps=1") == ""
    assert tried("optimizer.betas=[0,0]") == ""  # whole numbers are numbers
    both = tried("model.config.num_hidden_layers=0", "~optimizer.lr")
    assert (
        both.splitlines()[1]
        == "automodel_lite.parts.optimizers.adamw.adamw: missing a required argument: 'lr'."
    )


def test_sizes_that_only_a_forward_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin has shapes: what does not fit is found without weights; what the meta device cannot do is left alone."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaMLP

    source = CausalLM(
        config={
            "model_type": "llama",
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
        }
    )

    def wrong(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.zeros(7, 7, device=hidden.device)

    def unknown(self: LlamaMLP, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * hidden.sum().item()

    assert transformers.models.llama.modeling_llama.LlamaMLP is LlamaMLP
    monkeypatch.setattr(LlamaMLP, "forward", wrong)
    with pytest.raises(ConfigError, match=r"a model with these settings does not work: .*7"):
        build_on_meta(source)
    monkeypatch.setattr(LlamaMLP, "forward", unknown)
    build_on_meta(source)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_is_refused(family: str) -> None:
    config = FAMILIES[family]()
    known = type(config)().to_dict()
    settings = {key: value for key, value in config.to_diff_dict().items() if key in known}
    build_on_meta(CausalLM(config={**settings, "model_type": config.model_type}))


def test_a_mistake_costs_no_tokenizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "recipes.train_ft.prepare_data", lambda *_: pytest.fail("the data were read")
    )
    with pytest.raises(ConfigError, match="does not work"):
        train_quick(tmp_path / "run", "model.config.hidden_size=33")


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_weights_that_are_not_finite_are_named_as_such(tmp_path: Path, value: float) -> None:
    from safetensors.torch import load_file, save_file

    source = CausalLM(
        config={
            "model_type": "llama",
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 300,
        }
    )
    config = source.resolve_model_config({})
    import transformers

    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    load: Callable[[], object] = lambda: CausalLM(str(tmp_path)).build(byte_tokenizer(MARKED))  # noqa: E731
    load()
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError,
        match=r"1 weights hold values that are not finite \(inf or NaN\), model.norm.weight first",
    ):
        load()


def test_trying_the_settings_is_quick() -> None:
    tried()
    start = time.process_time()
    tried()
    assert time.process_time() - start < 5


def test_products_in_tf32_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    try:
        for tf32, precision in ((False, before), (True, "high")):
            prepare_process(TrainingConfig(tf32=tf32, num_threads=1))
            assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
        torch.set_num_threads(threads)


@pytest.mark.system
def test_the_seconds_of_the_start_are_told_by_phase(tmp_path: Path) -> None:
    """Printed in a line, and kept for comparison between hosts and jobs. A second run of a process has imported all."""
    options = ["training.max_steps=1", "checkpoint.export_hf=false", "report=false"]
    train_quick(tmp_path / "first", *options)
    began = time.perf_counter()
    _, screen = train_quick(tmp_path / "second", *options)
    took_s = time.perf_counter() - began
    first = rows_of(tmp_path / "second")[0]
    phases = {
        key.removeprefix("start_s/"): value
        for key, value in first.items()
        if key.startswith("start_s/")
    }
    assert list(phases) == [
        "imports",
        "ranks",
        "data",
        "groups",
        "model",
        "load",
        "probe",
        "compile",
        "checkpoint",
    ]
    assert 0 < sum(phases.values()) < took_s
    # The fraction is not read beside a number of steps.
    assert "(warmup_steps 10, min_lr_frac" in screen
    (line,) = re.findall(r"^start +[0-9.]+ s: (.*)$", screen, flags=re.MULTILINE)
    # Those that took long enough to be read in tenths of a second.
    assert all(
        f"{phase} {spent_s:.1f}" in line for phase, spent_s in phases.items() if spent_s > 0.06
    )
