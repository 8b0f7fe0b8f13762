"""Rows of an embedding and of a head that an adapter leaves as the base has them, although nobody
has trained them: those of added tokens, and those of tokens that a base model's chat template
brings.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from automodel_lite.errors import listed
from automodel_lite.models.layers import output_head, whole

UNTRAINED = 0.25
"""Of the median norm of all rows: those of tokens that a base model reserves for its users are near
0 in many families.
"""


@torch.no_grad()
def frozen_rows_note(
    lm: transformers.PreTrainedModel, tokenizer: PreTrainedTokenizerBase, known: Collection[str]
) -> str:
    """Returns a note on tokens whose rows stay untrained, or nothing; every rank calls it.

    known  the tokens that the model itself brings
    """
    added = sorted(tokenizer.get_vocab().keys() - known) if known else []
    ends = {"embedding": lm.get_input_embeddings(), "head": output_head(lm)}
    template = str(tokenizer.chat_template or "")
    of_template = [
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.content in template and token.content not in added
    ]
    frozen = set[str]()
    where = []
    for name, end in ends.items():
        found = [token for token in added if not _is_trained(end, tokenizer, token)]
        if unsaid := [token for token in of_template if not _is_trained(end, tokenizer, token)]:
            norms = _row_norms(end)
            least = UNTRAINED * norms.median()
            found += [t for t in unsaid if norms[tokenizer.get_vocab()[t]] < least]
        if found:
            frozen |= {*found}
            where.append(name)
    if not frozen:
        return ""
    tokens = sorted(frozen)
    names = {module: name.rpartition(".")[2] for name, module in lm.named_modules()}
    modules = ", ".join(names[end] for end in ends.values())
    wanted = ", ".join(f'"{token}"' for token in tokens)
    return (
        f"NOTE: nobody has trained the rows of {listed(tokens)} in the {' and the '.join(where)}, "
        f"which are frozen under the adapter: peft.trainable_tokens='[{wanted}]' trains them, "
        f"peft.modules_to_save='[{modules}]' all rows"
    )


def _is_trained(end: nn.Module, tokenizer: PreTrainedTokenizerBase, token: str) -> bool:
    """Returns whether the row of a token is trained in an embedding or a head."""
    if isinstance(end, TrainableTokensWrapper):
        rows: Any = end.token_adapter
        return tokenizer.get_vocab()[token] in rows.token_indices["default"]
    return isinstance(end, ModulesToSaveWrapper | BaseTunerLayer)


def _row_norms(end: nn.Module) -> Tensor:
    """Returns the norm of each row of its frozen weight, fp32 [V]."""
    weight = next(end.parameters())  # in front of those of an adapter
    norms = torch.linalg.vector_norm(weight.detach(), dim=1, dtype=torch.float32)
    return whole(norms)
