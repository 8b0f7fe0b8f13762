"""Score heads: which family's class has one, the names of its scores, and its first weights."""

from __future__ import annotations

import inspect
import re

import torch
import transformers
from transformers import PretrainedConfig

from automodel_lite.attention.spec import config_value
from automodel_lite.classes import ONE_SCORE, Classes
from automodel_lite.config.model_files import SCORES
from automodel_lite.errors import ConfigError

SCORE_WEIGHT = "score.weight"


def is_scorer(config: PretrainedConfig) -> bool:
    """Returns whether a config is of a model with a score head."""
    return any(name.endswith(SCORES) for name in config.architectures or ())


def score_class(config: PretrainedConfig) -> str | None:
    """Returns the name of the family's class with a score head that is one product with the last
    hidden state of a document; None without one.
    """
    mapping = transformers.AutoModelForSequenceClassification._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    is_linear = "self.score = nn.Linear(" in inspect.getsource(found.__init__)
    return found.__name__ if is_linear else None


def give_score_head(
    config: PretrainedConfig, classes: Classes | None, key: str, pretrained: str | None
) -> None:
    """Writes into a config, in place, that its model has a score head, and the names of its scores;
    raises ConfigError for a family without one, or a checkpoint with another one.

    classes     of the data; None before they are known
    key         of the model's node
    """
    name = score_class(config)
    if name is None:
        raise ConfigError(
            f"{key}.head=score: transformers has no {config.model_type} model with a linear score "
            "head on its last hidden state",
            key=f"{key}.head",
            cure="take another family (llama, qwen3, gemma2, mistral ...)",
        )
    is_stored = is_scorer(config)
    config.architectures = [name]
    if classes is None and is_stored:
        return
    classes = classes or ONE_SCORE
    if is_stored and config.num_labels != classes.num_scores:
        raise ConfigError(
            f"{key}.pretrained={pretrained} has a head of {config.num_labels} scores, and the data "
            f"ask for {classes.num_scores}",
            key=f"{key}.pretrained",
            cure="take the model without that head as its start, or data with the same classes",
        )
    config.id2label = dict(enumerate(classes.labels))
    config.label2id = {label: number for number, label in enumerate(classes.labels)}
    config.problem_type = classes.problem_type


@torch.no_grad()
def draw_score_head(lm: transformers.PreTrainedModel) -> None:
    """Draws the weight of a new score head, in place: by every rank the whole of it, alike, of
    which it keeps its part.
    """
    # with the models' code
    from automodel_lite.models.sharded import keep_part

    # as the seed stood when the model was asked for, whatever has been drawn since
    generator = torch.Generator().manual_seed(torch.initial_seed())
    text = lm.config.get_text_config()
    std = config_value(text, "initializer_range", 0.02)
    drawn = None
    for name, weight in lm.named_parameters():
        # an adapter keeps the original beside its copy
        if re.fullmatch(r"score\.(original_module\.|modules_to_save\.\w+\.)?weight", name):
            if drawn is None:
                drawn = torch.empty(weight.shape).normal_(0.0, std, generator=generator)
            keep_part(weight, drawn)
