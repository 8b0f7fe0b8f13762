"""The features of images take the places of their tokens inside the composite's own forward.

    record ─▶ tower ─▶ rows [R, C] ─▶ those of the placeholders ─▶ model(mm_encoder_outputs=...)

Legend: T tokens of the stream, R rows of image features, C model dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from automodel_lite import compat
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import towers
from automodel_lite.parallel.exchange import AllToAll
from automodel_lite.parallel.zigzag import inverse_permutation, rank_order
from automodel_lite.parts.images.ahead import TYPES
from automodel_lite.parts.images.axes import axes_of, num_axes
from automodel_lite.tensors import Tensors
from automodel_lite.thd import ThdBatch, TowerInputs


@dataclass(frozen=True)
class RowExchange(Tensors):
    """Sends feature rows of own images to the ranks of their placeholders, with gradients.

    send     int64: own rows, by the rank that gets them; one that several placeholders take, so
             often
    arrange  int64 [R]: the place among the received rows of each of this rank's placeholders
    counts   of rows that go to each rank, and that come from it
    """

    group: Any
    send: Tensor
    arrange: Tensor
    counts: tuple[list[int], list[int]]

    def __call__(self, rows: Tensor) -> Tensor:
        received = AllToAll.apply(rows.index_select(0, self.send), self.group, self.counts)
        return received.index_select(0, self.arrange)


@dataclass(frozen=True)
class PackedImages(TowerInputs):
    """The images of a micro-batch.

    record    what the processor makes of them in one call; where ranks share them, of own images
    num_rows  that the tower makes of it
    rows      int64 [R]: the feature row of each placeholder, in the order of the stream; those of
              all ranks' images are counted
    types     int64 [T]: what a token is, in the family's words
    seen      see `AttentionPlan.ahead`
    work      FLOPs of the towers for all images of the stream
    owner     int64: the rank of each feature row; None where each rank has all images
    exchange  of feature rows between the ranks
    """

    record: dict[str, Tensor]
    num_rows: int
    rows: Tensor
    types: Tensor
    seen: dict[bool, Tensor] = field(default_factory=dict)
    work: float = 0.0
    owner: Tensor | None = None
    exchange: RowExchange | None = None

    @property
    def ahead(self) -> dict[bool, Tensor]:
        """See `TowerInputs`."""
        return self.seen

    @property
    def flops(self) -> float:
        """See `TowerInputs`."""
        return self.work

    def model_inputs(self, lm: transformers.PreTrainedModel, batch: ThdBatch) -> dict[str, Any]:
        """Returns the arguments of the composite's forward; runs its towers."""
        inputs = batch.model_inputs()
        known = inspect.signature(type(lm).forward).parameters
        shift_T = batch.columns.get("rope_shift")
        if shift_T is not None:
            shifts = torch.stack(axes_of(shift_T, num_axes(lm.config)))
            inputs["position_ids"] = (shifts + batch.position_ids)[:, None]
        inputs |= {name: self.types[None] for name in TYPES if name in known}
        assert (self.owner is None) == (self.exchange is None), "not sharded"
        features = encode(lm, self)
        return {**inputs, "mm_encoder_outputs": {"image": features}}

    def shard(self, batch: ThdBatch, mine: Tensor, group: Any) -> PackedImages:
        """See `TowerInputs`. Each rank runs the towers on its images, and gets the rows of its
        tokens; or runs them on all images and takes its own rows. What the gradients of all ranks
        sum up to is that of one.
        """
        # Of each token of the stream, its feature row, -1 for text; then those of this rank's
        # tokens.
        types = self.types[mine]
        row_T = torch.full_like(batch.input_ids, -1)
        if len(self.rows):
            row_T[batch.columns["image"] > 0] = self.rows
        own = row_T[mine]
        own = own[own >= 0]
        if self.owner is None:
            return replace(self, rows=own, types=types, seen={})
        # The rank of each token of the stream: zig-zag deals it in halves, not in order.
        size = group.size()
        rank = group.rank()
        rank_T = torch.empty_like(row_T)
        order = rank_order(batch.cu_seqlens_padded, size)
        rank_T[order] = torch.arange(size).repeat_interleave(len(mine))
        # of each placeholder of the stream: who has its row, and who gets it
        owner = self.owner[self.rows]
        gets = rank_T[row_T >= 0]
        # What this rank sends: the rows of its own images, numbered among them, in the order of the
        # ranks that get them. What it receives comes in the order of the ranks that send, and
        # `arrange` puts it into the order of this rank's placeholders.
        is_own = self.owner == rank
        local = is_own.cumsum(0) - 1
        sent = self.rows[owner == rank]
        to = gets[owner == rank]
        arrange = inverse_permutation(self.owner[own].argsort(stable=True))
        exchange = RowExchange(
            group,
            send=local[sent[to.argsort(stable=True)]],
            arrange=arrange,
            counts=(
                torch.bincount(to, minlength=size).tolist(),
                torch.bincount(self.owner[own], minlength=size).tolist(),
            ),
        )
        return replace(self, rows=own, types=types, seen={}, exchange=exchange)


def encode(lm: transformers.PreTrainedModel, images: PackedImages) -> Any:
    """Runs the towers on this rank's images at once; returns their output with the rows of its
    placeholders.
    """
    # Pixels in the dtype of the tower; the rest of the record are sizes and masks.
    encoders = towers(lm)
    dtype = _computes_in(lm, encoders)
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in images.record.items()}
    base: Any = lm.base_model
    _keep_outputs(encoders)
    with ExitStack() as around:
        for patches in _patch_embeddings(encoders):
            around.callback(vars(patches).pop, "forward")
            vars(patches)["forward"] = partial(_embed_patches, patches)
        output = base.get_image_features(**given, return_dict=True)
    # A family's result is nested in its own way: its rows are taken out, replaced by those of this
    # rank's placeholders, and put back into the same nesting, which the model reads.
    parts: list[Tensor] = []
    put = _flattened(output, images.num_rows, parts)
    if images.exchange is not None:
        return put([images.exchange(part) for part in parts])
    return put([part.index_select(0, images.rows) for part in parts])


def _computes_in(lm: transformers.PreTrainedModel, encoders: Sequence[nn.Module]) -> torch.dtype:
    """Returns the dtype that the model computes in.

    FSDP stores shards in fp32 and gathers them in bf16, so the first weight that is not a shard
    decides. Cached as the class's `dtype`, because a family's own code reads it (SmolVLM casts
    features to it).
    """
    base: Any = lm.base_model
    kind = type(base)
    if "dtype" in vars(kind):
        return base.dtype
    # the tower may be a part of the language model, where there is no encoder (Chameleon)
    weights = [*encoders, lm]
    first = next(p for part in weights for p in part.parameters())
    whole = (p for part in weights for p in part.parameters() if not isinstance(p, DTensor))
    dtype = next(whole, first).dtype
    if isinstance(first, DTensor) or base.dtype != dtype:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        base.__class__ = type(kind.__name__, (kind,), {**names, "dtype": dtype})
    return dtype


def _keep_outputs(encoders: Sequence[nn.Module]) -> None:
    """Lets sharded towers return what they could before, the outputs of inner layers: transformers
    looks that up by the name of a class, and FSDP gives a module another one.
    """
    for tower in encoders:
        for kind in {type(module) for module in tower.modules()}:
            if issubclass(kind, FSDPModule):
                own = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))
                known = dict.get(compat.record_registry, str(own))
                dict.__setitem__(compat.record_registry, str(kind), known)


def _patch_embeddings(encoders: Sequence[nn.Module]) -> Iterator[nn.Conv3d]:
    """Yields convolutions whose kernel steps by its own size."""
    for tower in encoders:
        for module in tower.modules():
            if type(module) is not nn.Conv3d or "forward" in vars(module):
                continue
            if module.kernel_size == module.stride and module.groups == 1:
                yield module


def _embed_patches(conv: nn.Conv3d, patches: Tensor) -> Tensor:
    """Embeds patches that are as large as the kernel by one product: on a CPU in a third of the
    convolution's time, and in a seventh of that of its backward pass.
    """
    if patches.shape[2:] != conv.kernel_size:
        return nn.Conv3d.forward(conv, patches)
    rows = nn.functional.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)
    return rows[..., None, None, None]


def placed_fields(output: Any) -> list[str]:
    """Names what models read of a tower's output: nearly all `pooler_output`, Llama 4 and Fuyu the
    other one.
    """
    first = "last_hidden_state" if output.get("pooler_output") is None else "pooler_output"
    return [name for name in (first, "deepstack_features") if output.get(name) is not None]


def _flattened(
    output: Any, num_rows: int, parts: list[Tensor]
) -> Callable[[Sequence[Tensor]], Any]:
    """Appends to `parts` each tensor, or list of tensors, of `num_rows` rows; returns what puts
    others in their places.

    A tower's result is a tensor [images, tokens, C] or [R, C], or a list with one of each image;
    deepstack features are a list of such. Of two images with 3 and 2 rows, and two such layers:

        pooler_output       [x [3, C], y [2, C]]                     parts[0] = [5, C]
        deepstack_features  [[x1, y1], [x2, y2]]                     parts[1], parts[2] = [5, C]
        put([a, b, c])      pooler_output = (a,), deepstack_features = [(b,), (c,)]
    """

    def visit(value: Any) -> Callable[[Sequence[Tensor]], Any]:
        is_list = isinstance(value, (list, tuple))
        tensors = value if is_list else [value]
        rows = [x.flatten(0, -2) for x in tensors if isinstance(x, Tensor) and x.ndim > 1]
        if rows and sum(map(len, rows)) == num_rows:
            at = len(parts)
            parts.append(torch.cat(rows))
            is_by_image = not is_list and value.ndim > 2

            # what counts rows by images finds one of all of them
            def one_image(given: Sequence[Tensor]) -> Any:
                if is_list:
                    return (given[at],)
                return given[at][None] if is_by_image else given[at]

            return one_image
        # not rows of all images by itself: a list of such results, as of deepstack
        if is_list:
            made = [visit(x) for x in value]
            return lambda given: type(value)(x(given) for x in made)
        if isinstance(value, Tensor):
            raise ConfigError(
                f"the tower returns a tensor of shape {tuple(value.shape)} for {num_rows} places "
                "of images: this family is not supported."
            )
        return lambda given: value

    fields = {name: visit(output[name]) for name in placed_fields(output)}

    def put(given: Sequence[Tensor]) -> Any:
        for name, of_field in fields.items():
            setattr(output, name, of_field(given))
        return output

    return put
