from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.packing import histogram as histogram_module
from automodel_lite.data.packing.histogram import (
    ExactFiller,
    Placements,
    assign,
    best_fit,
    exact_fill_in_proportion,
    fewest_bins,
)
from benchmarks.packing import lower_bound

cases = st.integers(1, 50).flatmap(
    lambda c: st.tuples(st.lists(st.integers(1, c), min_size=1, max_size=150), st.just(c))
)


def the_slow_twin() -> Any:
    """The function that stands at the head of the file."""
    text = (histogram_module.__doc__ or "").partition("    def best_fit_one_by_one")
    made: dict[str, Any] = {}
    exec(textwrap.dedent((text[1] + text[2]).partition("\n\n`")[0]), made)
    return made["best_fit_one_by_one"]


best_fit_one_by_one = the_slow_twin()


def filled(placements: Placements) -> list[int]:
    """The tokens of each bin."""
    return placements.per_bin(placements.length * placements.copies).tolist()


def check(placements: Placements, lengths: list[int], size: int) -> None:
    """Every document has one place of its own, bins are full of neighbors without gaps and not over the size."""
    histogram = np.zeros(size + 1, int)
    np.add.at(histogram, placements.length, placements.bins * placements.copies)
    assert histogram.tolist() == np.bincount(lengths, minlength=size + 1).tolist()
    assert max(filled(placements)) <= size
    doc_ids, offsets = assign(placements, np.array(lengths), size, 0, 0)
    assert sorted(doc_ids.tolist()) == list(range(len(lengths)))
    tokens = np.add.reduceat(np.array(lengths)[doc_ids], offsets[:-1])
    assert sorted(tokens.tolist()) == sorted(filled(placements))


def test_the_placements_of_six_documents() -> None:
    placements = best_fit(np.bincount([4, 3, 4, 1, 1, 1], minlength=9), 8)
    rows = zip(
        placements.length, placements.first, placements.bins, placements.copies, placements.slot
    )
    assert [tuple(map(int, row)) for row in rows] == [
        (4, 0, 1, 2, 0),
        (3, 1, 1, 1, 0),
        (1, 1, 1, 3, 1),
    ]
    assert filled(placements) == [8, 6]


@settings(deadline=None)
@given(case=cases)
def test_best_fit_agrees_with_the_slow_twin(case) -> None:
    lengths, size = case
    placements = best_fit(np.bincount(lengths, minlength=size + 1), size)
    check(placements, lengths, size)
    assert sorted(filled(placements)) == sorted(best_fit_one_by_one(lengths, size))


@settings(deadline=None)
@given(case=cases, searched=st.sampled_from([7, 40_000]))
def test_exact_fill_in_proportion_places_every_document(case, searched: int) -> None:
    lengths, size = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(histogram_module, "SEARCHED_DOCUMENTS", searched)
        check(
            exact_fill_in_proportion(np.bincount(lengths, minlength=size + 1), size, seed=1),
            lengths,
            size,
        )


@settings(deadline=None)
@given(case=cases)
def test_the_fewest_bins_are_between_the_bound_and_best_fit(case) -> None:
    lengths, size = case
    histogram = np.bincount(lengths, minlength=size + 1)
    placements = fewest_bins(histogram, size, seed=1)
    check(placements, lengths, size)
    assert lower_bound(histogram, size) <= placements.num_bins <= best_fit(histogram, size).num_bins


@pytest.mark.parametrize(
    ("lengths", "size", "bound"),
    [
        ([4, 4, 4], 8, 2),
        ([5, 5, 5], 8, 3),  # two never share a pack
        ([6, 6, 3, 3], 8, 3),  # nor does a 3 go with a 6
        ([8, 7, 1], 8, 2),
        ([1], 8, 1),
    ],
)
def test_lower_bounds(lengths: list[int], size: int, bound: int) -> None:
    assert lower_bound(np.bincount(lengths, minlength=size + 1), size) == bound


@pytest.mark.parametrize("num", [30_000, 300_000], ids=["30k", "300k"])
def test_realistic_mixes_are_within_ten_packs_of_the_bound(num: int) -> None:
    rng = np.random.default_rng(0)
    for mean, size in ((200, 2048), (800, 4096)):
        lengths = np.clip(rng.lognormal(np.log(mean) - 0.4, 0.9, num).astype(int), 8, size)
        histogram = np.bincount(lengths, minlength=size + 1)
        plain = best_fit(histogram, size)
        assert (
            fewest_bins(histogram, size, 0).num_bins
            <= plain.num_bins
            <= lower_bound(histogram, size) + 10
        )


def test_a_narrow_mix_needs_3_percent_fewer_packs_than_best_fit() -> None:
    lengths = np.clip(np.random.default_rng(0).normal(700, 120, 20_000).astype(int), 1, 2048)
    histogram = np.bincount(lengths, minlength=2049)
    plain = best_fit(histogram, 2048)
    assert fewest_bins(histogram, 2048, 0).num_bins < 0.97 * plain.num_bins


streams = st.integers(1, 40).flatmap(
    lambda c: st.tuples(st.lists(st.integers(1, c), max_size=120), st.just(c))
)


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
