"""Counts what one rank of a simulated world holds, computes and sends, operation by operation.

Each operation on the fake GPU is seen once: a storage counts from its first tensor until it is
freed, a product by its FLOPs, everything else by the bytes that it reads and writes, and a
collective by what leaves this rank.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry

from automodel_lite.compat import FakeTensor, TorchDispatchMode
from automodel_lite.parallel.mesh import AXES, MeshShape

GPU = torch.device("cpu", 0)
"""Fake tensors tell it from the host, which is "cpu" without a number, and copy between the two."""


class Operation(NamedTuple):
    """A kernel on the GPU.

    kind    product | attention | update (of the optimizer) | layer (tokens inside a decoder layer)
            | logits | other
    flops   of an attention: per key that a query sees, as the documents are not known here
    window  keys that a query sees at most; None = all of its document before it
    """

    kind: str
    flops: float
    bytes: int
    window: int | None = None


class Message(NamedTuple):
    """A collective.

    axes         of the mesh, along which its ranks lie
    extent       ranks from its first to its last: more than a node has means the network
    is_parallel  travels beside the computation, as FSDP's weights and gradients do
    """

    axes: str
    extent: int
    is_parallel: bool
    bytes: int


Work = Counter[Operation | Message]
"""How often each happens."""


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, the operations, and what collectives send.

    part          of the step that is counted: micro (a micro-batch before the last), last, update
    tells_layers  has the backward pass of each layer a peak of its own, as `backward 3`?
    """

    def __init__(
        self, shape: MeshShape, routed_tokens: int, vocab_size: int, tells_layers: bool
    ) -> None:
        super().__init__()
        self.part = "update"
        self.work: dict[str, Work] = {"micro": Counter(), "last": Counter(), "update": Counter()}
        self.is_parallel = False  # does what is sent now travel beside the computation?
        # what comes now belongs to a decoder layer, which torch.compile makes few kernels of
        self.is_in_layer = False
        self._weight_shapes: set[torch.Size] = set()
        self._routed_tokens = routed_tokens
        self._vocab_size = vocab_size
        self._tells_layers = tells_layers
        self.phase = self._place = "load"
        self.now = 0
        self.after_layers = dict[int, int]()
        self.peaks: Counter[str] = Counter()
        self._shape = shape
        # name of a process group -> mesh axes, ranks, extent
        self._axes: dict[str, tuple[str, int, int]] = {}
        self._sizes: dict[int, int] = {}  # storage -> bytes
        self._kinds: dict[int, str] = {}  # storage -> what made it
        self._held: Counter[str] = Counter()  # kind -> bytes
        self._peak = 0
        self._held_at_peak = self._held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # six of ten calls: where is this tensor?
            return func(*args)
        if func is torch.ops.aten._local_scalar_dense.default and self._routed_tokens:
            # the one number that expert parallelism reads from the device
            return self._routed_tokens
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype == torch.float32:
            # its fake form knows bf16 alone
            result = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {}))
            result = result.float()
        else:
            result = func(*args, **(kwargs or {}))
        for value in gpu_tensors(result):
            self.watch(value, func)
        if func.overloadpacket is torch.ops._c10d_functional.wait_tensor:
            # what was waited for is the same memory; that of a fake collective is another
            pending = args[0].untyped_storage()._cdata
            if pending != result.untyped_storage()._cdata:
                self.resized(pending, 0)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._count_sent(func, args, kwargs or {}, result)
        elif self.phase in _COUNTED and (one := operation(func, args, kwargs or {}, result)):
            if one.kind == "other":
                one = one._replace(kind=self._place_of(func, args, result))
            self.work[self.part][one] += 1
        return result

    def _place_of(self, func: Any, args: Any, result: Any) -> str:
        """Returns whether an operation is of a layer's tokens, of logits, or of neither."""
        touched = gpu_tensors((args, result))
        if any(x.ndim > 1 and x.shape[-1] == self._vocab_size for x in touched):
            return "logits"
        # FSDP copies weights between layers, and autocast casts them: that is one kernel for each
        of_weights = func.namespace == "fsdp" or func.overloadpacket.__name__ in _OF_WEIGHTS
        of_weights = of_weights or all(
            x.ndim == 1 or x.shape in self._weight_shapes for x in touched
        )
        return "layer" if self.is_in_layer and not self.is_parallel and not of_weights else "other"

    def knows(self, weights: Iterable[Tensor]) -> None:
        """Tells operations on these from operations on tokens."""
        self._weight_shapes = {local.shape for each in weights for local in gpu_tensors([each])}

    def watch(self, value: Tensor, func: Any) -> None:
        """A storage counts from its first tensor on until it is freed."""
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        # collectives gather into memory that is not written yet
        is_gathered = func.overloadpacket._qualified_op_name in ("aten::empty", "aten::new_empty")
        is_logits = value.ndim > 1 and value.shape[-1] == self._vocab_size
        kind = (
            "gathered weights and gradients"
            if is_gathered
            else "logits"
            if is_logits
            else _MADE_IN[self.phase]
        )
        self._kinds[key] = _MADE_IN[self.phase] if self.phase in ("load", "optimizer") else kind
        self.resized(key, storage.nbytes())
        weakref.finalize(storage, self._freed, key)

    def resized(self, key: int, num_bytes: int) -> None:
        """FSDP frees a gathered parameter by a storage of no bytes."""
        if key in self._sizes:
            self._change(self._kinds[key], num_bytes - self._sizes[key])
            self._sizes[key] = num_bytes

    def enter(self, phase: str, layer: int | None = None) -> None:
        self.phase = phase
        self.is_in_layer = layer is not None
        self._place = f"{phase} {layer}" if self._tells_layers and layer is not None else phase
        self.peaks[self._place] = max(self.peaks[self._place], self.now)

    def forget(self, phase: str) -> None:
        """Drops this phase: the work before the first step does not belong to a step."""
        del self.peaks[phase]
        for work in self.work.values():
            work.clear()
        self._peak = 0

    def at_peak(self) -> dict[str, int]:
        """What was alive when most was held, the largest kinds first."""
        return {
            kind: num_bytes for kind, num_bytes in self._held_at_peak.most_common() if num_bytes
        }

    def _change(self, kind: str, num_bytes: int) -> None:
        self.now += num_bytes
        self._held[kind] += num_bytes
        self.peaks[self._place] = max(self.peaks[self._place], self.now)
        if self.now > self._peak:
            self._peak = self.now
            self._held_at_peak = self._held.copy()

    def _freed(self, key: int) -> None:
        self._change(self._kinds.pop(key), -self._sizes.pop(key))

    def _count_sent(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        given = [*args, *kwargs.values()]
        groups = [
            dist.ProcessGroup.unbox(x)
            for x in given
            if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
        ]
        group_name = (
            groups[0].group_name
            if groups
            else next(x for x in reversed(given) if isinstance(x, str))
        )
        axes, ranks, extent = self._axes_of(group_name)
        largest = max((t.nbytes for t in gpu_tensors([*given, result])), default=0)
        # a reduce-scatter and an all-gather
        times = 2 if "allreduce" in name or "all_reduce" in name else 1
        sent = times * largest * (ranks - 1) // ranks
        if self.phase in _COUNTED and sent:
            self.work[self.part][Message(axes, extent, self.is_parallel, sent)] += 1

    def _axes_of(self, group_name: str) -> tuple[str, int, int]:
        """Returns the axes of the mesh along which the ranks of a group lie, their number, and
        their extent.
        """
        if group_name not in self._axes:
            group = dist.distributed_c10d._resolve_process_group(
                group_name  # type: ignore[arg-type]
            )
            ranks = dist.get_process_group_ranks(group)
            names: list[str] = []
            stride = 1
            for axis in reversed(AXES):
                size = getattr(self._shape, axis)
                if len({rank // stride % size for rank in ranks}) > 1:
                    names.insert(0, axis)
                stride *= size
            self._axes[group_name] = (" x ".join(names), len(ranks), max(ranks) - min(ranks) + 1)
        return self._axes[group_name]


_COUNTED = frozenset({"forward", "backward", "optimizer"})
_MADE_IN = {  # phase -> what its tensors are
    "load": "weights",
    "optimizer": "optimizer states",
    "forward": "activations",
    "backward": "gradients and recomputed activations",
    "save": "states to save",
    "export": "weights to export",
}


_FREE = frozenset(
    {
        "detach",
        "view",
        "_unsafe_view",
        "t",
        "transpose",
        "unsqueeze",
        "expand",
        "slice",
        "select",
        "alias",
    }
)
_FREE |= {
    "permute",
    "split",
    "squeeze",
    "reshape",
    "as_strided",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
}
_FREE |= {"resize_", "device", "lift_fresh", "split_with_sizes", "unbind", "chunk"}
"""What moves no bytes: views, and memory that is not written yet."""
_FILLS = frozenset(
    {"zeros_like", "ones_like", "full_like", "rand_like", "new_zeros", "new_ones", "new_full"}
)
"""What reads nothing but a shape."""
_SCATTERS = frozenset({"scatter_add_", "scatter_", "index_add_", "index_put_", "masked_fill_"})
"""What writes a few places of its first argument."""
_OF_WEIGHTS = frozenset({"chunk_cat", "split_with_sizes_copy", "_foreach_copy_", "_chunk_cat"})
"""How FSDP copies weights and gradients."""


def operation(func: Any, args: Any, kwargs: Any, result: Any) -> Operation | None:
    """Returns what a kernel computes, and the bytes that it reads and writes; None for what is
    none.
    """
    name = func.overloadpacket.__name__
    if name in _FREE or func.namespace in ("prim", "profiler"):
        return None
    args = _own_parts(args)
    result = _own_parts(result)
    # a look-up reads the rows that it gives, not the table; a gather the places that it takes
    read = {"embedding": result, "index_select": result, "gather": args[1:]}.get(name, args)
    if name in _FILLS:
        read = ()
    elif name in _SCATTERS:  # read, added to, and written
        read, result = (args[1:], args[1:]), args[1:]
    elif name == "copy_":  # what is overwritten is not read
        read = args[1:]
    # `out` is the result
    given = {key: value for key, value in kwargs.items() if key != "out"}
    touched = gpu_tensors((read, given, result))
    moved = sum(x.nbytes for x in touched)
    if not moved:
        return None
    if "scaled_dot_product" in name:  # of a tower, whose images are apart: all pairs are visible
        query, keys = [x for x in touched if x.ndim == 4][:2]
        times = 10.0 if "backward" in name else 4.0
        return Operation("product", times * query.numel() * keys.shape[-2], moved)
    if "_attn" in name or "flash_attention" in name:
        # two products of each visible pair forward; five backward, as the scores are made again
        query = next(x for x in touched if x.ndim == 3)
        window = next(
            (x[0] + 1 for x in args if isinstance(x, list) and len(x) == 2 and x[0] >= 0), None
        )
        if "backward" not in name:
            return Operation("attention", 4.0 * query.numel(), moved, window)
        # FlashAttention adds up the queries' gradient in fp32 (cleared, added to, read and cast),
        # and makes those of keys and values for each query head, which a sum reads
        helpers = 16 * query.numel()
        keys = min((x for x in touched if x.ndim == 3), key=lambda x: x.shape[1])
        if keys.shape[1] != query.shape[1]:
            helpers += 2 * (4 * query.numel() + 2 * keys.numel())
        return Operation("attention", 10.0 * query.numel(), moved + helpers, window)
    # rows of the first, each with one matrix of the second; the latter two are of models/experts.py
    if name in ("_grouped_mm", "experts_one_by_one", "expert_gradients_one_by_one"):
        return Operation("product", 2.0 * args[0].numel() * args[1].shape[-1], moved)
    if func.overloadpacket in flop_registry:
        flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        return Operation("product", flops, moved)
    # reads four tensors of the weights' size, and writes them in place; gradients that it scales,
    # too
    if "adam" in name:
        written = 4 if kwargs.get("grad_scale") is not None else 3
        return Operation("update", 0.0, moved * (4 + written) // 4)
    return Operation("other", 0.0, moved)


def gpu_tensors(value: Any) -> list[Tensor]:
    """Returns the tensors on the fake GPU; of distributed ones this rank's parts."""
    if isinstance(value, (list, tuple)):
        return [found for each in value for found in gpu_tensors(each)]
    if isinstance(value, dict):
        return gpu_tensors(list(value.values()))
    value = value._local_tensor if isinstance(value, DTensor) else value
    return [value] if isinstance(value, FakeTensor) and value.device == GPU else []


def _own_parts(value: Any) -> Any:
    """Returns this rank's parts of distributed tensors; torch's pytree takes longer for what is so
    flat.
    """
    if isinstance(value, (list, tuple)):
        return [_own_parts(each) for each in value]
    return value._local_tensor if isinstance(value, DTensor) else value
