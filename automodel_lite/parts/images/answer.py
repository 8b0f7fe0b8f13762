"""What a trained model says to a prompt with images."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from automodel_lite.errors import ConfigError, DataError
from automodel_lite.parts.evaluation.generator import Generator
from automodel_lite.parts.images.sources import ImageLimits, source_of
from automodel_lite.parts.images.tokens import ImageProcessor


@torch.no_grad()
def answer(
    generator: Generator,
    folder: str,
    messages: Sequence[dict[str, Any]],
    images: Sequence[str],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
) -> str:
    """Returns the model's turn after a chat, before whose last turn the images stand.

    folder  of the model, or of an adapter, or a hub name

    Raises ConfigError for an image that cannot be read, and for a model without a processor.
    """
    settings = Path(folder) / "adapter_config.json"
    base = (
        json.loads(settings.read_text())["base_model_name_or_path"]
        if settings.is_file()
        else folder
    )
    processor = ImageProcessor(base, generator.model.config)
    limits = ImageLimits(Path.cwd())
    try:
        pixels = [source_of(image, "image").pixels(limits) for image in images]
    except DataError as error:
        raise ConfigError(f"--image: {error}") from error
    *before, last = messages
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": last["content"]}]
    template = generator.tokenizer.chat_template or processor.own.chat_template
    text = generator.tokenizer.apply_chat_template(
        [*before, {**last, "content": parts}],
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    # the template has brought its own special tokens, as in training
    inputs = processor.own(
        text=[text], images=pixels, return_tensors="pt", add_special_tokens=False
    ).to(generator.model.device)
    how: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        how["temperature"] = temperature
    generate: Any = generator.model.generate
    output = generate(**inputs, max_new_tokens=max_new_tokens, **how)
    new = output[0, inputs["input_ids"].shape[1] :]
    return str(generator.tokenizer.decode(new, skip_special_tokens=True))
