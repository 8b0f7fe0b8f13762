"""Documents of any kind to samples: text to tokenise and the stretches of it that are trained on."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from automodel_lite.data.chat import ChatRenderer, Sample, TrainOn, no_template
from automodel_lite.data.documents import Document
from automodel_lite.errors import ConfigError


class SampleRenderer:
    """Renders normalised documents.

    Chats go through the chat template. A prompt and its completion do too, as a user's and an assistant's turn, when
    the tokenizer has a template; without one they become `prompt completion <eos>`, with a line break between them
    where neither brings white space. Plain text becomes `<bos> text <eos>`, the BOS only for tokenizers that add one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, train_on: TrainOn, template_kwargs: dict[str, Any]):
        self._train_on = train_on
        has_template = tokenizer.chat_template is not None
        self._chat = ChatRenderer(tokenizer, train_on, template_kwargs) if has_template else None
        self._no_template = no_template(tokenizer)
        self._bos, self._eos = _text_frame(tokenizer)
        stop_tokens = [*self._chat.stop_tokens] if self._chat is not None else []
        stop_tokens += [self._eos] if self._eos else []
        self.stop_ids = frozenset(tokenizer.get_vocab()[token] for token in stop_tokens)

    def samples(self, document: Document) -> list[Sample]:
        """The samples of one document; more than one for a chat whose template rewrites earlier turns.

        Raises:
            DataError: the document cannot be rendered (says why, not where).
        """
        if "messages" in document:
            return self._need_chat().samples(document["messages"], document.get("tools"))
        if "completion" in document:
            return [self._prompt_completion(document)]
        return [self._text(document["text"])]

    def _need_chat(self) -> ChatRenderer:
        if self._chat is None:
            raise ConfigError(f"the data are chats, and {self._no_template}")
        return self._chat

    def _prompt_completion(self, document: Document) -> Sample:
        prompt, completion = document["prompt"], document["completion"]
        if self._chat is not None:
            system = [{"role": "system", "content": document["system"]}] if document.get("system") else []
            user, assistant = {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}
            return self._chat.samples([*system, user, assistant])[0]
        if document.get("system"):
            prompt = f"{document['system']}\n{prompt}"
        glue = "" if not prompt or prompt[-1].isspace() or completion[:1].isspace() else "\n"
        before = f"{self._frame_start(prompt)}{prompt}{glue}"
        text = f"{before}{completion}{self._frame_end(completion)}"
        return Sample(text, ((0 if self._train_on == "all" else len(before), len(text)),))

    def _text(self, text: str) -> Sample:
        if not text:
            return Sample("", ())
        whole = f"{self._frame_start(text)}{text}{self._frame_end(text)}"
        return Sample(whole, ((0, len(whole)),))

    def _frame_start(self, text: str) -> str:
        return "" if self._bos and text.startswith(self._bos) else self._bos

    def _frame_end(self, text: str) -> str:
        if not self._eos:
            raise ConfigError("the tokenizer has no eos_token, so a model would never learn to stop: give it one.")
        return "" if text.endswith(self._eos) else self._eos


def _text_frame(tokenizer: PreTrainedTokenizerFast) -> tuple[str, str]:
    """The BOS token if the tokenizer puts one before plain text, else "", and the end token."""
    first = tokenizer("a")["input_ids"][:1]
    adds_bos = tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id]
    return str(tokenizer.bos_token) if adds_bos else "", str(tokenizer.eos_token or "")
