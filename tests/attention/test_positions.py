"""Layers that scale by a place take that in the document, not in the stream."""

from __future__ import annotations

import pytest

from automodel_lite.attention.documents import WithinDocuments
from automodel_lite.attention.interface import check_packing_isolation, install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.short_lengths import short_lengths
from automodel_lite.errors import ConfigError
from tests.attention.families import build


def test_a_scale_by_the_place_in_the_stream_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins at 8,192 tokens: documents of 16 do not meet it."""
    model = build("llama4_chunks")
    scaling = [x for x in model.modules() if vars(x).get("attn_temperature_tuning")]
    assert scaling
    assert scaling[0].floor_scale == 8192
    monkeypatch.setattr("automodel_lite.attention.interface.scale_queries", lambda module, q, positions: q)
    install(model, ReferenceAttention())
    for module in model.modules():
        if isinstance(module.forward, WithinDocuments):
            module.forward.placed = []  # the fault: nobody turns the layers' own scaling off
    check_packing_isolation(model)
    with short_lengths(model):
        install(model, ReferenceAttention())
        with pytest.raises(ConfigError, match="depend on their place in the pack"):
            check_packing_isolation(model)
