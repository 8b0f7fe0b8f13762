"""Entries of the cache: complete or absent, and built once however many ask."""

from __future__ import annotations

import gzip
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from automodel_lite.config.components import build as build_part
from automodel_lite.data import cache
from automodel_lite.data.cache import CacheEntry, build_once, find_damage
from automodel_lite.data.prepare import build_documents
from automodel_lite.data.reading.documents import DocumentList
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.datasets.toy_chat import ToyChat
from tests.data.templates import MARKED, byte_tokenizer
from tests.ranks import fork_server
from tests.runs import config_of, wait_until


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def build(cache_dir: Path, log: Path, fails: bool, num_askers: int = 1) -> None:
    """Asks for an entry; builds it, if it comes to that, when so many have asked."""

    def make(folder: Path) -> None:
        append(log, "built")
        wait_until(lambda: len(asked.read_text().splitlines()) >= num_askers, 60)
        if fails:
            raise DataError("line 7 is bad")
        (folder / "data").write_text("x")

    def noted_lock(path: str) -> FileLock:  # asked for by who has found no entry
        append(asked, path)
        return FileLock(path)

    asked = log.with_name("asked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "FileLock", noted_lock)
        try:
            entry = build_once(cache_dir, "things", "a", {"size": "1"}, make)
            append(log, f"{(entry.folder / 'data').read_text()} {entry.note}")
        except DataError as error:
            append(log, str(error))


def run_both(target: Callable[..., None], *args: object) -> None:
    context = fork_server()
    processes = [context.Process(target=target, args=args) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0


def test_two_processes_build_once(tmp_path: Path) -> None:
    run_both(build, tmp_path / "cache", tmp_path / "log", False, 2)
    assert sorted((tmp_path / "log").read_text().splitlines()) == [
        "built",
        "x hit (built by another process)",
        "x miss (first time)",
    ]


def test_both_of_two_processes_fail(tmp_path: Path) -> None:
    run_both(build, tmp_path / "cache", tmp_path / "log", True, 2)
    assert (
        sorted((tmp_path / "log").read_text().splitlines()) == ["built"] * 2 + ["line 7 is bad"] * 2
    )


def test_a_failure_is_tried_again_later(tmp_path: Path) -> None:
    build(tmp_path, tmp_path / "log", True)
    build(tmp_path, tmp_path / "log", False)
    assert (tmp_path / "log").read_text().splitlines() == [
        "built",
        "line 7 is bad",
        "built",
        "x miss (first time)",
    ]


def killed_while_building(cache_dir: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "data").write_text("half")
        os._exit(0)

    build_once(cache_dir, "things", "a", {"size": "1"}, build)


def test_a_killed_builder_leaves_nothing_that_counts(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    process = fork_server().Process(target=killed_while_building, args=(cache,))
    process.start()
    process.join(120)
    assert len(list((cache / "things").glob(".a-*"))) == 1
    build(cache, tmp_path / "log", False)
    assert (tmp_path / "log").read_text().splitlines() == ["built", "x miss (first time)"]
    assert list((cache / "things").glob(".a-*")) == []


def test_what_changed_is_named_against_the_closest_entry(tmp_path: Path) -> None:
    def note(**key: str) -> str:
        return build_once(tmp_path, "things", "a", key, lambda folder: None).note

    assert note(data="1", tokenizer="1") == "miss (first time)"
    assert note(data="2", tokenizer="2") == "miss (changed: data, tokenizer)"
    # of two equally close, the newer
    assert note(data="2", tokenizer="1") == "miss (changed: tokenizer)"
    assert note(data="2", tokenizer="1", mask="1") == "miss (changed: mask)"
    assert note(data="1", tokenizer="1") == "hit"


def tokenize_toy_chat(cache_dir: Path, log: Path) -> None:
    documents = ToyChat(num_chats=300)
    documents.train = DocumentList([*documents.train.rows], "toy_chat")
    data = tokenize_documents(documents, TokenizeJob(byte_tokenizer(MARKED)), cache_dir)
    append(
        log, f"{data.fingerprint} {data.train.num_tokens} {int(data.train.columns['labels'].sum())}"
    )


def test_two_jobs_tokenize_the_same_rows_at_once(tmp_path: Path) -> None:
    run_both(tokenize_toy_chat, tmp_path / "cache", tmp_path / "log")
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first == second


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"cache_dir=.*file cannot be written .*AUTOMODEL_LITE_CACHE"
    ):
        build_once(tmp_path / "file", "things", "a", {}, lambda folder: None)


# -------------------------------------------------------------------------------------------------------------- damage
def make_entry(cache: Path, built: list[int]) -> CacheEntry:
    def build(folder: Path) -> None:
        built.append(len(built))
        np.save(folder / "ids.npy", np.arange(3_000_000))
        (folder / "small").write_text("x")

    return build_once(cache, "things", "a", {"size": "1"}, build)


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "a-bit": (
        lambda folder: _flip(folder / "ids.npy", 17_000_001),
        "ids.npy differs from what was written",
    ),
    "the-last-bit": (
        lambda folder: _flip(folder / "ids.npy", -1),
        "ids.npy differs from what was written",
    ),
    "the-header": (
        lambda folder: _flip(folder / "ids.npy", 3),
        "ids.npy differs from what was written",
    ),
    "a-small-file": (
        lambda folder: (folder / "small").write_text("y"),
        "small differs from what was written",
    ),
    "truncated": (
        lambda folder: os.truncate(folder / "ids.npy", 100),
        "ids.npy has 100 bytes instead of 24,000,128",
    ),
    "longer": (
        lambda folder: (folder / "small").write_text("xx"),
        "small has 2 bytes instead of 1",
    ),
    "a-file-gone": (lambda folder: (folder / "small").unlink(), "small is missing"),
    "key-gone": (lambda folder: (folder / "key.json").unlink(), "key.json is missing"),
    "key-torn": (lambda folder: os.truncate(folder / "key.json", 30), "key.json is incomplete"),
    "key-of-others": (
        lambda folder: (folder / "key.json").write_text("5"),
        "key.json is incomplete",
    ),
    "a-folder": (lambda folder: ((folder / "small").unlink(), (folder / "small").mkdir()), "small"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again_and_it_is_said(
    tmp_path: Path, damage: str, capfd: pytest.CaptureFixture[str]
) -> None:
    built: list[int] = []
    entry = make_entry(tmp_path, built)
    harm, said = DAMAGES[damage]
    harm(entry.folder)
    again = make_entry(tmp_path, built)
    assert (again.folder, len(built)) == (entry.folder, 2)
    assert said in again.note
    assert f"WARNING: {entry.folder} was damaged ({said}" in capfd.readouterr().err
    assert find_damage(entry.folder) is None
    assert np.load(again.folder / "ids.npy")[-1] == 2_999_999
    assert make_entry(tmp_path, built).note == "hit"
    assert len(list((tmp_path / "things").glob(".*"))) == 0


def test_a_damaged_entry_that_cannot_be_replaced_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_entry(tmp_path, [])
    (entry.folder / "small").unlink()

    def refuse(*names: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(
        ConfigError, match=rf"{entry.folder} is damaged \(small is missing\) .*remove this folder"
    ):
        make_entry(tmp_path, [])


def test_the_ranks_of_a_host_read_an_entry_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_entry(tmp_path / "cache", [])
    reads: list[Path] = []
    real = cache.content_sum

    def counted(path: Path) -> str:
        reads.append(path)
        return real(path)

    monkeypatch.setattr(cache, "content_sum", counted)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for rank in range(8):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert make_entry(tmp_path / "cache", []).note == "hit"
    assert len(reads) == 2


def test_a_damaged_entry_that_other_ranks_may_read_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = make_entry(tmp_path, [])
    _flip(entry.folder / "ids.npy", -1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(
        ConfigError, match=r"was damaged \(ids.npy differs .* and is removed; .*: start again"
    ):
        make_entry(tmp_path, [])
    assert make_entry(tmp_path, []).note.startswith("miss")
    assert len(list((tmp_path / "things").glob(".*"))) == 0


def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(
        ConfigError, match=r"cache_dir=.* cannot be written \(No space left on device\): make room"
    ):
        build_once(tmp_path, "things", "a", {}, build)
    assert not list((tmp_path / "things").glob(".a*"))


def test_flipped_token_ids_change_no_loss(tmp_path: Path) -> None:
    """They once did, in silence: ids, labels and offsets of the rows, and the tokenizer with its template."""
    documents = ToyChat(num_chats=100)

    def rows() -> tuple[str, int]:
        data = tokenize_documents(documents, TokenizeJob(byte_tokenizer(MARKED)), tmp_path)
        return data.fingerprint, int(
            data.train.columns["input_ids"].astype(np.int64).sum() + data.train.offsets.sum()
        )

    want = rows()
    for name in ("input_ids.bin", "labels.bin", "offsets.bin", "findings.json", "content.sha256"):
        for path in tmp_path.glob(f"tokens/*train*/{name}"):
            _flip(path, path.stat().st_size // 2)
        assert rows() == want


@pytest.mark.slow
@pytest.mark.parametrize("column", ["input_ids", "labels", "offsets"])
def test_rows_that_are_cut_short_while_they_are_mapped(column: str, tmp_path: Path) -> None:
    """Reading on would end the process by SIGBUS; a folder that is removed as a whole hurts nobody."""
    documents = ToyChat(num_chats=200)
    data = tokenize_documents(documents, TokenizeJob(byte_tokenizer(MARKED)), tmp_path).train
    again = pickle.loads(pickle.dumps(data))  # as workers get them
    assert len(again[19]["input_ids"]) > 5
    os.truncate(data.folder / f"{column}.bin", 72)
    for mapped in (data, again):
        for read in (lambda rows: rows[19], lambda rows: rows.locate(np.array([19]))):
            with pytest.raises(
                DataError, match=rf"{column}.bin: the file was truncated while it was being read"
            ):
                read(mapped)


def test_a_cache_where_nothing_can_be_made_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cache_dir=/proc/x cannot be written \(.*set cache_dir"):
        build_once(Path("/proc/x"), "tokens", "a", {}, lambda folder: None)


def test_copies_of_data_lie_in_the_cache_of_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They once filled the default one, whatever cache_dir said."""
    monkeypatch.setenv("AUTOMODEL_LITE_CACHE", str(tmp_path / "default"))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    own = [f"dataset.path={path}", f"cache_dir={tmp_path / 'own'}", "name=x", "model.pretrained=y"]
    config = config_of("finetune", tmp_path / "run", *own)
    assert len(build_documents(config).train) == 2
    assert [one.name for one in (tmp_path / "own").iterdir()] == ["decompressed"]
    assert not (tmp_path / "default").exists()
    build_part(config.dataset)  # of no run
    assert (tmp_path / "default/decompressed").is_dir()


def test_an_entry_that_another_job_renames_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job once ended with a FileNotFoundError where another one finished an entry at the same moment."""
    real = Path.glob

    def glob(folder: Path, pattern: str) -> list[Path]:
        return [*real(folder, pattern), folder / ".tokens-1.7/key.json"]

    monkeypatch.setattr(Path, "glob", glob)
    for value, note in (("a", "miss (first time)"), ("b", "miss (changed: tokenizer)")):
        entry = build_once(tmp_path, "rows", "tokens", {"tokenizer": value}, lambda folder: None)
        assert entry.note == note
