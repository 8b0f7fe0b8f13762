"""What an image is in tokens, by its size: asked from the family's own processor.

    640 x 480, 641 x 480 ─▶ 644 x 476 (what the family resizes both to), 391 tokens ─▶ one text

A blank image of a size gives its text, by one call of the whole processor. Sizes that a family
resizes to one and counts alike (`_get_num_multimodal_tokens`) are one question: of a million sizes,
some thousand are left. The first sizes that share an answer are asked themselves too; a family
that tells them apart is asked for each size.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from automodel_lite.errors import ConfigError, DataError, explained, is_limit
from automodel_lite.parts.images.sources import blank_image

MOST_SIZES = 200_000  # that are remembered
NUM_COMPARED = 20
_BACKENDS = "transformers.image_processing_backends"
_TEXT_ONLY = {"do_rescale": False, "do_normalize": False}  # which the text does not depend on
Process = Callable[..., tuple[dict[str, Tensor], list[str]]]


@dataclass(frozen=True)
class ImageTokens:
    """An image of some size: its text, how many placeholders that holds, what positions follow
    from.

    short  the text with one placeholder for each run of them
    runs   how many placeholders each of those stands for
    """

    text: str
    num_rows: int
    grid: dict[str, Tensor]
    short: str
    runs: tuple[int, ...]

    def is_like(self, other: ImageTokens) -> bool:
        """Returns whether both are the same in a document."""
        grids = [torch.equal(grid, other.grid[name]) for name, grid in self.grid.items()]
        return self.text == other.text and all(grids)


class SizeTable:
    """The tokens of images by their size.

    own      processor of the family
    process  images -> what the tower takes, and the text of each
    token    the placeholder
    """

    def __init__(self, own: Any, process: Process, token: str) -> None:
        self.own = own
        self.process = process
        self.token = token
        self.resized = resize_question(own)
        self._run = re.compile(f"(?:{re.escape(token)})+")
        self._of_size: dict[tuple[int, int], ImageTokens] = {}
        self._of_key: dict[Any, ImageTokens] = {}
        self._num_compared = 0
        self.has_keys = "_get_num_multimodal_tokens" in dir(own)
        self.num_asked = 0

    def of_size(self, width: int, height: int) -> ImageTokens:
        """Returns what an image of this size is; raises DataError for one that the processor
        refuses.
        """
        found = self._of_size.get((width, height))
        if found is None:
            if len(self._of_size) >= MOST_SIZES:
                self._of_size.clear()
            found = self._of_size[width, height] = self._found(width, height)
        return found

    def _found(self, width: int, height: int) -> ImageTokens:
        key = self._key(width, height)
        known = self._of_key.get(key)
        if key is not None and known is not None and self._num_compared >= NUM_COMPARED:
            return known
        asked = self._asked(width, height)
        if key is None:
            return asked
        if known is None:
            # what the family resizes first tells the rows and columns of an image
            if key[1] is None and (len(asked.runs) > 1 or asked.grid):
                self.has_keys = False
            self._of_key[key] = asked
            return asked
        self._num_compared += 1
        self.has_keys &= known.is_like(asked)
        return asked

    def _key(self, width: int, height: int) -> Any:
        """Returns what sizes of one text share; None of a family without such arithmetic."""
        if not self.has_keys:
            return None
        try:
            counted = self._counting._get_num_multimodal_tokens(image_sizes=[(height, width)])
        except Exception as error:  # not there, or of sizes that a family's code has not thought of
            if is_limit(error):
                raise
            return None
        return (*counted.num_image_tokens, *counted.num_image_patches), self.resized(width, height)

    @cached_property
    def _counting(self) -> Any:
        """The processor with its settings merged once: that is most of what a count takes."""
        counting = copy(self.own)
        merged = counting._merge_kwargs(counting.valid_processor_kwargs)

        def merge_kwargs(*given: Any, **options: Any) -> dict[str, Any]:
            return {name: copy(settings) for name, settings in merged.items()}

        counting._merge_kwargs = merge_kwargs
        return counting

    def _asked(self, width: int, height: int) -> ImageTokens:
        """Returns what the processor makes of a blank image."""
        self.num_asked += 1
        sentence = f"an image of {width} x {height} pixels is refused by the processor"
        # of sizes that a family's code has not thought of
        key = "dataset.bad_image"
        cure = f"crop it, or set {key}=drop"
        with explained(sentence, Exception, kind=DataError, key=key, cure=cure):
            record, (text,) = self.process([blank_image(width, height)], **_TEXT_ONLY)
        runs = tuple(len(found[0]) // len(self.token) for found in self._run.finditer(text))
        if not runs:
            raise ConfigError(
                f"dataset.processor writes {text[:40]!r} for an image, without the token "
                f"{self.token} that the model expects: use the model's own processor."
            )
        grid = {n: x for n, x in record.items() if n.endswith("grid_thw")}
        return ImageTokens(text, sum(runs), grid, self._run.sub(self.token, text), runs)


class _Seen(Exception):
    """What an image processor calls a function of its own with."""


def resize_question(own: Any) -> Callable[[int, int], tuple[int, int] | None]:
    """Returns what tells, of a size, to which one the family's code resizes it first; nothing is
    computed. None: it does not say.
    """
    processor = own.image_processor
    kind = type(processor)
    backends = [k for k in kind.__mro__ if k.__module__ == _BACKENDS and "resize" in vars(k)]
    if not backends:
        return lambda width, height: None

    def resize(self: Any, image: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Seen(size.height, size.width)

    def check(self: Any, images: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Seen(kwargs)

    # behind the family's class, which computes the size, and before the library's, which resizes
    first = type("First", (backends[0],), {"resize": resize})
    asked = copy(processor)
    asked.__class__ = type("Asked", (kind, first), {})
    checking = copy(processor)
    checking.__class__ = type("Checking", (kind,), {"_preprocess_image_like_inputs": check})
    how = own._merge_kwargs(own.valid_processor_kwargs, tokenizer_init_kwargs={})["images_kwargs"]
    how = {**how, "input_data_format": "channels_last"}
    ask: Callable[..., Any] = partial(asked, **how)
    try:
        checking([_unseen(1, 1)], **how)
    except _Seen as found:  # once for all sizes
        ask = partial(asked._preprocess_image_like_inputs, **found.args[0])
    except Exception as error:  # of what a family's code has not thought of
        if is_limit(error):
            raise
        return lambda width, height: None

    def resized(width: int, height: int) -> tuple[int, int] | None:
        try:
            ask([_unseen(width, height)])
        except _Seen as found:
            return None if None in found.args else found.args
        except Exception as error:  # of what a family's code has not thought of
            if is_limit(error):
                raise
            return None
        return None

    return resized


def _unseen(width: int, height: int) -> np.ndarray:
    """Returns an image of which nobody reads a pixel."""
    return np.broadcast_to(np.uint8(0), (height, width, 3))
