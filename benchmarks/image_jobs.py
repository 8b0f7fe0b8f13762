"""A job of one step for a family of models with images: the folder that a user would have, and the recipe on it.

The folder holds a tiny random model, its image processor at small sizes, a tokenizer with a chat template, and the
settings of the family's whole processor. Which tokens that processor asks its tokenizer for, which text it writes for
an image and how many placeholders, is asked of its own code.
"""

from __future__ import annotations

import inspect
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,
    processor_class_from_name,
)

from automodel_lite.cli import compose_config
from automodel_lite.config.check import check_config
from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.images.tokens import ImageProcessor
from benchmarks.image_families import (
    FIRST_TEXT,
    IMAGE,
    LAST_TEXT,
    PROCESSED_AS,
    SIZES,
    image_config,
    image_model,
    image_processor,
    pixels,
    random_image,
)

TEMPLATE = """{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}{% else %}\
{% for part in m['content'] %}{% if part['type'] == 'image' %}MARKER{% else %}{{ part['text'] }}{% endif %}{% endfor %}\
{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
WORDS = "abcdefghijklmnopqrstuvwxyz .?:\n0123456789_"
PLACEHOLDER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]|TILE_\w+")
_ASKED = re.compile(
    r"(?:has no attribute '?|does not have an `|missing required attribute ')(\w+?)(?:_id|_ids)?"
    r"(?:'?$|` defined|'\.)"
)
_NAMES = {"img_size": "image_size"}  # of a processor's setting in the config
_LENGTHS = ("image_seq_length", "image_seq_len", "num_image_tokens", "image_token_len")
"""What processors call the number of placeholders of an image, or of a part of it."""
_OPTIONAL = re.compile(r"getattr\(tokenizer, \"(\w+_token)\", None\)")
"""Tokens without which a processor is made, and then refuses every call."""
MOST_ASKED = 40
_PATCHES = (14, 1, 2, 3, 4, 6, 7, 8, 9, 12, 16, 28, 32, 56, 64)
"""Sizes of the patches that stand for one row of a tower, as far as a processor is told them."""


def step(family: str, folder: Path) -> str:
    """Trains one step; returns `trains`, or the sentence that refuses the family.

    Raises what else goes wrong, and ValueError for a family whose folder could not be made.
    """
    write_folder(family, folder)
    config = check_config(
        compose_config(
            "finetune",
            [
                "name=job",
                f"output_dir={folder}/run",
                f"cache_dir={folder}/cache",
                "dataset=images",
                f"dataset.path={folder}/chats.jsonl",
                f"model.pretrained={folder}",
                "model.train_towers=true",
                "packed_sequence.packed_sequence_size=2048",
                "training.global_batch_size=1",
                "training.max_steps=1",
                "training.allow_few_steps=true",
                "training.num_threads=1",
                "checkpoint.export_hf=false",
                "report=false",
            ],
        )
    )
    # with the whole program
    from recipes import train_ft

    try:
        code = train_ft.main(config)
    except (ConfigError, DataError) as error:
        # a processor that was made here, and not one that a family has
        if " places of images: " in str(error) or " writes '" in str(error):
            raise ValueError(f"its processor at tiny sizes fits no tiny tower ({error})") from error
        return str(error)
    assert code == 0
    return "trains"


def write_folder(family: str, folder: Path) -> None:
    """Writes model, tokenizer, processor and chats of a family."""
    config = image_config(family)
    text = config.get_text_config()
    if hasattr(text, "max_position_embeddings"):
        text.max_position_embeddings = 4096
    model = image_model(family, config)
    own = image_processor(family, config)
    kind = whole_processor(family, config)
    source = inspect.getsource(kind)
    asked = {name: f"<{name}>" for name in _OPTIONAL.findall(source)}
    specials: list[str] = []
    settings = named_settings(kind, config)
    if config.model_type not in PROCESSOR_MAPPING_NAMES:  # as the files of such a family say
        settings["processor_class"] = kind.__name__
    if getattr(own, "image_seq_length", 0) is None:
        own.image_seq_length = rows_of_image(own, model)
    made = build(kind, own, asked, specials, "<image>", settings)
    marker = getattr(made, "image_token", None) or "<image>"
    written = marker
    # what the family's own chat template writes around an image
    if hasattr(kind, "_has_wrappers"):
        written = f"{made.image_start_token}{marker}{made.image_end_token}"
    if getattr(made, "image_token", None):
        settings = fitted(kind, own, asked, model, settings)
        made = build(kind, own, asked, specials, marker, settings)
        text = text_of_image(made)
        token = placeholder_of(text, rows_of_image(own, model)) or marker
        specials += [*dict.fromkeys(PLACEHOLDER.findall(text)), marker]
        made = build(kind, own, asked, specials, token, settings)
    made.tokenizer.chat_template = TEMPLATE.replace("MARKER", written)
    made.tokenizer.save_pretrained(folder)
    own.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(settings))
    rows = len(made.tokenizer)
    if rows > model.get_input_embeddings().weight.shape[0]:  # a processor adds some of its own
        model.resize_token_embeddings(rows)
        config = model.config
    config.save_pretrained(folder)
    model.save_pretrained(folder)
    write_chats(folder)


def whole_processor(family: str, config: PretrainedConfig) -> Any:
    """Returns the class of the family's processor of images and text."""
    for name in (config.model_type, family, PROCESSED_AS.get(family, family)):
        if kind := PROCESSOR_MAPPING_NAMES.get(name):
            return processor_class_from_name(kind)
    raise ValueError("transformers names no processor for it")


def build(
    kind: Any,
    own: Any,
    asked: dict[str, str],
    specials: list[str],
    token: str,
    settings: dict[str, Any] | None = None,
) -> Any:
    """Makes the processor; tokens that it asks its tokenizer for are added to `asked`."""
    parts = {"image_processor": own}
    for _ in range(MOST_ASKED):
        parts["tokenizer"] = tokenizer_with(asked, specials, token)
        values = [parts.get(name) for name in kind.get_attributes()]
        without_others = type("OfImages", (kind,), {"check_argument_for_proper_class": _unchecked})
        try:
            made = without_others.from_args_and_dict(values, dict(settings or {}))
            if getattr(made, "image_token", None):
                text_of_image(made)
            return made
        except KeyError as error:  # of a vocabulary that lacks a token
            token_asked = str(error.args[0])
            if token_asked in specials or not token_asked.strip("|<>"):
                raise
            specials.append(token_asked)
        except (AttributeError, ValueError) as error:
            found = _ASKED.search(str(error))
            if not found or found[1] in asked:
                raise
            asked[found[1]] = f"<{found[1]}>"
    raise ValueError("its processor asks for tokens without end")


def _unchecked(self: Any, argument_name: str, argument: Any) -> Any:
    return None


def tokenizer_with(asked: dict[str, str], specials: list[str], token: str) -> Any:
    """Makes a tokenizer of characters with special tokens; the placeholder has the model's id."""
    words = [*WORDS][: LAST_TEXT + 1 - FIRST_TEXT]
    vocab = {"<pad>": 0, "<s>": 1, "<|end|>": 2}
    vocab |= {word: FIRST_TEXT + i for i, word in enumerate(words)}
    vocab[token] = IMAGE
    others = ["<|user|>", "<|assistant|>", *asked.values(), *specials]
    free = (i for i in [*range(LAST_TEXT + 1, IMAGE), *range(IMAGE + 1, 4096)])
    for other in others:
        if other not in vocab:
            vocab[other] = next(free)
    for i in range(max(vocab.values())):  # ids have no gaps
        if i not in vocab.values():
            vocab[f"<unused {i}>"] = i
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.add_special_tokens([x for x in vocab if len(x) > 1])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|end|>",
        extra_special_tokens=asked,
    )


def placeholder_of(text: str, num_rows: int) -> str:
    """Returns what stands for the rows of an image in its text: what is there as often, else what
    is there most often.
    """
    counted = Counter(PLACEHOLDER.findall(text)).most_common()
    as_often = [token for token, number in counted if number == num_rows]
    return next(iter([*as_often, *(token for token, _ in counted)]), "")


def rows_of_image(own: Any, model: Any) -> int:
    """Returns how many rows the tower makes of the image of `text_of_image`."""
    # from benchmarks.survey_images, which imports this file
    from benchmarks.survey_images import accepted_names, in_dtype, rows_of

    image = random_image(random.Random(0), SIZES[-1])
    record = in_dtype(pixels(own, [image], accepted_names(model)), torch.float32)
    return rows_of(model, record)


def text_of_image(made: Any) -> str:
    """Returns what the processor writes for an image, as the program asks it."""
    processor = ImageProcessor("", PretrainedConfig())
    vars(processor)["own"] = made
    image = random_image(random.Random(0), SIZES[-1])
    try:
        _, texts = made._process_images([image], **processor._settings)
    except NotImplementedError:
        return ""
    return texts[0]


def named_settings(kind: Any, config: PretrainedConfig) -> dict[str, Any]:
    """Returns the processor's settings that the config of the tiny model names too."""
    settings: dict[str, Any] = {}
    vision = getattr(config, "vision_config", config)
    for name in inspect.signature(kind.__init__).parameters:
        for part in (vision, config):
            value = getattr(part, _NAMES.get(name, name), None)
            if isinstance(value, (int, float, str)) and not name.endswith(("_token", "_token_id")):
                settings[name] = value
                break
    # of a tower of another package, whose config names none
    if "patch_size" in inspect.signature(kind.__init__).parameters:
        settings.setdefault("patch_size", _PATCHES[0])
    if "vision_aspect_ratio" in inspect.signature(kind.__init__).parameters:
        settings.setdefault("num_image_tokens", 4)
    return settings


def fitted(
    kind: Any, own: Any, asked: dict[str, str], model: Any, settings: dict[str, Any]
) -> dict[str, Any]:
    """Returns the settings with how many placeholders stand for an image of the tiny tower."""
    made = build(kind, own, asked, [], "<image>", settings)
    length = next((name for name in _LENGTHS if hasattr(made, name)), None)
    candidates = [{length: x} for x in range(1, 577)] if length else []
    if "num_additional_image_tokens" in inspect.signature(kind.__init__).parameters:
        candidates = [{}, {"num_additional_image_tokens": 1}]
    if not candidates and "patch_size" in settings:
        candidates = [{}, *({"patch_size": size} for size in _PATCHES)]
    if not candidates:
        return settings
    rows = rows_of_image(own, model)
    for more in candidates:
        if length in more and rows % more[length]:
            continue
        tried = settings | more
        made = build(kind, own, asked, [], "<image>", tried)
        text = text_of_image(made)
        if rows in Counter(PLACEHOLDER.findall(text)).values():
            return tried
    return settings


def write_chats(folder: Path, num: int = 12) -> None:
    """Writes chats with a picture in each question, as lines of JSON."""
    rng = random.Random(0)
    lines = []
    for number in range(num):
        random_image(rng, SIZES[number % len(SIZES)]).save(folder / f"{number}.png")
        asked = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "what?"}]
        said = "".join(rng.choices(WORDS[:26], k=6))
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        lines.append(json.dumps({"messages": turns}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
