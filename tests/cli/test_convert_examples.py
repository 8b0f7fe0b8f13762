"""What examples of five frameworks become is what they would have trained, and passes a dry run."""

from __future__ import annotations

import copy
import io
import json
import random
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from omegaconf import DictConfig

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.config.components import option
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.extras.cli import convert
from recipes import train_ft
from tests.runs import train_quick

HERE = Path(__file__).parent
FACTS: dict[str, dict[str, Any]] = yaml.safe_load((HERE / "peer_facts.yaml").read_text())
FILES = {path.stem: path for path in sorted((HERE / "peer_examples").iterdir())}
REFUSED = [name for name, facts in FACTS.items() if facts.get("refused")]
TRAINED = [*FILES, *(name for name in FACTS if name not in REFUSED)]
QUICK = ["axolotl_mixture"]


def peer_of_name(name: str) -> str:
    return next(peer for peer in convert._ANSWERS if name.startswith(peer.partition("_")[0]))


def theirs_of(name: str) -> dict[str, Any]:
    if name in FILES:
        return yaml.safe_load(FILES[name].read_text())
    return {key: value for key, value in FACTS[name].items() if key != "refused"}


def converted(name: str, folder: Path, *options: str) -> tuple[DictConfig, list[str], str]:
    """Returns the composed preset, what convert listed, and the preset's text."""
    source = folder / f"{name}.yml"
    source.write_text(yaml.safe_dump(theirs_of(name), sort_keys=False))
    target = folder / "mine.yaml"
    with redirect_stdout(io.StringIO()) as said:
        convert.convert([str(source), "--to", str(target), "--from", peer_of_name(name), *options])
    text = target.read_text()
    missing = [] if "sources:" in text or "\n  path:" in text else ["dataset.path=x"]
    raw = compose_config("mine", missing, config_dir=str(folder))
    return raw, said.getvalue().splitlines()[1:], text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    code, _ = train_quick(folder / "run", "checkpoint.export_hf=true", "training.max_steps=1")
    assert code == 0
    return folder / "run" / "hf"


def rows_of(dataset: DictConfig) -> list[dict[str, Any]]:
    """Returns rows of the form that the settings of a dataset name, other ones of each path."""
    columns = dict(dataset.get("columns") or {})
    kind = dataset.get("format") or ("columns" if columns else "messages")
    rows = []
    for number in range(60):
        asked, answer = f"{dataset.path}: what is {number} plus one?", f"It is {number + 1}."
        if kind == "preference":
            row = {"prompt": asked, "chosen": answer, "rejected": "I do not know."}
        elif kind == "verdict":
            row = {"prompt": asked, "completion": answer, "label": True}
        elif kind.startswith("alpaca"):
            row = {"instruction": asked, "input": "", "output": answer}
        elif kind == "squad":
            answers = {"text": [answer], "answer_start": [0]}
            row = {"context": "Counting.", "question": asked, "answers": answers}
        elif kind == "columns" and "question" in columns:
            row = {"system": "Counting.", "question": asked, "answer": answer}
        elif kind == "columns" and "prompt" in columns:
            row = {"prompt": asked, "completion": answer}
        elif kind == "columns" and "text" in columns:
            row = {"text": f"{asked} {answer}"}
        else:
            row = {"messages": [{"role": "user", "content": asked},
                                {"role": "assistant", "content": answer}]}  # fmt: skip
        rows.append({columns.get(key, key): value for key, value in row.items()})
    return rows


class Hub:
    """Stands for the hub: the data sets that a preset names, of rows that fit its settings. Splits are
    cut by `datasets` itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[tuple[str, str | None], dict[str, str]] = {}
        self.load = datasets.load_dataset

    def add(self, dataset: DictConfig) -> None:
        """Puts the rows of a dataset where its settings say that they are."""
        rows = rows_of(dataset)
        self._put(dataset, dataset.path, dataset.get("split"), rows[:50])
        if dataset.get("val_split"):
            self._put(dataset, dataset.path, dataset.val_split, rows[50:])
        if dataset.get("val_path"):
            self._put(dataset, dataset.val_path, dataset.get("split"), rows[50:])

    def _put(self, dataset: DictConfig, path: str, split: str | None, rows: list[Any]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        if Path(path).suffix:  # a file, in the working directory
            Path(path).write_text(lines)
            return
        parts = self.files.setdefault((path, dataset.get("name")), {})
        name = str(split or "train").partition("[")[0]
        if name not in parts:
            parts[name] = str(self.folder / f"{path.replace('/', '--')}.{name}.jsonl")
            Path(parts[name]).write_text(lines)

    def __call__(self, path: str, name: str | None = None, split: str = "", **options: Any) -> Any:
        return self.load("json", data_files=self.files[path, name], split=split, **options)


def dry_run(raw: DictConfig, model: Path, folder: Path) -> str:
    """Returns the sentence that refuses the preset; "" of none. It is started as it was written, on
    rows that fit it, and a tiny model in place of its own; what this machine lacks is left out,
    bitsandbytes and trackers.
    """
    for part in (raw.model, raw.tokenizer):
        for name in ("pretrained", "path"):
            if name in part:
                part[name] = str(model)
    if raw.model.get("revision"):  # of the model that was replaced
        raw.model.revision = None
    raw.logger = {
        name: part for name, part in raw.logger.items() if name not in ("wandb", "mlflow")
    }
    raw.training.allow_few_steps = True  # of so few rows
    if "QLora" in (raw.peft.get("_target_") or "") and not find_spec("bitsandbytes"):
        of_lora = option("peft", "lora")
        raw.peft = {name: value for name, value in raw.peft.items() if name in of_lora}
        raw.peft._target_ = of_lora["_target_"]
    raw.dry_run, raw.output_dir = True, str(folder / "run")
    raw.cache_dir = str(folder / "cache")
    hub = Hub(folder)
    sources = raw.dataset.get("sources") or {}
    for dataset in [source.dataset for source in sources.values()] or [raw.dataset]:
        hub.add(dataset)
    screen = io.StringIO()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(screen),
            redirect_stderr(screen),
        ):
            patch.setattr(datasets, "load_dataset", hub)
            code = train_ft.main(check_config(raw))
    except (ConfigError, DataError) as error:
        return str(error)
    return "" if code == 0 else screen.getvalue()


def check_example(name: str, model: Path, folder: Path) -> None:
    raw, _, _ = converted(name, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert dry_run(raw, model, folder) == "", name


@pytest.mark.parametrize("name", QUICK)
def test_an_example_passes_a_dry_run(name: str, model: Path, tmp_path: Path) -> None:
    check_example(name, model, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRAINED if name not in QUICK])
def test_every_example_passes_a_dry_run(name: str, model: Path, tmp_path: Path) -> None:
    check_example(name, model, tmp_path)


@pytest.mark.parametrize("name", REFUSED)
def test_what_trains_nothing_here_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"=.*: .*(train|here|start from|measures)"):
        converted(name, tmp_path)
    assert not (tmp_path / "mine.yaml").exists()


BASES = {
    "axolotl": "axolotl_padded",
    "llama_factory": "llama_factory_defaults",
    "nemo_automodel": "nemo_chat",
    "torchtune": "torchtune_lora_padded",
    "trl": "trl_defaults",
}
VALUES = [True, False, None, 2, 0.5, -1, "auto", "1e-4", ["x"], ["q_proj", "v_proj"], {"a": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("peer", sorted(BASES))
def test_any_key_with_any_value_is_held_or_named(peer: str) -> None:
    """Handfuls of the keys of their examples with values of every kind on top of a whole example."""
    listed = json.loads((HERE / "peer_keys.json").read_text())
    fields = json.loads((HERE / "trl_fields.json").read_text())
    keys = list(listed[peer]["keys"]) if peer in listed else list(fields)
    keys = [key for key in keys if "[]" not in key]
    rng = random.Random(peer)
    for _ in range(20):
        theirs = copy.deepcopy(theirs_of(BASES[peer]))
        for key in rng.sample(keys, 8):
            node: Any = theirs
            *path, last = key.split(".")
            for step in path:
                if not isinstance(node.get(step), dict):
                    node[step] = {}
                node = node[step]
            node[last] = rng.choice(VALUES)
        try:
            preset = convert.preset_of(peer, theirs, "mine")
        except ConfigError:
            continue  # it trains nothing here
        preset.leave_what_is_refused()
        assert preset._problem() is None, theirs
