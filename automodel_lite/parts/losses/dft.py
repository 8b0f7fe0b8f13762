"""Dynamic fine-tuning (arXiv:2508.05629): cross-entropy whose labels weigh as much as the model
finds them likely, without a gradient of that weight.

Labels that the model holds to be nearly impossible no longer have the largest gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from automodel_lite.models.loss import Average, AveragedLoss, LossInputs, LossOutput


@dataclass(frozen=True)
class Dft(AveragedLoss):
    """-p * log(p) of each label, p its probability as a number, as `loss_type=dft` of TRL is."""

    # over all labels of a step, or over its documents or turns of the mean over each
    average: Average = "labels"

    def __call__(self, inputs: LossInputs) -> LossOutput:
        log_probs_R = inputs.log_probs()
        losses_R = -log_probs_R.detach().exp() * log_probs_R
        weights_R = self.label_weights(inputs)
        return LossOutput((losses_R if weights_R is None else losses_R * weights_R).sum(), {})
