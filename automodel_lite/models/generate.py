"""Text from a trained model: an exported folder, an adapter or a hub name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from automodel_lite.attention.spec import config_value
from automodel_lite.config.components import locate
from automodel_lite.errors import ConfigError
from automodel_lite.interpreter import Deadline
from automodel_lite.models.source import check_finite, check_source, embedding_rows, load_whole

MAX_RENDER_S = 20.0


@dataclass(frozen=True)
class Generator:
    """A model and its tokenizer, ready to answer."""

    model: transformers.PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @torch.no_grad()
    def answer(
        self,
        messages: list[dict[str, str]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        is_chat: bool = True,
        write: Callable[[str], None] | None = None,
    ) -> str:
        """The model's turn after `messages`; pieces go to `write` as they come. temperature 0 = the likeliest token.

        is_chat   through the chat template; False: the last message's text is simply continued

        Raises ConfigError for a prompt that is empty or longer than the model's positions, and for one that its chat
        template or its embedding does not take.
        """
        inputs = self._inputs(messages, is_chat).to(self.model.device)
        max_new_tokens = min(max_new_tokens, self._room_tokens(inputs["input_ids"][0]))
        choice: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            choice["temperature"] = temperature
        streamer = _Stream(self.tokenizer, write) if write else None
        generate: Any = self.model.generate
        output = generate(**inputs, max_new_tokens=max_new_tokens, streamer=streamer, **choice)
        text: Any = self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return str(text)

    def _inputs(self, messages: list[dict[str, str]], is_chat: bool) -> Any:
        if not is_chat or self.tokenizer.chat_template is None:
            return self.tokenizer(messages[-1]["content"], return_tensors="pt")
        try:
            with Deadline(MAX_RENDER_S):
                return self.tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
                )
        except Exception as error:  # whatever a template does wrong
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise ConfigError(f"the chat template refuses the prompt ({reason}): --raw goes without it.") from error

    def _room_tokens(self, ids: Tensor) -> int:
        """How many tokens an answer to this prompt may have."""
        positions = config_value(self.model.config.get_text_config(), "max_position_embeddings", 2**31)
        if not len(ids):
            raise ConfigError("the prompt is empty: there is nothing to go on from.")
        highest, rows = int(ids.max()), embedding_rows(self.model)
        if highest >= rows:
            raise ConfigError(f"the tokenizer gives the id {highest}, and the model's embedding has {rows} rows.")
        if len(ids) >= positions:
            raise ConfigError(
                f"the prompt has {len(ids):,} tokens, and the model has {positions:,} positions, for the answer too: "
                "shorten the prompt."
            )
        return int(positions) - len(ids)


class _Stream(TextStreamer):
    """Hands over the text as soon as it is whole words."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.write(text + ("\n" if stream_end else ""))


def load_generator(source: str, trust_remote_code: bool = False) -> Generator:
    """Loads from a model or adapter folder, or by a hub name; on a GPU in bf16.

    Raises ConfigError for a model of code that is not trusted.
    """
    if not (Path(source) / "adapter_config.json").is_file():
        check_source("model", source)
    has_gpu = torch.cuda.is_available()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes of its reader
        raise _cannot_load(source, "tokenizer", error) from error
    model: Any = load_model(source, torch.bfloat16 if has_gpu else torch.float32, trust_remote_code)
    return Generator(model.to("cuda" if has_gpu else "cpu"), tokenizer)


def load_model(folder: str, dtype: torch.dtype, trust_remote_code: bool = False) -> transformers.PreTrainedModel:
    """A model's folder or hub name, or an adapter's folder with its base.

    Raises ConfigError for a model of code that is not trusted.
    """
    is_adapter = (Path(folder) / "adapter_config.json").is_file()
    load = locate("automodel_lite.models.lora.load_adapted") if is_adapter else load_whole
    try:
        model: transformers.PreTrainedModel = load(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a damaged file makes of its reader
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise _cannot_load(folder, "model", error) from error
        raise ConfigError(f"{folder} runs code of its own: read it, and allow it with --trust-remote-code.") from None
    check_finite(model, folder)
    return model.eval()


def _cannot_load(folder: str, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    return ConfigError(f"{folder} cannot be loaded as a {what}: {reason}")
