"""Draws answers from a model on its mesh: data-parallel ranks share the batches, and every rank
gets all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from automodel_lite.config.sizes import ceil_div
from automodel_lite.extras.client.sampling import (
    Draws,
    Endings,
    Request,
    batches_of_one_length,
    plain_settings,
)
from automodel_lite.models.checkpoints import replaced
from automodel_lite.parallel.mesh import Mesh
from automodel_lite.parallel.sharding import ParallelModel


def draw_answers(
    model: ParallelModel,
    mesh: Mesh,
    requests: Sequence[Request],
    batch_size: int,
    ends: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    must_stop: Callable[[], bool] = lambda: False,
) -> list[list[tuple[list[int], bool]]] | None:
    """Returns ids, and whether something has ended them, [request][answer]. Every rank calls it.

    ends       ids of the model's own end tokens
    must_stop  is called after every batch, on all ranks; None when it is true
    One batch holds prompts of one length, so nothing is padded.
    """
    lm = model.loss_model.lm
    batches = batches_of_one_length(requests, batch_size)
    drawn: list[tuple[tuple[int, int], list[int], bool]] = []
    was_training = model.module.training
    model.module.eval()
    # where weights are gathered for each forward, all ranks make as many of them
    rounds = ceil_div(len(batches), mesh.shape.dp)
    for number in range(mesh.dp_rank, rounds * mesh.shape.dp, mesh.shape.dp):
        own = batches[number] if number < len(batches) else [(0, 0)]
        of_rows = [requests[of] for of, _ in own]
        ids = torch.tensor([list(x.prompt) for x in of_rows], device=mesh.device)
        endings = Endings(of_rows, ends, ids.shape[1], tokenizer)
        numbered = [(requests[of], answer) for of, answer in own]
        longest = max(request.max_new_tokens for request in of_rows)
        settings = plain_settings(longest, ends[0] if ends else 0)
        # in place of the model's own, whose penalties would stay beside those that are passed
        with replaced(lm, "generation_config", settings):
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                logits_processor=[Draws(numbered, seed, mesh.device)],
                stopping_criteria=[endings],
                synced_gpus=model.sharded_over is not None and mesh.shape.world_size > 1,
            )
        if number < len(batches):
            new = out[:, ids.shape[1] :].tolist()
            cut = [answer[:length] for answer, length in zip(new, endings.lengths)]
            drawn += zip(own, cut, endings.is_ended)
        if must_stop():
            model.module.train(was_training)
            return None
    model.module.train(was_training)
    # ranks of one dp rank have drawn the same
    of_ranks = mesh.gather(drawn)[:: mesh.shape.cp * mesh.shape.tp]
    answers = {place: (ids, is_ended) for found in of_ranks for place, ids, is_ended in found}
    return [
        [answers[number, answer] for answer in range(request.num_samples)]
        for number, request in enumerate(requests)
    ]
