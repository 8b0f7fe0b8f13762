"""The inner functions on a packed stream are transformers' own on each document alone, gradients of all inputs too."""

from __future__ import annotations

import gc
import importlib
import inspect
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from automodel_lite.attention.mixers import packed_mixers
from automodel_lite.attention.mixers.functions import FUNCTIONS, packed_function
from automodel_lite.document_rows import document_rows
from automodel_lite.prefix_trees import find_nodes, find_pieces
from tests.attention.hybrids import HYBRIDS, InFloat64
from tests.attention.trees import batch_of, random_rows

pytestmark = pytest.mark.numbers

G, H, D, P, C = 2, 4, 8, 16, 12
"""Groups, heads, dims of keys and values, channels."""

DOCUMENTS = {
    "shorter than the convolution": [1, 2, 3, 1, 1],
    "shorter than a chunk": [37, 5, 20, 1, 23],
    "longer than chunks": [200, 130, 3, 1, 1, 90],
    "as long as chunks": [64, 64, 16, 48],
    "one": [150],
}

FUNCTION_OF = {
    "causal_conv1d_fn": "lfm2",
    "torch_chunk_gated_delta_rule": "qwen3_next",
    "chunk_kimi_delta_attention": "kimi_linear",
    "mamba2_chunk_scan": "nemotron_h",
    "mamba_selective_scan": "jamba",
}
CHANNELS_FIRST = {"causal_conv1d_fn", "mamba_selective_scan"}


def function_of(name: str, model_type: str) -> Any:
    return getattr(
        importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"), name
    )


def inputs(
    name: str, num_tokens: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Streams [T, ...], weights, and what is no tensor; decays from none to e^-60 per token."""
    generator = torch.Generator().manual_seed(num_tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if name == "causal_conv1d_fn":
        return (
            {"hidden_states": normal(num_tokens, C)},
            {"weight": normal(C, 4), "bias": normal(C)},
            {"activation": "silu"},
        )
    if name == "mamba2_chunk_scan":
        streams = {"hidden_states": normal(num_tokens, H, P), "dt": normal(num_tokens, H)}
        streams |= {"B": normal(num_tokens, G, D), "C": normal(num_tokens, G, D)}
        weights = {"A": -(2 * normal(H)).exp(), "D": normal(H), "dt_bias": normal(H)}
        return streams, weights, {"dt_softplus": True, "dt_limit": (0.01, 3.0)}
    if name == "mamba_selective_scan":
        streams = {key: normal(num_tokens, C) for key in ("hidden_states", "dt", "z")}
        streams |= {key: normal(num_tokens, 1, D) for key in ("B", "C")}
        weights = {"A": -(2 * normal(C, D)).exp(), "D": normal(C), "delta_bias": normal(C)}
        return streams, weights, {"delta_softplus": True}
    per_channel = name == "chunk_kimi_delta_attention"
    keys, decays = (H, (H, D)) if per_channel else (G, (H,))
    streams = {"query": normal(num_tokens, keys, D), "key": normal(num_tokens, keys, D)}
    streams |= {"value": normal(num_tokens, H, P), "beta": normal(num_tokens, H).sigmoid()}
    return (
        streams | {"g": -(2 * normal(num_tokens, *decays)).exp()},
        {},
        {"use_qk_l2norm_in_kernel": True},
    )


def by_document(name: str, lens: list[int], streams: dict[str, Tensor], **rest: Any) -> Tensor:
    """The slow twin."""
    function = inspect.unwrap(function_of(name, FUNCTION_OF[name]))
    rest |= {"chunk_size": 64} if name == "mamba2_chunk_scan" else {}
    is_turned = name in CHANNELS_FIRST
    outs = []
    for parts in zip(*(x.split(lens) for x in streams.values())):
        of_document = {
            n: x.flatten(1).t()[None] if is_turned else x[None] for n, x in zip(streams, parts)
        }
        out = function(**of_document, **rest)
        out = out[0] if isinstance(out, tuple) else out
        outs.append(out[0].t() if is_turned else out[0])
    return torch.cat(outs)


def of_stream(name: str, lens: list[int], streams: dict[str, Tensor], **rest: Any) -> Tensor:
    ours = packed_function(function_of(name, FUNCTION_OF[name]), name)
    assert ours is not None
    seq_idx = torch.arange(len(lens), dtype=torch.int32).repeat_interleave(torch.tensor(lens))
    return ours(seq_idx, **streams, **rest)  # type: ignore[no-any-return]


def output_and_gradients(
    function: Callable[..., Tensor], name: str, lens: list[int], dtype: torch.dtype
) -> list[Tensor]:
    streams, weights, rest = inputs(name, sum(lens))
    streams, weights = (
        {n: x.to(dtype).requires_grad_() for n, x in given.items()} for given in (streams, weights)
    )
    out = function(name, lens, streams, **weights, **rest)
    towards = torch.randn(
        out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).to(out.dtype)
    return [
        out.detach(),
        *torch.autograd.grad(out, [*streams.values(), *weights.values()], towards),
    ]


def largest_error(got: list[Tensor], want: list[Tensor]) -> float:
    """Relative to the largest element of each."""
    return max(
        float((x.double() - y).abs().max() / y.abs().max()) for x, y in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("lens", [pytest.param(lens, id=name) for name, lens in DOCUMENTS.items()])
@pytest.mark.parametrize("name", FUNCTION_OF)
def test_a_stream_equals_its_documents(name: str, lens: list[int]) -> None:
    with InFloat64():
        want = output_and_gradients(by_document, name, lens, torch.float64)
    assert largest_error(output_and_gradients(of_stream, name, lens, torch.float64), want) < 1e-12
    ours = largest_error(output_and_gradients(of_stream, name, lens, torch.float32), want)
    theirs = largest_error(output_and_gradients(by_document, name, lens, torch.float32), want)
    assert ours < 10 * theirs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "name", ["torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan"]
)
def test_a_branch_starts_from_its_trunks_state(name: str, seed: int) -> None:
    """Against the same function on every path as a whole; nodes of one token, too, and padding."""
    r = random.Random(seed)
    batch, _ = batch_of(
        [random_rows(r, 50), random_rows(r, 50, 0), random_rows(r, 50, 2, 3)], 1 + 7 * (seed % 2)
    )
    nodes = find_nodes(batch.cu_seqlens_padded, batch.position_ids, batch.cu_seqlens.diff())
    assert nodes is not None
    assert batch.mixers is not None
    assert batch.mixers.stream.tree is not None
    tree, document = (
        replace(batch.mixers.stream.tree, pieces=find_pieces(nodes)),
        batch.mixers.stream.document,
    )
    function: Any = packed_function(function_of(name, FUNCTION_OF[name]), name)

    def on_tree(name: str, lens: list[int], streams: dict[str, Tensor], **rest: Any) -> Tensor:
        return function(tree, **streams, **rest)  # type: ignore[no-any-return]

    def on_paths(name: str, lens: list[int], streams: dict[str, Tensor], **rest: Any) -> Tensor:
        walked = {key: x.index_select(0, tree.paths) for key, x in streams.items()}
        return function(document, **walked, **rest).index_select(0, tree.own)  # type: ignore[no-any-return]

    lens = [len(batch.labels)]
    got, want = (
        output_and_gradients(way, name, lens, torch.float64) for way in (on_tree, on_paths)
    )
    assert largest_error(got, want) < 1e-12


@pytest.mark.parametrize("name", ["causal_conv1d_fn", "mamba_selective_scan"])
def test_the_order_of_a_gpu_gives_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole streams and chunks side by side, where a CPU takes tokens a few at a time."""
    for lens in DOCUMENTS.values():
        want = output_and_gradients(of_stream, name, lens, torch.float64)
        with monkeypatch.context() as patch:
            patch.setattr(packed_mixers, "_has_cache", lambda _: False)
            assert (
                largest_error(output_and_gradients(of_stream, name, lens, torch.float64), want)
                < 1e-12
            )


def test_bf16_is_computed_in_fp32() -> None:
    for name in FUNCTION_OF:
        with torch.autocast("cpu", torch.bfloat16):
            got = output_and_gradients(of_stream, name, [70, 9], torch.bfloat16)
        want = output_and_gradients(of_stream, name, [70, 9], torch.float64)
        assert largest_error(got, want) < 0.03


@pytest.mark.same_on_every_cpu
def test_all_families_have_functions_that_ours_replace() -> None:
    """If this fails after an upgrade of transformers, a function has an argument that ours does not know."""
    ours = []
    for family in HYBRIDS:
        model_type = family.partition("-")[0].removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
        for name in FUNCTIONS.keys() & vars(module).keys():
            assert packed_function(getattr(module, name), name) is not None
            ours.append(name)
    assert {name: ours.count(name) for name in FUNCTION_OF} == {
        "causal_conv1d_fn": 20,
        "torch_chunk_gated_delta_rule": 6,
        "chunk_kimi_delta_attention": 2,
        "mamba2_chunk_scan": 6,
        "mamba_selective_scan": 3,
    }


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("num_tokens", [100, 128])
def test_masks_of_chunks_are_made_once_per_pack(num_tokens: int) -> None:
    """And forgotten with it."""
    gc.collect()
    others = len(packed_mixers._CHUNKS)
    rows = document_rows(torch.tensor([0, 37, num_tokens]))
    masks = [packed_mixers.Chunks.of(rows.document, 64).same for _ in range(2)]
    assert masks[0] is masks[1]
    assert packed_mixers.Chunks.of(rows.document.clone(), 64).same is not masks[0]
    assert len(packed_mixers._CHUNKS) == others + 1
    del rows, masks
    gc.collect()
    assert len(packed_mixers._CHUNKS) == others
