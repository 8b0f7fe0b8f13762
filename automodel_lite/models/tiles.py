"""Layers that work on each token alone, computed for a tile of tokens at a time: MLPs and norms.

At 131,072 tokens per rank the activations of one MLP are larger than all that is kept between layers. A tile is
computed again in the backward pass, so only the input of such a module is kept; gradients of its weights are added up
over the tiles in fp32, as one matrix product adds them. The numbers are those of the whole module.

Legend: T tokens, C model dim.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from automodel_lite.config.schema import TrainingConfig
from automodel_lite.errors import ConfigError

MANY_TOKENS = 32768
"""Tokens of a rank's micro-batch above which null tiles."""
TILE_TOKENS = 8192
"""A tile of an 8B model: 12,288 wide in bf16 it is 192 MiB, and its products still fill a GPU."""


def tile_layers(layers: list[nn.Module], tile_tokens: int) -> int:
    """Replaces the forward of the tokenwise modules of each layer; returns of how many. 0 tokens: none.

    Parameter names stay, as do the modules that FSDP, tensor parallelism and adapters know.
    """
    if not tile_tokens:
        return 0
    modules = [module for layer in layers for module in tokenwise_modules(layer)]
    for module in modules:
        module.forward = torch.compiler.disable(_tiled(module, tile_tokens))  # type: ignore[method-assign]
    return len(modules)


def chosen_tile(training: TrainingConfig, num_tokens: int) -> int:
    """Tokens of a tile for `num_tokens` of a rank's micro-batch; 0 = all at once.

    Raises ConfigError together with fp8, whose scales would be those of a tile.
    """
    if training.tile_tokens and training.fp8 != "none":
        raise ConfigError(
            f"training.tile_tokens={training.tile_tokens} would give each tile scales of its own with "
            f"training.fp8={training.fp8}: set one of them to null or none."
        )
    if training.tile_tokens is not None:
        return training.tile_tokens
    is_long = num_tokens > MANY_TOKENS and training.activation_checkpointing != "none"
    return TILE_TOKENS if is_long and training.fp8 == "none" else 0


def tokenwise_modules(layer: nn.Module) -> Iterator[nn.Module]:
    """MLPs and norms, told by their structure: one argument, and linear layers or vectors of weights alone."""
    for child in layer.children():
        if _is_tokenwise(child):
            yield child
        else:
            yield from tokenwise_modules(child)


def _is_tokenwise(module: nn.Module) -> bool:
    if len(inspect.signature(module.forward).parameters) != 1:
        return False  # attention and mixers take positions, caches, documents; gated norms their gate
    if any(isinstance(part, nn.Dropout) and part.p for part in module.modules()):
        return False  # would draw other numbers when it is computed again
    weighted = [part for part in module.children() if next(part.parameters(), None) is not None]
    if not weighted:
        own = list(module.parameters())
        return "Norm" in type(module).__name__ and bool(own) and all(p.ndim == 1 for p in own)
    own = list(module.parameters(recurse=False))
    return len(weighted) > 1 and not own and all("Linear" in type(part).__name__ for part in weighted)


def _tiled(module: nn.Module, tile_tokens: int) -> Callable[[Tensor], Tensor]:
    forward = module.forward

    @functools.wraps(forward)
    def tiled(x: Tensor) -> Tensor:
        dim = 1 if x.ndim > 2 else 0  # [1, T, C], [1, T, heads, C] or [T, C]
        if x.shape[dim] <= tile_tokens:
            whole: Tensor = forward(x)
            return whole
        out: Tensor = _Tiled.apply(x, module, forward, (tile_tokens, dim), *_trained(module))
        return out

    return tiled


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


class _Tiled(torch.autograd.Function):
    """The weights are arguments, so that their gradients are returned; the module finds them by itself."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        module: nn.Module,
        forward: Callable[[Tensor], Tensor],
        tiles: tuple[int, int],
        *weights: Tensor,
    ) -> Tensor:
        device = x.device.type
        ctx.save_for_backward(x)
        ctx.module, ctx.forward, ctx.tiles = module, forward, tiles
        ctx.autocast = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        return torch.cat([forward(tile) for tile in x.split(*tiles)], tiles[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weights = _trained(ctx.module)  # FSDP has gathered them again
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        totals: list[Tensor] = []
        dtype, is_cast = ctx.autocast
        starts = range(0, x.shape[ctx.tiles[1]], ctx.tiles[0])
        for start, tile, of_tile in zip(starts, x.split(*ctx.tiles), grad.split(*ctx.tiles)):
            leaf = tile.detach().requires_grad_(grad_x is not None)
            with torch.enable_grad(), torch.autocast(x.device.type, dtype, enabled=is_cast, cache_enabled=False):
                out = ctx.forward(leaf)
            wanted = [leaf, *weights] if grad_x is not None else weights
            grads = list(torch.autograd.grad(out, wanted, of_tile))
            if grad_x is not None:
                grad_x.narrow(ctx.tiles[1], start, tile.shape[ctx.tiles[1]]).copy_(grads.pop(0))
            if totals:
                for total, part in zip(totals, grads):
                    total += part
            else:
                totals = [part.float() for part in grads]
        return grad_x, None, None, None, *(total.to(p.dtype) for total, p in zip(totals, weights))
