"""What tokens and pairs of tokens cost: shared by whoever balances packs and whoever reports utilisation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a forward and backward pass: `per_token`, and `per_pair` of a visible (query, key) pair.

    window: keys that a query sees in sliding-window layers; `window_frac` of the layers have it.
    """

    per_token: float
    per_pair: float
    window: int | None = None
    window_frac: float = 0.0

    @staticmethod
    def of_decoder(
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        vocab_size: int,
        experts_per_token: int = 1,
        window: int | None = None,
        window_frac: float = 0.0,
    ) -> CostModel:
        """From the integers of a model config: gated MLP, grouped-query attention, an output head; 6 FLOPs per weight
        and token, 12 per pair and attention channel (two products, forward and twice backward)."""
        attention = hidden_size * head_dim * (2 * num_heads + 2 * num_kv_heads)
        mlp = 3 * hidden_size * intermediate_size * experts_per_token
        weights = num_layers * (attention + mlp) + hidden_size * vocab_size
        return CostModel(6.0 * weights, 12.0 * num_layers * num_heads * head_dim, window, window_frac)

    def pairs(self, lengths: np.ndarray) -> np.ndarray:
        """Visible pairs of causal documents, float64: s (s + 1) / 2, fewer where a window cuts them."""
        s = lengths.astype(np.float64)
        full = s * (s + 1) / 2
        if self.window is None or not self.window_frac:
            return full
        beyond = np.maximum(s - self.window, 0)
        return full - self.window_frac * beyond * (beyond + 1) / 2
