"""Each command on each kind of run, with data of each kind: what it starts, or which command does what was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from automodel_lite.cli import compose_config
from automodel_lite.cli.hydra_app import named_run
from automodel_lite.cli.job import job_of
from automodel_lite.cli.line import RECIPES
from automodel_lite.cli.recipes import Recipe
from automodel_lite.cli.sources import Sources
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError
from automodel_lite.models.source import CausalLM
from automodel_lite.run.folder import RunFolder
from recipes import decide, evaluate, plan, score, verify

ROWS = {
    "chats": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    },
    "labeled": {"text": "a card", "label": "billing"},
    "pairs": {"prompt": "Peru?", "chosen": "Lima", "rejected": "Cusco"},
    "questions": {"state": "a card", "question": "which?", "options": ["a", "b"]},
    "tickets": {"body": "a card", "team": "billing"},
}
WRITES_NOTHING = (
    "has a score head, which gives a document numbers and writes no text: automodel-lite evaluate "
    "runs/{run} FILE compares its scores with the labels or pairs of a file; transformers' "
    "pipeline('text-classification') scores a text."
)
NO_QUESTIONS = (
    '{file}: its rows are no questions with fixed choices, {{"state": ..., "question": ..., '
    '"options": [...]}}: name their columns, dataset.columns.state=... dataset.columns.question=...'
    " dataset.columns.options=...; automodel-lite generate runs/lm --prompts {file} --out "
    "answers.jsonl answers questions freely."
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that have exported a causal LM, a score head, and an adapter of each; data of each
    kind.
    """
    place = tmp_path_factory.mktemp("kinds")
    for run, name in (("lm", "LlamaForCausalLM"), ("scorer", "LlamaForSequenceClassification")):
        config = LlamaConfig(architectures=[name], hidden_size=32, num_labels=2)
        config.save_pretrained(place / f"runs/{run}/hf")
    for run, kind in (("lora", "CAUSAL_LM"), ("scorer_lora", "SEQ_CLS")):
        adapter = place / f"runs/{run}/adapter"
        adapter.mkdir(parents=True)
        settings = {"task_type": kind, "base_model_name_or_path": str(place / "runs/lm/hf")}
        (adapter / "adapter_config.json").write_text(json.dumps(settings))
    for run in (place / "runs").iterdir():
        (run / "config.yaml").write_text("{}")
    for name, row in ROWS.items():
        (place / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    return place


@pytest.fixture(autouse=True)
def _folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)


def started(command: str, *words: str) -> str:
    """The preset that a command with a model and data starts, or what it says of them."""
    recipe = Recipe(f"recipes.{RECIPES[command][0]}:main")
    job = job_of(recipe, Sources.of(None, None, recipe), words, None)
    return "\n".join(map(str, job.problems)) or job.preset


@pytest.mark.parametrize("command", ["train", "inspect", "prepare", "evaluate"])
def test_rows_of_a_model_with_a_score_head(command: str) -> None:
    found = {data: started(command, "runs/scorer", f"{data}.jsonl") for data in ROWS}
    wanted = dict.fromkeys(ROWS, "classify") | {"pairs": "reward"}
    assert found == wanted
    assert started(command, "runs/scorer/hf", "pairs.jsonl") == "reward"
    assert started(command, "runs/scorer_lora", "labeled.jsonl") == "classify"
    assert started(command, "runs/lm", "pairs.jsonl") == "dpo"
    assert "match no known format" in started(command, "runs/lm", "tickets.jsonl")


def test_a_classifier_on_rows_without_its_columns() -> None:
    from automodel_lite.data.reading.columns import detect

    with pytest.raises(
        ConfigError, match=r"for instance dataset.columns.text=body dataset.columns.label=team, or"
    ):
        detect(["body", "team"], "labeled", {})
    with pytest.raises(
        ConfigError, match=r"the data have messages: name them with dataset.columns, or"
    ):
        detect(["messages"], "labeled", {})


@pytest.mark.parametrize("run", ["scorer", "scorer/hf"])
@pytest.mark.parametrize("data", ["questions", "labeled"])
def test_a_score_head_is_asked_for_decisions(run: str, data: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide.main([f"runs/{run}", f"{data}.jsonl"])
    assert str(caught.value) == "runs/scorer/hf " + WRITES_NOTHING.format(run="scorer")


def test_an_adapter_with_a_score_head_is_asked() -> None:
    cure = (
        "automodel-lite export runs/scorer_lora merges the adapter, after which automodel-lite "
        "evaluate runs/scorer_lora FILE compares"
    )
    with pytest.raises(ConfigError, match=cure):
        decide.main(["runs/scorer_lora", "questions.jsonl"])


@pytest.mark.parametrize("data", ["chats", "labeled", "pairs", "tickets"])
def test_decisions_of_rows_that_ask_none(data: str) -> None:
    with pytest.raises(ConfigError) as caught:
        decide.main(["runs/lm", f"{data}.jsonl"])
    assert str(caught.value) == NO_QUESTIONS.format(file=f"{data}.jsonl")


@pytest.mark.parametrize(
    ("run", "data", "said"),
    [
        ("scorer", "labeled", "compares a trained score head with the labels or pairs of a file"),
        ("scorer", "tickets", "compares a trained score head with the labels or pairs of a file"),
        ("scorer", "pairs", "compares a trained score head with the labels or pairs of a file"),
        ("lm", "chats", "--config-name dpo or kto for a reference"),
        ("lm", "tickets", "--config-name dpo or kto for a reference"),
        ("lm", "pairs", ""),
    ],
)
def test_scores_ahead_of_a_training(run: str, data: str, said: str) -> None:
    preset = started("score", f"runs/{run}", f"{data}.jsonl")
    typed = ["name=a", f"model.pretrained=runs/{run}/hf", f"dataset.path={data}.jsonl"]
    config = check_config(compose_config(preset, typed))
    if not said:
        score.check_computed(config)
        return
    with pytest.raises(ConfigError, match=said):
        score.check_computed(config)


def test_an_adapter_is_evaluated_on_its_base(place: Path) -> None:
    typed = ["name=a", "dataset.path=chats.jsonl", "model.pretrained=runs/lora"]
    config = evaluate.of_folder(check_config(compose_config("finetune", typed)), None)
    assert config.model["pretrained"] == str(place / "runs/lm/hf")
    assert config.tokenizer["path"] == "runs/lora/adapter"
    assert config.peft
    assert config.peft["adapter"] == "runs/lora/adapter"
    typed = ["name=a", "dataset.path=labeled.jsonl", "model.pretrained=runs/scorer_lora"]
    config = check_config(compose_config("classify", typed))
    cure = "automodel-lite export runs/scorer_lora merges both into the base: then name runs/scorer_lora"
    with pytest.raises(ConfigError, match=cure):
        evaluate.of_folder(config, None)


@pytest.mark.parametrize("settings", [{}, {"base_model_name_or_path": None}])
def test_an_adapter_without_a_base_is_named(settings: dict[str, None], place: Path) -> None:
    folder = place / "nameless"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
    typed = ["name=a", "dataset.path=chats.jsonl", "model.pretrained=nameless"]
    with pytest.raises(ConfigError, match="does not name the base of the adapter: write its"):
        evaluate.of_folder(check_config(compose_config("finetune", typed)), None)


def test_a_run_is_planned_as_what_it_has_exported() -> None:
    for run in ("lm", "scorer"):
        preset = {"lm": "finetune", "scorer": "classify"}[run]
        config = plan.composed(preset, [f"model.pretrained=runs/{run}"])
        assert config.model["pretrained"] == f"runs/{run}/hf"


def test_a_plan_of_a_model_and_its_data() -> None:
    preset, overrides = plan.named_job(None, ["runs/scorer", "labeled.jsonl", "mesh.cp=1"])
    assert preset == "classify"
    assert overrides == [
        "model.pretrained='runs/scorer'",
        "dataset.path='labeled.jsonl'",
        "mesh.cp=1",
    ]
    assert plan.named_job(None, ["runs/lm"]) == ("finetune", ["model.pretrained='runs/lm'"])
    assert plan.named_job(None, ["runs/scorer"])[0] == "classify"
    assert plan.named_job("smoke", ["mesh.cp=2"]) == ("smoke", ["mesh.cp=2"])
    with pytest.raises(ConfigError, match="automodel-lite plan MODEL DATA, or"):
        plan.named_job(None, ["mesh.cp=2"])


def test_a_score_head_is_verified() -> None:
    verify.check_has_no_scores(CausalLM("runs/lm/hf"))
    cure = "name the model that it began as, or a run alone, automodel-lite verify RUN"
    with pytest.raises(ConfigError, match=cure):
        verify.check_has_no_scores(CausalLM("runs/scorer/hf", head="score"))


def test_a_run_is_verified_on_data() -> None:
    cure = "--config-name finetune model.pretrained=runs/lm dataset.path=chats.jsonl"
    with pytest.raises(ConfigError, match=cure):
        named_run(["runs/lm", "chats.jsonl"])


def test_an_adapter_with_a_score_head_is_merged_before_it_is_evaluated(place: Path) -> None:
    folder = RunFolder(place / "runs/scorer_lora")
    folder.write_facts([], kind="labeled", head={"kind": "one", "names": ["a", "b"]})
    merge, then = folder.next_commands("finished")
    assert "export runs/scorer_lora   # merges" in merge.replace(f"{place}/", "")
    assert then.replace(f"{place}/", "").endswith("evaluate runs/scorer_lora held_out.jsonl")
