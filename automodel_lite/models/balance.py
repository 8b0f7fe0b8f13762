"""The load-balancing loss of a mixture of experts (Switch Transformer, arXiv:2101.03961), of each document by itself.

transformers takes its means over whatever shares a batch, so its loss depends on packs and ranks. Over one document,
with the tokens of all sparse layers counted together as transformers does, it depends on nothing else:

    balance(document) = E * sum over experts of  choices / rows * probabilities / rows      rows = tokens * layers
    added to the loss: coefficient * sum over documents of  label tokens * balance(document)

The choices have no gradient. So ranks that share a document need no more than their sum, and each rank adds what its
own tokens contribute.

Legend: T tokens of the stream (of this rank), N documents, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from automodel_lite.errors import ConfigError
from automodel_lite.models.source import experts_per_token
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
        if batch.mixers.stream.tree is not None:
            raise ConfigError(
                "model.router_aux_loss counts a row's tokens together, which trees spread over branches: set "
                "packed_sequence.tree=off, or model.router_aux_loss=0."
            )
        document_T, within_T = document_of_tokens(batch)
        is_real_T = (within_T < batch.cu_seqlens.diff()[document_T]).float()
        num_documents, num_experts = len(batch.cu_seqlens) - 1, router_logits_TE[0].shape[-1]
        choices_NE = probabilities_NE = torch.zeros(num_documents, num_experts, device=document_T.device)
        for logits_TE in router_logits_TE:
            probs_TE = logits_TE.flatten(0, -2).float().softmax(-1)
            chosen_TE = torch.zeros_like(probs_TE).scatter_(1, probs_TE.topk(self.top_k).indices, 1.0)
            choices_NE = choices_NE.index_add(0, document_T, chosen_TE * is_real_T[:, None])
            probabilities_NE = probabilities_NE.index_add(0, document_T, probs_TE * is_real_T[:, None])
        # Label tokens of each document weigh its balance, as they weigh its cross-entropy.
        of_labels = batch.label_rows
        labels_N = choices_NE.new_zeros(num_documents).index_add(0, document_T[of_labels], is_real_T[of_labels])
        known = torch.cat([choices_NE, labels_N[:, None]], 1)
        # Choices have no gradient, so ranks that share a document need only their sum.
        if batch.mixers.exchange is not None:
            known = batch.mixers.exchange.summed(known)
        choices_NE, labels_N = known[:, :-1], known[:, -1]
        rows_N = batch.cu_seqlens.diff().clamp(min=1) * len(router_logits_TE)
        products_N = (choices_NE * probabilities_NE).sum(1) / rows_N**2
        return self.coefficient * num_experts * (labels_N * products_N).sum()


def document_of_tokens(batch: ThdBatch) -> tuple[Tensor, Tensor]:
    """Returns the documents of this rank's tokens, int64 [T], and their places in them, in tokens of the slot."""
    exchange, device = batch.mixers.exchange if batch.mixers else None, batch.labels.device
    places = torch.arange(len(batch.labels) * (exchange.size if exchange else 1), device=device)
    own = exchange.own(places) if exchange else places
    starts = batch.cu_seqlens_padded.long()
    document = torch.bucketize(own, starts[1:], right=True)
    return document, own - starts[document]


def balance_of(lm: transformers.PreTrainedModel, coefficient: float) -> Balance | None:
    """Returns None for a coefficient of 0; raises ConfigError for families that transformers gives no such loss."""
    if coefficient == 0:
        return None
    top_k = experts_per_token(lm.config.get_text_config())
    if top_k is None or "load_balancing_loss_func" not in vars(sys.modules[type(lm).__module__]):
        raise ConfigError(
            f"model.router_aux_loss={coefficient}: transformers has no load-balancing loss for {type(lm).__name__} (no "
            "experts, or experts that are balanced by a bias): set model.router_aux_loss=0."
        )
    return Balance(coefficient, top_k)
