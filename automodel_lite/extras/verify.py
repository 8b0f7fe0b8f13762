"""Do two ways of computing a step give the same loss and the same gradients? Differences, verdicts,
a table; the first layers of a model, for checks that need its arithmetic but not its size; a small
sample of the packs of a training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from automodel_lite.columns import COLUMNS
from automodel_lite.config.schema import Config
from automodel_lite.config.sizes import round_up
from automodel_lite.data.feeding.order import epoch_order
from automodel_lite.data.feeding.source import has_adapting
from automodel_lite.data.packing.packs import EMPTY_PACK, PackedDataset, Packer, join_packs
from automodel_lite.data.packing.plan import plan_packs
from automodel_lite.data.prepare import PlannedPacks, batch_shape, build_documents, build_packer
from automodel_lite.data.tokens.token_rows import TokenizedDocuments
from automodel_lite.data.tokens.trees import cut_tree
from automodel_lite.extras.short_models import layer_settings, with_layers
from automodel_lite.models.settings import describe_with
from automodel_lite.models.source import CausalLM, describe
from automodel_lite.parallel.mesh import MeshShape

if TYPE_CHECKING:
    from automodel_lite.parts.images.packs import ImageReader


@dataclass(frozen=True)
class Step:
    """Mean loss over the label tokens of a step, and its gradients by parameter name
    (fp32, whole).
    """

    loss: float
    gradients: dict[str, Tensor]

    @property
    def grad_norm(self) -> float:
        return float(torch.stack([grad.double().norm() for grad in self.gradients.values()]).norm())


class Difference(NamedTuple):
    """Relative differences of two steps: of the loss, of the worst single gradient to the largest,
    of the norm.
    """

    loss: float
    gradients: float
    grad_norm: float


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    difference: Difference
    limit: float
    # the step was broken on purpose: the row passes when the difference shows it
    is_fault: bool = False

    @property
    def passed(self) -> bool:
        if self.is_fault:
            return not self._within(10 * self.limit)
        return self._within(self.limit)

    def _within(self, limit: float) -> bool:
        # one by one: the largest of some numbers need not be a NaN that is among them
        return all(value <= limit for value in self.difference)


def difference(step: Step, want: Step) -> Difference:
    """Returns how far a step is from another; a parameter without a gradient has zeros."""
    zero = torch.zeros(())
    largest = max(float(grad.abs().max()) for grad in want.gradients.values())
    pairs = [
        (step.gradients.get(name, zero), want.gradients.get(name, zero))
        for name in step.gradients.keys() | want.gradients.keys()
    ]
    worst = torch.stack([(grad - expected).abs().max() for grad, expected in pairs])
    return Difference(
        loss=abs(step.loss - want.loss) / abs(want.loss),
        gradients=float(worst.max()) / largest,  # NaN where one is
        grad_norm=abs(step.grad_norm - want.grad_norm) / want.grad_norm,
    )


def take_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Tensor]:
    """Copies of all gradients on the CPU in fp32, sharded ones gathered (a collective); clears
    them.
    """
    gradients = {}
    for name, parameter in parameters:
        grad = parameter.grad
        if grad is not None:
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            gradients[name] = whole.detach().float().cpu().clone()
        parameter.grad = None
    return gradients


def table(checks: Iterable[Check]) -> str:
    """Rows of relative differences, each with its limit and verdict."""
    checks = list(checks)
    width = max(len(check.name) for check in checks) + 2
    lines = [f"{'':{width}} {'loss':>8} {'gradients':>10} {'grad norm':>10} {'limit':>8}"]
    for check in checks:
        d = check.difference
        is_fault = check.is_fault
        verdict = (
            ("noticed" if is_fault else "PASS")
            if check.passed
            else ("FAIL: not noticed" if is_fault else "FAIL")
        )
        numbers = f"{d.loss:8.0e} {d.gradients:10.0e} {d.grad_norm:10.0e}"
        lines.append(
            f"{check.name:{width}} {numbers} {'' if is_fault else f'{check.limit:.0e}':>8}  "
            f"{verdict}"
        )
    return "\n".join(lines)


LARGEST_PARAMETERS = {"cpu": 60e6, "cuda": 2e9}
LEAST_LAYERS = 2


def first_layers(
    source: CausalLM, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[CausalLM, str]:
    """A model of as many layers as are quickly checked on the device, each kind of layer included;
    and how many. Heads that predict further tokens are left out.
    """
    source = copy(source)
    source.mtp_loss = 0.0
    config = source.config(tokenizer)
    text = config.get_text_config()
    num_layers = text.num_hidden_layers
    largest = LARGEST_PARAMETERS[device.type]
    whole, of_one = (
        sum(p.numel() for p in describe_with(source.settings, partial(describe, one)).parameters())
        for one in (config, with_layers(config, 1))
    )
    if whole <= largest or num_layers <= LEAST_LAYERS:
        return source, f"all {num_layers} layers, {whole / 1e6:,.1f} M parameters"
    per_layer = (whole - of_one) / (num_layers - 1)
    fitting = int((largest - (whole - num_layers * per_layer)) / per_layer)
    kinds = text.to_dict().get("layer_types") or []
    with_all_kinds = max((kinds.index(kind) + 1 for kind in kinds), default=1)
    kept = min(num_layers, max(LEAST_LAYERS, fitting, with_all_kinds))
    settings = layer_settings(text, kept)
    if text is not config:  # a composite has them in a part of its own
        part = next(name for name in config.sub_configs if getattr(config, name, None) is text)
        settings = {part: {**source.overrides.get(part, {}), **settings}}
    cut = copy(source)
    cut.overrides = {**source.overrides, **settings}
    return cut, f"the first {kept} of {num_layers} layers ({whole / 1e6:,.0f} M parameters in all)"


LARGEST_PACK_TOKENS = {"cpu": 512, "cuda": 4096}
PACKS_A_RANK = 2
LEAST_PACKS = 4

Pack = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """Packs as the loader gives them, without their images, the documents in them, and how they
    were packed.

    reader  of the images; None for text
    """

    packs: list[Pack]
    documents: TokenizedDocuments
    tokenizer: PreTrainedTokenizerFast
    packer: Packer
    training_size: int  # packed_sequence.packed_sequence_size of the run
    reader: ImageReader | None = None

    def row(self, packs: Sequence[Pack], is_shared: bool = False) -> Pack:
        """Returns packs one behind the other with their images, all of them or, `is_shared`, this
        rank's.
        """
        row = join_packs(packs)
        if self.reader is None:
            return row
        reader = self.reader if is_shared else replace(self.reader, share=None)
        return reader.with_images(row)

    def each_document(self) -> Iterator[tuple[dict[str, Tensor], Tensor, Tensor]]:
        """Yields what plain transformers is given of a document, its labels, int64 without padding,
        and their weights; of a tree, each row whole, with the labels that no row before it shares:
        their weights count all rows.
        """
        columns = {
            "loss_weights": np.ones(self.documents.num_tokens, np.float32),
            **self.documents.columns,
        }
        for start, stop in pairwise(self.documents.offsets.tolist()):
            document = {name: values[start:stop] for name, values in columns.items()}
            for row in cut_tree(document, 1) if "branches" in document else [document]:
                inputs = {"input_ids": torch.from_numpy(row["input_ids"])[None]}
                if self.reader is not None:
                    inputs |= self.reader.inputs_alone(row["input_ids"], row["image"])
                labels, weights = (torch.from_numpy(row[x]) for x in ("labels", "loss_weights"))
                yield inputs, labels, weights

    def packed_otherwise(self) -> list[Pack]:
        """Returns the same documents in other company and order, in packs half as large again."""
        multiple = self.packer.slot_multiple
        size = round_up(self.packer.packed_sequence_size * 3 // 2, multiple)
        plan = plan_packs(
            np.diff(self.documents.offsets), size, strategy="best_fit", slot_multiple=multiple
        )
        packs = PackedDataset(self.documents, plan)
        return [packs[i] for i in reversed(range(len(packs)))]


def draw_sample(config: Config, shape: MeshShape) -> Sample:
    """The first packs of the first epoch's order, a multiple of the data-parallel ranks (a last one
    may be empty, as in training); smaller ones than training's when those are large and hold text
    alone: images cannot be cut.
    """
    packer = build_packer(config)
    training_size = packer.packed_sequence_size
    multiple = packer.slot_multiple
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = min(training_size, LARGEST_PACK_TOKENS[device] // multiple * multiple)
    documents = build_documents(config)
    if size < training_size and not has_adapting(documents):
        packer.packed_sequence_size = size
        packer.overlong = "truncate"
    data = PlannedPacks.prepare(config, documents, packer, batch_shape(config.training, dp_size=1))
    packs = data.packs_of(0)
    reader = None
    if data.job.reads_images:
        from automodel_lite.parts.images.packs import ImagePacks  # with Pillow

        assert isinstance(packs, ImagePacks)
        reader = packs.reader
    num_packs = max(LEAST_PACKS, PACKS_A_RANK * shape.dp)
    order = epoch_order(len(packs), config.seed, 0, config.dataloader.shuffle)[:num_packs].tolist()
    order += [EMPTY_PACK] * (-len(order) % shape.dp)
    sample = _documents(packs, [number for number in order if number != EMPTY_PACK])
    stacked = packs.__getitems__(order)  # of one length, also without packing
    each = [stacked[i] for i in range(len(order))]
    return Sample(each, sample, data.tokenizer, packer, training_size, reader)


def _documents(packs: PackedDataset, order: list[int]) -> TokenizedDocuments:
    """Returns what the plan put into these packs."""
    plan = packs.plan
    names = [name for name in COLUMNS if name in packs[order[0]]]
    # Packs show branches by their positions; here they say where rows begin.
    names += ["branches"] * ("branches" in packs.rows[0])
    found: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number in order:
        for place in range(*plan.offsets[number : number + 2].tolist()):
            row = packs.rows[int(plan.doc_ids[place])]
            first = 0 if plan.starts is None else int(plan.starts[place])
            last = None if plan.stops is None else int(plan.stops[place])
            for name, documents in found.items():
                documents.append(np.asarray(row[name][first:last], COLUMNS[name].batched))
    offsets = np.cumsum([0, *map(len, found["labels"])])
    return TokenizedDocuments(
        {name: np.concatenate(documents) for name, documents in found.items()}, offsets
    )
