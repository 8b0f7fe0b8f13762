"""Every family of docs/models.md is truly counted, or said not to be: a step of two ranks under fake tensors."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.extras.plan.simulation import CountError, simulate
from automodel_lite.parallel.mesh import MeshShape
from automodel_lite.training.settings import RunParts, build_parts
from benchmarks.tiny_models import COMPOSITES, decoder_families, tiny_config
from tests.runs import composed

IN_FP32 = {"minimax", "openai-gpt", "xlstm"}
"""Families whose own code mixes fp32 into bf16, which torch refuses on a GPU as well."""
NOT_COUNTED = {"dbrx", "jetmoe", "longcat_flash"}
"""Families that loop over the experts that were asked, whom nobody knows under fake tensors."""
COMMON = {
    "llama": "rotations of one kind",
    "phi3": "LongRoPE",
    "internlm3": "dynamic scaling",
    "diffllama": "weights drawn on the host",
    "deepseek_v3": "values narrower than keys",
    "bloom": "by rows",
}


def parts_of(precision: str) -> RunParts:
    settings = [
        "packed_sequence.packed_sequence_size=32",
        "training.activation_checkpointing=none",
        "training.global_batch_size=2",
        "mesh.dp_shard=2",
        f"training.precision={precision}",
    ]
    return build_parts(check_config(composed("smoke", *settings)))


def counted(families: list[str]) -> dict[str, str]:
    """What became of each: `counted`, `refused`, `not counted`."""
    parts, found = {name: parts_of(name) for name in ("bf16", "fp32")}, {}
    for family in families:
        try:
            config = tiny_config(family)
        except Exception:  # of a package that is not here
            continue
        try:
            of = simulate(
                parts["fp32" if family in IN_FP32 else "bf16"], config, MeshShape(1, 2, 1)
            )
        except CountError as error:
            if not isinstance(error.__cause__, ImportError):
                found[family] = "not counted"
        except ConfigError:
            found[family] = "refused"
        else:
            assert of.peak > of.weights > 0, family
            found[family] = "counted"
        assert not dist.is_initialized(), family
    return found


@pytest.mark.parametrize("family", COMMON, ids=COMMON.values())
def test_kinds_of_families_are_counted(family: str) -> None:
    assert counted([family]) == {family: "counted"}


@pytest.mark.slow
def test_every_family_is_counted_or_named() -> None:
    found = counted([*decoder_families(), *COMPOSITES])
    by_word = {word: sorted(f for f in found if found[f] == word) for word in {*found.values()}}
    print({word: len(families) for word, families in by_word.items()}, by_word["refused"])
    assert {*by_word.get("not counted", [])} == NOT_COUNTED
