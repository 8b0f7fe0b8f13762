"""What is said to the user: closest names, one line, nothing that a terminal would obey; what an error is a sign of."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist

from automodel_lite.errors import (
    MISTAKE_EXIT,
    ConfigError,
    DataError,
    PeerError,
    counted,
    did_you_mean,
    format_value,
    is_limit,
    is_lost_peer,
    is_out_of_memory,
    one_line,
    printable,
    system_errors,
)
from automodel_lite.run.ending import ending_of

KEYS = [
    "optimizer.lr",
    "optimizer.weight_decay",
    "training.max_steps",
    "training.precision",
    "model.pretrained",
    "seed",
]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("training.max_stepz", "training.max_steps"),  # the last part, in its group
        ("trainng.precision", "training.precision"),  # the group
        ("max_steps", "training.max_steps"),  # a key without its group
        ("optimizer.max_steps", "training.max_steps"),  # of another group
        ("sead", "seed"),
        ("Max_Steps", "training.max_steps"),
        ("SEED", "seed"),
    ],
)
def test_the_closest_key_is_named(name: str, found: str) -> None:
    assert did_you_mean(name, KEYS) == f"; did you mean {found}?"


@pytest.mark.parametrize("name", ["training.zzz", "xyz", "optimizer.", ""])
def test_what_is_like_no_key_gets_no_proposal(name: str) -> None:
    assert did_you_mean(name, KEYS) == "."


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("1 document", (1, "document")),
        ("0 documents are", (0, "document", "is")),
        ("1,121 rows have", (1121, "row", "has")),
        ("1 row does", (1, "row", "does")),
        ("2 packs make", (2, "pack", "makes")),
    ],
)
def test_one_thing_is_singular(said: str, words: tuple[int, str, str]) -> None:
    assert counted(*words) == said


def test_the_verb_follows_the_number_and_the_noun_what_it_is_of() -> None:
    assert counted(1, "row", "has", of=60) == "1 of 60 rows has"
    assert counted(2, "row", "is", of=60) == "2 of 60 rows are"
    assert counted(1, "row", "is", of=1) == "1 of 1 row is"


def test_private_names_are_not_proposed() -> None:
    assert did_you_mean("_targt_", ["_target_"]) == "."


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_a_message_cannot_write_to_the_terminal(kind: type[Exception]) -> None:
    """A column may be named after an escape sequence, which would clear the screen; lines of a message stay."""
    assert (
        str(kind("column \x1b[2J\ud800ü\r\nis missing")) == "column \\x1b[2J\\ud800ü\\r\nis missing"
    )


def test_printable_keeps_what_is_asked() -> None:
    assert printable("a\tb\nc\x00") == "a\\tb\\nc\\x00"
    assert printable("a\tb\nc", kept="\t\n") == "a\tb\nc"


def test_an_error_in_a_sentence_is_one_line() -> None:
    assert one_line(ValueError("first\n\n   second  third\n")) == "first second third"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert one_line("x" * 400) == "x" * 300


@pytest.mark.parametrize(
    ("value", "typed"), [(None, "null"), (True, "true"), (0.1, "0.1"), ("True", "True"), (1, "1")]
)
def test_values_as_they_are_typed(value: object, typed: str) -> None:
    assert format_value(value) == typed


def test_a_peers_error_ends_with_the_peers_code() -> None:
    assert PeerError("rank 1: no").exit_code == MISTAKE_EXIT == 2
    assert PeerError("rank 1: stopped", 75).exit_code == 75
    assert isinstance(PeerError("x"), ConfigError)


def test_what_the_other_rank_could_not_print_is_told_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A killed rank 0 takes the store along: the others of its host once ended without a word."""
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert not ending_of(PeerError("rank 0: no")).is_shown
    assert ending_of(PeerError("the store is gone", 1, is_printed=False)).is_shown


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (dist.DistNetworkError("unreachable"), True),
        (dist.DistBackendError("x"), True),
        (
            RuntimeError(
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
            ),
            True,
        ),
        (RuntimeError("NCCL communicator was aborted on rank 3"), True),
        (RuntimeError("shape '[2, 3]' is invalid"), False),
        (ValueError("Connection reset by peer"), False),  # a download, say
    ],
    ids=str,
)
def test_which_errors_tell_of_a_lost_peer(error: Exception, is_so: bool) -> None:
    assert is_lost_peer(error) is is_so


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 64 bytes."), True),
        (RuntimeError("you tried to allocate 64 bytes"), False),
        (OSError("No space left on device"), False),
    ],
    ids=["python", "gpu", "cpu", "another allocator", "disk"],
)  # fmt: skip
def test_which_errors_tell_of_memory(error: Exception, is_so: bool) -> None:
    assert is_out_of_memory(error) is is_so


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("Too many open files"), True),
        (ValueError("of a row"), False),
    ],
    ids=["memory", "threads", "files", "a mistake"],
)
def test_which_errors_tell_of_a_limit_of_the_machine(error: Exception, is_so: bool) -> None:
    assert is_limit(error) is is_so


def test_torchs_own_message_is_recognized() -> None:
    """It is matched by its text, which another version may change."""
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(error.value)


def test_an_error_of_a_package_in_rust_is_the_systems() -> None:
    with pytest.raises(OSError, match="No space left") as raised, system_errors():
        raise Exception("No space left on device (os error 28)")
    assert ending_of(raised.value).text.startswith("No space left on device (os error 28): make")
    with pytest.raises(Exception, match=r"^data did not match$") as other, system_errors():
        raise Exception("data did not match")
    assert not isinstance(other.value, OSError)


def test_a_bad_row_keeps_its_cures_on_the_way_to_its_place() -> None:
    """Out of a worker too, which pickles it."""
    error = DataError("no answer", key="dataset.columns", cure="add one", can_skip=True)
    moved = pickle.loads(pickle.dumps(error.at("a.jsonl:3")))
    skip = "or leave bad rows out with tokenize.on_bad_row=skip"
    assert str(moved) == f"a.jsonl:3: no answer: add one, {skip}."
    assert moved.left_out() == "a.jsonl:3: no answer: add one."
    assert moved.key == "dataset.columns"
