"""A policy's rows from a file train as they do from Python."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_lite import TrainingClient
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.losses.policy import Cispo, Dro, Gspo, ImportanceSampling, Ppo
from recipes import train_ft
from tests.models.test_policy import make_groups, save_model
from tests.runs import config_of, losses, train

COLUMNS = ("input_ids", "labels", "advantages", "old_log_probs")
ROWS = [{name: row[name] for name in COLUMNS} for group in make_groups() for row in group]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("model"))


def settings(folder: str, path: Path, rows: list[dict]) -> list[str]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        f"model.pretrained={folder}",
        "loss.average=rows",
        "packed_sequence.packed_sequence_size=256",
        "training.num_threads=1",
        f"dataset.path={path}",
    ]


OPTIONS = {
    "ppo": Ppo,
    "cispo": Cispo,
    "dro": Dro,
    "gspo": Gspo,
    "importance_sampling": ImportanceSampling,
}


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(name, marks=() if name in ("gspo", "cispo") else pytest.mark.system)
        for name in OPTIONS
    ],
)
def test_rows_of_a_file_train_as_from_python(option: str, folder: str, tmp_path: Path) -> None:
    chosen = settings(folder, tmp_path / "rows.jsonl", ROWS)
    quick = ("training.max_steps=1", "training.global_batch_size=64", "checkpoint.export_hf=false")
    typed = [f"loss={option}", "name=x"]
    (loss, grad_norm), *_ = losses(train("policy", tmp_path / "run", *typed, *chosen, *quick))
    with TrainingClient("policy", *chosen, f"output_dir={tmp_path / 'client'}") as client:
        out = client.forward_backward(ROWS, OPTIONS[option](average="rows"))
        step = client.optim_step()
    assert (out.num_items, step.loss) == (len(ROWS), pytest.approx(loss, rel=1e-5))
    assert step.grad_norm == pytest.approx(grad_norm, rel=1e-4)


def rewarded() -> list[dict]:
    """Rows with a reward and a group; some of a group are equal, or begin alike."""
    rows = []
    for number, group in enumerate(make_groups()):
        for place, row in enumerate(group):
            bare = {"input_ids": row["input_ids"], "labels": row["labels"]}
            rows.append(bare | {"reward": float(place % 3), "group": f"q{number}"})
    return rows


@pytest.mark.parametrize(("tree", "kl"), [("auto", 0.0), ("off", 0.0), ("auto", 0.5)])
def test_advantages_are_made_of_rewards(tree: str, kl: float, folder: str, tmp_path: Path) -> None:
    """Beside a reference, too, whose values are kept for the rows as the file has them."""
    rows = rewarded()
    chosen = [*settings(folder, tmp_path / "rows.jsonl", rows), f"packed_sequence.tree={tree}"]
    chosen += [f"loss.kl={kl}", "loss.kl_kind=k1"] if kl else []
    quick = ("training.max_steps=1", "training.global_batch_size=64", "checkpoint.export_hf=false")
    (_, grad_norm), *_ = losses(train("policy", tmp_path / "run", *chosen, *quick, "name=x"))
    with TrainingClient("policy", *chosen, f"output_dir={tmp_path / 'client'}") as client:
        if kl:
            reference = client.forward(rows).log_probs
            rows = [row | {"reference_log_probs": own} for row, own in zip(rows, reference)]
        out = client.forward_backward(rows)
        assert client.optim_step().grad_norm == pytest.approx(grad_norm, rel=1e-4)
    assert out.num_items == len(rows)


def test_wrong_rewards_of_a_file_get_a_sentence(folder: str, tmp_path: Path) -> None:
    rows = rewarded()
    cases = {
        "equal": (
            [row | {"reward": 1.0} for row in rows],
            r"equal.jsonl, train: the rewards of .* there is nothing to learn",
        ),
        "none": (
            [*rows[:3], {**rows[3], "reward": None}, *rows[4:]],
            "1 row brings no `reward` or no `group`",
        ),
        "alone": (
            [{**rows[0], "group": None}, *rows[1:]],
            "1 row brings no `reward` or no `group`",
        ),
        "list": (
            [rows[0], rows[1] | {"reward": [1.0]}],
            r"list.jsonl:2: column reward must be one",
        ),
    }
    for name, (given, sentence) in cases.items():
        chosen = settings(folder, tmp_path / f"{name}.jsonl", given)
        with pytest.raises(DataError, match=sentence):
            train_ft.main(
                config_of("policy", tmp_path / name, *chosen, "name=x", "training.max_steps=1")
            )


def test_a_held_out_set_of_equal_rewards_is_validated(folder: str, tmp_path: Path) -> None:
    """It has nothing to teach and ended the run, although only the training rows are learnt from."""
    equal = tmp_path / "equal.jsonl"
    equal.write_text("\n".join(json.dumps(row | {"reward": 1.0}) for row in rewarded()))
    chosen = [*settings(folder, tmp_path / "rows.jsonl", rewarded()), f"+dataset.val_path={equal}"]
    quick = ("training.max_steps=1", "training.val_every_steps=1", "checkpoint.export_hf=false")
    rows = train("policy", tmp_path / "run", *chosen, *quick, "name=x")
    assert [row["val_loss/val"] for row in rows if "val_loss/val" in row] == [0.0]


@pytest.mark.parametrize("computed", ["advantages", "reference"])
def test_a_mixture_of_what_is_computed_gets_a_sentence(
    computed: str, folder: str, tmp_path: Path
) -> None:
    """Before a model is loaded."""
    file = tmp_path / "rows.jsonl"
    chosen = settings(folder, file, ROWS if computed == "reference" else rewarded())
    target = "automodel_lite.data.reading.files.FilesDataset"
    source = f"{{dataset:{{_target_:{target},path:{file}}}}}"
    chosen = [x for x in chosen if not x.startswith("dataset")]
    chosen += ["dataset=mixture", f"dataset.sources={{a:{source},b:{source}}}"]
    chosen += ["loss.kl=0.1"] if computed == "reference" else []
    with pytest.raises(ConfigError, match=r"^values per label, and advantages of rewards, are"):
        train_ft.main(config_of("policy", tmp_path / "run", *chosen, "name=x"))


@pytest.mark.parametrize("column", ["advantages", "old_log_probs"])
@pytest.mark.parametrize("place", [0, 3])
def test_a_row_without_what_others_bring_is_refused(
    column: str, place: int, folder: str, tmp_path: Path
) -> None:
    """It was trained as if it had been sure to be sampled, or neither good nor bad."""
    bare = {name: value for name, value in ROWS[place].items() if name != column}
    rows = [*ROWS[:place], bare, *ROWS[place + 1 :]]
    chosen = settings(folder, tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=rf"train: some documents bring {column}, and others"):
        train_ft.main(config_of("policy", tmp_path / "run", *chosen, "name=x"))
    with (
        TrainingClient("policy", *chosen, f"output_dir={tmp_path / 'client'}") as client,
        pytest.raises(ValueError, match=f"row {place} lacks {column}"),
    ):
        client.forward_backward(rows)


@pytest.mark.parametrize("cut", ["packed_sequence.overlong=split", "packed_sequence=wrapped"])
def test_rows_are_not_cut_apart(cut: str, folder: str, tmp_path: Path) -> None:
    """The second piece was compared with log-probabilities that had seen the first: ratios of 1 became 1.1."""
    chosen = [cut, *settings(folder, tmp_path / "rows.jsonl", ROWS), "name=x"]
    with pytest.raises(ConfigError, match="rows of loss=Ppo stay whole"):
        train_ft.main(config_of("policy", tmp_path / "run", *chosen))


def test_rows_over_the_pack_are_not_told_to_be_split(folder: str, tmp_path: Path) -> None:
    """What the sentence names has to be accepted."""
    chosen = [*settings(folder, tmp_path / "rows.jsonl", ROWS), "name=x"]
    chosen.append("packed_sequence.packed_sequence_size=20")
    with pytest.raises(DataError, match=r"keeps 99 %\), or packed_sequence\.overlong=drop if"):
        train_ft.main(config_of("policy", tmp_path / "run", *chosen))


def test_wrong_columns_of_a_file_get_a_sentence(folder: str, tmp_path: Path) -> None:
    bad = [*ROWS[:2], ROWS[2] | {"advantages": [1.0]}]
    chosen = [*settings(folder, tmp_path / "bad.jsonl", bad), "name=x"]
    with pytest.raises(DataError, match=r"bad\.jsonl:3: column advantages must be"):
        train_ft.main(config_of("policy", tmp_path / "run", *chosen))
    bare = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in ROWS]
    chosen = [*settings(folder, tmp_path / "bare.jsonl", bare), "name=x"]
    problem = r"per-token column advantages: bring it with the token rows \(those with images"
    with pytest.raises(ConfigError, match=problem):
        train_ft.main(config_of("policy", tmp_path / "run", *chosen))


@pytest.mark.parametrize(
    ("typed", "column"),
    [
        (["loss.clip_low=0.1"], "old_log_probs"),
        (["loss=dro", "loss.beta=0.5"], "old_log_probs"),
        (["loss.truncation=1.5"], "sampler_log_probs"),
    ],
)
def test_a_setting_of_a_column_that_the_rows_lack(
    typed: list[str], column: str, folder: str, tmp_path: Path
) -> None:
    chosen = settings(folder, tmp_path / "rows.jsonl", rewarded())
    with pytest.raises(
        ConfigError, match=f"{typed[-1]} does nothing, as the rows bring no {column}"
    ):
        train("policy", tmp_path / "run", *typed, *chosen, "name=x")
