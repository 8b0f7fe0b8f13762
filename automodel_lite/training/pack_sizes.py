"""The tokens of a pack, `packed_sequence.packed_sequence_size=auto`: from the lengths of the
documents.

    99.5 % of 5,000 documents have at most 391 tokens        512, which holds them
    4 of a typical length fit a pack that one leaves empty   2,048, if the run has steps enough
    60 documents of 45 to 53 tokens: 2 in 128, fill 77 %     148, which holds 3: fill 99 %
"""

from __future__ import annotations

import math

import numpy as np

from automodel_lite.config.schema import TrainingConfig
from automodel_lite.config.sizes import AUTO_BATCH_SIZE, LEAST_STEPS, round_up
from automodel_lite.data.feeding.planned import epochs_of
from automodel_lite.data.packing.histogram import best_fit

COVERED_FRAC = 0.995  # of the documents, which fit a pack whole
LEAST_PACK = 128  # tokens
FEW_DOCUMENTS = 4  # of a typical length: as many leave little of a pack empty
LEAST_SPLIT_PACK = 512  # of text, which is split: a shorter context teaches little
MOST_PACK = 4096  # tokens; longer packs are for documents that need them
# of AUTO_BATCH_SIZE packs: where a run has more, longer packs waste less time per step
MANY_STEPS = 500
GOOD_FILL = 0.98  # of the best fill: a power of two that has so much stays
NEAR_FILL = 0.99  # of the best fill: of sizes that have so much, the nearest to a power of two
LEAST_FILLED_PACK = 64  # tokens, of packs that are chosen by their fill
MOST_SEARCHED = 10**6  # documents, of larger sets a power of two is filled by the short ones


def fitted_pack_size(
    lengths: np.ndarray,
    training: TrainingConfig,
    is_split: bool = False,
    is_wrapped: bool = False,
    multiple: int = 1,
) -> tuple[int, str]:
    """Returns the tokens of a pack, and why: the power of two that holds 99.5 % of the documents
    whole, or more: several documents fill a pack that one leaves half empty, and long packs waste
    less time per step, where the run has steps enough. Where documents leave much of it empty, a
    size that they fill.

    lengths     tokens of each document, int [documents]
    is_split    documents may be cut, so that no pack has to hold one whole
    is_wrapped  they are laid end to end, which fills packs of any size
    multiple    of which the slots of documents, and a pack, are

    >>> fitted_pack_size(np.array([100, 250, 213]), TrainingConfig())
    (256, '99.5 % of 3 documents have at most 250 tokens')
    """
    covered = int(np.quantile(lengths, COVERED_FRAC, method="inverted_cdf"))
    size = max(LEAST_PACK, 1 << (covered - 1).bit_length())
    reason = f"{COVERED_FRAC:.1%} of {len(lengths):,} documents have at most {covered:,} tokens"
    reason = reason.replace("%", " %")
    if is_split:
        size = min(size, LEAST_SPLIT_PACK)
        reason = f"{len(lengths):,} documents, which may be cut"
    tokens = int(lengths.sum(dtype=np.int64)) * epochs_of(training, len(lengths))[0]
    typical = int(np.median(lengths))
    wanted = 0 if is_split else min(FEW_DOCUMENTS * typical, MOST_PACK)
    least = size
    # steps of two packs are enough of them
    while size < wanted and tokens >= 4 * size * LEAST_STEPS:
        size *= 2
    if size > least:
        reason += f"; several of about {typical:,} fill a pack better than one"
    least = size
    while size < MOST_PACK and tokens >= 2 * size * AUTO_BATCH_SIZE * MANY_STEPS:
        size *= 2
    if size > least:
        reason += f", and {tokens:,} tokens are over {MANY_STEPS} steps of longer packs too"
    if is_wrapped or len(lengths) > MOST_SEARCHED:
        return size, reason
    best, fill, fill_of_size = filled_pack_size(lengths, training, size, is_split, multiple)
    if best != size:
        reason += f"; packs of {size:,} would be {fill_of_size:.0%} full, these are {fill:.0%}"
        reason = reason.replace("%", " %").replace("  %", " %")
    return best, reason


def filled_pack_size(
    lengths: np.ndarray, training: TrainingConfig, size: int, is_split: bool, multiple: int
) -> tuple[int, float, float]:
    """Returns the size, at most twice the given one, whose packs are filled best, its fill, and
    that of the given one; that one, if it is as good.

    The run keeps as many steps as packs of the given size make, or LEAST_STEPS.
    """
    slots = round_up(lengths, multiple)
    values, counts = np.unique(slots, return_counts=True)
    epochs, _ = epochs_of(training, len(lengths))
    tokens = int(lengths.sum(dtype=np.int64))
    num_packs = packs_of(values, counts, size)
    fill_of_size = min(1.0, tokens / (num_packs * size))
    covered = int(np.quantile(slots, COVERED_FRAC, method="inverted_cdf"))
    least = max(min(covered, LEAST_SPLIT_PACK) if is_split else covered, LEAST_FILLED_PACK)
    most = max(size, min(2 * size, MOST_PACK))
    # products in fp8 take multiples of 16; the finer, the fuller packs of few documents are
    tile = 4 if size <= LEAST_SPLIT_PACK and training.fp8 == "none" else 16
    step = math.lcm(multiple, tile)
    needed = min(num_packs * epochs, LEAST_STEPS)
    fills = {size: fill_of_size}
    for other in range(round_up(least, step), most + 1, step):
        num_packs = packs_of(values, counts, other)
        if num_packs * epochs >= needed:
            fills[other] = tokens / (num_packs * other)
    best_fill = max(fills.values())
    if fill_of_size >= GOOD_FILL * best_fill:
        return size, fill_of_size, fill_of_size
    near = [other for other, fill in fills.items() if fill >= NEAR_FILL * best_fill]
    best = min(near, key=lambda other: abs(math.log(other / size)))
    return best, fills[best], fill_of_size


def packs_of(values: np.ndarray, counts: np.ndarray, size: int) -> int:
    """Returns how many packs of this size best-fit makes of `counts` documents of each length;
    longer ones are cut.
    """
    whole = int((values // size * counts).sum())
    histogram = np.bincount(values % size, weights=counts, minlength=size + 1).astype(np.int64)
    histogram[0] = 0
    return max(1, whole + best_fit(histogram, size).num_bins)
