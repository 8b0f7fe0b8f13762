"""From files to packs: what is left out is judged with the labels that are left once documents are cut."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from automodel_lite.config.schema import TokenizeConfig
from automodel_lite.data.feeding.planned import check_masked
from automodel_lite.data.packing.packs import Packer, size_that_keeps
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.token_rows import RowCounts, flatten
from automodel_lite.data.tokens.tokenize import Job, tokenize_documents
from automodel_lite.errors import DataError
from tests.data.templates import MARKED, byte_tokenizer

_ = -100
SHORT = {"input_ids": [1, 2, 3], "labels": [_, 3, _]}
LATE = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [_, _, _, _, 6, _]}  # its answer is behind the fourth token
EARLY = {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [2, _, _, _, _, _]}


def test_documents_without_a_label_after_cutting_are_left_out() -> None:
    rows = flatten([SHORT, LATE, EARLY])
    plan = plan_packs(rows.lengths, 4, overlong="truncate", has_labels=rows.has_labels)
    assert sorted(plan.doc_ids.tolist()) == [0, 2]
    counts = plan.counts
    assert (counts.masked_documents, counts.masked_tokens, counts.cut_tokens, counts.packed_tokens) == (1, 4, 4, 7)
    assert counts.packed_documents == 2
    with pytest.raises(DataError, match=r"train: 1 of 3 documents have nothing trained on within .*=4: .* allows 0"):
        check_masked("train", plan, {"train": RowCounts(3, 3)}, 0.05)
    check_masked("train", plan, {"train": RowCounts(3, 3)}, 0.4)


def test_pieces_without_a_label_are_left_out() -> None:
    rows = flatten([SHORT, LATE, EARLY])
    plan = plan_packs(rows.lengths, 4, overlong="split", has_labels=rows.has_labels)
    pieces = sorted(zip(plan.doc_ids.tolist(), plan.starts.tolist(), plan.stops.tolist()))
    assert pieces == [(0, 0, 3), (1, 4, 6), (2, 0, 4)]
    assert (plan.counts.masked_documents, plan.counts.masked_tokens) == (0, 6)


def test_nothing_is_left_to_train_on() -> None:
    rows = flatten([LATE])
    with pytest.raises(DataError, match=r"no document has a label within packed_sequence.packed_sequence_size=4"):
        plan_packs(rows.lengths, 4, overlong="truncate", has_labels=rows.has_labels)


def test_dropping_much_must_be_meant() -> None:
    lengths = np.array([100] * 98 + [900, 1300])
    assert (size_that_keeps(lengths), size_that_keeps(lengths, 0.85)) == (1408, 1024)
    packer = Packer(512)
    with pytest.raises(
        DataError, match=r"train: .*=512 would be dropped, with 22% .*_size=1408 \(keeps 99 %\), .*=split"
    ):
        packer.check_dropped(2200, 12000, "train", lengths) or packer.check_dropped(2600, 12000, "train", lengths)
    packer.check_dropped(2000, 12000, "train", lengths)
    Packer(512, overlong="drop").check_dropped(12000, 12000, "train", lengths)
    assert (packer.fitted_to("text").overlong, packer.fitted_to("messages").overlong) == ("split", "drop")
    assert Packer(512, overlong="drop").fitted_to("text").overlong == "drop"


def test_special_tokens_in_the_text_of_users_are_noted(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "x"}] for text in ("a", "b<|end|>")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    data = tokenize_documents(
        FilesDataset(str(tmp_path / "a.jsonl")), Job(byte_tokenizer(MARKED), TokenizeConfig()), tmp_path
    )
    assert data.counts["train"].num_with_special_tokens == 1
    assert data.notes[1] == (
        "NOTE: train: 1 documents have special tokens in their text, which become real ones (first: a.jsonl:2: <|end|>)"
    )


def test_what_nothing_uses_is_named_wherever_it_begins(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a", "name": "Eve"}, {"role": "assistant", "content": "x", "origin": "web"}]
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]}] * 30
    rows += [{"messages": turns, "is_correct": False, "text": "other", "notes": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = Job(byte_tokenizer(MARKED), TokenizeConfig())
    (note,) = tokenize_documents(FilesDataset(str(tmp_path / "a.jsonl")), job, tmp_path).notes[1:]
    assert note.startswith("NOTE: train: ignored, as nothing uses them: is_correct (a.jsonl:31), text (a.jsonl:31)")
    assert "name of a turn (a.jsonl:31)" in note
    assert "origin of a turn (a.jsonl:31)" in note
    assert "notes" not in note


def test_empty_answers_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\na,\nb,c\n")
    job = Job(byte_tokenizer(MARKED), TokenizeConfig())
    notes = tokenize_documents(FilesDataset(str(tmp_path / "a.csv")), job, tmp_path).notes
    assert notes[1:] == ("NOTE: train: 1 rows train only the end of an answer, which is empty",)


@pytest.mark.parametrize("key", ["rationale", "thoughts", "inner_thought", "cot", "reasoning_text"])
def test_thoughts_under_any_name_are_not_dropped(tmp_path: Path, key: str) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x", key: "because"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with pytest.raises(DataError, match=f"a.jsonl:1: message 1 has {key} that the chat template does not write"):
        tokenize_documents(FilesDataset(str(tmp_path / "a.jsonl")), Job(byte_tokenizer(MARKED)), tmp_path)


def test_functions_of_the_older_form_are_tools(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns, "functions": [{"name": "weather"}]}) + "\n")
    document = FilesDataset(str(tmp_path / "a.jsonl")).train[0]
    assert document["tools"] == [{"type": "function", "function": {"name": "weather"}}]


def test_a_template_that_never_ends_is_named(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    from automodel_lite.data.tokens import tokenize

    monkeypatch.setattr(tokenize, "STALL_S", 0.2)
    slow = MARKED.template.replace(
        "{%- for message",
        "{% if messages | length > 2 %}{% for a in range(99999) %}{% for b in range(300) %}{% endfor %}{% endfor %}{% endif %}{%- for message",
        1,
    )
    tokenizer = byte_tokenizer(MARKED)
    tokenizer.chat_template = slow
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": c}) + "\n" for c in (chat, chat * 2)))
    tokenize_documents(FilesDataset(str(tmp_path / "a.jsonl")), Job(tokenizer, TokenizeConfig()), tmp_path)
    assert "WARNING: a.jsonl:2 has been with the chat template for 0 s" in capsys.readouterr().err
