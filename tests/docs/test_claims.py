"""What README.md and docs/compare.md claim is shown: by a row of the proof, by RESULTS.md, or by a
test; docs/claims.yaml says by which.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from automodel_lite.extras.proof.rows import ROWS

ROOT = Path(__file__).resolve().parents[2]
CLAIMS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "docs" / "claims.yaml").read_text())
EACH = [(page, text, shown) for page, claims in CLAIMS.items() for text, shown in claims.items()]


@pytest.mark.parametrize(("page", "text", "shown"), EACH, ids=[text for _, text, _ in EACH])
def test_what_shows_a_claim_exists(page: str, text: str, shown: dict[str, list[str]]) -> None:
    assert text in (ROOT / page).read_text(), f"{page} no longer says it"
    assert shown
    assert shown.keys() <= {"proof", "results", "tests"}
    assert set(shown.get("proof", [])) <= {row.name for row in ROWS}
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text()
    headings = set(re.findall(r"^## (.+)$", results, re.M))
    assert set(shown.get("results", [])) <= headings
    assert [path for path in shown.get("tests", []) if not (ROOT / path).is_file()] == []


def covered(page: str, text: str) -> bool:
    return any(claim in text for claim in CLAIMS[page])


def test_the_claims_of_the_readme_have_something_that_shows_them() -> None:
    text = (ROOT / "README.md").read_text()
    numbers = text.partition("## Numbers")[2].partition("\n\nMethods")[0]
    rows = [line for line in numbers.splitlines() if line.startswith("| ")][1:]
    claims = re.findall(r"^- \*\*(.+?)\*\*", text, re.M)
    assert len(rows) >= 6
    assert len(claims) >= 3
    assert [line for line in [*rows, *claims] if not covered("README.md", line)] == []


def test_the_claims_of_the_comparison_have_something_that_shows_them() -> None:
    table = (ROOT / "docs" / "compare.md").read_text().partition("## Further trainers")[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    ours = [cells[0] for cells in rows if cells[1].startswith(("✓", "(✓)"))]
    assert len(ours) > 15
    assert [name for name in ours if not covered("docs/compare.md", name)] == []
