"""Local copies of data sets with several subsets and splits: chosen, or refused with the choices."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import ConfigError
from tests.data.reading.test_paths import write

MAIN = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: [socratic/train-*, "more/**/*.jsonl"]
---
# GSM8K
"""
GSM8K = [
    "main/train-00000-of-00001.jsonl",
    "main/test-00000-of-00001.jsonl",
    "socratic/train-00000-of-00001.jsonl",
    "more/a/b.jsonl",
]


def folder_of(root: Path, names: list[str], card: str = "") -> str:
    for name in names:
        write(root / name, name)
    if card:
        (root / "README.md").write_text(card)
    return str(root)


def trained(path: Any, **options: Any) -> list[str]:
    rows = FilesDataset(path, **options).train
    return [rows[index]["text"] for index in range(len(rows))]


def refused(path: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        FilesDataset(path, **options)
    return str(caught.value)


def typed(cure: str) -> dict[str, Any]:
    """Returns the options of FilesDataset that typing a cure gives."""
    override = OverridesParser.create().parse_override(cure)
    return {override.key_or_group.removeprefix("dataset."): override.value()}


def check_cures(message: str, path: str, expected: list[list[str]]) -> None:
    """Each cure that a message names trains on its files."""
    told = message.split(": ")[-1]
    cures = re.findall(r"dataset\.\w+=(?:\[[^\]]*\]|[^\s,'\[]+?)(?=[,.']|\s|$)", told)
    assert len(cures) == len(expected), (cures, message)
    for cure, files in zip(cures, expected, strict=True):
        assert trained(**{"path": path, **typed(cure)}) == files


def test_a_card_of_several_subsets_is_refused_and_each_choice_works(tmp_path: Path) -> None:
    """Both were trained on: the same questions twice."""
    path = folder_of(tmp_path / "gsm8k", GSM8K, MAIN)
    message = refused(path)
    assert message.startswith(
        f"dataset.path={path} holds several subsets, main, socratic, by its README.md, which may"
    )
    check_cures(message, path, [GSM8K[:1], [GSM8K[3], GSM8K[2]]])
    assert trained(path, name="main", split="test") == GSM8K[1:2]
    dataset = FilesDataset(path, name="main", val_split="test")
    assert [dataset.val["val"][0]["text"]] == GSM8K[1:2]
    assert "2 of subsets other than main (more/a/b.jsonl, socratic/train-" in dataset.description
    assert f"1 of splits other than train ({GSM8K[1]})" in dataset.description
    assert refused(path, name="sokratic") == (
        f"dataset.name=sokratic is not in {path}, whose README.md lists main, socratic."
    )
    assert refused(path, name="socratic", val_split="test") == (
        f"dataset.val_split=test is not in {path}, which has train."
    )


@pytest.mark.parametrize("mark", ["config_name: default", "config_name: main\n  default: true"])
def test_a_default_subset_is_taken_and_named(tmp_path: Path, mark: str) -> None:
    card = f"---\nconfigs:\n- {mark}\n  data_files: a.jsonl\n- config_name: all\n---\n"
    path = folder_of(tmp_path, ["a.jsonl", "b.jsonl"], card)
    dataset = FilesDataset(path)
    assert len(dataset.train) == 1
    name = mark.partition("\n")[0].removeprefix("config_name: ")
    assert f"1 of subsets other than {name}, the default (b.jsonl)" in dataset.description
    assert trained(path, name="all") == ["a.jsonl", "b.jsonl"]


def test_the_only_subset_of_a_card_is_taken_with_the_split_it_lists(tmp_path: Path) -> None:
    card = (
        "---\nconfigs:\n- config_name: x\n  data_dir: in\n  data_files:\n"
        "  - {split: train, path: evaluated.jsonl}\n  - {split: extra, path: ['*.txt']}\n---\n"
    )
    path = folder_of(tmp_path / "a", ["in/evaluated.jsonl", "in/b.txt", "c.jsonl"], card)
    assert trained(path) == ["in/evaluated.jsonl"]
    assert trained(path, split="extra") == ["in/b.txt"]
    only_test = card.replace("split: train", "split: test").replace("extra", "other")
    path = folder_of(tmp_path / "b", ["in/evaluated.jsonl", "in/b.txt"], only_test)
    message = refused(path)
    assert message.startswith(f"dataset.split=train is not in {path}, which has test, other: ")
    check_cures(message, path, [["in/evaluated.jsonl"], ["in/b.txt"]])
    assert len(FilesDataset(path, split="test", val_path=f"{path}/in/b.txt").val["val"]) == 1


@pytest.mark.parametrize(
    ("card", "told"),
    [
        ("---\nconfigs: main\n---\n", "configs: must be a list of config_name and data_files"),
        ("---\nconfigs:\n- config_name: [a\n---\n", "configs: must be a list of config_name"),
        ("---\nconfigs:\n- {config_name: a, data_files: [{path: x}]}\n---\n", "configs: must be a"),
        (
            "---\nconfigs:\n- {config_name: a, data_files: b.tar}\n---\n",
            "README.md names b.tar for",
        ),
    ],
)
def test_a_card_that_cannot_be_followed_is_refused(tmp_path: Path, card: str, told: str) -> None:
    assert told in refused(folder_of(tmp_path, ["a.jsonl"], card))


@pytest.mark.parametrize("card", ["# configs: none", "---\nlicense: mit\n---\n", "---\n[\n---\n"])
def test_a_card_without_subsets_leaves_all_files(tmp_path: Path, card: str) -> None:
    assert trained(folder_of(tmp_path, ["a.jsonl", "b.jsonl"], card)) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("root", ["", "data/"])
def test_folders_of_subsets_without_a_card_are_refused(tmp_path: Path, root: str) -> None:
    names = [f"{root}{n}" for n in ("main/train.jsonl", "main/test.jsonl", "socratic/train.jsonl")]
    path = folder_of(tmp_path / "g", names)
    message = refused(path)
    assert f"holds several subsets, {root}main, {root}socratic, which may be the same" in message
    check_cures(message, path, [names[:1], names[2:], [names[0], names[2]]])
    assert trained(path, name="main", split="test") == names[1:2]
    dataset = FilesDataset(path, name="socratic")
    assert "of subsets other than " in dataset.description
    assert refused(path, name="x") == (
        f"dataset.name=x is not in {path}, which has {root}main, {root}socratic."
    )
    message = refused(names and f"{path}/{names[2]}", val_path=path)
    assert f"set dataset.val_path={path}/{root}main, dataset.val_path={path}/{root}soc" in message


def test_cures_are_typed_as_a_shell_takes_them(tmp_path: Path) -> None:
    """A comma would be two values, a space two words, a number no text; zsh looks for a star."""
    names = ["my main/train.jsonl", "so,cratic/train.jsonl", "2024/train.jsonl"]
    path = folder_of(tmp_path / "g", names)
    message = refused(path)
    assert message.endswith(
        "set 'dataset.name=\"2024\"', 'dataset.name=\"my main\"', 'dataset.name=\"so,cratic\"', or "
        f'all of them, \'dataset.path=[{path}/2024,"{path}/my main","{path}/so,cratic"]\'.'
    )
    for cure in shlex.split(message.rpartition(": set ")[2].removesuffix(".")):
        if cure.startswith("dataset.name="):
            name = typed(cure.rstrip(","))["name"]
            assert trained(path, name=name) == [f"{name}/train.jsonl"]
    every = shlex.split(message.rpartition("all of them, ")[2].removesuffix("."))[0]
    assert sorted(trained(**typed(every))) == sorted(names)
    shards = [f"{split}-00000-of-00001.jsonl" for split in ("train_a", "train_b")]
    path = folder_of(tmp_path / "s", shards)
    message = refused(str(tmp_path / "g/2024"), val_path=path)
    assert f"set 'dataset.val_path={path}/train_a-*'" in message


def test_folders_that_are_parts_of_one_set_are_taken(tmp_path: Path) -> None:
    names = ["part1/train.jsonl", "part2/train.jsonl", "part2/other.jsonl"]
    assert sorted(trained(folder_of(tmp_path, names))) == sorted(names)


def test_saved_datasets_in_one_folder_are_subsets(tmp_path: Path) -> None:
    import datasets

    for name in ("main", "socratic"):
        datasets.Dataset.from_list([{"text": name}]).save_to_disk(tmp_path / "d" / name)
    path = str(tmp_path / "d")
    check_cures(refused(path), path, [["main"], ["socratic"], ["main", "socratic"]])


def test_shards_of_several_splits_are_refused(tmp_path: Path) -> None:
    """As ultrachat_200k's `train_sft` and `train_gen`."""
    splits = ("train_gen", "train_sft", "test_sft")
    names = [f"data/{one}-0000{n}-of-00002.jsonl" for one in splits for n in (0, 1)]
    path = folder_of(tmp_path / "u", names)
    message = refused(path)
    assert "holds several splits, train_gen, train_sft, which may be the same" in message
    check_cures(message, path, [names[:2], names[2:4], names[:4]])
    assert trained(path, split="train_sft") == names[2:4]
    assert len(FilesDataset(path, split="train_sft", val_split="test_sft").val["val"]) == 2
    assert refused(path, split="sft") == (
        f"dataset.split=sft is not in {path}, which has test_sft, train_gen, train_sft."
    )
    with_train = folder_of(tmp_path / "t", [*names, "data/train-00000-of-00001.jsonl"])
    assert trained(with_train) == ["data/train-00000-of-00001.jsonl"]


def test_a_name_beside_a_file_is_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.jsonl", "a"))
    assert refused(path, name="main") == (
        f"dataset.name=main is a subset of a hub dataset or a folder, and {path} has none: leave "
        "it out."
    )


def test_a_folder_at_an_address_is_chosen_from_alike(tmp_path: Path) -> None:
    path = f"file://{folder_of(tmp_path / 'a', GSM8K, MAIN)}"
    check_cures(refused(path), path, [GSM8K[:1], [GSM8K[3], GSM8K[2]]])
    assert trained(path, name="main", split="test") == GSM8K[1:2]
    names = ["main/train.jsonl", "socratic/train.jsonl", "socratic/test.jsonl"]
    folder = folder_of(tmp_path / "b", names)
    check_cures(refused(f"file://{folder}"), f"file://{folder}", [names[:1], names[1:2], names[:2]])
    packed = shutil.make_archive(str(tmp_path / "b"), "zip", folder)
    path = f"zip://::file://{packed}"
    check_cures(refused(path), path, [names[:1], names[1:2], names[:2]])
    assert trained(path, name="socratic", split="test") == names[2:]
    assert refused(path, name="socratic", split="dev") == (
        f"dataset.split=dev is not in zip://socratic::file://{packed}, which has test, train."
    )
    assert "is a subset of a hub dataset or a folder" in refused(
        f"file://{folder}/{names[0]}", name="main"
    )


def test_a_split_that_nothing_has_is_refused(tmp_path: Path) -> None:
    import datasets

    path = folder_of(tmp_path / "a", ["main/a.jsonl", "other/a.jsonl"])
    for one in (path, f"file://{path}"):
        assert "a.jsonl has no splits: name its files" in refused(one, name="main", split="extra")
        assert trained(one, name="main") == ["main/a.jsonl"]
    whole = datasets.DatasetDict(
        {n: datasets.Dataset.from_list([{"text": n}]) for n in ("train", "x")}
    )
    whole.save_to_disk(tmp_path / "saved" / "main")
    for one in (f"{tmp_path}/saved", f"file://{tmp_path}/saved"):
        assert trained(one, name="main", split="x") == ["x"]
