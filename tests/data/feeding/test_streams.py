"""Streams: every document once, the same packs on any number of ranks and workers, and a position that is exact."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import datasets
import pytest

from automodel_lite.config.schema import DataloaderConfig, MeshConfig, TokenizeConfig
from automodel_lite.data.feeding.order import BatchShape
from automodel_lite.data.feeding.source import Cursor, HostStep
from automodel_lite.data.packing.packs import Packer
from automodel_lite.data.tokens.chunks import TokenizeJob
from automodel_lite.data.tokens.tokenize import tokenize_documents
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.models.flops import CostModel
from automodel_lite.parallel.mesh import init_mesh
from automodel_lite.parts.datasets.streams import ShardTurns, StreamedPacks, StreamingDataset
from tests.data.templates import MARKED, QWEN3, Family, byte_tokenizer
from tests.ranks import run_ranks

NUM_ROWS = 61
COSTS = CostModel(1.0, 0.0)


def rows() -> Iterator[dict[str, Any]]:
    """Each text holds its own number, so that a token row says which document it is."""
    for i in range(NUM_ROWS):
        yield {"prompt": "q", "completion": f"{i}," + "x" * (i * 7 % 23)}


def write(path: Path) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return str(path)


def loader_of(
    path: str | None, global_batch_size: int = 4, num_workers: int = 0, **options: Any
) -> StreamedPacks:
    mesh = init_mesh(MeshConfig())
    dataset = StreamingDataset(**({"path": path, "num_shards": 4} | options))
    shape, dataloader = (
        BatchShape(global_batch_size, 1, mesh.shape.dp),
        DataloaderConfig(num_workers=num_workers),
    )
    return StreamedPacks(
        dataset,
        TokenizeJob(byte_tokenizer(MARKED)),
        Packer(40),
        {},
        (),
        shape,
        dataloader,
        False,
        40,
    )


def documents_of(batches: HostStep) -> list[list[str]]:
    """The numbers of the documents in each pack of a step, in order of packs."""
    decode = byte_tokenizer(MARKED).decode
    packs = [batch["input_ids"].tolist() for batch in batches.micro_batches]
    return [
        [part.split(",")[0] for part in decode(pack).split("<|assistant|>")[1:]] for pack in packs
    ]


def epoch_of(loader: StreamedPacks, cursor: Cursor) -> list[tuple[list[list[str]], Cursor]]:
    own = takewhile(
        lambda batches: batches.epoch == cursor.epoch,
        loader.steps(cursor, init_mesh(MeshConfig()), COSTS),
    )
    return [(documents_of(batches), batches.after) for batches in own]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_document_once_and_the_next_epoch_is_equal(tmp_path: Path, num_workers: int) -> None:
    loader = loader_of(write(tmp_path / "a.jsonl"), num_workers=num_workers)
    first = epoch_of(loader, Cursor())
    seen = [number for packs, _ in first for pack in packs for number in pack]
    assert sorted(map(int, seen)) == list(range(NUM_ROWS))
    second = epoch_of(loader, Cursor(1))
    assert [packs for packs, _ in second] == [packs for packs, _ in first]


def uneven_rows(num_shards: int, seed: int) -> list[dict[str, Any]]:
    """Texts that fill a pack in some shards and a tenth of one in others, so that shards end at different turns."""
    rng = random.Random(f"{num_shards} {seed}")
    widest = [rng.choice([1, 8, 28]) for _ in range(num_shards)]
    return [
        {"prompt": "q", "completion": f"{i}," + "x" * rng.randint(0, widest[i % num_shards])}
        for i in range(rng.randint(1, 90))
    ]


def all_met(path: str, global_batch_size: int, num_shards: int, num_workers: int) -> list[str]:
    """The documents of this rank in the first epoch."""
    loader = loader_of(path, global_batch_size, num_workers, num_shards=num_shards)
    epoch = epoch_of(loader, Cursor())
    return [number for packs, _ in epoch for pack in packs for number in pack]


def all_met_on_ranks(
    rank: int, world_size: int, cases: list[tuple[str, int, int, int]]
) -> list[list[str]]:
    return [all_met(*case) for case in cases]


@pytest.mark.system
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_epoch_ends_when_every_shard_has_ended(tmp_path: Path, world_size: int) -> None:
    """Whatever the batch, the shards, the ranks and the workers, and however unequal the shards."""
    cases, expected = [], []
    for seed in range(4):
        for num_shards in (1, 2, 4, 8):
            for batch in (1, 2, 3, 4):
                if num_shards % world_size or batch % world_size:
                    continue
                path = tmp_path / f"{num_shards}-{seed}.jsonl"
                lines = [json.dumps(row) + "\n" for row in uneven_rows(num_shards, seed)]
                path.write_text("".join(lines))
                num_workers = 2 if (world_size, num_shards, batch, seed) == (1, 4, 4, 0) else 0
                cases.append((str(path), batch, num_shards, num_workers))
                expected.append(sorted(map(str, range(len(lines)))))
    if world_size == 1:
        ranks = [all_met_on_ranks(0, 1, cases)]
    else:
        ranks = run_ranks(all_met_on_ranks, world_size, cases)
    for case, wanted, *parts in zip(cases, expected, *ranks):
        assert sorted(number for part in parts for number in part) == wanted, case


def test_an_edit_between_what_is_hashed_is_another_stream(tmp_path: Path) -> None:
    """For what is kept of its first documents: their tokens, or a tokenizer."""
    path, line = tmp_path / "a.jsonl", json.dumps({"prompt": "q", "completion": "x" * 400}) + "\n"
    path.write_text(line * 1000)
    tokenizer, found = byte_tokenizer(MARKED), []
    for text in ("x", "y"):
        with path.open("r+") as file:
            file.seek(157 * len(line) + 100)  # behind the 64 KiB at the head, between two blocks
            file.write(text * 200)
        rows = tokenize_documents(
            StreamingDataset(str(path)), TokenizeJob(tokenizer), tmp_path / "cache"
        ).train
        found.append(tokenizer.decode(rows[157]["input_ids"]).count("y"))
    assert found == [0, 200]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resumed_after_any_step(tmp_path: Path, num_workers: int) -> None:
    path = write(tmp_path / "a.jsonl")
    whole = epoch_of(loader_of(path), Cursor())
    for stop in range(1, len(whole), 1 if num_workers == 0 else 3):
        # as a checkpoint keeps it
        saved = json.loads(json.dumps({"shards": whole[stop - 1][1].shards}))
        cursor = Cursor(0, whole[stop - 1][1].packs, saved["shards"])
        rest = epoch_of(loader_of(path, num_workers=num_workers), cursor)
        assert [packs for packs, _ in rest] == [packs for packs, _ in whole[stop:]]


def test_resumed_at_the_edge_of_an_epoch(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    whole = epoch_of(loader_of(path), Cursor())
    after_last = next(loader_of(path).steps(whole[-1][1], init_mesh(MeshConfig()), COSTS))
    assert after_last.epoch == 1
    assert documents_of(after_last) == whole[0][0]


def steps_on_ranks(rank: int, world_size: int, path: str) -> list:
    loader = loader_of(path)
    steps = epoch_of(loader, Cursor())
    return [
        (packs, after.gather(init_mesh(MeshConfig())).shards, after.packs) for packs, after in steps
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_packs_do_not_depend_on_ranks(tmp_path: Path, world_size: int) -> None:
    path = write(tmp_path / "a.jsonl")
    alone = epoch_of(loader_of(path), Cursor())
    ranks = run_ranks(steps_on_ranks, world_size, path)
    for step, (packs, _) in enumerate(alone):
        dealt = [ranks[k % world_size][step][0][k // world_size] for k in range(4)]
        assert dealt == packs


def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    alone = [packs for packs, _ in epoch_of(loader_of(path), Cursor())]
    two = run_ranks(steps_on_ranks, 2, path)
    shards, num_packs = two[0][2][1], two[0][2][2]  # behind the third step
    rest = epoch_of(loader_of(path), Cursor(0, num_packs, shards))
    assert [packs for packs, _ in rest] == alone[3:]


def test_ranks_end_together_when_shards_are_uneven(tmp_path: Path) -> None:
    """Three rows in four shards: one shard is empty from the start, on one of the ranks."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in islice(rows(), 3)))
    ranks = run_ranks(steps_on_ranks, 2, str(path))
    assert [len(steps) for steps in ranks] == [1, 1]
    assert [steps[0][0] for steps in ranks] == [[["0"], ["2"]], [["1"], []]]


def test_a_stream_without_a_fitting_document_ends(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "q", "completion": "x" * 100}) + "\n")
    loader = loader_of(str(path))
    with pytest.raises(
        DataError, match=r"a.jsonl: documents over .*=40 would be dropped, with 100% of all tokens"
    ):
        next(loader.steps(Cursor(), init_mesh(MeshConfig()), COSTS))
    meant = replace(loader, packer=Packer(40, overlong="drop"))
    with pytest.raises(DataError, match="the stream ends without a document that fits a pack"):
        next(meant.steps(Cursor(), init_mesh(MeshConfig()), COSTS))


@pytest.mark.parametrize("num_shards", [1, 8])
def test_prompts_that_fill_a_pack_are_bad_documents(tmp_path: Path, num_shards: int) -> None:
    """Cut to a pack, they hold no label: counted over all shards, however few rows each of them has."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": "q" * (90 if i % 2 else 1), "completion": "x"}) + "\n"
            for i in range(40)
        )
    )
    loader = replace(
        loader_of(str(path), num_shards=num_shards), packer=Packer(40, overlong="truncate")
    )
    with pytest.raises(
        DataError, match=r"40 documents read, 20 bad, empty .*max_bad_frac=0.05 allows 2 bad ones"
    ):
        epoch_of(loader, Cursor())


def test_long_documents_of_a_stream_are_split(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij" * 20)
    dataset = StreamingDataset(str(path), num_shards=1)
    packer = Packer(40).for_document_kind(dataset.kind)
    shape = BatchShape(1, 1, 1)
    job, dataloader = TokenizeJob(byte_tokenizer(MARKED)), DataloaderConfig()
    loader = StreamedPacks(dataset, job, packer, {}, (), shape, dataloader, False, 40)
    steps = list(
        takewhile(
            lambda batches: not batches.epoch,
            loader.steps(Cursor(), init_mesh(MeshConfig()), COSTS),
        )
    )
    text = byte_tokenizer(MARKED).decode(
        [t for s in steps for t in s.micro_batches[0]["input_ids"].tolist()]
    )
    # the end token is the last label, of no piece a token
    assert text.replace("<|end|>", "") == "abcdefghij" * 20


def test_shards_must_be_whole_for_every_reader(tmp_path: Path) -> None:
    cures = "use 6, or ranks and workers whose product divides 4, as a run that continues has to"
    with pytest.raises(ConfigError, match=f"dataset.num_shards=4 must be .* of 3 .*: {cures}"):
        loader_of(write(tmp_path / "a.jsonl"), num_workers=3)


def test_generators_and_hub_streams_give_what_files_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = [packs for packs, _ in epoch_of(loader_of(write(tmp_path / "a.jsonl")), Cursor())]
    generated = epoch_of(loader_of(None, generator=f"{__name__}:rows"), Cursor())
    assert [packs for packs, _ in generated] == whole
    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    streamed = epoch_of(loader_of("org/set"), Cursor())
    assert [packs for packs, _ in streamed] == whole


def test_files_of_a_hub_stream_are_dealt_to_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_files(numbers: list[int]) -> Iterator[dict[str, Any]]:
        for number in numbers:
            yield {"prompt": "q", "completion": str(number)}

    stream = datasets.IterableDataset.from_generator(
        in_files, gen_kwargs={"numbers": list(range(8))}
    )
    assert stream.num_shards == 8
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    dataset = StreamingDataset("org/set", num_shards=4)
    read = [
        [document["completion"] for _, document in dataset.read(shard, 0)] for shard in range(4)
    ]
    assert sorted(number for shard in read for number in shard) == [str(i) for i in range(8)]
    assert [document["completion"] for _, document in dataset.read(1, 1)] == read[1][1:]


def test_bad_rows_are_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps(row) for row in rows()]
    lines[5] = "broken"
    path.write_text("\n".join(lines) + "\n")
    for num_workers in (0, 1):  # without the traceback of a worker
        with pytest.raises(DataError, match=r"^a.jsonl:6:1: not JSON"):
            epoch_of(loader_of(str(path), num_workers=num_workers), Cursor())
    loader = loader_of(str(path))
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig(on_bad_row="skip"))
    steps = epoch_of(replace(loader, job=job), Cursor())
    seen = {number for packs, _ in steps for pack in packs for number in pack}
    assert seen == {str(i) for i in range(NUM_ROWS) if i != 5}
    assert sum(state["num_empty"] for state in (steps[-1][1].shards or {}).values()) == 1


@pytest.mark.system
def test_too_many_bad_rows_end_a_stream(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\nbroken\n" for row in rows()) * 10)
    dataset = StreamingDataset(str(path), num_shards=1)
    job = TokenizeJob(byte_tokenizer(MARKED), TokenizeConfig(on_bad_row="skip"))
    turns = list(ShardTurns(dataset, job, Packer(40), [0], {}))
    assert turns[-1][1] is None
    assert turns[-1][2]["num_empty"] == 610
    loader = replace(loader_of(str(path)), job=job)
    with pytest.raises(
        DataError,
        match=r"\d+ documents read, \d+ bad, empty .*max_bad_frac=0.05 allows \d+ bad ones",
    ):
        epoch_of(loader, Cursor())


def two_turns() -> Iterator[dict[str, Any]]:
    for i in range(9):
        turn = [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"{i},"}]
        yield {"messages": turn + turn}


@pytest.mark.parametrize("family", [QWEN3], ids=["qwen3"])
def test_chats_that_become_several_rows_resume_between_them(family: Family) -> None:
    def loader() -> StreamedPacks:
        dataset = StreamingDataset(generator=f"{__name__}:two_turns", num_shards=1)
        job = TokenizeJob(byte_tokenizer(family))
        return StreamedPacks(
            dataset, job, Packer(120), {}, (), BatchShape(1, 1, 1), DataloaderConfig(), True, 120
        )

    def packs_from(cursor: Cursor) -> list[tuple[list[int], Cursor]]:
        steps = takewhile(
            lambda batches: not batches.epoch,
            loader().steps(cursor, init_mesh(MeshConfig()), COSTS),
        )
        return [
            (batches.micro_batches[0]["input_ids"].tolist(), batches.after) for batches in steps
        ]

    whole = packs_from(Cursor())
    text = byte_tokenizer(family).decode([token for pack, _ in whole for token in pack])
    assert text.count("<think>") == 18
    for stop in range(1, len(whole)):
        assert [pack for pack, _ in packs_from(whole[stop - 1][1])] == [
            pack for pack, _ in whole[stop:]
        ]


def test_settings_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset.path and dataset.generator: set exactly one of them"
    ):
        StreamingDataset()
    with pytest.raises(ConfigError, match=r"tests.data.feeding.test_streams has no none"):
        StreamingDataset(generator="tests.data.feeding.test_streams:none")
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(DataError, match="the stream is empty"):
        StreamingDataset(str(tmp_path / "a.jsonl"))
