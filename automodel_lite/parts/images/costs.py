"""What the towers of a model do for an image: FLOPs, counted once on the model without weights.

    images of some sizes ─▶ towers on the meta device, forward and backward ─▶ FLOPs of each
    FLOPs = per_row x rows + per_pair x rows²      (of patches that see each other)

A tower that is frozen has no backward pass, one of which a part is trained as much as that needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from automodel_lite.compat import TorchDispatchMode, disable_current_modes, pytree
from automodel_lite.config.components import build
from automodel_lite.config.schema import Config
from automodel_lite.data.reading.documents import DocumentSet
from automodel_lite.errors import DataError
from automodel_lite.evaluation.questions import IMAGES
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parts.images.sources import blank_image
from automodel_lite.parts.images.tokens import ImageProcessor
from automodel_lite.parts.images.tower import placed_fields


@dataclass(frozen=True)
class TowerCosts:
    """FLOPs of the towers for an image, by its feature rows."""

    per_row: float = 0.0
    per_pair: float = 0.0

    def of(self, num_rows: np.ndarray) -> np.ndarray:
        """Returns float64, of images of so many rows each."""
        rows = num_rows.astype(np.float64)
        return rows * (self.per_row + self.per_pair * rows)

    @classmethod
    def through(cls, points: Mapping[int, float]) -> TowerCosts:
        """Returns the costs of which `points` are rows and FLOPs: through the first and the last of
        them, of a single one in proportion. The same on all ranks, whatever their machine.

        >>> TowerCosts.through({2: 12.0, 4: 32.0})
        TowerCosts(per_row=4.0, per_pair=1.0)
        """
        if not points:
            return cls()
        few = min(points)
        many = max(points)
        of_few = points[few] / few
        of_many = points[many] / many
        per_pair = (of_many - of_few) / (many - few) if many > few else 0.0
        per_row = of_few - per_pair * few
        # rows of which a family crops some are cheaper in large images
        if min(per_row, per_pair) < 0:
            return cls(sum(points.values()) / sum(points))
        return cls(per_row, per_pair)


class ValuesKept(TorchDispatchMode):
    """Computes what has values, as positions in a grid and masks, where it is, while all else runs
    on a device without values.

    device    of what has none
    is_there  of a tensor: has it none?
    watch     gets what is made, and what made it, beside fake tensors, whose mode knows no values
    """

    def __init__(
        self,
        device: torch.device,
        is_there: Callable[[Tensor], bool],
        watch: Callable[[Tensor, Any], None] | None = None,
    ) -> None:
        super().__init__()
        self.device = device
        self.is_there = is_there
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        tensors = [getattr(tensor, "_local_tensor", tensor) for tensor in _tensors(given)]
        if any(map(self.is_there, tensors)):
            is_index = "index" in func.overloadpacket.__name__
            args, kwargs = self._brought(given, is_index)
            if "device" in kwargs and self.device.type == "meta":
                kwargs["device"] = self.device  # it cannot be moved to what has values
            return func(*args, **kwargs)
        args, kwargs = given
        if tensors:  # what would be moved to the weights keeps its values
            kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        elif kwargs.get("device") not in (None, torch.device("cpu")):
            return func(*args, **kwargs)
        return self.of_values(func, args, kwargs)

    def of_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs what has values."""
        if self.watch is None:
            return func(*args, **kwargs)
        with disable_current_modes():
            result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self.watch(tensor, func)
        return result

    def _brought(self, value: Any, is_index: bool) -> Any:
        """Returns the arguments with all tensors there; a mask among indices becomes the places
        that it lets through, whose number is a shape.
        """
        if isinstance(value, DTensor):
            own = self._brought(value._local_tensor, is_index)
            return DTensor.from_local(own, value.device_mesh, value.placements, run_check=False)
        if isinstance(value, Tensor):
            if self.is_there(value):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device=self.device)
        if isinstance(value, (list, tuple)):
            brought = []
            for each in value:
                is_mask = isinstance(each, Tensor) and each.dtype == torch.bool
                # indices are a list, and what is indexed stands beside it
                is_among = is_index and isinstance(value, list)
                if is_mask and is_among and not self.is_there(each):
                    shape = (self.of_values(_num_true, (each,), {}),)
                    for _ in range(each.ndim):
                        brought.append(torch.empty(shape, dtype=torch.long, device=self.device))
                else:
                    brought.append(self._brought(each, is_index))
            return type(value)(brought)
        if isinstance(value, dict):
            return {name: self._brought(each, is_index) for name, each in value.items()}
        return value


class _NumbersHere(TorchFunctionMode):
    """Makes the numbers that a family's code counts with where they have values: `torch.tensor` on
    a device without values passes by what is dispatched.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.arange):
            kwargs.pop("device", None)
        return func(*args, **kwargs)


def _num_true(mask: Tensor) -> int:
    return int(mask.sum())


def _tensors(value: Any) -> list[Tensor]:
    return [found for found in pytree.tree_leaves(value) if isinstance(found, Tensor)]


def count_tower(described: Any, record: Mapping[str, Tensor]) -> tuple[int, float]:
    """Returns how many feature rows the towers make of a record, and the FLOPs of that, forward
    and backward.

    described  a model on the meta device, of whose towers is trained what requires a gradient
    """
    weight = next(p for p in described.base_model.parameters() if p.is_floating_point())
    given = {n: x.to(weight.dtype) if x.is_floating_point() else x for n, x in record.items()}
    with (
        FlopCounterMode(display=False) as counter,
        ValuesKept(torch.device("meta"), lambda tensor: tensor.is_meta),
        _NumbersHere(),
    ):
        output = described.base_model.get_image_features(**given, return_dict=True)
        fields = [_tensors(output[name]) for name in placed_fields(output)]
        trained = [x for tensors in fields for x in tensors if x.requires_grad]
        if trained:
            torch.autograd.backward(trained, [torch.empty_like(x) for x in trained])
    num_rows = sum(x.flatten(0, -2).shape[0] for x in fields[0] if x.ndim > 1)
    for parameter in described.parameters():
        parameter.grad = None
    return num_rows, float(counter.get_total_flops())


MOST_MEASURED = 32
"""Documents whose images are looked at."""


def work_of_towers(config: Config, processor: ImageProcessor, documents: DocumentSet) -> TowerCosts:
    """Returns what the towers do for images of some rows, as far as they are trained: counted for
    the smallest and the largest of some of the documents' images.
    """
    sizes: dict[int, list[int]] = {}  # by their rows
    step = max(1, len(documents) // MOST_MEASURED)
    for index in range(0, len(documents), step):
        with suppress(DataError):  # named later
            for image in documents[index][IMAGES]:
                *size, _, _ = image.source.header(image.limits)
                sizes[processor.sizes.of_size(*size).num_rows] = size
    source: CausalLM = build(config.model)
    described = describe(processor.config)
    source.dtype = torch.float32  # of weights without values
    source.freeze_weights(described)
    if config.peft:
        described.requires_grad_(False)
        of_towers = isinstance(config.peft.get("target_modules"), list)
        if of_towers or config.peft.get("modules_to_save"):
            with torch.device("meta"):
                build(config.peft).adapt(described, str(source.pretrained))
            described.to("meta")  # peft makes whole copies on the host
    points: dict[int, float] = {}
    for num_rows in {min(sizes), max(sizes)} if sizes else ():
        record, _ = processor.process([blank_image(*sizes[num_rows])])
        points[num_rows] = count_tower(described, record)[1]
    return TowerCosts.through(points)
