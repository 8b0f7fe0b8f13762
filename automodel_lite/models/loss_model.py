"""The module whose forward returns the loss: batch in, summed loss out.

It is the root for FSDP, so that the output head's weight is whole while the loss uses it. Only rows that carry a
label meet the head.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from automodel_lite.models.loss import Loss
from automodel_lite.thd import ThdBatch


class LossModel(nn.Module):
    """A Hugging Face causal LM and a loss. `forward(batch) -> fp32 scalar`, the SUM over this rank's label tokens."""

    def __init__(self, lm: transformers.PreTrainedModel, loss: Loss) -> None:
        super().__init__()
        self.lm = lm
        self.loss = loss
        self.softcap: float | None = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)

    def forward(self, batch: ThdBatch) -> Tensor:
        labels_R = batch.labels.index_select(0, batch.label_rows)
        if self.loss.includes_head:
            hidden_TC = self.lm.base_model(**batch.model_inputs()).last_hidden_state[0]
            hidden_RC = hidden_TC.index_select(0, batch.label_rows)
            return self.loss(hidden_RC, self.head_weight, labels_R, self.softcap)
        logits_RV = self.lm(**batch.model_inputs(), logits_to_keep=batch.label_rows).logits[0]
        return self.loss(logits_RV, labels_R)

    def logits(self, batch: ThdBatch, num_last: int = 0) -> Tensor:
        """[num_last, V] of the stream's last tokens; 0 = of all."""
        logits_TV: Tensor = self.lm(**batch.model_inputs(), logits_to_keep=num_last).logits[0]
        return logits_TV

    @property
    def head_weight(self) -> Tensor:
        """The output head's weight [V, C]."""
        weight: Tensor = self.lm.get_output_embeddings().weight
        return weight


@torch.no_grad()
def head_is_plain(lm: transformers.PreTrainedModel, inputs: dict[str, Any]) -> bool:
    """Are the model's logits `softcap(hidden @ weight.T)`? Granite, Cohere and heads with a bias or adapter are not."""
    head = lm.get_output_embeddings()
    if [name for name, _ in head.named_parameters()] != ["weight"]:  # a fresh adapter adds nothing yet
        return False
    was_training = lm.training
    lm.eval()
    hidden = lm.base_model(**inputs).last_hidden_state[0]
    want = lm(**inputs).logits[0].float()
    lm.train(was_training)
    got = hidden.float() @ head.weight.t().float()
    softcap = getattr(lm.config.get_text_config(), "final_logit_softcapping", None)
    if softcap is not None:
        got = softcap * torch.tanh(got / softcap)
    tolerance = 1e-4 if hidden.dtype == torch.float32 else 5e-2
    return bool((got - want).abs().max() <= tolerance * want.abs().max().clamp(min=1))
