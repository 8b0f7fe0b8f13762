"""Pack counts and CPU seconds of the packing engine beside its peers, on the same lengths in one run.

    python -m benchmarks.packing plans    packs of every strategy and peer on nine mixes of lengths
    python -m benchmarks.packing growth   CPU seconds from 10^4 to 10^7 documents

Seconds are CPU seconds of this process. Peers that are not installed are named and left out; they install with
`pip install --no-deps trl axolotl lightbinpack` (and numba for axolotl).
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from automodel_lite.data.packing.histogram import assign, best_fit
from automodel_lite.data.packing.plan import plan_packs

Mix = tuple[str, np.ndarray, int]  # name, lengths, pack size
Prepared = Callable[[], int]  # packs everything that it was prepared for -> number of packs
Prepare = Callable[[np.ndarray, int], Prepared]  # of lengths and a pack size


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


# peers: (lengths, size) -> what to time; their inputs are made outside of the clock


def trl_whole(lengths: np.ndarray, size: int) -> Prepared:
    from trl.data_utils import _pack_bfd

    table = one_byte_tokens(lengths)
    return lambda: len(_pack_bfd(table, size))


def trl_shipped(lengths: np.ndarray, size: int) -> Prepared:
    from trl.data_utils import _pack_bfd

    parts = [one_byte_tokens(part) for part in thousands(lengths)]
    return lambda: sum(len(_pack_bfd(part, size)) for part in parts)


def axolotl(lengths: np.ndarray, size: int) -> Prepared:
    from axolotl.utils.samplers.multipack import pack_parallel

    # compiles
    pack_parallel(lengths[:100], size, group_size=100_000, bin_size=200, num_processes=1)
    return lambda: len(
        pack_parallel(lengths, size, group_size=100_000, bin_size=200, num_processes=1)
    )


def light_bin_pack(lengths: np.ndarray, size: int) -> Prepared:
    from lightbinpack import obfd

    as_list = lengths.tolist()
    return lambda: len(obfd(as_list, size))


PEERS: dict[str, tuple[str, Prepare]] = {
    "TRL, all at once": ("trl", trl_whole),
    "TRL, as shipped": ("trl", trl_shipped),
    "axolotl": ("axolotl", axolotl),
    "LightBinPack": ("lightbinpack", light_bin_pack),
}


def one_byte_tokens(lengths: np.ndarray) -> Any:
    import pyarrow as pa

    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]))
    values = pa.array(np.zeros(int(lengths.sum()), np.int8))
    return pa.table({"input_ids": pa.LargeListArray.from_arrays(offsets, values)})


def thousands(lengths: np.ndarray) -> list[np.ndarray]:
    return [lengths[i : i + 1000] for i in range(0, len(lengths), 1000)]


def present_peers() -> dict[str, Prepare]:
    absent = sorted(
        {package for package, _ in PEERS.values() if importlib.util.find_spec(package) is None}
    )
    if absent:
        print(f"not installed, left out: {', '.join(absent)}")
    return {name: prepare for name, (package, prepare) in PEERS.items() if package not in absent}


def compare(lengths: np.ndarray, size: int, peers: dict[str, Prepare]) -> None:
    """Prints packs and CPU seconds of each strategy and peer on the same lengths."""
    histogram = np.bincount(lengths, minlength=size + 1)
    bound = lower_bound(histogram, size)
    ways: dict[str, Prepared] = {
        "best-fit, count only": lambda: (
            best_fit(np.bincount(lengths, minlength=size + 1), size).num_bins
        ),
        "best-fit, assigned": lambda: best_fit_assigned(lengths, size),
    }
    for strategy in ("best_fit", "exact_fill", "next_fit"):
        ways[strategy] = partial(packs_of, lengths, size, strategy)
    for peer, prepare in peers.items():
        ways[peer] = prepare(lengths, size)
    print(f"{len(lengths):,} documents, lower bound {bound:,} packs")
    for label, count in ways.items():
        began = time.process_time()
        packs = count()
        seconds = time.process_time() - began
        fill = 100 * int(lengths.sum()) / (packs * size)
        print(f"  {label:<22}{packs - bound:>+9,} packs  {fill:7.3f} %  {seconds:9.3f} s")


def packs_of(lengths: np.ndarray, size: int, strategy: str) -> int:
    return len(plan_packs(lengths, size, strategy=strategy))


def best_fit_assigned(lengths: np.ndarray, size: int) -> int:
    """What peers' best-fit does: a list of documents for each pack."""
    plan = best_fit(np.bincount(lengths, minlength=size + 1), size)
    _, offsets = assign(plan, lengths, size, 0, 0)
    return len(offsets) - 1


def plans(n: int) -> None:
    peers = present_peers() if n <= 100_000 else {}  # an hour at a million; see `growth`
    for name, lengths, size in mixes(n):
        print(f"\n{name}: ", end="")
        compare(lengths, size, peers)


def growth(most: int) -> None:
    peers = present_peers()
    n = 10**4
    while n <= most:
        compare(log_normal(np.random.default_rng(0), n, 200, 0.9, 8, 2048), 2048, peers)
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
