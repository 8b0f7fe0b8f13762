"""What the data say of a score head: its classes, which the model and the loss are given once the
data are known, and the token that fills up the rows of a batch for who loads the export.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from automodel_lite.classes import ONE_SCORE, Classes, described
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.feeding.source import PackSource, has_adapting
from automodel_lite.data.reading.documents import Documents
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.data.tokens.stop_tokens import template_end
from automodel_lite.data.tokens.token_rows import members_of
from automodel_lite.errors import ConfigError, listed
from automodel_lite.training.settings import RunParts


def classes_of_documents(documents: Documents) -> Classes | None:
    """Returns the classes of the data; None of data without labels.

    Raises ConfigError for a mixture of sets with other classes each.
    """
    found = {}
    for name, member in members_of(documents).items():
        own = member.found_classes if isinstance(member, FilesDataset) else None
        found[name] = own
    first = next(iter(found.values()), None)
    for name, own in found.items():
        if own != first:
            raise ConfigError(
                f"dataset.sources.{name} has {_labels(own)}, and the sets before it "
                f"{_labels(first)}",
                key=f"dataset.sources.{name}.dataset.classes",
                cure=_cure(found),
            )
    return first


def _labels(classes: Classes | None) -> str:
    return described(classes) if classes else "no labels"


def _cure(found: dict[str, Classes | None]) -> str:
    """Returns what makes the labels of a mixture one kind: each source is given all names."""
    kinds = {classes.kind if classes else None for classes in found.values()}
    if len(kinds) > 1 or kinds <= {"number", None}:
        return "mix sets of one kind of labels"
    names = dict.fromkeys(name for classes in found.values() if classes for name in classes.names)
    typed = ", ".join(sorted(names))
    return f"give each source the same list, dataset.sources.<name>.dataset.classes=[{typed}]"


def with_classes(parts: RunParts, data: PackSource) -> RunParts:
    """Returns the parts with the loss of the labels that the data have; tells the model's source,
    in place, how many scores its head gives, and which token fills up rows.
    """
    if parts.loss.head != "score":
        return parts
    if has_adapting(data.documents):
        raise ConfigError(
            "model.head=score reads text alone, and the data have images",
            key="dataset",
            cure="use dataset=files",
        )
    classes = classes_of_documents(data.documents)
    loss = parts.loss.of_classes(classes)
    parts.model.classes = classes or ONE_SCORE
    parts.model.padding_id = padding_token(data)
    return replace(parts, loss=loss)


def untrained_note(data: PackSource) -> str:
    """Returns a note of the classes that no document that is trained on has: a validation set has
    them, or `dataset.classes` names them. Nothing where there is none, and of a stream.
    """
    classes = classes_of_documents(data.documents)
    if data.planned is None or classes is None or classes.kind == "number":
        return ""
    codes = _codes_of(data.planned.tokens.train)
    if classes.kind == "many":
        trained = {number for code in codes for number in classes.sets[code]}
    else:
        trained = codes
    missing = [name for number, name in enumerate(classes.names) if number not in trained]
    if not missing:
        return ""
    return (
        f"NOTE: no document that is trained on has the label {listed(missing, 5)}: the model never "
        "learns it"
    )


def _codes_of(rows: Any) -> set[int]:
    """Returns the numbers of the classes, or sets of classes, that rows are labeled with."""
    found: set[int] = set()
    for source in getattr(rows, "sources", [rows]):
        labels = np.asarray(source.flat.columns["labels"])
        found.update(np.unique(labels[labels != IGNORE_INDEX]).tolist())
    return found


_FILLS = re.compile(r"pad|reserved|unused|unk", re.IGNORECASE)  # tokens that no text holds


def padding_token(data: PackSource) -> int:
    """Returns the token that may fill up rows of other lengths: transformers takes the last token
    that is not it for the end of a document, so that no document ends with it.

    Raises ConfigError where documents end with each of the tokenizer's special tokens.
    """
    tokenizer = data.tokenizer
    specials = {
        number: token.content
        for number, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special
    }
    named = [number for number, text in specials.items() if _FILLS.search(text)]
    ends = _last_tokens(data)
    for token in (tokenizer.pad_token_id, *named, tokenizer.eos_token_id, *specials):
        if token is not None and token not in ends:
            return int(token)
    raise ConfigError(
        "model.head=score: documents end with every special token that the tokenizer has, and one "
        "has to fill up the rows of a batch",
        key="tokenizer.added_tokens",
        cure='set tokenizer.added_tokens=["<pad>"] model.resize_embeddings=true',
    )


def _last_tokens(data: PackSource) -> set[int]:
    """Returns the tokens that documents end with, which are those that carry a label."""
    found: set[int] = set()
    if data.planned is None:  # of a stream, what ends texts and turns
        end = template_end(data.tokenizer, data.job.settings.template_kwargs)
        known = [data.tokenizer.eos_token_id, end and data.tokenizer.get_vocab()[end]]
        return {one for one in known if one is not None}
    for rows in (data.planned.tokens.train, *data.planned.tokens.val.values()):
        for source in getattr(rows, "sources", [rows]):
            columns = source.flat.columns
            is_end = np.asarray(columns["labels"]) != IGNORE_INDEX
            found.update(np.unique(np.asarray(columns["input_ids"])[is_end]).tolist())
    return found
