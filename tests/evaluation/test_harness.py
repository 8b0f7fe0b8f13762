"""Public benchmarks: refused without the package, and a task of one's own where it is installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from automodel_lite.errors import ConfigError
from tests.runs import problems, train

SMALL = ("training.num_threads=1", "dataset.num_chats=40", "training.max_steps=2")
TASK = """
task: my_choice
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [Lima, Oslo]
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
has_package = find_spec("lm_eval") is not None


@pytest.mark.skipif(has_package, reason="lm-eval is installed")
def test_without_the_package_the_cure_is_named() -> None:
    assert problems("evaluation=lm_eval", "evaluation.tasks=[gsm8k]") == [
        "evaluation needs the package lm_eval: pip install 'automodel-lite[eval]'."
    ]


@pytest.mark.skipif(not has_package, reason="pip install 'automodel-lite[eval]'")
def test_a_task_of_ones_own_scores_the_export(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{x}?", "answer": 0}}\n' for x in ("Peru", "Rimac")))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/task.yaml").write_text(TASK.replace("ROWS", str(rows)))
    chosen = ("evaluation=lm_eval", f"evaluation.include_path={tmp_path}/mine")
    logged = train("smoke", tmp_path / "run", *SMALL, *chosen, "evaluation.tasks=[my_choice]")
    (scores,) = [row for row in logged if "lm_eval/my_choice/acc" in row]
    assert scores["lm_eval/my_choice/acc"] in (0, 0.5, 1), json.dumps(scores)
    with pytest.raises(ConfigError, match=r"no task my_choise; did you mean my_choice\?"):
        train("smoke", tmp_path / "typo", *SMALL, *chosen, "evaluation.tasks=[my_choise]")
