"""What a model gets of a chat with images, whose turns are lists of parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from automodel_lite.config.model_files import base_of
from automodel_lite.errors import ConfigError, DataError, counted, is_limit, one_line
from automodel_lite.evaluation.generator import Generator
from automodel_lite.evaluation.questions import PROBE, parts_of, probe_turn
from automodel_lite.parts.images.rows import PlacedImage
from automodel_lite.parts.images.sources import ImageLimits, problem_of_question, source_of
from automodel_lite.parts.images.tokens import ImageProcessor
from automodel_lite.run.export import PROCESSOR_FILES


def processor_of(generator: Generator) -> ImageProcessor:
    """Returns the processor of a model, or of an adapter: its own, or that of its base."""
    folder = Path(generator.source)
    settings = folder / "adapter_config.json"
    base = generator.source
    has_own = any((folder / name).is_file() for name in PROCESSOR_FILES)
    if settings.is_file() and not has_own:
        base = base_of(folder)
    return ImageProcessor(base, generator.model.config)


def inputs_of(
    generator: Generator,
    processor: ImageProcessor,
    chat: Sequence[dict[str, Any]],
    is_chat: bool = True,
    tools: list[Any] | None = None,
) -> Any:
    """Returns what the model gets of a chat, by its processor.

    An image is a part `{"type": "image", "image": ...}`: a `PlacedImage`, a path, an address or
    bytes. Raises ConfigError for one that cannot be read, for a model without a processor, and for
    a chat that its template does not take.
    """
    turns = []
    pixels = []
    for turn in chat:
        said = turn["content"]
        parts = parts_of(said) if isinstance(said, str) else said
        turns.append({**turn, "content": parts})
        images = [part["image"] for part in parts if part["type"] == "image"]
        pixels += [pixels_of(image, generator.most_pixels) for image in images]
    template = generator.tokenizer.chat_template or processor.own.chat_template
    is_written = is_chat and template is not None
    if is_written:
        text = prompt_text(generator, template, turns, tools, processor.marker, len(pixels))
    else:
        text = text_of(turns[-1]["content"], processor.marker)
    # a template has brought its own special tokens, as in training
    inputs = processor.own(
        text=[text], images=pixels or None, return_tensors="pt", add_special_tokens=not is_written
    )
    return inputs.to(generator.model.device)


def pixels_of(image: Any, most_pixels: int | None = None) -> Any:
    """Decodes an image of a chat; raises ConfigError for one that cannot be read.

    most_pixels  to which one that was not placed with limits of its own is scaled down
    """
    try:
        if isinstance(image, PlacedImage):
            return image.source.pixels(image.limits)
        return source_of(image, "image").pixels(ImageLimits(Path.cwd(), most_pixels))
    except DataError as error:
        raise ConfigError(problem_of_question(error)) from error


def prompt_text(
    generator: Generator,
    template: str,
    turns: Sequence[dict[str, Any]],
    tools: list[Any] | None,
    marker: str,
    num_images: int,
) -> str:
    """Renders a chat whose next turn is the model's: by its parts, or, in turns of which the
    template does not take them, by its text with markers.
    """

    def render(chat: Sequence[dict[str, Any]], prompt: bool = False) -> str:
        text: Any = generator.tokenizer.apply_chat_template(
            list(chat),
            tools,
            chat_template=template,
            tokenize=False,
            add_generation_prompt=prompt,
            **generator.template_kwargs,
        )
        return str(text)

    roles = {turn["role"] for turn in turns}
    taken = {role for role in roles if probe_turn(render, role, parts_of(PROBE))}
    plain = [{**turn, "content": text_of(turn["content"], marker)} for turn in turns]
    mixed = [own if own["role"] in taken else text for own, text in zip(turns, plain)]
    problem = ""
    for chat in (mixed, plain):
        try:
            text = render(chat, prompt=True)
        except Exception as error:  # whatever a template does wrong
            if is_limit(error):
                raise
            problem = problem or one_line(error)
            continue
        if text.count(marker) == num_images:
            return text
        problem = f"it writes {text.count(marker)} of {counted(num_images, 'image')}"
    raise ConfigError(
        f"the chat template refuses the prompt ({problem}): use the model's own template."
    )


def text_of(parts: Sequence[dict[str, Any]], marker: str) -> str:
    """Returns what parts say, with a marker for each image."""
    return "".join(marker if part["type"] == "image" else part["text"] for part in parts)
