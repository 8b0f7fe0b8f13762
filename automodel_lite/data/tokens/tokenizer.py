"""Tokenizers: loaded from a folder or the hub, or trained on the documents themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from automodel_lite.config.rules import PathStr, Range, check_folder, read_template
from automodel_lite.data.cache import build_once, cache_root, short_hash
from automodel_lite.data.formats.decisions import decisions_of
from automodel_lite.data.reading.documents import Documents, DocumentSet
from automodel_lite.data.reading.readers import placed
from automodel_lite.errors import ConfigError, DataError, is_limit, system_errors
from automodel_lite.models.reading import ask_no_hub_without_network, hub_reason
from automodel_lite.redact import secret_in

TokenCount = Annotated[int, Range(262, 1_000_000)]
MAX_CHARS = 20_000_000  # that a tokenizer is trained on
PAD = "<|pad|>"
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
"""A turn is `<|role|>content<|end|>`; what an assistant thinks, says and calls, its end token
included, is marked as generated.
"""


def load_tokenizer(
    path: PathStr | None,
    *,
    chat_template: str | None = None,  # a Jinja file that replaces the tokenizer's own template
    # texts that become tokens of their own; see model.resize_embeddings
    added_tokens: list[str] | None = None,
) -> PreTrainedTokenizerFast:
    """Loads a fast tokenizer by folder or hub name; `chat_template` may also be the text of a
    template.
    """
    if path is None:
        raise ConfigError(
            "tokenizer.path=null: a model from scratch brings no tokenizer: choose tokenizer=bpe, "
            "which is trained on the data, or name a folder or a hub name, tokenizer.path=..."
        )
    if not check_folder("tokenizer.path", path):
        ask_no_hub_without_network()
    source = str(Path(path).expanduser())
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes of its reader
        if is_limit(error):
            raise
        if "instantiate the backend tokenizer" in str(error):
            raise ConfigError(
                f"tokenizer.path={path} has no tokenizer.json: set tokenizer.path to a "
                "folder or a hub name that has one."
            ) from None
        raise ConfigError(
            f"tokenizer.path={path} cannot be loaded as a tokenizer: {hub_reason(error)}"
        ) from error
    use_processors_template(tokenizer, Path(source))
    # a byte order mark of its file would be written into every document
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = tokenizer.chat_template.removeprefix("\ufeff")
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
        if name := secret_in(tokenizer.chat_template):
            raise ConfigError(
                f"tokenizer.chat_template holds the value of {name}, which would be trained on and "
                "exported: remove it."
            )
    if known := [token for token in added_tokens or () if token in tokenizer.get_vocab()]:
        raise ConfigError(
            f"tokenizer.added_tokens={added_tokens}: {known[0]} is a token of {path} already: "
            "remove it."
        )
    tokenizer.add_tokens(list(added_tokens or ()))
    # only these know which characters a token covers
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(
            f"tokenizer.path={path} is a slow tokenizer ({type(tokenizer).__name__}): use a fast "
            "one."
        )
    return tokenizer


def use_processors_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Gives a tokenizer without a chat template that of its folder's processor: some families of
    images keep it there alone. What it writes is trained, and what ends its turns ends answers.
    """
    if tokenizer.chat_template is not None or not folder.is_dir():
        return
    with suppress(Exception):  # no such file, or one that its own reader names
        found, _ = transformers.ProcessorMixin.get_processor_dict(str(folder))
        tokenizer.chat_template = found.get("chat_template")


def check_vocabulary(pretrained: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raises ConfigError when the ids of a pretrained model mean other tokens here; more tokens may
    be added.

    A model without tokenizer files is taken at its word.
    """
    models_own = vocabulary_of(pretrained)
    ours = tokenizer.get_vocab()
    if moved := sorted(token for token, i in models_own.items() if ours.get(token) != i):
        raise ConfigError(
            f"tokenizer is not that of model.pretrained={pretrained}: {len(moved):,} of its "
            f"{len(models_own):,} tokens have another id or none, as {moved[0]!r}, so its "
            "embeddings would stand for other tokens. Remove the tokenizer settings (the model's "
            "own is the default), or train from scratch, model.config.model_type=..."
        )


def vocabulary_of(pretrained: str, revision: str = "main") -> dict[str, int]:
    """Returns token -> id of a model; none without tokenizer files that can be read."""
    with suppress(Exception):
        return dict(
            transformers.AutoTokenizer.from_pretrained(
                pretrained, revision=revision, trust_remote_code=False
            ).get_vocab()
        )
    return {}


def padding_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """Returns the id that fills packs up: end, else pad, else 0. Padding is masked by position, so
    any id is right whose row of the embedding is not zero, as that of pad is in a new model:
    Gemma 3n divides by the deviation of what comes of it.
    """
    return next(
        int(i) for i in (tokenizer.eos_token_id, tokenizer.pad_token_id, 0) if i is not None
    )


def train_bpe_tokenizer(
    documents: Documents,
    vocab_size: TokenCount = 384,  # at least 262: 256 bytes, six special tokens
    *,
    cache_dir: str | Path | None = None,
) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer with a chat template on the documents, once; later calls
    load it.
    """
    if documents.kind in ("tokens", "rows"):
        raise ConfigError(
            "tokenizer=bpe needs text to train on, and dataset has token ids: use "
            "tokenizer=pretrained."
        )
    key = {
        "data": documents.identity,
        "vocab_size": str(vocab_size),
        "template": short_hash(CHAT_TEMPLATE),
    }

    @system_errors()
    def build(folder: Path) -> None:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[PAD, END, *ROLES],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(_document_texts(documents.train), trainer)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            pad_token=PAD,
            eos_token=END,
            additional_special_tokens=list(ROLES),
        )
        tokenizer.chat_template = CHAT_TEMPLATE
        tokenizer.save_pretrained(folder)

    entry = build_once(cache_root(cache_dir), "tokenizers", f"bpe{vocab_size}", key, build)
    return PreTrainedTokenizerFast.from_pretrained(entry.folder)


_LONG_WORD = re.compile(r"\S{1001}|\s{1001}")


def _document_texts(rows: DocumentSet) -> Iterator[str]:
    """Yields the texts of the documents until MAX_CHARS were given.

    Bad rows are passed over here: they are reported, or counted, when the documents are tokenized.
    """
    num_chars = 0
    for _, document in placed(rows):
        if isinstance(document, DataError):
            continue
        texts: list[Any] = []
        for part in document.get("documents", [document]):
            texts += [message.get("content") for message in part.get("messages", ())]
            texts += [part.get(key) for key in ("system", "prompt", "completion", "text")]
        for decision in decisions_of(document):
            texts += [decision.system, decision.state, decision.question]
            texts += [word for choice in decision.choices for word in choice]
        for text in texts:
            if not text:
                continue
            num_chars += len(text)
            # The trainer's time grows with the square of the longest word (base64, a line of
            # dashes): 17 s for 100,000 letters.
            step = 1000 if _LONG_WORD.search(text) else len(text)
            yield from (text[start : start + step] for start in range(0, len(text), step))
        if num_chars >= MAX_CHARS:
            return
