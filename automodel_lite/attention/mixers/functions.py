"""The functions that transformers' recurrent and convolution mixers call, made to keep documents
apart.

Every such mixer of transformers goes through a handful of module-level functions, each of which is
a package's kernel where the package is installed (causal-conv1d, mamba-ssm,
flash-linear-attention), else PyTorch. Inside `running` these functions split at documents: kernels
that take the boundaries get them; PyTorch is replaced by our own functions for a packed stream;
where there is none, the documents are passed as rows. Under context parallelism they get all tokens
of some heads.

Legend: T tokens, H heads or channels, n rows of L tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

from automodel_lite.attention.mixers import packed_mixers
from automodel_lite.attention.spec import FAMILIES
from automodel_lite.document_rows import NEAR_TOKENS, DocumentRows, MixerPlan
from automodel_lite.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """A function of families.yaml, which explains the fields."""

    tokens: dict[str, tuple[int, int | None]]
    packed: str
    weights: dict[str, int] = field(default_factory=dict)
    boundary: str | None = None
    has_states: bool = False
    in_trees: str = "paths"


FUNCTIONS = {name: Layout(**layout) for name, layout in FAMILIES["mixer_functions"].items()}
FUSED: dict[str, str | None] = FAMILIES["fused_functions"]
# from the first version that does so to the first that does not
WRONG_ON_HOPPER = (Version("3.4.0"), Version("3.7.1"))
_BOUNDARIES = frozenset({"seq_idx", "cu_seqlens", "cu_seqlens_cpu"})


@dataclass(frozen=True)
class Call:
    """One call of one of the functions.

    positional  names of the arguments that were not named: packages give them other names
    """

    function: Callable[..., Any]
    name: str
    positional: tuple[str, ...]
    arguments: dict[str, Any]

    def again(self, **changed: Any) -> Any:
        named = self.arguments | changed
        positional = [named.pop(name) for name in self.positional]
        return self.function(*positional, **named)


_RUN: ContextVar[Callable[[Call], Any] | None] = ContextVar("mixer_functions", default=None)


def patch_functions(mixer: nn.Module) -> None:
    """Routes the functions that `mixer` calls through `running`; outside it they are unchanged."""
    names = inspect.unwrap(type(mixer).forward).__globals__
    for name in (*FUNCTIONS, *FUSED):
        if name in names and not isinstance(names[name], _Patched):
            names[name] = _Patched(names[name], name)


class _Patched:
    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self.function = function
        self.name = name
        self.signature = inspect.signature(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = _RUN.get()
        if run is None:
            return self.function(*args, **kwargs)
        arguments = self.signature.bind(*args, **kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        positional = tuple(self.signature.parameters)[: len(args)]
        return run(
            Call(
                self.function,
                self.name,
                positional,
                {k: v for k, v in arguments.items() if k not in _BOUNDARIES},
            )
        )


@contextmanager
def running(run: Callable[[Call], Any]) -> Iterator[None]:
    """Calls of patched functions go to `run`."""
    before = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(before)


@dataclass
class Recorded:
    """What a mixer called: for each call its heads, and whether the function works on a packed
    stream.
    """

    heads: list[list[int]] = field(default_factory=list)
    takes_streams: list[bool] = field(default_factory=list)

    def __call__(self, call: Call) -> Any:
        if call.name in FUSED:
            return None
        layout = FUNCTIONS[call.name]
        given = [(call.arguments.get(name), heads) for name, (_, heads) in layout.tokens.items()]
        self.heads.append(
            [x.shape[heads] for x, heads in given if heads is not None and isinstance(x, Tensor)]
        )
        self.takes_streams.append(
            takes_boundaries(call.function, layout.boundary)
            or packed_function(call.function, call.name) is not None
        )
        return call.again()

    def divide(self, num_ranks: int) -> bool:
        """Can `num_ranks` ranks share the heads of all functions? Groups are repeated where they
        are too few.
        """
        for heads in self.heads:
            if heads[0] % num_ranks or any(heads[0] % groups for groups in heads):
                return False
        return bool(self.heads)


@functools.cache
def takes_boundaries(function: Callable[..., Any], boundary: str | None) -> bool:
    """Is `function` a package's kernel that has the argument `boundary`? transformers' PyTorch
    fallback refuses it.
    """
    known = resolved_implementation(function)
    return bool(known.get("is_new_implementation")) and boundary in known["applicable_params"]


@functools.cache
def check_gradients(name: str, capability: tuple[int, int]) -> None:
    """Raises ConfigError where flash-linear-attention refuses the backward pass of a gated rule, by
    a traceback and after minutes of tuning: these Tritons compile it wrongly for Hopper.
    """
    if (
        name != "torch_chunk_gated_delta_rule"
        or capability[0] != 9
        or find_spec("tilelang") is not None
    ):
        return
    found = version("triton")
    if WRONG_ON_HOPPER[0] <= Version(found) < WRONG_ON_HOPPER[1]:
        raise ConfigError(
            f"flash-linear-attention cannot train on this GPU: Triton {found} compiles its "
            f"gradients wrongly for Hopper. Install Triton {WRONG_ON_HOPPER[1]} or newer, which "
            "comes with newer releases of torch, or tilelang, or uninstall flash-linear-attention "
            "(slower)."
        )


@functools.cache
def packed_function(function: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    """Ours in place of transformers' PyTorch; None with a package's kernel, or if `function` has an
    argument that ours does not know.
    """
    ours: Callable[..., Any] = getattr(packed_mixers, FUNCTIONS[name].packed)
    if resolved_implementation(function).get("is_new_implementation"):
        return None
    known = _parameters(ours).union(*FAMILIES["not_on_a_stream"])
    return ours if _parameters(function) <= known else None


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def resolved_implementation(function: Callable[..., Any]) -> Mapping[str, Any]:
    """What transformers' decorator found when it looked for the package."""

    def variables(wrapper: Callable[..., Any]) -> Mapping[str, Any]:
        return inspect.getclosurevars(wrapper).nonlocals if inspect.isfunction(wrapper) else {}

    return variables(
        inspect.unwrap(function, stop=lambda wrapper: "is_new_implementation" in variables(wrapper))
    )


def split_at_documents(plan: MixerPlan) -> Callable[[Call], Any]:
    """The functions on the documents of `plan`; with an exchange, on this rank's heads of the whole
    stream.
    """

    def run(call: Call) -> Any:
        if call.name not in FUSED:
            return _split(call, FUNCTIONS[call.name], plan)
        is_split_up = plan.exchange is not None or plan.stream.tree is not None
        if is_split_up or not takes_boundaries(call.function, FUSED[call.name]):
            return None
        return call.again(seq_idx=plan.stream.seq_idx)

    return run


class _OnRows:
    """A call on other streams in place of its own: [n, L, H, ...] each -> [n, L, H, ...].

    given         the arguments that are streams -> where they have their tokens and heads
    weights       of this rank's heads
    gives_states  whether it returned a state beside its output
    """

    def __init__(
        self, call: Call, given: dict[str, tuple[int, int | None]], weights: dict[str, Tensor]
    ) -> None:
        self.call = call
        self.given = given
        self.weights = weights
        self.gives_states = FUNCTIONS[call.name].has_states

    def __call__(self, of_rows: Sequence[Tensor], **boundaries: Any) -> Tensor:
        rows = {name: _as_rows(x, *place) for (name, place), x in zip(self.given.items(), of_rows)}
        out = self.call.again(**rows, **self.weights, **boundaries)
        self.gives_states = isinstance(out, tuple)
        first, *_ = self.given.values()
        mixed: Tensor = out[0] if self.gives_states else out
        return mixed.movedim(first, (1, 2))  # type: ignore[arg-type]


def _split(call: Call, layout: Layout, plan: MixerPlan) -> Any:
    """Returns what the call returns, of documents that lie on one stream."""
    exchange = plan.exchange
    arguments = call.arguments
    given = {
        name: place
        for name, place in layout.tokens.items()
        if isinstance(arguments.get(name), Tensor)
    }
    streams = [_as_stream(arguments[name], *place) for name, place in given.items()]
    weights = {
        name: arguments[name] for name in layout.weights if isinstance(arguments.get(name), Tensor)
    }
    if exchange is not None:
        streams = exchange.to_heads([_repeated(x, exchange.size) for x in streams])
        weights = {
            name: exchange.part(weight, layout.weights[name]) for name, weight in weights.items()
        }
    on_rows = _OnRows(call, given, weights)
    out = _on_documents(on_rows, layout, plan, streams)
    if exchange is not None:
        out = exchange.from_heads(out)
    first, *_ = given.values()
    out = _as_rows(out[None], *first)
    out = out.contiguous() if first[0] == 1 else out  # callers take views of it
    return (out, None) if on_rows.gives_states else out


def _repeated(x_TH: Tensor, num_ranks: int) -> Tensor:
    """Repeats groups that several heads share until the ranks divide them."""
    groups = x_TH.shape[1]
    wanted = math.lcm(groups, num_ranks)
    return x_TH.repeat_interleave(wanted // groups, 1) if wanted > groups else x_TH


def _on_documents(
    on_rows: _OnRows, layout: Layout, plan: MixerPlan, streams: list[Tensor]
) -> Tensor:
    """Returns [T, H, ...]: by the package's kernel, by our function, or of documents as rows."""
    call = on_rows.call
    weights = on_rows.weights
    stream = plan.stream
    tree = stream.tree
    if layout.in_trees == "near" and tree and weights["weight"].shape[-1] <= NEAR_TOKENS:
        stream = tree.near or stream
    if takes_boundaries(call.function, layout.boundary):
        if torch.is_grad_enabled() and streams[0].is_cuda:
            check_gradients(call.name, torch.cuda.get_device_capability(streams[0].device))
        # transformers leaves out what a kernel lacks; some versions of fla read the boundaries on
        # the host.
        boundaries = {"cu_seqlens": stream.cu_seqlens, "cu_seqlens_cpu": stream.cu_host}
        if layout.boundary == "seq_idx":
            boundaries = {"seq_idx": stream.seq_idx}
        return _on_paths(
            stream, streams, lambda xs: on_rows([x[None] for x in xs], **boundaries).squeeze(0)
        )
    ours = packed_function(call.function, call.name)
    if ours is None:
        return plan.stream.map_rows(on_rows, streams)
    taken = _parameters(ours)
    known = {name: value for name, value in call.arguments.items() if name in taken} | weights
    if layout.in_trees == "states" and stream.tree and stream.tree.pieces is not None:
        return ours(stream.tree, **known | dict(zip(on_rows.given, streams)))
    document = stream.document
    return _on_paths(
        stream, streams, lambda xs: ours(document, **known | dict(zip(on_rows.given, xs)))
    )


def _on_paths(
    rows: DocumentRows, streams: Sequence[Tensor], function: Callable[[Sequence[Tensor]], Tensor]
) -> Tensor:
    """`function` of streams [T, ...]; where documents branch, on all of their paths, one after the
    other.
    """
    if rows.tree is None:
        return function(streams)
    return function([x.index_select(0, rows.tree.paths) for x in streams]).index_select(
        0, rows.tree.own
    )


def _as_stream(x: Tensor, time: int, heads: int | None) -> Tensor:
    """[1, ...] -> [T, H, ...]; [T, 1, ...] where all heads share it."""
    # squeeze, not [0]: the gradient of a selection is a copy
    return (
        x.movedim(time, 1).squeeze(0)[:, None]
        if heads is None
        else x.movedim((time, heads), (1, 2)).squeeze(0)
    )


def _as_rows(x: Tensor, time: int, heads: int | None) -> Tensor:
    """[n, L, H, ...] -> the layout of the function."""
    return x.squeeze(2).movedim(1, time) if heads is None else x.movedim((1, 2), (time, heads))
