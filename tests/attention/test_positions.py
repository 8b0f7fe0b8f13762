"""Layers that scale by a place take that in the document; the probe with lengths of a model's own below its documents."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
from torch import nn

from automodel_lite.attention.documents import WithinDocuments
from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import check_packing_isolation
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.positions import SHORT, short_lengths
from automodel_lite.errors import ConfigError
from tests.attention.families import FAMILIES, build
from tests.attention.hybrids import HYBRIDS, build_hybrid


def test_windows_are_read_again_behind_the_probe() -> None:
    """Inside, layers of 16 have seen 6 keys."""
    model = build("mistral_window")
    for has_short_lengths in (True, False):
        with short_lengths(model) if has_short_lengths else nullcontext():
            install(model, ReferenceAttention())
            check_packing_isolation(model)
    windows = [vars(x)["packed_as"].window for x in model.modules() if "packed_as" in vars(x)]
    assert windows == [16, 16]


def test_a_scale_by_the_place_in_the_stream_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at 8,192 tokens: documents of 16 do not meet it."""
    model = build("llama4_chunks")
    scaling = [x for x in model.modules() if vars(x).get("attn_temperature_tuning")]
    assert scaling
    assert scaling[0].floor_scale == 8192
    monkeypatch.setattr(
        "automodel_lite.attention.interface.scale_queries", lambda module, q, positions: q
    )
    install(model, ReferenceAttention())
    for module in model.modules():
        if isinstance(module.forward, WithinDocuments):
            module.forward.placed = []  # the fault: nobody turns the layers' own scaling off
    check_packing_isolation(model)
    with short_lengths(model):
        install(model, ReferenceAttention())
        with pytest.raises(ConfigError, match="depend on their place in the pack"):
            check_packing_isolation(model)


def settings_of(model: nn.Module) -> list:
    plain = (int, float, str, bool, type(None))
    return [
        *(
            copy.deepcopy(module.config.to_dict())
            for module in model.modules()
            if hasattr(module, "config")
        ),
        *(
            {k: v for k, v in vars(module).items() if isinstance(v, plain)}
            for module in model.modules()
        ),
    ]


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS])
def test_every_family_passes_and_is_left_as_it_was(family: str) -> None:
    model = build_hybrid(family) if family in HYBRIDS else build(family)
    install(model, ReferenceAttention())
    check_packing_isolation(model)
    before = settings_of(model)
    with short_lengths(model) as has_lengths:
        if has_lengths:
            install(model, ReferenceAttention())
            check_packing_isolation(model)
    install(model, ReferenceAttention())
    check_packing_isolation(model)
    assert settings_of(model) == before


def test_all_places_of_a_length_are_found() -> None:
    found = {}
    for family in ("gemma2_softcap_window", "llama4_chunks", "phi3_longrope"):
        with short_lengths(build(family)) as found[family]:
            pass
    assert found == dict.fromkeys(found, True)
    with short_lengths(build("llama")) as has_lengths:
        assert not has_lengths
    model = build("llama4_chunks")
    with short_lengths(model):
        assert model.config.attention_chunk_size == SHORT
        assert {
            layer.self_attn.floor_scale
            for layer in model.model.layers
            if hasattr(layer.self_attn, "floor_scale")
        } <= {SHORT}
