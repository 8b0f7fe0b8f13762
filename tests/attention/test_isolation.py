"""The isolation probe finds documents that see each other, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Qwen3MoeConfig,
)

from automodel_lite.attention import interface
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import TRIALS, check_packing_isolation, model_logits
from automodel_lite.attention.kernel import ReferenceAttention, over_tree
from automodel_lite.errors import ConfigError
from automodel_lite.thd import Segments, TreeKeys
from tests.attention.families import build
from tests.attention.test_interface import SMALL

PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_named(value: float) -> None:
    """They once were "documents of a pack see each other"."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    install(model, ReferenceAttention())
    with pytest.raises(
        ConfigError,
        match="gives logits that are not finite, though loaded weights are: a sum overflows",
    ):
        check_packing_isolation(model)


class LeakingAttention(ReferenceAttention):
    """The classical bug: one segment for the whole stream."""

    name = "thd_leaking"

    def __call__(self, q: Any, k: Any, v: Any, segments: Segments, options: Any) -> torch.Tensor:
        ends = torch.tensor([0, -1])
        whole = segments._replace(cu_q=segments.cu_q[ends], cu_k=segments.cu_k[ends])
        return super().__call__(q, k, v, whole, options)


def probe(model: torch.nn.Module, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        check_packing_isolation(model)


@PRECISIONS
def test_a_leaked_document_is_noticed(dtype: torch.dtype) -> None:
    model = build("llama")
    install(model, LeakingAttention())
    with pytest.raises(ConfigError, match="documents of a pack see each other"):
        probe(model, dtype)


def test_rounding_is_no_leak() -> None:
    """In bf16 a change of one document moves the others of a mixture of experts a little: its experts' groups differ."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=16384,
        hidden_size=256,
        moe_intermediate_size=128,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.06,
    )
    model = AutoModelForCausalLM.from_config(config)
    install(model, ReferenceAttention())
    probe(model, torch.bfloat16)
    probe(model, torch.float32)


def test_what_one_trial_shows_alone_is_rounding() -> None:
    """A router near a tie sends a token to other experts: its logits are others then, as far off as a leak makes them."""
    model = build("llama")
    install(model, ReferenceAttention())

    def moved(trials: int) -> Any:
        left = [3.0] * trials + [0.0] * TRIALS

        def logits(batch: Any) -> torch.Tensor:
            found = model_logits(model)(batch)
            found[0] += left.pop(0) * found.std()  # of the document that is alone
            return found

        return logits

    check_packing_isolation(model, logits=moved(TRIALS - 1))
    with pytest.raises(ConfigError, match="documents of a pack see each other"):
        check_packing_isolation(model, logits=moved(TRIALS))


def test_ranks_try_again_together() -> None:
    """One alone would wait for the layers of the others."""
    model = build("llama")
    install(model, ReferenceAttention())
    calls = []

    def logits(batch: Any) -> torch.Tensor:
        calls.append(batch)
        return model_logits(model)(batch)

    def gather(own: str) -> list[str]:
        assert own == ""
        return [own, "is another rank's problem" if len(calls) < TRIALS else ""]

    check_packing_isolation(model, logits=logits, gather=gather)
    assert len(calls) == TRIALS


class OneTokenLeaks(ReferenceAttention):
    """The first token of each document also sees the token before it."""

    name = "thd_one_token_leaks"

    def __call__(self, q: Any, k: Any, v: Any, segments: Segments, options: Any) -> torch.Tensor:
        out = super().__call__(q, k, v, segments, options).clone()
        starts = segments.cu_q[1:-1].long()
        out[starts] = (
            out[starts] + v[starts - 1].repeat_interleave(q.shape[1] // v.shape[1], 1)
        ) / 2
        return out


@PRECISIONS
def test_one_leaked_token_is_noticed(dtype: torch.dtype) -> None:
    model = build("llama")
    install(model, OneTokenLeaks())
    with pytest.raises(ConfigError, match="documents of a pack see each other"):
        probe(model, dtype)


def test_positions_that_run_on_are_noticed() -> None:
    """A model with learned positions that numbers the whole stream instead of each document."""
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=1)
    )
    install(model, ReferenceAttention())
    whole = model.forward

    def forward(**inputs: Any) -> Any:
        return whole(**inputs | {"position_ids": torch.arange(inputs["input_ids"].shape[1])[None]})

    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="depend on their place in the pack"):
        check_packing_isolation(model)


def test_the_probe_leaves_the_model_as_it_was() -> None:
    model = build("llama").train()
    install(model, ReferenceAttention())
    check_packing_isolation(model)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_branches_that_see_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the second branch, from key 112 on, sees tokens of the first in place of what they share."""

    def leaking(kernel: Any, tree: TreeKeys, is_cut: bool) -> Any:
        paths = tree.paths.clone()
        paths[112:119] += 8
        return over_tree(kernel, replace(tree, paths=paths), is_cut)

    model = build("llama")
    install(model, ReferenceAttention())
    check_packing_isolation(model)
    monkeypatch.setattr(interface, "over_tree", leaking)
    with pytest.raises(
        ConfigError, match="LlamaForCausalLM lets branches of a tree of documents see each other"
    ):
        check_packing_isolation(model)
