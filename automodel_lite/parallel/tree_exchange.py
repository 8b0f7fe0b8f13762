"""Keys of documents that branch: queries see the path of their branch, and no rows beside it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_lite.parallel.exchange import AllGatherKV
from automodel_lite.parallel.zigzag import OwnedSegments, keys_ahead
from automodel_lite.prefix_trees import concatenated_ranges
from automodel_lite.tensors import cumulative
from automodel_lite.thd import AttentionPlan, Segments, ThdBatch


def tree_plan(
    batch: ThdBatch,
    owned: OwnedSegments,
    paths: Tensor,
    to_stream: Tensor,
    group: dist.ProcessGroup,
) -> AttentionPlan:
    """The plan of a rank whose runs are cut at the nodes of trees; each piece sees its path up to
    its own last token, or to the end of the image that this is of.

    paths  the keys of the nodes of the whole stream (see `TreeKeys`)
    """
    nodes = batch.attention.segments
    node_starts = nodes.cu_q.long()
    path_ends = nodes.cu_k.long()[1:]
    # A rank's runs are ascending in the stream, so all cuts in order are its pieces in its local
    # order.
    cuts = torch.cat([owned.start, owned.end, node_starts]).unique()
    start = cuts[:-1]
    end = cuts[1:]
    run = torch.searchsorted(owned.start, start, right=True) - 1
    is_owned = (run >= 0) & (start < owned.end[run])
    start = start[is_owned]
    end = end[is_owned]
    node = torch.searchsorted(node_starts, start, right=True) - 1
    path_starts = nodes.cu_k.long()[node]
    path_stops = path_ends[node] - (node_starts[node + 1] - end)
    q_lens = end - start
    before = path_stops - q_lens - path_starts if batch.attention.ahead else None
    path_stops = path_stops + keys_ahead(batch, end)
    k_lens = path_stops - path_starts
    keys = AllGatherKV(group, to_stream[paths[concatenated_ranges(path_starts, path_stops)]], None)
    own = Segments(cumulative(q_lens), cumulative(k_lens), int(q_lens.max()), int(k_lens.max()))
    return AttentionPlan(own, keys, before=before)
