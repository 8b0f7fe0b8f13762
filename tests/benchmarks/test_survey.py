"""The survey of model families: a family of each kind always, all of them in the slow tests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers.utils import is_timm_available

from benchmarks.models_page import MOST_USED, exact_of
from benchmarks.survey_models import Finding, is_near_tie
from benchmarks.tiny_models import COMPOSITES, decoder_families


def found(families: list[str], folder: Path) -> list[Finding]:
    """In a process of its own: each family's memory is bounded, what the tests hold included."""
    command = [
        sys.executable,
        "benchmarks/survey_models.py",
        "--jobs",
        "2",
        "--json",
        str(folder / "found.jsonl"),
    ]
    subprocess.run(
        [*command, "--families", *families],
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
    )
    findings = [
        Finding(**json.loads(line)) for line in (folder / "found.jsonl").read_text().splitlines()
    ]
    return sorted(findings, key=lambda finding: families.index(finding.family))


@pytest.mark.slow
def test_a_family_of_each_kind(tmp_path: Path) -> None:
    """MiniMax M1: lightning attention, experts, and buffers that its checkpoints hold in bf16. Bloom: no kernel."""
    refused, hybrid, by_rows = found(["deepseek_v32", "minimax", "bloom"], tmp_path)
    assert refused.verdict == "refused"
    assert "indexed_attention" in refused.refused
    assert [*hybrid.steps] == [
        "costs",
        "packed",
        "trees",
        "step",
        "export",
        "LoRA",
        "adapter",
        "fp8",
        "cp 4",
    ]
    assert (hybrid.verdict, by_rows.verdict) == ("exact", "exact")


@pytest.mark.slow
def test_every_family_is_exact_or_refused_in_a_sentence(tmp_path: Path) -> None:
    findings = found([*decoder_families(), *COMPOSITES], tmp_path)
    assert [f.family for f in findings if f.verdict in ("WRONG", "BROKEN")] == []
    exact = {f.family for f in findings if f.verdict == "exact"}
    assert len(exact - {*COMPOSITES}) >= 120
    missing = {*MOST_USED.split()} - {*exact_of(MOST_USED.split(), findings)}
    assert missing <= ({"gemma3n"} if not is_timm_available() else set())


def test_a_composite_counts_as_a_whole() -> None:
    found = [
        Finding("gemma3n_text", steps={"step": "exact"}),
        Finding("llama4_text", steps={"step": "exact"}),
    ]
    found += [
        Finding("llama4", steps={"step": "exact"}),
        Finding("gemma3n", native="ImportError: timm"),
    ]
    assert exact_of(["gemma3n", "llama4", "kimi_linear"], found) == ["llama4"]


def test_a_near_tie_is_told_from_a_fault() -> None:
    small, large = "WRONG by 2e-05", "WRONG by 2e-02"
    assert is_near_tie(Finding("a", steps={"step": small, "export": "exact"}, is_mixture=True))
    assert not is_near_tie(Finding("dense", steps={"packed": "exact, 1e-07", "step": small}))
    assert is_near_tie(Finding("unscaled", steps={"packed": "exact, 2e-14 in fp64", "step": small}))
    assert not is_near_tie(Finding("a", steps={"step": small, "cp 4": large}, is_mixture=True))
    assert not is_near_tie(
        Finding("a", steps={"step": small, "export": "WRONG: ['lm_head']"}, is_mixture=True)
    )
    assert not is_near_tie(Finding("a", steps={"step": "exact"}, is_mixture=True))
