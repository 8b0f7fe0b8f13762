from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.packing.packs import Packer
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.datasets.stream_packing import PackStream


def documents(lengths: list[int], start: int) -> Iterator[list[dict]]:
    for number in range(start, len(lengths)):
        ids = np.arange(lengths[number]) + 1000 * (number + 1)
        yield [{"input_ids": ids, "labels": ids + 1}]


def streamed(lengths: list[int], lookahead: int = 256, **arguments) -> PackStream:
    return PackStream(lambda start: documents(lengths, start), Packer(**arguments), lookahead)


def plain(pack: dict) -> tuple:
    return tuple(
        tuple(np.asarray(pack[name]).tolist()) for name in ("input_ids", "labels", "seq_lens")
    )


def test_packs_of_a_stream() -> None:
    packs = list(streamed([6, 7, 4, 6, 4, 3], packed_sequence_size=10))
    assert [pack["seq_lens"].tolist() for pack in packs] == [[6, 4], [7, 3], [6, 4]]
    assert packs[1]["input_ids"].tolist() == [
        2000,
        2001,
        2002,
        2003,
        2004,
        2005,
        2006,
        6000,
        6001,
        6002,
    ]
    assert packs[1]["labels"].tolist() == [
        2001,
        2002,
        2003,
        2004,
        2005,
        2006,
        2007,
        6001,
        6002,
        6003,
    ]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 22), max_size=80),
    overlong=st.sampled_from(["drop", "truncate"]),
    multiple=st.sampled_from([1, 2, 4]),
    stop=st.integers(0, 30),
)
def test_every_document_once_and_resumed_anywhere(
    lengths, overlong: str, multiple: int, stop: int
) -> None:
    arguments = {
        "packed_sequence_size": 16,
        "overlong": overlong,
        "slot_multiple": multiple,
        "lookahead": 12,
    }
    whole = streamed(lengths, **arguments)
    packs = [plain(pack) for pack in whole]
    tokens = sorted(token for ids, _, _ in packs for token in ids if token)
    kept = [n if n <= 16 else {"drop": 0, "truncate": 16}[overlong] for n in lengths]
    assert tokens == sorted(1000 * (i + 1) + k for i, n in enumerate(kept) for k in range(n))
    assert whole.counts["num_dropped"] == (
        sum(n > 16 for n in lengths) if overlong == "drop" else 0
    )

    first = streamed(lengths, **arguments)
    done = [plain(pack) for pack in islice(first, stop)]
    state = first.state_dict()
    assert len(state["waiting"]) <= 12
    second = streamed(lengths, **arguments)
    second.load_state_dict(state)
    assert done + [plain(pack) for pack in second] == packs
    assert second.state_dict() == whole.state_dict()


def test_bad_streams() -> None:
    with pytest.raises(ConfigError, match="size=10 must be a multiple of 4"):
        streamed([1], packed_sequence_size=10, slot_multiple=4)
    with pytest.raises(
        DataError,
        match=r"1 of 1 document is over packed_sequence\.packed_sequence_size=8, such as document 1 with 9 tokens",
    ):
        list(streamed([3, 9], packed_sequence_size=8, overlong="error"))
    with pytest.raises(DataError, match="document 1 has 0 input_ids"):
        list(streamed([3, 0], packed_sequence_size=8))
