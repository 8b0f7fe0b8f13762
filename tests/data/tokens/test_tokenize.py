"""From documents to token rows: labels, counts, what is refused, and the cache."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers.normalizers import NFC

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.reading.documents import DocumentList
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob, _process_context, tokenize_chunks
from automodel_lite.data.tokens.findings import mark_trained
from automodel_lite.data.tokens.token_rows import TokenizedDocuments
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.data.tokens.tokenizer import train_bpe_tokenizer
from automodel_lite.errors import DataError
from automodel_lite.launched import start_ticks
from automodel_lite.parts.datasets.toy_chat import ToyChat
from tests.data.templates import FAMILIES, LLAMA3, MARKED, Family, byte_tokenizer
from tests.data.tokens.given import HELLO, HI, Given, chats, token_file, tokenized
from tests.ranks import fork_server

_ = -100
USER, ASSISTANT, END = 256, 257, 260  # ids of the special tokens of MARKED


def as_lists(rows: TokenizedDocuments) -> list[tuple[list[int], list[int]]]:
    return [(rows[i]["input_ids"].tolist(), rows[i]["labels"].tolist()) for i in range(len(rows))]


def test_labels_are_the_next_token_of_what_the_assistant_says(tmp_path: Path) -> None:
    rows = tokenized(chats([HI, HELLO]), tmp_path).train
    h, i, y, o = (sorted_alphabet_id(letter) for letter in "HiYo")
    assert as_lists(rows) == [([USER, h, i, END, ASSISTANT, y, o, END], [_, _, _, _, y, o, END, _])]


def sorted_alphabet_id(letter: str) -> int:
    return byte_tokenizer(MARKED).get_vocab()[letter]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rows_show_the_mask_of_the_text(tmp_path: Path, family: str) -> None:
    tokenizer = byte_tokenizer(FAMILIES[family])
    rows = tokenize_documents(chats([HI, HELLO]), TokenizeJob(tokenizer), tmp_path).train
    text = mark_trained(tokenizer, rows[0]["input_ids"], rows[0]["labels"])
    assert text.count("⟦") == text.count("⟧") == 1
    assert "Yo" in text[text.index("⟦") : text.index("⟧")]
    assert text.replace("⟦", "").replace("⟧", "") == tokenizer.apply_chat_template(
        [HI, HELLO], tokenize=False
    )
    bos = FAMILIES[family].bos
    assert bos is None or text.count(bos) == 1


@pytest.mark.parametrize(
    ("document", "family", "text"),
    [
        ({"prompt": "1+1", "completion": "2"}, MARKED, "<|user|>1+1<|end|><|assistant|>⟦2<|end|>⟧"),
        (
            {"prompt": "1+1", "completion": "2", "system": "S"},
            MARKED,
            "<|system|>S<|end|><|user|>1+1<|end|><|assistant|>⟦2<|end|>⟧",
        ),
        ({"prompt": "1+1", "completion": "2"}, None, "1+1\n⟦2</s>⟧"),
        ({"prompt": "1+1 ", "completion": "2"}, None, "1+1 ⟦2</s>⟧"),
        ({"text": "abc"}, None, "a⟦bc</s>⟧"),
        ({"text": "abc</s>"}, None, "a⟦bc</s>⟧"),
    ],
    ids=[
        "template",
        "template with system",
        "plain",
        "plain with its own space",
        "text",
        "text with its own end",
    ],
)
def test_documents_of_other_kinds(
    tmp_path: Path, document: dict, family: Family | None, text: str
) -> None:
    tokenizer = byte_tokenizer(family or Family("", ("</s>",), "</s>"))
    if family is None:
        tokenizer.chat_template = None
    kind = "text" if "text" in document else "prompt_completion"
    rows = tokenize_documents(
        Given(DocumentList([document], "x"), kind), TokenizeJob(tokenizer), tmp_path
    ).train
    assert mark_trained(tokenizer, rows[0]["input_ids"], rows[0]["labels"]) == text


def test_a_trimmed_space_belongs_to_its_word(tmp_path: Path) -> None:
    """Byte-level tokenizers leave a leading space out of the offsets of ` 4`; the token is trained all the same."""
    documents = Given(
        DocumentList([{"prompt": "2 + 2 =", "completion": " 4 or four"}] * 50, "x"),
        "prompt_completion",
    )
    tokenizer = train_bpe_tokenizer(ToyChat(num_chats=50), 300, cache_dir=tmp_path)
    tokenizer.chat_template = None
    rows = tokenize_documents(documents, TokenizeJob(tokenizer), tmp_path).train
    assert (
        mark_trained(tokenizer, rows[0]["input_ids"], rows[0]["labels"])
        == "2 + 2 =⟦ 4 or four<|end|>⟧"
    )


@pytest.mark.parametrize(
    "text", ["🙂", "é", "日本", "a🙂b"], ids=["emoji", "accent", "two of three bytes", "inside"]
)
def test_all_bytes_of_a_character_are_trained(tmp_path: Path, text: str) -> None:
    tokenizer = byte_tokenizer(MARKED)
    rows = tokenize_documents(
        chats([HI, {**HELLO, "content": text}]), TokenizeJob(tokenizer), tmp_path
    ).train
    num_bytes = len(text.encode())
    assert (rows[0]["labels"] != _).sum() == num_bytes + 1
    assert mark_trained(tokenizer, rows[0]["input_ids"], rows[0]["labels"]).endswith(
        f"⟦{text}<|end|>⟧"
    )


@pytest.mark.parametrize(
    ("row", "expected", "note"),
    [
        ({"input_ids": [1, 2, 3, 4], "labels": [_, 3, 4, _]}, [_, 3, 4, _], "next-token aligned"),
        (
            {"input_ids": [1, 2, 3, 4], "labels": [_, _, 3, 4]},
            [_, 3, 4, _],
            "unshifted (shifted once here)",
        ),
        (
            {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
            [_, 3, 4, _],
            "unshifted (shifted once here)",
        ),
        (
            {
                "input_ids": [1, 2, 3, 0, 0],
                "labels": [_, 3, _, _, _],
                "attention_mask": [1, 1, 1, 0, 0],
            },
            [_, 3, _],
            "next-token aligned",
        ),
    ],
    ids=["aligned", "unshifted", "loss mask", "padded"],
)
def test_given_labels_are_aligned_once(
    tmp_path: Path, row: dict, expected: list, note: str
) -> None:
    documents = token_file(tmp_path / "a.jsonl", row)
    assert documents.description.endswith(f"→ tokens, labels {note}")
    assert as_lists(tokenized(documents, tmp_path).train)[0][1] == expected


def test_packed_rows_are_taken_apart(tmp_path: Path) -> None:
    pack = {
        "input_ids": [1, 2, 3, 0, 4, 5, 6, 0],
        "labels": [_, 3, _, _, 5, 6, _, _],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
        "seq_lens": [3, 3],
        "seq_lens_padded": [4, 4],
    }
    documents = token_file(tmp_path / "a.jsonl", pack, pack)
    rows = tokenized(documents, tmp_path).train
    assert as_lists(rows) == [([1, 2, 3], [_, 3, _]), ([4, 5, 6], [5, 6, _])] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"input_ids": [1, 2, 900]},
            "a.jsonl:1: column input_ids holds ids from 1 to 900, and the tokenizer has",
        ),
        ({"input_ids": [1, 2, 3]}, "a.jsonl:1: has input_ids without labels: set train_on=all"),
        (
            {"input_ids": [1, 2], "labels": [1]},
            "a.jsonl:1: column labels has 1 value and input_ids 2",
        ),
        (
            {"input_ids": [1, "2"]},
            "a.jsonl:1: column input_ids must be a list of integers, not list",
        ),
        ({"input_ids": [[1], [2]]}, "a.jsonl:1: column input_ids must be a list of integers"),
        ({"input_ids": [[1], 2]}, "a.jsonl:1: column input_ids must be a flat list of integers."),
    ],
    ids=["another tokenizer", "no labels", "lengths", "text", "nested", "ragged"],
)
def test_token_rows_that_cannot_be(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(DataError) as caught:
        tokenized(token_file(tmp_path / "a.jsonl", row), tmp_path)
    assert str(caught.value).startswith(message)


def test_token_ids_without_labels_are_trained_whole_when_asked(tmp_path: Path) -> None:
    rows = tokenized(
        token_file(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3]}), tmp_path, train_on="all"
    ).train
    assert as_lists(rows) == [([1, 2, 3], [2, 3, _])]


def test_labels_of_neither_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="of 3 labels 1 are the next token and 1 the token itself"):
        token_file(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3, 4], "labels": [2, 2, 9, _]})


def test_a_bad_row_stops_by_default(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"^given\[1\]: has no assistant message, so nothing is trained on"
    ):
        tokenized(chats([HI, HELLO], [HI]), tmp_path)


# --------------------------------------------------------------------------------------------------------- cache
def test_cache_says_hit_or_miss_and_what_changed(tmp_path: Path) -> None:
    documents = chats([HI, HELLO])

    def note(**options: Any) -> str:
        return tokenized(documents, tmp_path, **options).notes[0].rpartition("cache: ")[2]

    assert note() == "miss (first time)"
    assert note() == "hit"
    assert note(train_on="last_assistant") == "miss (changed: train_on)"
    assert note(family=LLAMA3) == (
        "miss (changed: tokenizer, tokenizer.chat_template, tokenizer.special_tokens)"
    )
    assert note() == "hit"


def test_the_key_is_readable(tmp_path: Path) -> None:
    data = tokenized(chats([HI, HELLO]), tmp_path)
    assert data.train.folder is not None
    key = json.loads((data.train.folder / "key.json").read_text())["key"]
    assert key["train_on"] == "assistant"
    assert {"dataset", "tokenizer", "tokenizer.chat_template"} <= key.keys()


def test_a_changed_file_is_tokenized_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [HI, HELLO]}) + "\n")
    first = tokenized(FilesDataset(str(path)), tmp_path)
    path.write_text(json.dumps({"messages": [HI, {**HELLO, "content": "No"}]}) + "\n")
    second = tokenized(FilesDataset(str(path)), tmp_path)
    assert first.fingerprint != second.fingerprint
    assert as_lists(first.train) != as_lists(second.train)
    assert second.notes[0].endswith("miss (changed: dataset)")


@pytest.mark.system
def test_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    fork_server()
    documents = ToyChat(num_chats=1200)
    tokenizer = train_bpe_tokenizer(documents, 300, cache_dir=tmp_path)
    alone = tokenize_documents(
        documents, TokenizeJob(tokenizer, TokenizeConfig(num_proc=1)), tmp_path / "1"
    ).train
    two = tokenize_documents(
        documents, TokenizeJob(tokenizer, TokenizeConfig(num_proc=2)), tmp_path / "2"
    ).train
    assert np.array_equal(alone.columns["input_ids"], two.columns["input_ids"])
    assert np.array_equal(alone.columns["labels"], two.columns["labels"])
    assert np.array_equal(alone.offsets, two.offsets)


def tokenize_and_die(noted: Path) -> None:
    documents = chats(*[[HI, HELLO]] * 1500).train
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig(num_proc=2))
    next(tokenize_chunks(documents, job, range(1500)))
    noted.write_text(json.dumps([worker.pid for worker in multiprocessing.active_children()]))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.system
def test_no_process_outlives_a_job_that_is_killed(tmp_path: Path) -> None:
    noted = tmp_path / "workers.json"
    job = fork_server().Process(target=tokenize_and_die, args=(noted,))
    job.start()
    job.join()
    assert job.exitcode == -signal.SIGKILL
    workers = json.loads(noted.read_text())
    assert len(workers) == 2
    latest = time.monotonic() + 100
    while any(start_ticks(worker) for worker in workers):
        assert time.monotonic() < latest
        time.sleep(0.1)


def test_no_socket_where_the_temporary_path_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_server()
    assert _process_context().get_start_method() == "forkserver"
    monkeypatch.setattr(tempfile, "tempdir", f"/{80 * 'x'}")
    assert _process_context().get_start_method() == "spawn"


def test_a_bad_row_is_named_from_another_process(tmp_path: Path) -> None:
    fork_server()
    documents = chats(*[[HI, HELLO]] * 1500, [HI])
    with pytest.raises(
        DataError, match=r"^given\[1500\]: has no assistant message, so nothing is trained on"
    ):
        tokenized(documents, tmp_path, num_proc=2)


def test_special_tokens_in_the_text_of_users_are_noted(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
        for text in ("a", "b<|end|>")
    ]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    data = tokenize_documents(
        FilesDataset(str(tmp_path / "a.jsonl")),
        TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig()),
        tmp_path,
    )
    assert data.notes[1] == (
        "NOTE: train: 1 document has special tokens in the text, which become real ones (first: a.jsonl:2: <|end|>)"
    )


def test_special_tokens_in_answers_are_noted_apart(tmp_path: Path) -> None:
    answers = ("a", "b<|end|>\n", "<|assistant|>c")
    chats_of = [[HI, {"role": "assistant", "content": answer}] for answer in answers]
    rows = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats_of)
    (tmp_path / "a.jsonl").write_text(rows)
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig())
    data = tokenize_documents(FilesDataset(str(tmp_path / "a.jsonl")), job, tmp_path)
    assert data.notes[1:] == (
        "NOTE: train: 1 document has special tokens in answers, where they are trained on (first: a.jsonl:3: <|assistant|>)",
    )


def test_what_tables_write_for_no_value_is_noted(tmp_path: Path) -> None:
    cells = ("2", "k. A.", "n/a", "NaN", "-", "NULL", "#NV", "none", "n/a or 3", "4-2")
    rows = "".join(f"Q{number};{cell}\n" for number, cell in enumerate(cells))
    (tmp_path / "a.csv").write_text(f"instruction;output\n{rows}")
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig())
    data = tokenize_documents(FilesDataset(str(tmp_path / "a.csv")), job, tmp_path / "cache")
    said = (
        "NOTE: train: 6 documents have what tables write for no value as an answer or the end of a "
        "prompt (first: a.csv:3: k. A.): it is trained on as text; leave such rows out where it is none"
    )
    assert said in data.notes
    row = {"instruction": "Add.", "input": "nan", "output": "4"}
    (tmp_path / "b.jsonl").write_text(json.dumps(row))
    data = tokenize_documents(FilesDataset(str(tmp_path / "b.jsonl")), job, tmp_path / "cache")
    assert any("(first: b.jsonl:1: nan)" in note for note in data.notes)


def test_ends_of_texts_that_are_values_are_not_noted(tmp_path: Path) -> None:
    """What a program prints or a tool returns, rules of Markdown, minus signs, lists."""
    said = {"role": "assistant", "content": "- one\n- two\n---"}
    returned = {"role": "tool", "content": "null"}
    rows = [
        {"messages": [HI | {"content": "Sum up:\n---\nIt rains.\n---"}, said]},
        {"messages": [HI, {"role": "assistant", "content": "It prints:\nnull"}]},
        {"messages": [HI, said, returned, said]},
        {"messages": [HI, {"role": "assistant", "content": "-3"}]},
        {"messages": [HI, {"role": "assistant", "content": "None"}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "a: 1\n---"}))
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig())
    for name in ("a", "b"):
        source = FilesDataset(str(tmp_path / f"{name}.jsonl"))
        notes = tokenize_documents(source, job, tmp_path / "cache").notes
        assert not any("no value" in note for note in notes), notes


def asked(folder: Path, name: str, answers: list[str], **template_kwargs: bool) -> tuple[str, ...]:
    """The notes on chats with these answers, under the template of a published model."""
    source = (Path(__file__).parents[1] / f"chat_templates/{name}.jinja").read_text()
    specials = ("<|im_start|>", "<|im_end|>", "<｜end▁of▁sentence｜>")
    tokenizer = byte_tokenizer(Family(source, specials, specials[-1]))
    chats = [[HI, {"role": "assistant", "content": answer}] for answer in answers]
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    job = TokenizeJob(tokenizer, TokenizeConfig(template_kwargs=template_kwargs))
    return tokenize_documents(FilesDataset(str(folder / "a.jsonl")), job, folder).notes[1:]


def test_answers_that_the_prompt_does_not_lead_to_are_counted(tmp_path: Path) -> None:
    """DeepSeek-R1 is asked to think, and these answers do not; Qwen3 is asked not to, and one does."""
    (note,) = asked(tmp_path, "deepseek_r1_distill", ["Yes.", "No."])
    assert note.startswith(
        "NOTE: train: 2 documents have a last answer that is trained without the end of the prompt that the chat "
        "template writes for one (first: a.jsonl:1: '<think>\\n'): "
    )
    answers = ["Yes.", "<think>\nHm.\n</think>\n\nNo."]
    (note,) = asked(tmp_path, "qwen3", answers, enable_thinking=False)
    assert "1 document has a last answer" in note
    assert "(first: a.jsonl:2: " in note
    assert asked(tmp_path, "qwen3", answers) == ()


def test_what_nothing_uses_is_named_wherever_it_begins(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a", "name": "Eve"},
        {"role": "assistant", "content": "x", "origin": "web"},
    ]
    rows = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]}
    ] * 30
    rows += [{"messages": turns, "is_correct": False, "text": "other", "notes": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig())
    (note,) = tokenize_documents(FilesDataset(str(tmp_path / "a.jsonl")), job, tmp_path).notes[1:]
    assert note.startswith(
        "NOTE: train: ignored, as nothing uses them: is_correct (a.jsonl:31), text (a.jsonl:31)"
    )
    assert "name of a turn (a.jsonl:31)" in note
    assert "origin of a turn (a.jsonl:31)" in note
    assert "notes" not in note


def test_empty_answers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\na,\nb,c\n")
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig())
    notes = tokenize_documents(FilesDataset(str(tmp_path / "a.csv")), job, tmp_path).notes
    (note,) = notes[1:]
    assert note.startswith("NOTE: train: 1 row trains only the end of an answer: it is empty, or")


def test_pairs_of_equal_tokens_are_dropped_and_counted(tmp_path: Path) -> None:
    """Texts that differ, to a tokenizer that takes both forms of a letter as one: the loss stayed
    ln 2.
    """
    rows = [{"prompt": "a", "chosen": "caf\u00e9", "rejected": "cafe\u0301"}]
    rows += [{"prompt": "a", "chosen": f"b{n}", "rejected": "c"} for n in range(30)]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.backend_tokenizer.normalizer = NFC()
    data = tokenize_documents(
        FilesDataset(str(file), format="preference"),
        TokenizeJob(tokenizer, TokenizeConfig()),
        tmp_path,
    )
    assert (data.counts["train"].num_rows, data.counts["train"].num_equal_pairs) == (60, 1)
    assert "1 pairs of equal tokens dropped" in data.notes[0]
    file.write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match=r"nothing is left.*Of 1 pairs, chosen and rejected become"):
        tokenize_documents(
            FilesDataset(str(file), format="preference"),
            TokenizeJob(tokenizer, TokenizeConfig()),
            tmp_path,
        )


@pytest.mark.system
def test_a_template_that_never_ends_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    from automodel_lite.data.tokens import chunks

    monkeypatch.setattr(chunks, "STALL_S", 0.2)
    slow = MARKED.template.replace(
        "{%- for message",
        "{% if messages | length > 2 %}{% for a in range(99999) %}{% for b in range(300) %}{% endfor %}{% endfor %}{% endif %}{%- for message",
        1,
    )
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.chat_template = slow
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"messages": c}) + "\n" for c in (chat, chat * 2))
    )
    tokenize_documents(
        FilesDataset(str(tmp_path / "a.jsonl")), TokenizeJob(tokenizer, TokenizeConfig()), tmp_path
    )
    assert "WARNING: a.jsonl:2 has been with the chat template for 0 s" in capsys.readouterr().err
