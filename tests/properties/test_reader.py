"""An independent reader of drawn files: forms x trees x streams x masks x cuts; labels with their contexts, and denominators."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from automodel_lite.config.schema import DataloaderConfig, MeshConfig, TokenizeConfig
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.source import Cursor
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import DataError
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.parts.datasets.streams import StreamedPacks, StreamingDataset
from automodel_lite.thd import to_thd
from tests.data.templates import MARKED, byte_tokenizer
from tests.properties.explore import SEED

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
TOKENIZER = byte_tokenizer(MARKED)
CHATS, PAIRS = ("messages", "conversations"), ("prompt", "question", "alpaca", "responses", "text")
FORMS = (*CHATS, *PAIRS)
MASKS = ("assistant", "last_assistant", "completion", "all")
Turn = tuple[str, str, int]  # role, text, weight
Labels = Counter[tuple[tuple[int, ...], int]]  # (the tokens before and with the position, label)


def draw_text(draw: random.Random) -> str:
    """From one byte to a hundred; half of the long ones begin alike, for trees."""
    kind = draw.random()
    if kind < 0.3:
        return "same " * 16 + draw.choice("abc") * draw.randint(1, 20)
    letters = "abcXYZ ,;\n\u2028üé漢😀\"'|\t0"
    body = "".join(draw.choices(letters, k=draw.randint(0, 60 if kind < 0.7 else 6)))
    return f"<{body}>"


def draw_rows(draw: random.Random, form: str) -> list[tuple[dict[str, Any], list[list[Turn]]]]:
    """(a row of the file, the chats that it means)."""
    rows: list[tuple[dict[str, Any], list[list[Turn]]]] = []
    for _ in range(draw.randint(1, 25)):
        question, answer = draw_text(draw), draw_text(draw)
        pair: list[Turn] = [("user", question, 1), ("assistant", answer, 1)]
        if form == "messages":
            chat: list[Turn] = []
            for _ in range(draw.randint(1, 3)):
                silent = draw.random() < 0.2
                chat += [("user", draw_text(draw), 1), ("assistant", draw_text(draw), 1 - silent)]
            keys = ("role", "content", "weight")
            turns = [dict(zip(keys if turn[2] == 0 else keys[:2], turn)) for turn in chat]
            rows.append(({"messages": turns}, [chat]))
        elif form == "conversations":
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            rows.append(({"conversations": turns}, [pair]))
        elif form == "prompt":
            rows.append(({"prompt": question, "completion": answer}, [pair]))
        elif form == "question":
            rows.append(({"question": question, "answer": answer}, [pair]))
        elif form == "alpaca":
            rows.append(({"instruction": question, "input": "", "output": answer}, [pair]))
        elif form == "responses":
            answers = [draw_text(draw) for _ in range(draw.randint(1, 4))]
            chats: list[list[Turn]] = [[pair[0], ("assistant", one, 1)] for one in answers]
            rows.append(({"prompt": question, "responses": answers}, chats))
        else:
            rows.append(({"text": answer}, [[("text", answer, 1)]]))
    return rows


def write(draw: random.Random, folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    """In one of the formats that hold such rows."""
    kinds = ["jsonl", "json", "jsonl.gz", "parquet"]
    if form not in (*CHATS, "responses"):
        kinds += ["csv", "tsv"]
        kinds += ["semicolon.csv"] if len(rows[0]) > 1 else []  # of one column nothing shows it
    kind = draw.choice(kinds)
    path = folder / f"a.{kind}"
    if kind.endswith(("csv", "tsv")):
        delimiter = {"csv": ",", "semicolon.csv": ";", "tsv": "\t"}[kind]
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(lines) if kind.endswith("gz") else lines)
    return path


def read_independently(chats: list[list[Turn]], train_on: str, size: int, overlong: str) -> Labels:
    """By the page's words alone: what each chat trains, after which tokens."""
    found: Labels = Counter()
    for chat in chats:
        answers = [n for n, (role, _, _) in enumerate(chat) if role == "assistant"]
        asked = [n for n, (role, _, _) in enumerate(chat) if role == "user"]
        ids: list[int] = []
        trained: list[bool] = []
        for number, (role, text, weight) in enumerate(chat):
            head = "" if role == "text" else f"<|{role}|>"
            is_on = (
                role == "text"
                or {
                    "assistant": number in answers,
                    "last_assistant": number == answers[-1:][0] if answers else False,
                    "completion": number in answers and number > max(asked, default=-1),
                    "all": True,
                }[train_on]
            )
            own = TOKENIZER(head, add_special_tokens=False)["input_ids"] if head else []
            said = TOKENIZER(f"{text}<|end|>", add_special_tokens=False)["input_ids"]
            ids += [*own, *said]
            trained += [train_on == "all" and bool(weight)] * len(own)
            trained += [bool(is_on and weight)] * len(said)
        labels = [ids[i + 1] if trained[i + 1] else -100 for i in range(len(ids) - 1)] + [-100]
        starts = range(0, len(ids), size)
        if len(ids) > size and overlong == "drop":
            continue
        for start in starts[:1] if overlong == "truncate" else starts:
            for place in range(start, min(start + size, len(ids))):
                if labels[place] != -100:
                    found[tuple(ids[start : place + 1]), labels[place]] += 1
    return found


def read_batches(batches: Iterator[dict[str, Any]]) -> tuple[Labels, float]:
    """Labels of packs by the path of their positions, times their weights; and the denominators."""
    found: Labels = Counter()
    count = 0.0
    for batch in batches:
        count += to_thd(batch, False).num_label_tokens
        columns = (batch[name].tolist() for name in ("input_ids", "labels", "position_ids"))
        weights = batch["loss_weights"].tolist() if "loss_weights" in batch else None
        path: list[int] = []
        for at, (token, label, place) in enumerate(zip(*columns)):
            path = [*path[:place], token]
            if label != -100:
                found[tuple(path), label] += weights[at] if weights else 1  # type: ignore[assignment]
    return found, count


def trial(number: int) -> str:
    """Draws a case and compares; returns its kind, or what it was refused with."""
    draw = random.Random(f"{SEED} {number}")
    form, train_on = draw.choice(FORMS), draw.choice(MASKS)
    tree = draw.choice(["off", "auto", "all"])
    overlong = draw.choice(["drop", "truncate", "split"])
    size, is_stream = draw.choice([64, 128, 256, 1024]), draw.random() < 0.4
    multiple = draw.choice([1, 2, 4])
    if form == "text":
        train_on = "all" if draw.random() < 0.5 else "assistant"
    rows = draw_rows(draw, form)
    chats = [chat for _, own in rows for chat in own]
    wanted = read_independently(chats, train_on, size, overlong)
    settings = TokenizeConfig(train_on=train_on, max_bad_frac=1.0)
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        os.environ["AUTOMODEL_LITE_CACHE"] = folder
        path = write(draw, Path(folder), form, [row for row, _ in rows])
        job = TokenizeJob(TOKENIZER, settings, tree, size)
        packer = Packer(size, overlong=overlong, tree=tree, slot_multiple=multiple, seed=number)  # type: ignore[arg-type]
        try:
            if is_stream:
                batch = draw.randint(1, 4)
                dataset = StreamingDataset(str(path), num_shards=draw.choice([1, 2, 3, 8]))
                shape, mesh = BatchShape(batch, 1, 1), init_mesh(MeshConfig())
                source = StreamedPacks(
                    dataset, job, packer, {}, (), shape, DataloaderConfig(), tree != "off", size
                )
                steps = source.steps(Cursor(), mesh, CostModel(1.0, 0.0))
                epoch = takewhile(lambda step: step.epoch == 0, steps)
                found, count = read_batches(one for step in epoch for one in step.micro_batches)
            else:
                tokens = tokenize_documents(FilesDataset(str(path)), job, folder).train
                packs = packer.packs(tokens)
                ids = range(len(packs))
                found, count = read_batches(packs.__getitems__([i]).row for i in ids)
        except DataError as error:
            # nothing is left to train on, or a third of the tokens is dropped
            if wanted and "over-long" not in str(error) and "would be dropped" not in str(error):
                raise
            return "refused"
    case = (number, form, train_on, tree, overlong, size, is_stream, multiple)
    assert found == wanted, (case, len(found), len(wanted))
    assert count == wanted.total(), (case, count, wanted.total())
    return f"{'stream' if is_stream else 'file'}, tree={tree}"


@pytest.mark.parametrize("num_trials", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_an_independent_reader_finds_the_same_labels(num_trials: int) -> None:
    kinds = Counter(trial(number) for number in range(num_trials))
    print(dict(kinds))
    assert kinds["refused"] < num_trials / 2
