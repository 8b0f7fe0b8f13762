"""What the adapter and the probe refuse, with the reason and the cure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DogeConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from automodel_lite.attention import interface
from automodel_lite.attention.interface import check_packing_isolation, install
from automodel_lite.attention.kernel import ReferenceAttention, over_tree
from automodel_lite.attention.spec import AttentionSpec
from automodel_lite.errors import ConfigError
from automodel_lite.thd import Segments, TreeKeys
from benchmarks.tiny_models import tiny_config
from tests.attention.families import BASE, build, documents, stream

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def started(config: PretrainedConfig) -> None:
    """What happens to every model at start-up."""
    model = AutoModelForCausalLM.from_config(config)
    install(model, ReferenceAttention())
    check_packing_isolation(model)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            lambda: tiny_config("cpmant"),
            "is not causal: a token moves the logits of those before it",
        ),
        (lambda: DogeConfig(**SMALL), "brings a mask of shape"),
    ],
    ids=["cpmant", "doge"],
)
def test_families_that_cannot_be_packed(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        started(config())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_named(value: float) -> None:
    """They once were "documents of a pack see each other"."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL))
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = value
    install(model, ReferenceAttention())
    with pytest.raises(
        ConfigError, match="its logits are not finite, though loaded weights are: a sum overflows"
    ):
        check_packing_isolation(model)


def test_dropout_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, attention_dropout=0.1)).train()
    install(model, ReferenceAttention())
    with pytest.raises(
        ConfigError, match=r"attention dropout 0.1: set model\.config\.attention_dropout=0"
    ):
        model(**stream(documents([4, 5], vocab=64)).model_inputs())


def test_a_mask_is_refused() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    with pytest.raises(
        ConfigError, match="packed attention, which takes its documents from ThdBatch"
    ):
        model(attention_mask=torch.ones(1, 1, 9, 9), **stream(documents([4, 5])).model_inputs())


def test_rows_are_refused() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    inputs = stream(documents([4, 5])).model_inputs()
    inputs |= {
        "input_ids": inputs["input_ids"].view(3, 3),
        "position_ids": inputs["position_ids"].view(3, 3),
    }
    with pytest.raises(ConfigError, match="got 3 rows: packed attention needs one stream"):
        model(**inputs)


def test_without_boundaries_it_is_refused() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    with pytest.raises(ConfigError, match="got no documents: call the model with ThdBatch"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))


class RecordsDtypes(ReferenceAttention):
    """Writes down the dtypes that reach the kernel."""

    name = "thd_records"

    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()

    def __call__(self, q: Any, k: Any, v: Any, *rest: Any) -> torch.Tensor:
        self.seen |= {q.dtype, k.dtype, v.dtype}
        return super().__call__(q, k, v, *rest)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2_softcap_window", "deepseek_v3_latent"]
)
def test_autocast_reaches_the_kernel_in_one_dtype(family: str) -> None:
    """Rotary embeddings promote queries and keys to fp32 there, which FlashAttention does not take."""
    model, kernel = build(family), RecordsDtypes()
    install(model, kernel)
    with torch.autocast("cpu", torch.bfloat16):
        model(**stream(documents([5, 9])).model_inputs()).logits.sum().backward()
    assert kernel.seen == {torch.bfloat16}


class LeakingAttention(ReferenceAttention):
    """The classical bug: one segment for the whole stream."""

    name = "thd_leaking"

    def __call__(self, q: Any, k: Any, v: Any, segments: Segments, options: Any) -> torch.Tensor:
        ends = torch.tensor([0, -1])
        whole = segments._replace(cu_q=segments.cu_q[ends], cu_k=segments.cu_k[ends])
        return super().__call__(q, k, v, whole, options)


PRECISIONS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


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


def test_transformers_builds_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 16k tokens a mask would be 256 MiB; the adapter refuses any, and here none was asked to be allocated."""
    model = AutoModelForCausalLM.from_config(MistralConfig(**BASE, sliding_window=16))
    install(model, ReferenceAttention())
    seen: list[int] = []
    tensor_bool = torch.Tensor.bool
    monkeypatch.setattr(
        torch.Tensor, "bool", lambda self: seen.append(self.numel()) or tensor_bool(self)
    )
    model(**stream(documents([30] * 20)).model_inputs())
    assert max(seen, default=0) < 600 * 600


def test_peft_and_recomputation_pass_the_boundaries_on() -> None:
    model = build("llama")
    install(model, ReferenceAttention())
    batch = stream(documents([5, 9]))
    want = model(**batch.model_inputs()).logits
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    got = model(**batch.model_inputs()).logits
    assert torch.equal(got, want)
    got.sum().backward()


def test_the_names_of_the_kernels_avoid_transformers_own_checks() -> None:
    from automodel_lite.parts.kernels.flex import FlexAttention
    from automodel_lite.parts.kernels.varlen import VarlenAttention

    for name in (
        ReferenceAttention.name,
        VarlenAttention.name,
        FlexAttention.name,
        "thd_fa2",
        "thd_te",
    ):
        assert not any(word in name for word in ("sdpa", "flash", "flex_attention"))
    assert isinstance(ReferenceAttention().check(_spec()), type(None))


def _spec() -> AttentionSpec:
    return AttentionSpec("llama", torch.device("cpu"), torch.float32, 16, 16)


def test_transformers_is_new_enough() -> None:
    assert int(transformers.__version__.split(".")[0]) >= 5


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
