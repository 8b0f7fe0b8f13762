from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.packing.histogram import ExactFiller

streams = st.integers(1, 40).flatmap(lambda c: st.tuples(st.lists(st.integers(1, c), max_size=120), st.just(c)))


def subset_sum_packs(lengths: list[int], size: int, lookahead: int) -> list[list[int]]:
    """The slow twin: the same rules, every subset tried by a set of sums with their oldest members."""
    waiting = list(enumerate(lengths))
    packs = []
    while waiting:
        pack = [waiting.pop(0)]
        room = size - pack[0][1]
        while room > size // 2 and waiting and room - waiting[0][1] >= size // 2:
            room -= waiting[0][1]
            pack.append(waiting.pop(0))
        sums = {0: ()}  # the first way found to reach each sum
        for document in waiting[:lookahead] if room else []:
            for total, members in list(sums.items()):
                if total + document[1] <= room:
                    sums.setdefault(total + document[1], (*members, document))
            if room in sums:
                break
        for document in sums[max(sums)]:
            waiting.remove(document)
            pack.append(document)
        packs.append([i for i, _ in pack])
    return packs


def test_the_tail_is_filled_exactly_by_the_oldest_documents() -> None:
    #        in order 5; room 5: 4 + 1 is found before 3 + 2
    assert list(ExactFiller([5, 4, 3, 1, 2], 10)) == [[0, 1, 3], [2, 4]]


def test_the_oldest_document_is_always_packed_next() -> None:
    assert list(ExactFiller([6, 7, 4, 6, 4, 3], 10)) == [[0, 2], [1, 5], [3, 4]]


@settings(deadline=None)
@given(case=streams, lookahead=st.integers(1, 20), read_ahead=st.sampled_from([1, 3, 512]))
def test_agrees_with_the_slow_twin(case, lookahead: int, read_ahead: int) -> None:
    lengths, size = case
    packs = list(ExactFiller(lengths, size, lookahead=lookahead, read_ahead=read_ahead))
    assert packs == subset_sum_packs(lengths, size, lookahead)


def test_reads_no_further_than_the_look_ahead() -> None:
    read = []

    def endless():
        while True:
            read.append(7)
            yield 7

    packs = ExactFiller(endless(), 10, lookahead=16)
    assert [next(packs) for _ in range(3)] == [[0], [1], [2]]
    assert len(read) == 3 + 16


def test_documents_of_ten_thousand_are_packed_once() -> None:
    lengths = [i * 7_919 % 997 + 1 for i in range(10_000)]
    packs = list(ExactFiller(lengths, 1000))
    assert sorted(i for pack in packs for i in pack) == list(range(10_000))
    assert max(sum(lengths[i] for i in pack) for pack in packs) == 1000


@pytest.mark.parametrize("lengths", [[], [3]])
def test_short_streams(lengths: list[int]) -> None:
    assert list(ExactFiller(lengths, 3)) == [[0]] * len(lengths)
