"""Attention over trees: rows that share a beginning, which is in the stream once (paths.py).

A kernel that can take one integer per key, until when it is seen, gets the stream as it is. Any other gets the keys of
each path gathered: its segments are nodes of queries and paths of keys, bottom right, as under context parallelism. So
windows, softcap, sinks and chunks are those of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from automodel_lite.thd import AttentionInputs, AttentionOptions, Segments, TreeKeys


@runtime_checkable
class TreeKernel(Protocol):
    """A kernel that needs no key twice."""

    def attend_tree(self, inputs: AttentionInputs, tree: TreeKeys) -> Tensor:
        """q, k, v are those of the stream, [T, H, D] each; query i sees key j if `j <= i < tree.until[j]`, and with a
        window only if their positions are close enough.
        """


def over_tree(kernel: Any, tree: TreeKeys, is_cut: bool) -> Callable[..., Tensor]:
    """`kernel`, called with the q, k and v of a stream that holds `tree`.

    is_cut  the segments are cut at chunks, which the integers of the keys know nothing of
    """

    def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, segments: Segments, options: AttentionOptions) -> Tensor:
        if isinstance(kernel, TreeKernel) and not is_cut:
            return kernel.attend_tree(AttentionInputs(q_THD, k_THD, v_THD, segments, options), tree)
        k, v = (x.index_select(0, tree.paths) for x in (k_THD, v_THD))
        out: Tensor = kernel(q_THD, k, v, segments, options)
        return out

    return attend
