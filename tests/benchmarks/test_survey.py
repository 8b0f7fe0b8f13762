"""The survey of model families: a family of each kind always, all of them in the slow tests."""

import pytest

from benchmarks.survey_models import MOST_USED, Finding, quiet, survey
from benchmarks.tiny_models import COMPOSITES, decoder_families


def found(families: list[str]) -> list[Finding]:
    quiet()
    return survey(families, 2, lambda finding: None)


def test_a_family_of_each_kind() -> None:
    """MiniMax M1: lightning attention, experts, and buffers that its checkpoints hold in bf16. Bloom: no kernel."""
    refused, hybrid, by_rows = found(["deepseek_v32", "minimax", "bloom"])
    assert refused.verdict == "refused"
    assert "indexed_attention" in refused.refused
    assert [*hybrid.steps] == ["costs", "packed", "step", "export", "LoRA", "adapter", "cp 2"]
    assert (hybrid.verdict, by_rows.verdict) == ("exact", "exact")


@pytest.mark.slow
def test_every_family_is_exact_or_refused_in_a_sentence() -> None:
    findings = found([*decoder_families(), *COMPOSITES])
    assert [f.family for f in findings if f.verdict in ("WRONG", "BROKEN")] == []
    exact = {f.family for f in findings if f.verdict == "exact"}
    assert len(exact - {*COMPOSITES}) >= 120
    assert {*MOST_USED.split()} <= exact | {family.removesuffix("_text") for family in exact}
