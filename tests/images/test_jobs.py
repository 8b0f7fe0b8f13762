"""Jobs of one step with the processors of families whose code asks for more than others, or that are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers.utils import is_torchvision_available

from benchmarks.image_jobs import step

NEEDS_TORCHVISION = pytest.mark.skipif(
    not is_torchvision_available(), reason="its image processor needs torchvision"
)


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("ovis2", "trains"),  # its processor reads tensors
        pytest.param("lfm2_vl", "trains", marks=NEEDS_TORCHVISION),  # and a setting of the whole
        ("idefics2", "the processor of model_type=idefics2 writes the text of an image inside its"),
        ("pp_chart2table", "the processor of model_type=pp_chart2table names no token for the pla"),
    ],
)
def test_a_job_trains_or_names_the_family(family: str, said: str, tmp_path: Path) -> None:
    assert step(family, tmp_path).startswith(said)
