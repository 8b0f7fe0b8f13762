"""The features of images take the places of their tokens inside the composite's own forward.

    record ─▶ tower ─▶ rows [R, C] ─▶ those of the placeholders ─▶ model(mm_encoder_outputs=...)

Legend: T tokens of the stream, R rows of image features, C model dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import towers
from automodel_lite.parts.images.tokens import rope_positions
from automodel_lite.thd import ThdBatch, TowerInputs

TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments by which models tell what a token is: 0 text, 1 image."""


@dataclass(frozen=True)
class PackedImages(TowerInputs):
    """The images of a micro-batch.

    record    what the processor makes of them in one call
    num_rows  that the tower makes of it
    rows      int64 [R]: the feature row of each placeholder, in the order of the stream
    """

    record: dict[str, Tensor]
    num_rows: int
    rows: Tensor

    def model_inputs(self, lm: transformers.PreTrainedModel, batch: ThdBatch) -> dict[str, Any]:
        """Returns the arguments of the composite's forward; runs its towers."""
        inputs = batch.model_inputs()
        known = inspect.signature(type(lm).forward).parameters
        image_T = batch.columns.get("image")
        shift_T = batch.columns.get("rope_shift")
        if shift_T is not None:
            inputs["position_ids"] = rope_positions(shift_T, batch.position_ids)[:, None]
        if image_T is not None:
            inputs |= {name: (image_T > 0).long()[None] for name in TYPES if name in known}
        features = encode(lm, self.record, self.num_rows, self.rows)
        return {**inputs, "mm_encoder_outputs": {"image": features}}

    def shard(self, batch: ThdBatch, mine: Tensor) -> PackedImages:
        """See `TowerInputs`. Each rank runs the towers on all images, and takes its own rows: what
        the gradients of all ranks sum up to is that of one.
        """
        row_T = torch.full_like(batch.input_ids, -1)
        row_T[batch.columns["image"] > 0] = self.rows
        own = row_T[mine]
        return replace(self, rows=own[own >= 0])


def encode(
    lm: transformers.PreTrainedModel, record: dict[str, Tensor], num_rows: int, rows: Tensor
) -> Any:
    """Runs the towers on all images at once; returns their output with these `rows` of it."""
    dtype = next(p.dtype for tower in towers(lm) for p in tower.parameters())
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in record.items()}
    base: Any = lm.base_model
    output = base.get_image_features(**given, return_dict=True)
    parts: list[Tensor] = []
    put = _flattened(output, num_rows, parts)
    return put([part.index_select(0, rows) for part in parts])


def _fields(output: Any) -> list[str]:
    """Names what models read of a tower's output: nearly all `pooler_output`, Llama 4 and Fuyu the
    other one.
    """
    first = "last_hidden_state" if output.get("pooler_output") is None else "pooler_output"
    return [name for name in (first, "deepstack_features") if output.get(name) is not None]


def _flattened(
    output: Any, num_rows: int, parts: list[Tensor]
) -> Callable[[Sequence[Tensor]], Any]:
    """Appends to `parts` each tensor, or list of tensors, of `num_rows` rows; returns what puts
    others in their places.

    A tower's result is a tensor [images, tokens, C] or [R, C], or a list with one of each image;
    deepstack features are a list of such.
    """

    def visit(value: Any) -> Callable[[Sequence[Tensor]], Any]:
        is_list = isinstance(value, (list, tuple)) and all(isinstance(x, Tensor) for x in value)
        tensors = [value] if isinstance(value, Tensor) else list(value) if is_list else []
        rows = [x.flatten(0, -2) for x in tensors if x.ndim > 1]
        if rows and sum(map(len, rows)) == num_rows:
            at = len(parts)
            parts.append(torch.cat(rows))
            # what counts rows by the images of a list finds one of all images
            return lambda given: (given[at],) if is_list else given[at]
        if isinstance(value, (list, tuple)):
            made = [visit(x) for x in value]
            return lambda given: type(value)(x(given) for x in made)
        if isinstance(value, Tensor):
            raise ConfigError(
                f"the tower returns a tensor of shape {tuple(value.shape)} for {num_rows} places "
                "of images: this family is not supported."
            )
        return lambda given: value

    fields = {name: visit(output[name]) for name in _fields(output)}

    def put(given: Sequence[Tensor]) -> Any:
        for name, of_field in fields.items():
            setattr(output, name, of_field(given))
        return output

    return put
