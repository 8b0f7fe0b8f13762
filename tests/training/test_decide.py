"""Documents and the positions of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
from automodel_lite.training.decide import check_positions
from tests.data.templates import LLAMA3, byte_tokenizer

LONG = {
    "rope_type": "dynamic",
    "factor": 4.0,
    "rope_theta": 1e4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("longest", "has_trees", "is_refused"),
    [(64, True, False), (65, False, False), (65, True, True)],
)
def test_trees_with_rows_over_the_original_length(
    longest: int, has_trees: bool, is_refused: bool
) -> None:
    data: Any = SimpleNamespace(
        longest=longest, has_trees=has_trees, tokenizer=byte_tokenizer(LLAMA3)
    )
    model = CausalLM(
        config={"model_type": "llama", "max_position_embeddings": 256, "rope_parameters": LONG}
    )
    if not is_refused:
        check_positions(data, model)
        return
    with pytest.raises(
        ConfigError, match=r"rope_type=dynamic rotates rows over 64 tokens differently.*tree=off"
    ):
        check_positions(data, model)


def test_a_teacher_with_fewer_positions_is_named() -> None:
    data: Any = SimpleNamespace(longest=200, has_trees=False, tokenizer=byte_tokenizer(LLAMA3))
    model = CausalLM(config={"model_type": "llama"})
    teacher = CausalLM(config={"model_type": "gpt2", "n_positions": 128})
    check_positions(data, model)
    with pytest.raises(
        ConfigError,
        match="the longest document has 200 tokens, the teacher max_position_embeddings=128",
    ):
        check_positions(data, model, teacher)
