"""Which families train exactly on packs with images, and which are refused, and why: the column of docs/models.md.

    python benchmarks/survey_images.py                            print one line per family
    python benchmarks/survey_images.py --json images.jsonl        keep what was found, and continue there
    python benchmarks/survey_images.py --families qwen3_vl gemma3
    python benchmarks/survey_images.py --json images.jsonl --write docs/models.md    write the page's blocks on images

Every family of AutoModelForImageTextToText, as a tiny random model with its own image processor. Truth is plain
transformers on each document alone, with its own processor call; against it stands one pack of all documents, with one
call of processor and towers: the loss, and the gradients of language model, projector and tower, relative to the
largest gradient of each. What is exact is then trained for a step by the recipe, from a folder with the family's own
processor (image_jobs.py). What transformers' own two attentions, eager and sdpa, differ by is shown beside it. A family
that differs by more than rounding should is computed again in fp64.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from automodel_lite.attention.interface import install
from automodel_lite.attention.isolation import tolerance_std
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.attention.spec import attention_specs
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.errors import ConfigError
from automodel_lite.models.layers import output_head, text_decoder
from automodel_lite.models.loss import CrossEntropy, FusedLinearCrossEntropy
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.source import describe
from automodel_lite.parts.images.ahead import TYPES, ahead_of, find_rules
from automodel_lite.parts.images.axes import rope_shifts
from automodel_lite.parts.images.probe import check_family, check_forward, check_images_apart
from automodel_lite.parts.images.tokens import check_tower
from automodel_lite.parts.images.tower import PackedImages, placed_fields
from automodel_lite.thd import ThdBatch, stream_of
from benchmarks.image_families import (
    FAMILIES,
    FIRST_TEXT,
    IMAGE,
    LAST_TEXT,
    SIZES,
    image_config,
    image_model,
    image_processor,
    image_stream,
    pixels,
    random_image,
)
from benchmarks.image_jobs import step
from benchmarks.models_page import of_images
from benchmarks.survey import forked, survey, wait, words
from benchmarks.survey_models import InDouble

DOCUMENTS = ["t8 i t5", "t9", "t4 i t3 i t6", "t3 i", "i t7", "t5 i i t4"]
"""i is an image, t8 a text of 8 tokens. One document ends with an image and the next begins with one."""
EXACT, EXACT_LOSS = 1e-5, 1e-6
EXACT_FP64, NEARLY_FP64 = 1e-9, 1e-6
LARGEST_OWN = 1e-4
KINDS = ("language", "projector", "tower")
_SWITCHES = {"return_dict", "output_hidden_states", "vision_feature_layer"}
_SWITCHES |= {"vision_feature_select_strategy"}
BYTES = 12 << 30
PROJECTING = re.compile(
    "projector|merger|connector|aligner|newline|embed_vision|resampler|adapter|projection|qformer|perceiver|embedder"
)
EVALUATED = {"gemma3n", "fast_vlm"}
"""Families whose stand-ins for towers have batch norms, which mix images: compared in evaluation mode."""


def accepted_names(lm: Any) -> set[str]:
    """Returns the names of what the towers take, without switches."""
    known = inspect.signature(lm.base_model.get_image_features).parameters
    return {n for n, p in known.items() if p.kind is not p.VAR_KEYWORD} - _SWITCHES


def let_see(lm: transformers.PreTrainedModel) -> None:
    """Lets the layers of a language model whose prompts see themselves run on a kernel, which is
    told what each token sees.
    """
    for module in text_decoder(lm).modules():
        if vars(module).get("is_causal") is False:
            module.is_causal = True  # type: ignore[assignment]


@dataclass
class Finding:
    """What came out for one family.

    gaps   loss, language, projector, tower: differences of one pack from documents alone
    own    the same of transformers' eager attention from its sdpa; empty where it has no sdpa
    job    what the recipe says of one step on the family's folder; "not tried: ..." without a folder
    fp64   the largest of `gaps` in fp64, where it was asked; 0 = not asked
    notes  mRoPE, deep rows, what sees ahead
    """

    family: str
    gaps: dict[str, float] = field(default_factory=dict)
    own: dict[str, float] = field(default_factory=dict)
    fp64: float = 0.0
    refused: str = ""
    not_built: str = ""
    broken: str = ""
    # `trains`: the recipe makes a step with the family's own processor; else why not
    job: str = ""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    version: str = transformers.__version__

    @property
    def verdict(self) -> str:
        for name in ("refused", "not_built", "broken"):
            if getattr(self, name):
                return name.replace("_", " ")
        if is_exact(self.gaps):
            return "exact"
        # in fp64 the difference is gone; or transformers' own two attentions are as far apart
        own = max(self.own.values(), default=0.0)
        is_rounding = 0 < self.fp64 <= EXACT_FP64
        is_alike = max(self.gaps.values()) <= min(2 * own, LARGEST_OWN) and self.fp64 <= NEARLY_FP64
        return "exact" if is_rounding or is_alike else "WRONG"


def is_exact(gaps: dict[str, float]) -> bool:
    return gaps["loss"] <= EXACT_LOSS and all(gaps.get(kind, 0.0) <= EXACT for kind in KINDS)


def line(finding: Finding) -> str:
    gaps = " ".join(f"{name} {gap:.0e}" for name, gap in finding.gaps.items())
    if finding.fp64:
        gaps += f" (fp64 {finding.fp64:.0e})"
    own = max(finding.own.values(), default=0.0)
    said = (
        finding.refused or finding.not_built or finding.broken or f"{gaps}, eager / sdpa {own:.0e}"
    )
    notes = ", ".join(finding.notes)
    job = f", job: {finding.job}" if finding.verdict == "exact" else ""
    start = f"{finding.family:24s} {finding.verdict:9s} {finding.seconds:4.0f} s"
    return f"{start}  {said}{job}  {notes}"


def in_process(family: str) -> Finding:
    """Surveys a family in a process of its own: a crash, or a model too large, is that family's."""
    start = time.time()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "finding.json"
        pid = forked(lambda: json.dumps(asdict(found(family))), result, BYTES)
        text = wait(pid, result)
    finding = Finding(**json.loads(text)) if text.startswith("{") else Finding(family, broken=text)
    finding.seconds = time.time() - start
    return finding


def found(family: str) -> Finding:
    finding = Finding(family)
    try:
        refuse_encoders(family)
        check_forward(getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family]))
        config = image_config(family)
        attention_specs(config, torch.device("cpu"), torch.float32)
        plain = image_model(family, config)
        check_tower(plain)
        processor = image_processor(family, config)
    except ConfigError as error:
        finding.refused = str(error)
        return finding
    except Exception as error:
        finding.not_built = words(error)
        return finding
    try:
        finding.gaps = compared(finding, plain, processor, torch.float32)
        worst = max(finding.gaps.values())
        if not is_exact(finding.gaps) and worst < 1e-2:
            with contextlib.suppress(RuntimeError, PlainError), InDouble():
                again = compared(
                    Finding(family), in_precision(plain, torch.float64), processor, torch.float64
                )
                finding.fp64 = max(again.values())
    except ConfigError as error:
        finding.refused = str(error)
    except PlainError as error:
        finding.not_built = str(error)
    except Exception as error:
        finding.broken = words(error)
    if finding.verdict == "exact":
        finding.job = job_of(family)
    return finding


def job_of(family: str) -> str:
    """Trains one step by the recipe; returns `trains`, the refusal, or `not tried` with the reason
    where the folder of such a family could not be made at tiny sizes.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        try:
            said = step(family, Path(folder))
        except Exception as error:
            print(words(error), file=sys.stderr)
            return f"not tried: {words(error)}".replace(folder, "FOLDER")
    return said.replace(folder, "FOLDER")


class PlainError(Exception):
    """What stands in the way of the truth itself."""


def refuse_encoders(family: str) -> None:
    """Raises ConfigError for a family that is not decoder-only."""
    kind = transformers.CONFIG_MAPPING[family]
    is_encoder = getattr(kind, "is_encoder_decoder", False) or "encoder" in kind.sub_configs
    if is_encoder or family in ("florence2", "t5gemma2"):
        raise ConfigError("An encoder-decoder: packs are of decoder-only models.")


def compared(finding: Finding, plain: Any, processor: Any, dtype: torch.dtype) -> dict[str, float]:
    """Returns the gaps of one pack from documents alone, and fills in the finding's other fields."""
    torch.set_default_dtype(dtype)
    family, is_trained = finding.family, finding.family not in EVALUATED
    config = plain.config
    rules = find_rules(describe(config))
    of_prompt = any(rule.of_prompt for rule in rules.values())
    plain.train(is_trained)
    rng = random.Random(0)
    try:
        documents = [
            Document(plain, processor, layout, rng, of_prompt, dtype) for layout in DOCUMENTS
        ]
        losses = [document.loss(plain) for document in documents]
        expected = gradients(plain, sum(losses))
    except Exception as error:
        raise PlainError(words(error)) from error
    total = float(sum(losses))
    finding.own = own_differences(plain, documents, total, expected)
    model = in_precision(image_model(family, config), dtype)
    model.load_state_dict(plain.state_dict())
    model.train(is_trained)
    kernel = ReferenceAttention()
    install(model, kernel)
    if of_prompt:
        let_see(model)
    check_family(model, rules, kernel)
    check_apart(model, processor, rules, dtype)
    batch = packed(model, processor, documents, rules, dtype)
    loss_model = LossModel(model, FusedLinearCrossEntropy()).eval()
    if not loss_model.probe(stream_of([torch.arange(FIRST_TEXT, FIRST_TEXT + 16)]))[
        1
    ]:  # as the recipe finds it
        loss_model = LossModel(model, CrossEntropy())
    loss_model.train(is_trained)
    loss = loss_model(batch).sum
    gaps = differences(model, expected, gradients(model, loss))
    if "rope_shift" in batch.columns:
        finding.notes.append("mRoPE")
    if "deepstack" in inspect.getsource(sys.modules[type(model).__module__]):
        finding.notes.append("deep rows")
    for is_windowed, rule in rules.items():
        kind = "layers with a window" if is_windowed else "full layers"
        finding.notes.append(f"{'prompts' if rule.of_prompt else 'images'} see ahead in {kind}")
    return {"loss": abs(float(loss) - total) / abs(total), **gaps}


class Document:
    """Tokens with images, and what their own processor call gives."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        layout: str,
        rng: random.Random,
        of_prompt: bool,
        dtype: torch.dtype,
        size: tuple[int, int] | None = None,
    ) -> None:
        names = accepted_names(model)
        has_rule = hasattr(model.base_model, "get_rope_index")
        if has_rule:  # in these families, text always stands between two images
            layout = layout.replace("i i", "i t1 i")
        self.images: list[Any] = []
        self.records: list[dict[str, Tensor]] = []
        self.image_lens: list[int] = []
        known = vars(model.config)
        edges = [
            known.get(f"vision_{x}_token_id", known.get(f"image_{x}_id")) for x in ("start", "end")
        ]
        start, end = ([], []) if None in edges else ([edges[0]], [edges[1]])
        # ids, the number of their image or 0, and whether they are words
        parts: list[tuple[list[int], int, bool]] = []
        for part in layout.split():
            if part == "i":
                image = random_image(rng, size)
                record = in_dtype(pixels(processor, [image], names), dtype)
                num_rows = rows_of(model, record)
                self.images.append(image)
                self.records.append(record)
                self.image_lens.append(num_rows)
                rows = [IMAGE] * num_rows
                parts += [(start, 0, False), (rows, len(self.images), False), (end, 0, False)]
            else:
                text = [rng.randint(FIRST_TEXT, LAST_TEXT) for _ in range(int(part[1:]))]
                parts.append((text, 0, True))
        ids = [token for tokens, _, _ in parts for token in tokens]
        self.ids = torch.tensor(ids)
        self.numbers = torch.tensor([number for tokens, number, _ in parts for _ in tokens])
        is_text = [is_word for tokens, _, is_word in parts for _ in tokens]
        chosen = torch.rand(len(ids), generator=torch.Generator().manual_seed(len(ids))) < 0.7
        trained = torch.tensor(is_text) & chosen
        self.types = (self.numbers > 0).long()
        if of_prompt:  # all before the answer is a prompt, which sees itself
            trained = torch.arange(len(ids)) >= len(ids) - 3
            self.types = trained.long()
        self.labels = torch.full_like(self.ids, IGNORE_INDEX)
        self.labels[:-1] = self.ids[1:].where(trained[1:], IGNORE_INDEX)
        self.pixels = in_dtype(pixels(processor, self.images, names), dtype) if self.images else {}

    def loss(self, model: Any) -> Tensor:
        attention = model.config.get_text_config()._attn_implementation
        assert attention in ("eager", "sdpa"), "the truth is not plain transformers"
        known = inspect.signature(type(model).forward).parameters
        given = {name: self.types[None] for name in TYPES if name in known}
        given["attention_mask"] = torch.ones_like(self.ids[None])
        logits = model(input_ids=self.ids[None], use_cache=False, **self.pixels, **given).logits[0]
        # what the recipe sums in: fp32, or fp64 of fp64
        logits = logits.float() if logits.dtype != torch.float64 else logits
        return F.cross_entropy(logits, self.labels, reduction="sum")


def in_precision(model: Any, dtype: torch.dtype) -> Any:
    """Casts weights and real buffers, in place; frequencies of rotations may be complex."""
    if dtype == torch.float64:
        model.config.get_text_config()._experts_implementation = "eager"  # grouped_mm has no fp64
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def in_dtype(record: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in record.items()}


def rows_of(model: Any, record: dict[str, Tensor]) -> int:
    """Counts the rows that the towers make of an image."""
    with torch.no_grad():
        output = model.base_model.get_image_features(**record, return_dict=True)
    first = output[placed_fields(output)[0]]
    while isinstance(first, (list, tuple)) and isinstance(first[0], tuple):
        first = first[0][-1]  # Granite's: (layer, its features) of each layer
    tensors = first if isinstance(first, (list, tuple)) else [first]
    return sum(x.flatten(0, -2).shape[0] for x in tensors)


def packed(
    model: Any, processor: Any, documents: list[Document], rules: Any, dtype: torch.dtype
) -> ThdBatch:
    """Returns the stream of documents; one call of the processor makes the record of all images."""
    images = [image for document in documents for image in document.images]
    types = torch.cat([document.types for document in documents])
    is_first = torch.cat([torch.arange(len(document.ids)) for document in documents]) == 0
    rule = getattr(model.base_model, "get_rope_index", None)
    num_rows = sum(sum(document.image_lens) for document in documents)
    record = in_dtype(pixels(processor, images, accepted_names(model)), dtype)
    seen = {kind: ahead_of(types, is_first, rule) for kind, rule in rules.items()}
    columns = {
        "input_ids": [document.ids for document in documents],
        "labels": [document.labels for document in documents],
        "image": [document.numbers for document in documents],
    }
    if rule is not None:
        columns["rope_shift"] = [shifts_of(rule, document) for document in documents]
    return image_stream(
        columns, PackedImages(record, num_rows, torch.arange(num_rows), types, seen)
    )


def shifts_of(rule: Any, document: Document) -> Tensor:
    known = inspect.signature(rule).parameters
    grids = [{n: x for n, x in record.items() if n in known} for record in document.records]
    if not grids:
        return torch.zeros_like(document.ids)
    is_image = (document.numbers > 0).numpy()
    return torch.from_numpy(rope_shifts(rule, document.ids.numpy(), is_image, grids))


@torch.no_grad()
def check_apart(model: Any, processor: Any, rules: Any, dtype: torch.dtype) -> None:
    """The start-up check, on documents of this survey."""
    was_training = model.training
    model.eval()
    of_prompt = any(rule.of_prompt for rule in rules.values())

    def document(seed: int, size: tuple[int, int]) -> Document:
        # the words are the same, the noise is not
        made = Document(model, processor, "t4 i t5", random.Random(0), of_prompt, dtype, size)
        made.images = [random_image(random.Random(seed), size)]
        return made

    b, a, other = document(1, SIZES[1]), document(2, SIZES[0]), document(3, SIZES[0])
    loss_model = LossModel(model, CrossEntropy())
    streams = [[b, a, b], [b, other, b], [b]]
    logits = [
        loss_model.logits(packed(model, processor, stream, rules, dtype)) for stream in streams
    ]
    lens = [len(x.ids) for x in streams[0]]
    check_images_apart(type(model).__name__, logits, lens, tolerance_std(torch.float32))
    model.train(was_training)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def own_differences(
    plain: Any, documents: list[Document], total: float, expected: dict[str, Tensor]
) -> dict[str, float]:
    """Returns what transformers' sdpa differs from its eager attention by, on the same documents."""
    try:
        plain.set_attn_implementation("sdpa")
        losses = [document.loss(plain) for document in documents]
        gaps = differences(plain, expected, gradients(plain, sum(losses)))
        return {"loss": abs(float(sum(losses)) - total) / abs(total), **gaps}
    except Exception:
        return {}
    finally:
        plain.set_attn_implementation("eager")


def differences(model: Any, one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest difference of each kind of weights, relative to the largest gradient of the kind."""
    of_text = {id(p) for x in (text_decoder(model), output_head(model)) for p in x.parameters()}
    kinds = {
        name: "language"
        if id(p) in of_text
        else "projector"
        if PROJECTING.search(name)
        else "tower"
        for name, p in model.named_parameters()
    }
    gap, largest = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    for name in one.keys() | other.keys():
        zero = torch.zeros_like(one.get(name, other.get(name)))
        a, b = one.get(name, zero), other.get(name, zero)
        kind = kinds[name]
        gap[kind] = max(gap[kind], float((a - b).abs().max()))
        largest[kind] = max(largest[kind], float(a.abs().max()))
    return {kind: gap[kind] / largest[kind] if largest[kind] else gap[kind] for kind in KINDS}


if __name__ == "__main__":
    raise SystemExit(survey(Finding, FAMILIES, in_process, line, of_images))
