"""Rows in the prompts of other frameworks: the texts and the ids that their own renderers make of ten rows.

Compared with axolotl 0.19.0's own AlpacaPromptTokenizingStrategy, id by id, trained on answers and on all.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.data.reading.columns import detect
from automodel_lite.data.reading.documents import question_of
from automodel_lite.data.tokens.encode import Encoder, Renderer
from automodel_lite.errors import ConfigError, DataError
from tests.data.templates import FAMILIES, byte_tokenizer

WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
)
WITHOUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n"
)
# instruction, input, output, the prompt of axolotl's AlpacaPrompter and torchtune's AlpacaToMessages
ALPACA = [
    ("Add.", "2 2", "4", WITH_INPUT + "Add.\n\n### Input:\n2 2\n\n### Response:\n"),
    ("Add.", "", "4", WITHOUT + "Add.\n\n### Response:\n"),
    ("Add.", None, " 4", WITHOUT + "Add.\n\n### Response:\n"),
    ("Add.", " ", "\n4", WITH_INPUT + "Add.\n\n### Input:\n \n\n### Response:\n"),
    ("Use {input}.", "{}", "{}", WITH_INPUT + "Use {input}.\n\n### Input:\n{}\n\n### Response:\n"),
    ("A\nB", "", "C\nD\n", WITHOUT + "A\nB\n\n### Response:\n"),
    (" Add. ", "", "4 ", WITHOUT + " Add. \n\n### Response:\n"),
    ("Größe?", "5 €", "Groß", WITH_INPUT + "Größe?\n\n### Input:\n5 €\n\n### Response:\n"),
    ("", "", "4", WITHOUT + "\n\n### Response:\n"),
    ("Add.", "\n2", "It is 4", WITH_INPUT + "Add.\n\n### Input:\n\n2\n\n### Response:\n"),
]
# context, question, texts of the answers, what NeMo AutoModel's make_squad_dataset writes
SQUAD = [
    ("Paris is big.", "What is?", ["Paris"], "Context: Paris is big. Question: What is? Answer: ", "Paris"),
    ("A", "B", [" C ", "D"], "Context: A Question: B Answer: ", "C"),
    ("A", "B", [], "Context: A Question: B Answer: ", ""),
    ("A\n", " B", ["C\nD"], "Context: A\n Question:  B Answer: ", "C\nD"),
]  # fmt: skip


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words begin with a mark that a text's first word gets too, as Llama 2's do."""
    letters = sorted({*"▁ \n", *"".join(str(cell) for row in ALPACA for cell in row)})
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", "<unk>", "▁It", "▁4", *letters])}
    merges = [("▁", "4"), ("▁", "I"), ("▁I", "t")]
    vocab["▁I"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def rendered(
    name: str, tokenizer: Any, row: dict[str, Any], train_on: str = "assistant"
) -> tuple[str, list[int], list[int]]:
    """Returns the text of a row, its ids, and those of them that are labels."""
    document = detect(list(row), name, None).document(row, "a.jsonl:1")
    (rendering,) = Renderer(tokenizer, train_on, {}).renderings(document)
    columns, _ = Encoder(tokenizer).encode([rendering])
    labels = [label for label in columns["labels"].tolist() if label != IGNORE_INDEX]
    return rendering.text, columns["input_ids"].tolist(), labels


@pytest.mark.parametrize("number", range(len(ALPACA)))
def test_alpaca_prompts_are_those_of_axolotl(number: int) -> None:
    """The prompt as it is, and the answer tokenized on its own; a chat template makes nothing of them."""
    instruction, given, output, prompt = ALPACA[number]
    row = {"instruction": instruction, "input": given, "output": output}
    tokenizer = sentencepiece_like()
    tokenizer.chat_template = FAMILIES["mistral"].template
    before, answer = (tokenizer(text)["input_ids"] for text in (prompt, output))
    text, ids, labels = rendered("alpaca_prompt", tokenizer, row)
    assert text == f"{prompt}{output}</s>"
    assert ids == [*before, *answer, 1]
    assert labels == [*answer, 1]
    _, ids, labels = rendered("alpaca_prompt", tokenizer, row, "all")
    assert labels == ids[1:] == [*before, *answer, 1][1:]


def test_an_answer_is_a_text_of_its_own() -> None:
    row = {"instruction": "Add.", "input": "", "output": "It"}
    _, ids, labels = rendered("alpaca_prompt", sentencepiece_like(), row)
    assert labels == [3, 1]  # ▁It </s>
    assert ids[-2:] == [3, 1]


@pytest.mark.parametrize("number", range(len(ALPACA)))
def test_alpaca_turns_are_those_of_torchtune(number: int) -> None:
    """The same prompt as a user's turn, which the chat template writes."""
    instruction, given, output, prompt = ALPACA[number]
    row = {"instruction": instruction, "input": given, "output": output}
    tokenizer = byte_tokenizer(FAMILIES["llama3"])
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": output}]
    text, _, _ = rendered("alpaca_turn", tokenizer, row)
    assert text == tokenizer.apply_chat_template(turns, tokenize=False)


@pytest.mark.parametrize("number", range(len(SQUAD)))
def test_squad_is_that_of_nemo(number: int) -> None:
    context, question, texts, prompt, answer = SQUAD[number]
    answers = {"text": texts, "answer_start": [0] * len(texts)}
    row = {"id": "1", "context": context, "question": question, "answers": answers}
    plain = byte_tokenizer(FAMILIES["mistral"])
    plain.chat_template = None
    text, ids, labels = rendered("squad", plain, row)
    assert text == f"{prompt}{answer}</s>"
    assert ids == [*plain(f"{prompt}{answer}")["input_ids"], plain.eos_token_id]
    assert labels == [*plain(answer)["input_ids"], plain.eos_token_id]
    if answer:
        tokenizer = byte_tokenizer(FAMILIES["qwen3"])
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        text, _, _ = rendered("squad", tokenizer, row)
        assert text == tokenizer.apply_chat_template(turns, tokenize=False)


def test_answers_of_another_form_are_refused() -> None:
    row = {"context": "A", "question": "B", "answers": ["C"]}
    with pytest.raises(DataError, match=r"column answers must have a list of texts, text, not"):
        detect(list(row), "squad", None).document(row, "a.jsonl:1")


def test_a_question_of_such_rows_is_asked_as_it_was_trained() -> None:
    row = {"instruction": "Add.", "output": "4"}
    document = detect(list(row), "alpaca_prompt", None).document(row, "a.jsonl:1")
    question = question_of(document)
    assert question
    assert not question.is_chat
    assert question.messages[-1]["content"] == WITHOUT + "Add.\n\n### Response:\n"


def test_they_are_taken_by_name_alone() -> None:
    assert detect(["instruction", "input", "output"], None, None).format.name == "alpaca"
    with pytest.raises(ConfigError, match="column"):
        detect(["context", "question", "answers"], None, None)
