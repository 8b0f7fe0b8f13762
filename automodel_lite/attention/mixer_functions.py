"""The functions that transformers' recurrent and convolution mixers call, made to keep documents apart.

Every such mixer of transformers goes through a handful of module-level functions, each of which is a package's kernel
where the package is installed (causal-conv1d, mamba-ssm, flash-linear-attention), else PyTorch. Between `call_within`
and its end these functions split at documents: kernels that take the boundaries get them; the others get the documents
as rows. Under context parallelism they see all tokens of some heads.

Legend: T tokens, H heads or channels, n rows of L tokens.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from automodel_lite.thd import MixerPlan


@dataclass(frozen=True)
class Layout:
    """Where a function's arguments [1, ...] have their tokens and heads. The output is laid out as the first of them.

    tokens    argument -> (dim of time, dim of heads); heads None: shared by all heads
    weights   argument -> dim of heads
    boundary  the argument by which the package's kernel takes the documents; None without
    """

    tokens: dict[str, tuple[int, int | None]]
    weights: dict[str, int] = field(default_factory=dict)
    boundary: str | None = None


_CHANNELS, _HEADS = (2, 1), (1, 2)
_DELTA_RULE = Layout({name: _HEADS for name in ("value", "query", "key", "g", "beta")}, boundary="cu_seqlens")

FUNCTIONS: dict[str, Layout] = {
    "causal_conv1d_fn": Layout({"hidden_states": _CHANNELS}, {"weight": 0, "bias": 0}, "seq_idx"),
    "torch_chunk_gated_delta_rule": _DELTA_RULE,
    "chunk_kimi_delta_attention": _DELTA_RULE,
    "mamba2_chunk_scan": Layout(
        {name: _HEADS for name in ("hidden_states", "dt", "B", "C", "z")}, {"A": 0, "D": 0, "dt_bias": 0}, "seq_idx"
    ),
    "mamba_selective_scan": Layout(
        {"hidden_states": _CHANNELS, "dt": _CHANNELS, "z": _CHANNELS, "B": (2, None), "C": (2, None)},
        {"A": 0, "D": 0, "delta_bias": 0},
    ),
}
FUSED = {"mamba2_split_conv1d_scan_combined": "seq_idx", "mamba_inner_fn": None}
"""Convolution and scan in one, where the package has it; else these return None, and the functions above are called."""

_BOUNDARIES = frozenset({"seq_idx", "cu_seqlens", "cu_seqlens_cpu", "cu_seq_lens_q", "cu_seq_lens_k"})

_Run = Callable[[Callable[..., Any], str, dict[str, Any]], Any]
_RUN: ContextVar[_Run | None] = ContextVar("mixer_functions", default=None)


def patch_functions(mixer: nn.Module) -> None:
    """Makes the functions that `mixer` calls listen to `running`; they are as before outside of it."""
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
        return run(self.function, self.name, {k: v for k, v in arguments.items() if k not in _BOUNDARIES})


@contextmanager
def running(run: _Run) -> Iterator[None]:
    """Calls of patched functions go to `run(function, name, arguments)`."""
    before = _RUN.set(run)
    try:
        yield
    finally:
        _RUN.reset(before)


@dataclass
class Recorded:
    """What a mixer called: for each call its heads, and whether a package's kernel takes the boundaries."""

    heads: list[list[int]] = field(default_factory=list)
    takes_boundaries: list[bool] = field(default_factory=list)

    def __call__(self, function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Any:
        if name in FUSED:
            return None
        layout = FUNCTIONS[name]
        self.heads.append([x.shape[dim] for x, dim in _with_heads(layout, arguments)])
        self.takes_boundaries.append(takes_boundaries(function, layout.boundary))
        return function(**arguments)

    def divide(self, num_ranks: int) -> bool:
        """Can the heads of all functions be dealt to `num_ranks` ranks? Groups are repeated where they are too few."""
        return bool(self.heads) and all(
            heads[0] % num_ranks == 0 and all(heads[0] % groups == 0 for groups in heads) for heads in self.heads
        )


def takes_boundaries(function: Callable[..., Any], boundary: str | None) -> bool:
    """Is `function` a package's kernel that has the argument `boundary`? transformers' PyTorch fallback refuses it."""
    known = _chosen(inspect.unwrap(function, stop=lambda f: "is_new_implementation" in _chosen(f)))
    return bool(known.get("is_new_implementation")) and boundary in known["applicable_params"]


def _chosen(function: Callable[..., Any]) -> Mapping[str, Any]:
    """What transformers' decorator found when it looked for the package."""
    return inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}


def split_at_documents(plan: MixerPlan) -> _Run:
    """The functions on the documents of `plan`; with an exchange, on this rank's heads of the whole stream."""

    def run(function: Callable[..., Any], name: str, arguments: dict[str, Any]) -> Any:
        if name in FUSED:
            if plan.exchange is not None or not takes_boundaries(function, FUSED[name]):
                return None
            return function(**arguments, seq_idx=plan.stream.seq_idx)
        return _Call(function, FUNCTIONS[name], arguments, plan).run()

    return run


@dataclass(frozen=True)
class _Call:
    """One call of a function."""

    function: Callable[..., Any]
    layout: Layout
    arguments: dict[str, Any]
    plan: MixerPlan

    def run(self) -> Any:
        exchange = self.plan.exchange
        given = [name for name in self.layout.tokens if isinstance(self.arguments.get(name), Tensor)]
        streams = [_heads_second(self.arguments[name], *self.layout.tokens[name]) for name in given]
        weights = {name: self.arguments.get(name) for name in self.layout.weights}
        if exchange is not None:
            streams = exchange.to_heads([_dealable(x, streams[0].shape[1], exchange.size) for x in streams])
            parts = {name: exchange.part(w, self.layout.weights[name]) for name, w in weights.items() if w is not None}
            weights |= parts
        rest = {name: x for name, x in self.arguments.items() if name not in given} | weights
        returns_states = False

        def call(of_rows: list[Tensor], **boundaries: Any) -> Tensor:
            """[n, L, H, ...] each -> [n, L, H, ...]."""
            nonlocal returns_states
            laid_out = {name: _laid_out(x, *self.layout.tokens[name]) for name, x in zip(given, of_rows)}
            out = self.function(**laid_out, **rest, **boundaries)
            returns_states = isinstance(out, tuple)
            return _heads_third(out[0] if isinstance(out, tuple) else out, *self.layout.tokens[given[0]])

        rows = self.plan.stream
        if takes_boundaries(self.function, self.layout.boundary):
            out = call([x[None] for x in streams], **self._boundaries())[0]
        else:
            out = rows.each(call, streams)
        if exchange is not None:
            out = exchange.from_heads(out)
        out = _laid_out(out[None], *self.layout.tokens[given[0]])
        out = out.contiguous() if self.layout.tokens[given[0]] == _HEADS else out  # callers take views of it
        return (out, None) if returns_states else out

    def _boundaries(self) -> dict[str, Any]:
        """transformers leaves out what a kernel lacks; some versions of fla read the boundaries on the host."""
        rows = self.plan.stream
        if self.layout.boundary == "seq_idx":
            return {"seq_idx": rows.seq_idx}
        return {"cu_seqlens": rows.cu_seqlens, "cu_seqlens_cpu": rows.cu_host}


def _with_heads(layout: Layout, arguments: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
    for name, (_, heads) in layout.tokens.items():
        if heads is not None and isinstance(arguments.get(name), Tensor):
            yield arguments[name], heads


def _heads_second(x: Tensor, time: int, heads: int | None) -> Tensor:
    """[1, ...] -> [T, H, ...]; [T, 1, ...] where all heads share it."""
    if heads is None:
        return x[0].movedim(time - 1, 0)[:, None]
    return x[0].movedim((time - 1, heads - 1), (0, 1))


def _heads_third(x: Tensor, time: int, heads: int | None) -> Tensor:
    """[n, ...] -> [n, L, H, ...]."""
    assert heads is not None
    return x.movedim((time, heads), (1, 2))


def _laid_out(x: Tensor, time: int, heads: int | None) -> Tensor:
    """[n, L, H, ...] -> as the function wants it."""
    if heads is None:
        return x.squeeze(2).movedim(1, time)
    return x.movedim((1, 2), (time, heads))


def _dealable(x_TH: Tensor, num_heads: int, num_ranks: int) -> Tensor:
    """Groups that several heads share, repeated until the ranks divide them."""
    groups = x_TH.shape[1]
    wanted = math.lcm(groups, num_ranks)
    assert num_heads % groups == 0
    assert num_heads % num_ranks == 0
    return x_TH if wanted == groups else x_TH.repeat_interleave(wanted // groups, 1)
