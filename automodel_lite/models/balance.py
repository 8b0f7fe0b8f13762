"""The load-balancing loss of a mixture of experts (Switch Transformer, arXiv:2101.03961), of each
document by itself.

transformers takes its means over whatever shares a batch, so its loss depends on packs and ranks.
Over one document, with the tokens of all sparse layers counted together as transformers does, it
depends on nothing else:

    balance(document) = E * sum over experts of  choices / rows * probabilities / rows
                        rows = tokens * layers
    added to the loss   coefficient * sum over documents of  label tokens * balance(document)

It is divided by the label tokens of the step (with `loss_weights`, by their weights), whatever the
loss itself is divided by.

The choices have no gradient. So ranks that share a document need no more than their sum, and each
rank adds what its own tokens contribute.

Legend: T tokens of the stream (of this rank), N documents, E experts.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import has_experts
from automodel_lite.models.loss import document_of_tokens
from automodel_lite.models.settings import experts_per_token
from automodel_lite.thd import ThdBatch


@dataclass(frozen=True)
class Balance:
    """coefficient  of the loss
    top_k        experts that a token is sent to
    """

    coefficient: float
    top_k: int

    def __call__(self, router_logits_TE: Sequence[Tensor], batch: ThdBatch) -> Tensor:
        """Sums over this rank's tokens; router_logits_TE of each sparse layer."""
        assert batch.mixers is not None
        exchange = batch.mixers.exchange
        # 1. To which document each token belongs, and whether it is real: slots end in padding.
        (document_T, within_T) = document_of_tokens(batch)
        is_real_T = within_T < batch.cu_seqlens.diff()[document_T]
        sum_rows = functools.partial(
            _sum_rows, batch, document_T, batch.cu_seqlens_padded[document_T] + within_T
        )
        # 2. Of each document, its labels and its tokens. Labels weigh its balance, as they weigh
        # its cross-entropy; tokens are what means are taken over.
        weights_T = batch.columns.get("loss_weights", 1)
        labels_T = (batch.labels != IGNORE_INDEX) * weights_T + batch.columns.get("row_labels", 0)
        counts_N2 = sum_rows(torch.stack([labels_T * is_real_T, is_real_T], 1).float())
        # 3. How often each expert was chosen, and its probabilities, over all sparse layers.
        # [N, 1] zeros grow to [N, E] by the first sum.
        choices_NE = probabilities_NE = torch.zeros_like(counts_N2[:, :1])
        for logits_TE in router_logits_TE:
            probs_TE = logits_TE.flatten(0, -2).float().softmax(-1)
            chosen_TE = torch.zeros_like(probs_TE).scatter_(
                1, probs_TE.topk(self.top_k).indices, 1.0
            )
            choices_NE = choices_NE + sum_rows(chosen_TE * is_real_T[:, None])
            probabilities_NE = probabilities_NE + sum_rows(probs_TE * is_real_T[:, None])
        # 4. Choices have no gradient, so ranks that share a document need only their sum; the
        # probabilities stay this rank's, and the ranks' losses add up to the whole one.
        known = torch.cat([choices_NE, counts_N2], 1)
        known = exchange.summed(known) if exchange else known
        choices_NE = known[:, :-2]
        labels_N = known[:, -2]
        lens_N = known[:, -1].clamp(min=1)
        # 5. E * sum of the products of both means, by the labels of each document.
        products_N = (choices_NE * probabilities_NE).sum(1) / (lens_N * len(router_logits_TE)) ** 2
        return self.coefficient * choices_NE.shape[1] * (labels_N * products_N).sum()


def _sum_rows(batch: ThdBatch, document_T: Tensor, place_T: Tensor, x_TK: Tensor) -> Tensor:
    """Sums this rank's values over each row, [N, K]; a token that rows of a tree share counts in
    all of them.
    """
    assert batch.mixers is not None
    stream = batch.mixers.stream
    if stream.tree is None:
        return x_TK.new_zeros(len(batch.cu_seqlens) - 1, x_TK.shape[1]).index_add(
            0, document_T, x_TK
        )
    # Paths lie in the whole stream, of which other ranks hold the rest: zeros here.
    whole = x_TK.new_zeros(len(stream.tree.own), x_TK.shape[1]).index_add(0, place_T, x_TK)
    of_paths = whole.index_select(0, stream.tree.paths)
    return x_TK.new_zeros(len(stream.cu_seqlens) - 1, x_TK.shape[1]).index_add(
        0, stream.document, of_paths
    )


def balance_of(lm: transformers.PreTrainedModel, coefficient: float) -> Balance:
    """Raises ConfigError for families that transformers gives no such loss."""
    top_k = experts_per_token(lm.config.get_text_config())
    has_loss = "load_balancing_loss_func" in vars(sys.modules[type(lm).__module__])
    if top_k is None or not has_loss or not has_experts(lm):
        raise ConfigError(
            f"model.router_aux_loss={coefficient}: transformers has no load-balancing loss for "
            f"{type(lm).__name__} (no experts, or experts that are balanced by a bias): set "
            "model.router_aux_loss=0."
        )
    return Balance(coefficient, top_k)
