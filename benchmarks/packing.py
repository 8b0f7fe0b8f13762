"""Pack counts and CPU seconds of the packing engine beside TRL's, on the same lengths in one run.

    python -m benchmarks.packing plans    packs of every strategy and of TRL on nine mixes of lengths
    python -m benchmarks.packing growth   CPU seconds from 10^4 to 10^7 documents

Seconds are CPU seconds of this process. TRL takes part where it is installed (`pip install --no-deps trl`).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from automodel_lite.data.packing.histogram import assign, best_fit
from automodel_lite.data.packing.plan import plan_packs

Mix = tuple[str, np.ndarray, int]  # name, lengths, pack size
Prepared = Callable[[], int]  # packs everything that it was prepared for -> number of packs
HAS_TRL = importlib.util.find_spec("trl") is not None


def lower_bound(histogram: np.ndarray, size: int) -> int:
    """No packing uses fewer bins: the larger of ceil(sum / size) and the L2 bound of Martello and Toth (1990).

    histogram: int64 [size + 1], documents of each length. L2 counts, for each small length a, that documents over
    size - a share a bin with none of length >= a, and documents over size / 2 with none of their kind.
    """
    lengths = np.arange(size + 1)
    volume = histogram * lengths
    total = int(volume.sum())
    bound = -(-total // size)
    if not histogram[size // 2 + 1 :].any():
        return bound
    # [a] = documents of length >= a
    count_over = np.concatenate([np.cumsum(histogram[::-1])[::-1], [0]])
    volume_over = np.concatenate([np.cumsum(volume[::-1])[::-1], [0]])
    a = np.arange(size // 2 + 1)
    half = size // 2 + 1
    large = count_over[size - a + 1]
    middle = count_over[half] - large
    middle_volume = volume_over[half] - volume_over[size - a + 1]
    small_volume = volume_over[a] - volume_over[half]
    beyond = small_volume - (middle * size - middle_volume)
    return max(bound, int((large + middle + np.maximum(0, -(-beyond // size))).max()))


def mixes(n: int) -> Iterator[Mix]:
    rng = np.random.default_rng(0)
    # fitted to the words of its train set
    yield "GSM8K-like in 2k", log_normal(rng, n, 151, 0.35, 53, 432), 2048
    yield "log-normal 200 in 2k", log_normal(rng, n, 200, 0.9, 8, 2048), 2048
    yield "log-normal 200 in 4k", log_normal(rng, n, 200, 0.9, 8, 2048), 4096
    yield "web-like 800 in 4k", log_normal(rng, n, 800, 1.0, 16, 4096), 4096
    long_tail = log_normal(rng, n, 600, 0.9, 16, 8192)
    long = rng.random(n) < 0.1
    long_tail[long] = rng.integers(8192, 32769, int(long.sum()))
    yield "90 % 600 + 10 % 8k..32k in 32k", long_tail, 32768
    yield "N(700,120) in 2k", np.clip(rng.normal(700, 120, n).astype(np.int64), 1, 2048), 2048
    yield "U(600,1400) in 2k", rng.integers(600, 1401, n), 2048
    yield "U(1,8192) in 8k", rng.integers(1, 8193, n), 8192
    yield "sorted log-normal 200 in 2k", np.sort(log_normal(rng, n, 200, 0.9, 8, 2048)), 2048


def log_normal(
    rng: np.random.Generator, n: int, mean: float, sigma: float, low: int, high: int
) -> np.ndarray:
    """Integer lengths of the given mean before clipping."""
    return np.clip(rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, n).astype(np.int64), low, high)


def trl(lengths: np.ndarray, size: int, rows_at_once: int) -> Prepared:
    from trl.data_utils import _pack_bfd

    starts = range(0, len(lengths), rows_at_once)
    parts = [one_byte_tokens(lengths[start : start + rows_at_once]) for start in starts]
    return lambda: sum(len(_pack_bfd(part, size)) for part in parts)


def one_byte_tokens(lengths: np.ndarray) -> Any:
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    values = pa.array(np.zeros(int(lengths.sum()), np.int8))
    return pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, values)})


def compare(lengths: np.ndarray, size: int, with_trl: bool) -> None:
    """Prints packs and CPU seconds of each strategy, and of TRL, on the same lengths."""
    histogram = np.bincount(lengths, minlength=size + 1)
    bound = lower_bound(histogram, size)
    ways: dict[str, Prepared] = {
        "best-fit, count only": lambda: (
            best_fit(np.bincount(lengths, minlength=size + 1), size).num_bins
        ),
        "best-fit, assigned": lambda: best_fit_assigned(lengths, size),
    }
    for strategy in ("best_fit", "exact_fill", "next_fit"):
        ways[strategy] = lambda name=strategy: len(plan_packs(lengths, size, strategy=name))
    if with_trl:  # its inputs are made outside of the clock
        ways["TRL, all at once"] = trl(lengths, size, len(lengths))
        ways["TRL, as shipped"] = trl(lengths, size, 1000)
    print(f"{len(lengths):,} documents, lower bound {bound:,} packs")
    for label, count in ways.items():
        began = time.process_time()
        packs = count()
        seconds = time.process_time() - began
        fill = 100 * int(lengths.sum()) / (packs * size)
        print(f"  {label:<22}{packs - bound:>+9,} packs  {fill:7.3f} %  {seconds:9.3f} s")


def best_fit_assigned(lengths: np.ndarray, size: int) -> int:
    """What peers' best-fit does: a list of documents for each pack."""
    plan = best_fit(np.bincount(lengths, minlength=size + 1), size)
    _, offsets = assign(plan, lengths, size, 0, 0)
    return len(offsets) - 1


def plans(n: int) -> None:
    with_trl = HAS_TRL and n <= 100_000  # an hour at a million; see `growth`
    for name, lengths, size in mixes(n):
        print(f"\n{name}: ", end="")
        compare(lengths, size, with_trl)


def growth(most: int) -> None:
    n = 10**4
    while n <= most:
        lengths = log_normal(np.random.default_rng(0), n, 200, 0.9, 8, 2048)
        compare(lengths, 2048, HAS_TRL)
        n *= 10


PARTS: dict[str, tuple[Callable[[int], None], int]] = {
    "plans": (plans, 1_000_000),
    "growth": (growth, 10_000_000),
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--documents", type=int, help="how many; for growth the most")
    arguments = parser.parse_args()
    part, documents = PARTS[arguments.part]
    part(arguments.documents or documents)
