"""Every document once or counted, no pack over its size, never over the bounds; each bad input in a sentence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from automodel_lite.data.packing.histogram import best_fit
from automodel_lite.data.packing.plan import OVERLONG, PackPlan, padding_segments, plan_packs
from automodel_lite.data.packing.strategies import STRATEGIES, STRATEGY_NAMES, Packed
from automodel_lite.data.tokens.token_rows import flatten
from automodel_lite.errors import ConfigError, DataError
from benchmarks.packing import lower_bound
from tests.data.packing.brute_force import fewest_packs

WHOLE = [name for name in STRATEGIES if name != "wrapped"]
lengths_and_size = st.integers(1, 60).flatmap(
    lambda size: st.tuples(st.lists(st.integers(1, size), min_size=1, max_size=80), st.just(size))
)


def packs_of(plan: PackPlan) -> list[list[int]]:
    return [plan.doc_ids[a:b].tolist() for a, b in zip(plan.offsets[:-1], plan.offsets[1:])]


@pytest.mark.parametrize(
    ("strategy", "packs"),
    [
        ("next_fit", [[0, 1], [2, 3], [4]]),
        ("none", [[0], [1], [2], [3], [4]]),
    ],
)
def test_the_packs_of_five_documents(strategy: str, packs: list[list[int]]) -> None:
    assert packs_of(plan_packs([6, 3, 4, 4, 6], 10, strategy=strategy)) == packs


@pytest.mark.parametrize("strategy", ["exact_fill", "best_fit"])
def test_five_documents_in_the_fewest_packs(strategy: str) -> None:
    plan = plan_packs([6, 3, 7, 4, 10], 10, strategy=strategy)
    assert sorted(sorted(pack) for pack in packs_of(plan)) == [[0, 3], [1, 2], [4]]
    assert plan.lower_bound == 3


@pytest.mark.parametrize("strategy", WHOLE)
@settings(deadline=None, max_examples=60)
@given(case=lengths_and_size, seed=st.integers(0, 9), epoch=st.integers(0, 3))
def test_every_document_once_and_no_pack_over_its_size(
    strategy: str, case, seed: int, epoch: int
) -> None:
    lengths, size = case
    plan = plan_packs(lengths, size, strategy=strategy, seed=seed, epoch=epoch)
    assert sorted(plan.doc_ids.tolist()) == list(range(len(lengths)))
    assert plan.tokens_per_pack.tolist() == [
        sum(lengths[i] for i in pack) for pack in packs_of(plan)
    ]
    assert plan.tokens_per_pack.max() <= size
    assert np.diff(plan.offsets).min() >= 1
    assert plan.counts.packed_tokens == sum(lengths)
    assert len(plan) >= plan.lower_bound


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    size=st.integers(2, 12).map(lambda slots: slots * 4),
    multiple=st.sampled_from([1, 2, 4]),
    overlong=st.sampled_from(["truncate", "split", "drop"]),
    max_packs=st.none() | st.integers(1, 8),
)
def test_nothing_is_lost_without_a_number(
    strategy, lengths, size, multiple, overlong, max_packs
) -> None:
    arguments = {
        "strategy": strategy,
        "overlong": overlong,
        "slot_multiple": multiple,
        "max_packs": max_packs,
    }
    if strategy != "wrapped" and overlong == "drop" and min(lengths) > size:
        with pytest.raises(
            DataError, match=f"{len(lengths)} of {len(lengths)} documents? (is|are) over"
        ):
            plan_packs(lengths, size, **arguments)
        return
    plan = plan_packs(lengths, size, **arguments)
    pieces = plan.piece_lengths(np.array(lengths))
    slots = -(-pieces // multiple) * multiple
    assert np.add.reduceat(slots, plan.offsets[:-1]).max() <= size
    assert np.add.reduceat(pieces, plan.offsets[:-1]).tolist() == plan.tokens_per_pack.tolist()
    assert max_packs is None or len(plan) == min(max_packs, plan.num_packs_made)
    counts = plan.counts
    assert (
        counts.documents
        == counts.packed_documents + counts.dropped_documents + counts.left_out_documents
    )
    assert (
        sum(lengths)
        == counts.packed_tokens + counts.dropped_tokens + counts.cut_tokens + counts.left_out_tokens
    )
    assert min(vars(counts).values()) >= 0
    covered = np.zeros((len(lengths), 100), int)
    starts = np.zeros(len(pieces), int) if plan.starts is None else plan.starts
    for document, start, length in zip(plan.doc_ids, starts, pieces):
        covered[document, start : start + length] += 1
    assert covered.max() <= 1
    assert covered.sum() == counts.packed_tokens
    if max_packs is None:
        kept = {
            "drop": lambda n: n if n <= size else 0,
            "truncate": lambda n: min(n, size),
            "split": lambda n: n,
        }
        expected = lengths if strategy == "wrapped" else [kept[overlong](n) for n in lengths]
        assert covered.sum(axis=1).tolist() == list(expected)


@settings(deadline=None, max_examples=100)
@given(
    case=st.integers(4, 40).flatmap(
        lambda c: st.tuples(st.lists(st.integers(1, c), min_size=1, max_size=9), st.just(c))
    )
)
def test_small_cases_against_every_possible_packing(case) -> None:
    lengths, size = case
    fewest = fewest_packs(lengths, size)
    assert lower_bound(np.bincount(lengths, minlength=size + 1), size) <= fewest
    for strategy in ("exact_fill", "best_fit"):
        assert len(plan_packs(lengths, size, strategy=strategy)) <= fewest + 1
    assert len(plan_packs(lengths, size, strategy="wrapped")) == -(-sum(lengths) // size)


def test_500_random_small_cases_are_packed_optimally() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        size = int(rng.integers(5, 60))
        low, high = sorted(rng.integers(1, size + 1, 2).tolist())
        lengths = rng.integers(low, high + 1, rng.integers(1, 9)).tolist()
        fewest = fewest_packs(lengths, size)
        assert [len(plan_packs(lengths, size, strategy=s)) for s in ("exact_fill", "best_fit")] == [
            fewest,
            fewest,
        ]


@settings(deadline=None, max_examples=100)
@given(case=lengths_and_size)
def test_pack_counts_stay_under_their_bounds(case) -> None:
    lengths, size = case
    bound = lower_bound(np.bincount(lengths, minlength=size + 1), size)
    plain = best_fit(np.bincount(lengths, minlength=size + 1), size).num_bins
    packs = {strategy: len(plan_packs(lengths, size, strategy=strategy)) for strategy in WHOLE}
    assert bound <= packs["best_fit"] <= plain
    assert packs["exact_fill"] <= int(1.002 * plain)
    two_volumes = 2 * -(-sum(lengths) // size)
    assert packs["next_fit"] <= two_volumes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_are_equal_everywhere_and_differ_by_epoch(strategy: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 5_000)
    plan = plan_packs(lengths, 1024, strategy=strategy, seed=1)
    assert (
        plan.fingerprint()
        == plan_packs(lengths.tolist(), 1024, strategy=strategy, seed=1).fingerprint()
    )
    assert (
        plan.fingerprint()
        == plan_packs(lengths.astype(np.int16), 1024, strategy=strategy, seed=1).fingerprint()
    )
    other_epoch = plan_packs(lengths, 1024, strategy=strategy, seed=1, epoch=1).fingerprint()
    assert (plan.fingerprint() != other_epoch) == (
        strategy in ("exact_fill", "best_fit", "wrapped")
    )


@pytest.mark.parametrize(
    ("strategy", "fingerprint"),
    [
        ("exact_fill", "62c969e55353ed47"),
        ("best_fit", "dca5acfc0c371683"),
        ("next_fit", "22a9a4f10a500975"),
        ("wrapped", "65a2e79f66d75bfb"),
    ],
)
def test_a_known_plan_on_every_machine(strategy: str, fingerprint: str) -> None:
    lengths = np.arange(5_000) * 7_919 % 611 + 1
    assert (
        plan_packs(lengths, 1024, strategy=strategy, seed=5, epoch=2).fingerprint() == fingerprint
    )


def test_exact_fill_gives_way_to_best_fit_where_that_is_better() -> None:
    lengths = np.random.default_rng(0).integers(1, 8193, 4_000)
    plan = plan_packs(lengths, 8192)
    assert len(plan) == len(plan_packs(lengths, 8192, strategy="best_fit"))
    assert "best_fit taken" in plan.note


@pytest.mark.system
def test_exact_fill_gives_way_to_best_fit_where_fits_are_rare() -> None:
    lengths = np.clip(np.random.default_rng(0).normal(700, 120, 100_000).astype(int), 1, 2048)
    plan = plan_packs(lengths, 2048)
    plain = best_fit(np.bincount(lengths, minlength=2049), 2048).num_bins
    assert plan.note.startswith("exact fits are rare")
    assert sorted(plan.doc_ids.tolist()) == list(range(100_000))
    assert len(plan) <= 0.97 * plain
    few = plan_packs(lengths[:10_000], 2048)
    assert not few.note
    assert few.tokens_per_pack.max() == 2048


@pytest.mark.parametrize(
    ("mean", "sigma", "longest", "size"),
    [
        (151, 0.35, 432, 2048),
        (200, 0.9, 2048, 2048),
        (200, 0.9, 2048, 4096),
        (800, 1.0, 4096, 4096),
    ],
    ids=["gsm8k-like", "chats", "chats in 4k", "web-like"],
)
@pytest.mark.parametrize("strategy", ["exact_fill", "best_fit"])
def test_realistic_mixes_are_within_two_packs_of_the_lower_bound(
    strategy: str, mean, sigma, longest, size
) -> None:
    drawn = np.random.default_rng(1).lognormal(np.log(mean) - sigma**2 / 2, sigma, 20_000)
    plan = plan_packs(np.clip(drawn.astype(int), 8, longest), size, strategy=strategy)
    assert len(plan) <= plan.lower_bound + 2


def test_exact_fill_keeps_documents_near_their_place() -> None:
    lengths = np.random.default_rng(0).integers(8, 700, 20_000)
    plan = plan_packs(lengths, 2048, seed=4)
    from automodel_lite.seed import seeded_order

    place = np.empty(len(lengths), int)
    place[seeded_order(len(lengths), 4, 0)] = np.arange(len(lengths))
    assert np.abs(place[plan.doc_ids] - np.arange(len(lengths))).mean() < 15
    assert len(plan) == plan.lower_bound


def test_best_fit_shuffles_documents_of_equal_length_and_packs() -> None:
    plan = plan_packs([5] * 1000 + [3] * 1000, 8, strategy="best_fit", seed=1)
    long, short = plan.doc_ids[::2], plan.doc_ids[1::2]
    assert len(plan) == 1000
    assert abs(np.corrcoef(long, short)[0, 1]) < 0.2
    assert abs(np.corrcoef(long, np.arange(1000))[0, 1]) < 0.2


def test_max_packs_is_a_fair_sample() -> None:
    lengths = np.concatenate([np.full(3_000, 100), np.full(300, 1000)])
    for strategy in ("exact_fill", "best_fit", "next_fit"):
        picked = np.concatenate(
            [
                plan_packs(lengths, 1000, strategy=strategy, max_packs=60, seed=s).doc_ids
                for s in range(20)
            ]
        )
        share_of_tokens_in_long = (
            lengths[picked][lengths[picked] == 1000].sum() / lengths[picked].sum()
        )
        assert 0.4 < share_of_tokens_in_long < 0.6  # half of all tokens are in long documents


def test_wrapped_cuts_documents_where_packs_end() -> None:
    plan = plan_packs([5, 6], 4, strategy="wrapped", slot_multiple=2, seed=0)
    first, second = plan.doc_ids[0], plan.doc_ids[-1]
    assert {int(first), int(second)} == {0, 1}
    assert len(plan) == 3
    assert plan.counts.split_documents == 2
    assert plan.counts.packed_tokens == 11


def test_pieces_that_train_nothing_are_counted() -> None:
    """Documents of 5 and 6 whose last label is their only one: a piece before it trains nothing."""
    rows = flatten([{"input_ids": [1] * n, "labels": [-100] * (n - 2) + [1, -100]} for n in (5, 6)])
    plan = plan_packs([5, 6], 4, strategy="wrapped", has_labels=rows.has_labels)
    has_label = rows.has_labels(plan.doc_ids, plan.starts, plan.stops)
    assert plan.counts.unlabeled_pieces == int((~has_label).sum()) > 0
    assert plan.counts.packed_tokens == 11


def test_split_cuts_over_long_documents_into_pieces() -> None:
    plan = plan_packs([10, 3], 4, strategy="next_fit", overlong="split")
    assert plan.doc_ids.tolist() == [0, 0, 0, 1]
    assert (plan.starts.tolist(), plan.stops.tolist()) == ([0, 4, 8, 0], [4, 8, 10, 3])
    assert plan.offsets.tolist() == [0, 1, 2, 3, 4]


def test_padding_segments_are_bounded() -> None:
    assert padding_segments(0) == []
    assert padding_segments(700) == [512, 188]
    assert padding_segments(1200, 12) == [504, 504, 192]
    assert padding_segments(1400, 700) == [700, 700]


@pytest.mark.parametrize(
    ("lengths", "arguments", "sentence"),
    [
        ([], {}, "there are no documents to pack"),
        (
            [3, 0, 2],
            {},
            "such as 0: they must be a flat list of whole numbers of tokens, at least 1 each",
        ),
        ([3, -4], {}, "such as -4: they must be"),
        ([3.5, 2], {}, "type float64, such as 2.0: they must be"),
        ([True], {}, "type bool"),
        ([[1, 2]], {}, r"lengths of shape \(1, 2\)"),
        (
            [9, 10],
            {},
            r"2 of 2 documents are over packed_sequence.packed_sequence_size=8, such as document 0 with 9 tokens",
        ),
        (
            [9, 3],
            {"overlong": "error"},
            r"1 of 2 documents is over .*size=8, such as document 0 with 9 tokens: raise it",
        ),
    ],
)
def test_bad_lengths(lengths, arguments, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        plan_packs(lengths, 8, **arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"packed_sequence_size": 0},
            "packed_sequence.packed_sequence_size=0 must be a whole number over 0",
        ),
        (
            {"packed_sequence_size": 8.0},
            "packed_sequence.packed_sequence_size=8.0 must be a whole number",
        ),
        (
            {"max_packs": 0},
            "packed_sequence.max_packs=0 must be a whole number over 0: use null for all packs",
        ),
        ({"slot_multiple": 0}, "packed_sequence.slot_multiple=0 must be a whole number over 0"),
        (
            {"slot_multiple": 3},
            r"size=8 must be a multiple of 3 \(packed_sequence.slot_multiple\): use 9",
        ),
        (
            {"strategy": "bets_fit"},
            "packed_sequence.strategy='bets_fit' is unknown: use one of exact_fill, best_fit",
        ),
        (
            {"overlong": "cut"},
            "packed_sequence.overlong='cut' is unknown: use one of drop, truncate, split, error",
        ),
    ],
)
def test_bad_settings(arguments, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan_packs([3, 4], **{"packed_sequence_size": 8, **arguments})


def test_the_lists_of_choices() -> None:
    assert (
        tuple(STRATEGIES)
        == STRATEGY_NAMES
        == ("exact_fill", "best_fit", "next_fit", "wrapped", "none")
    )
    assert OVERLONG == ("drop", "truncate", "split", "error")


def two_each(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    return Packed(np.arange(len(slots)), np.append(np.arange(0, len(slots), 2), len(slots)))


def test_a_strategy_from_outside() -> None:
    plan = plan_packs([3, 4, 5, 1, 2], 8, strategy=f"{__name__}:two_each")
    assert plan.offsets.tolist() == [0, 2, 4, 5]
    assert plan.tokens_per_pack.tolist() == [7, 6, 2]


def lost(slots: np.ndarray, size: int, seed: int, epoch: int) -> Packed:
    return Packed(np.arange(len(slots) - 1), np.array([0, len(slots) - 1]))


def test_a_strategy_from_outside_is_checked() -> None:
    with pytest.raises(DataError, match="must return each of 3 documents once"):
        plan_packs([3, 4, 5], 8, strategy=f"{__name__}:lost")
    with pytest.raises(DataError, match="made a pack of 9 slots; at most 8 fit"):
        plan_packs([4, 5], 8, strategy=f"{__name__}:two_each")
