"""Entries of the cache: complete or absent, built once however many ask, and the same failure for all who waited."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from automodel_lite.data.cache import build_once
from automodel_lite.data.documents import DocumentList
from automodel_lite.data.tokenize import tokenize_documents
from automodel_lite.data.toy_chat import ToyChat
from automodel_lite.errors import DataError
from tests.data.templates import MARKED, byte_tokenizer


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def build_slowly(cache_dir: Path, log: Path, fails: bool) -> None:
    def build(folder: Path) -> None:
        append(log, "built")
        time.sleep(0.5)
        if fails:
            raise DataError("line 7 is bad")
        (folder / "data").write_text("x")

    try:
        entry = build_once(cache_dir, "things", "a", {"size": "1"}, build)
        append(log, f"{(entry.folder / 'data').read_text()} {entry.note}")
    except DataError as error:
        append(log, str(error))


def run_both(target: object, *args: object) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=args) for _ in range(2)]  # type: ignore[arg-type]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_two_processes_build_once(tmp_path: Path) -> None:
    run_both(build_slowly, tmp_path / "cache", tmp_path / "log", False)
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        "built",
        "x hit (another process made it)",
        "x miss (first time)",
    ]


def test_two_processes_fail_alike_and_try_once(tmp_path: Path) -> None:
    run_both(build_slowly, tmp_path / "cache", tmp_path / "log", True)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["built", "line 7 is bad", "line 7 is bad"]


def test_a_failure_is_tried_again_later(tmp_path: Path) -> None:
    build_slowly(tmp_path, tmp_path / "log", True)
    time.sleep(0.01)
    build_slowly(tmp_path, tmp_path / "log", False)
    assert (tmp_path / "log").read_text().splitlines() == ["built", "line 7 is bad", "built", "x miss (first time)"]


def killed_while_building(cache_dir: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "data").write_text("half")
        os._exit(0)

    build_once(cache_dir, "things", "a", {"size": "1"}, build)


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    process = multiprocessing.get_context("fork").Process(target=killed_while_building, args=(cache,))
    process.start()
    process.join(60)
    assert len(list((cache / "things").glob(".a-*"))) == 1
    build_slowly(cache, tmp_path / "log", False)
    assert (tmp_path / "log").read_text().splitlines() == ["built", "x miss (first time)"]
    assert list((cache / "things").glob(".a-*")) == []


def test_what_changed_is_named_against_the_closest_entry(tmp_path: Path) -> None:
    def note(**key: str) -> str:
        return build_once(tmp_path, "things", "a", key, lambda folder: None).note

    assert note(data="1", tokenizer="1") == "miss (first time)"
    assert note(data="2", tokenizer="2") == "miss (changed: data, tokenizer)"
    assert note(data="2", tokenizer="1") == "miss (changed: tokenizer)"  # of two equally close, the newer
    assert note(data="2", tokenizer="1", mask="1") == "miss (changed: mask)"
    assert note(data="1", tokenizer="1") == "hit"


def tokenize_toy_chat(cache_dir: Path, log: Path) -> None:
    documents = ToyChat(num_chats=300)
    documents.train = DocumentList([*documents.train.documents], "toy_chat")
    data = tokenize_documents(documents, byte_tokenizer(MARKED), cache_dir=cache_dir)
    append(log, f"{data.fingerprint} {data.train.num_tokens} {int(data.train.labels.sum())}")


def test_two_jobs_tokenise_the_same_rows_at_once(tmp_path: Path) -> None:
    run_both(tokenize_toy_chat, tmp_path / "cache", tmp_path / "log")
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == second


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot be made .*set AUTOMODEL_LITE_CACHE"):
        build_once(tmp_path / "file", "things", "a", {}, lambda folder: None)
