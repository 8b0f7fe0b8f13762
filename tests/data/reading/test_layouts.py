"""Layouts of public data sets, and of what stands beside what is read: how each is read, or the refusal and its cure."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from automodel_lite.data.reading.columns import detect
from automodel_lite.data.reading.files import FilesDataset
from automodel_lite.errors import ConfigError, DataError

ASKED = [{"role": "user", "content": "Why is the sky blue?"}]
CHAT = [*ASKED, {"role": "assistant", "content": "It scatters; so \\boxed{4}."}]
SHARED = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]
RENDERED = "Below is an instruction.\n### Instruction:\nAdd\n### Input:\n1+1\n### Response:\n2"

# data set: a row of its columns, what it is read as
READ: dict[str, tuple[dict[str, Any], str]] = {
    "tatsu-lab/alpaca": ({"instruction": "Add", "input": "1+1", "output": "2", "text": RENDERED}, "columns instruction,input,output,text → alpaca, ignored: text"),
    "yahma/alpaca-cleaned": ({"output": "2", "input": "", "instruction": "Add"}, "columns output,input,instruction → alpaca"),
    "iamtarun/python_code_instructions": ({"instruction": "Add", "input": "1+1", "output": "2", "prompt": RENDERED}, "columns instruction,input,output,prompt → alpaca, ignored: prompt"),
    "databricks/databricks-dolly-15k": ({"instruction": "Why?", "context": "", "response": "So.", "category": "open_qa"}, "columns instruction,context,response,category → alpaca (input = context, output = response), ignored: category"),
    "garage-bAInd/Open-Platypus": ({"input": "", "output": "2", "instruction": "Add", "data_source": "x"}, "columns input,output,instruction,data_source → alpaca, ignored: data_source"),
    "TIGER-Lab/MathInstruct": ({"source": "x", "output": "2", "instruction": "Add"}, "columns source,output,instruction → alpaca, ignored: source"),
    "Open-Orca/OpenOrca": ({"id": "1", "system_prompt": "S", "question": "Why?", "response": "So."}, "columns id,system_prompt,question,response → question_answer (answer = response), ignored: id"),
    "openai/gsm8k": ({"question": "1+1?", "answer": "#### 2"}, "columns question,answer → question_answer"),
    "b-mc2/sql-create-context": ({"answer": "SELECT", "question": "How many?", "context": "CREATE"}, "columns answer,question,context → question_answer"),
    "meta-math/MetaMathQA": ({"type": "t", "query": "q", "original_question": "o", "response": "r"}, "columns type,query,original_question,response → prompt_completion (prompt = query, completion = response), ignored: type, original_question"),
    "HuggingFaceH4/MATH-500": ({"problem": "p", "solution": "so \\boxed{4}.", "answer": "4", "subject": "s", "level": 2}, "columns problem,solution,answer,subject,level → prompt_completion (prompt = problem, completion = solution), ignored: answer, subject, level"),
    "nvidia/HelpSteer2": ({"prompt": "p", "response": "r", "helpfulness": 3, "correctness": 4}, "columns prompt,response,helpfulness,correctness → prompt_completion (completion = response), ignored: helpfulness, correctness"),
    "m-a-p/CodeFeedback": ({"query": "q", "answer": "a", "resource": "x", "lang": "py"}, "columns query,answer,resource,lang → prompt_completion (prompt = query, completion = answer), ignored: resource, lang"),
    "nvidia/OpenCodeReasoning": ({"id": "1", "input": "q", "output": "<think>t</think> print(1)", "solution": "print(1)"}, "columns id,input,output,solution → prompt_completion (prompt = input, completion = output), ignored: id, solution"),
    "trl-lib/tldr": ({"prompt": "p", "completion": "c"}, "columns prompt,completion → prompt_completion"),
    "cnn_dailymail": ({"article": "a", "highlights": "h", "id": "1"}, "columns article,highlights,id → prompt_completion (prompt = article, completion = highlights), ignored: id"),
    "xsum": ({"document": "d", "summary": "s", "id": "1"}, "columns document,summary,id → prompt_completion (prompt = document, completion = summary), ignored: id"),
    "HuggingFaceH4/ultrachat_200k": ({"prompt": ASKED[0]["content"], "prompt_id": "1", "messages": CHAT}, "columns prompt,prompt_id,messages → messages, ignored: prompt, prompt_id"),
    "AI-MO/NuminaMath-CoT": ({"source": "s", "problem": ASKED[0]["content"], "solution": CHAT[1]["content"], "messages": CHAT}, "columns source,problem,solution,messages → messages, ignored: source, problem, solution"),
    "open-r1/OpenR1-Math-220k": ({"problem": ASKED[0]["content"], "solution": "Another one.", "answer": "4", "generations": ["a"], "messages": CHAT}, "columns problem,solution,answer,generations,messages → messages, ignored: problem, solution, answer, generations"),
    "HuggingFaceTB/smoltalk": ({"messages": CHAT, "source": "x"}, "columns messages,source → messages, ignored: source"),
    "trl-lib/Capybara": ({"source": "x", "messages": CHAT, "num_turns": 1}, "columns source,messages,num_turns → messages, ignored: source, num_turns"),
    "lmsys/lmsys-chat-1m": ({"conversation_id": "1", "model": "m", "conversation": CHAT, "turn": 1, "language": "English"}, "columns conversation_id,model,conversation,turn,language → messages (messages = conversation), ignored: conversation_id, model, turn, language"),
    "open-thoughts/OpenThoughts-114k": ({"system": "S", "conversations": SHARED}, "columns system,conversations → sharegpt"),
    "Magpie-Align/Magpie-Pro": ({"uuid": "1", "instruction": "Hi", "response": "Hello!", "conversations": SHARED}, "columns uuid,instruction,response,conversations → sharegpt, ignored: uuid, instruction"),
    "NousResearch/hermes-function-calling-v1": ({"id": "1", "conversations": SHARED, "category": "c", "task": "t"}, "columns id,conversations,category,task → sharegpt, ignored: id, category, task"),
    "HuggingFaceFW/fineweb": ({"text": "t", "id": "1", "dump": "d", "url": "u", "token_count": 1}, "columns text,id,dump,url,token_count → text, ignored: id, dump, url, token_count"),
    "wikimedia/wikipedia": ({"id": "1", "url": "u", "title": "T", "text": "t"}, "columns id,url,title,text → text, ignored: id, url, title"),
    "stanfordnlp/imdb": ({"text": "Good.", "label": 1}, "columns text,label → text, ignored: label"),
    "bigcode/the-stack": ({"content": "x = 1", "lang": "py", "size": 5}, "columns content,lang,size → text (text = content), ignored: lang, size"),
    "a pair of one's own": ({"input": "hi", "output": "yo"}, "columns input,output → prompt_completion (prompt = input, completion = output)"),
    "thoughts": ({"question": "2+2?", "reasoning": "two and two", "answer": "4"}, "columns question,reasoning,answer → question_answer (reasoning_content = reasoning)"),
}  # fmt: skip

# layout: a row, what the refusal has in it, the columns of a cure that it names (None: the format)
REFUSED: dict[str, tuple[dict[str, Any], str, dict[str, str] | None]] = {
    "HuggingFaceTB/cosmopedia": ({"prompt": "p", "text": "t", "audience": "a"}, "column prompt stands beside text", {"prompt": "prompt", "completion": "text"}),
    "billsum": ({"text": "A long bill.", "summary": "Short.", "title": "T"}, "column summary stands beside text", {"prompt": "text", "completion": "summary"}),
    "mbpp": ({"task_id": 1, "text": "Write a sum.", "code": "sum(a)"}, "column code stands beside text", {"prompt": "text", "completion": "code"}),
    "text, answer": ({"text": "What is 2+2, 4 or 5?", "answer": "4"}, "column answer stands beside text", {"prompt": "text", "completion": "answer"}),
    "text, a number": ({"text": "What is 2+2?", "answer": 4}, "column answer stands beside text", None),
    "text, a class in words": ({"text": "Good.", "label": "positive"}, "column label stands beside text", {"prompt": "text", "completion": "label"}),
    "text, Answer": ({"text": "What?", "Answer": "That."}, "column Answer stands beside text", {"prompt": "text", "completion": "Answer"}),
    "instruction, text": ({"instruction": "Translate", "text": "cat"}, "column instruction stands beside text", {"prompt": "instruction", "completion": "text"}),
    "question, content": ({"question": "What?", "content": "That."}, "column question stands beside content", {"prompt": "question", "completion": "content"}),
    "context, text": ({"context": "c", "text": "t"}, "column context stands beside text", {"prompt": "context", "completion": "text"}),
    "text, reasoning": ({"text": "t", "reasoning": "r"}, "column reasoning would be ignored", None),
    "text, dialogue": ({"text": "t", "dialogue": CHAT}, "column dialogue would be ignored", {"messages": "dialogue"}),
    "a message per row": ({"role": "user", "content": "hello"}, "column role tells who speaks", None),
    "OpenAssistant/oasst1": ({"message_id": "1", "parent_id": "0", "text": "hi", "role": "prompter"}, "column role tells who speaks", None),
    "an instruction about a text": ({"instruction": "Shorten.", "text": "A long report.", "output": "Report."}, "column text would be ignored", {"input": "text"}),
    "a question about an article": ({"question": "Who?", "article": "Ada wrote it.", "answer": "Ada"}, "column article would be ignored", {"context": "article"}),
    "a prompt and its context": ({"prompt": "Who?", "context": "Ada wrote it.", "completion": "Ada"}, "column context would be ignored", {"question": "prompt", "context": "context", "answer": "completion"}),
    "two answers": ({"prompt": "2+2?", "completion": "4", "output": "It is 5."}, "column output may be the answer that is meant", {"completion": "output"}),
    "FreedomIntelligence/medical-o1": ({"question": "q", "Complex_CoT": "t", "response": "r"}, "column Complex_CoT would be ignored", {"reasoning_content": "Complex_CoT"}),
    "an answer beside a chat": ({"messages": [*CHAT, *ASKED], "output": "Paris"}, "column output stands beside messages, which do not end with an answer", {"response": "output"}),
    "a passage beside a chat": ({"messages": CHAT, "context": "The sky is high and wide."}, "column context would be ignored", None),
}  # fmt: skip


def jsonl(path: Path, row: dict[str, Any]) -> str:
    path.write_text(json.dumps(row) + "\n")
    return str(path)


@pytest.mark.parametrize(("row", "line"), READ.values(), ids=READ)
def test_a_layout_is_read_as_what_it_is(tmp_path: Path, row: dict[str, Any], line: str) -> None:
    dataset = FilesDataset(jsonl(tmp_path / "a.jsonl", row))
    assert dataset.description == f"a.jsonl: 1 document, {line}"
    assert dataset.train[0]


@pytest.mark.parametrize(("row", "told", "cure"), REFUSED.values(), ids=REFUSED)
def test_half_of_a_row_is_refused_and_each_cure_works(
    tmp_path: Path, row: dict[str, Any], told: str, cure: dict[str, str] | None
) -> None:
    path = jsonl(tmp_path / "a.jsonl", row)
    with pytest.raises(DataError) as caught:
        FilesDataset(path).train[0]
    message = str(caught.value)
    assert message.startswith(f"a.jsonl:1: {told}")
    named = re.search(r"set dataset\.format=(\w+) to train", message)
    assert named
    assert FilesDataset(path, format=named[1]).train[0]
    if cure:
        assert all(f"dataset.columns.{name}={column}" in message for name, column in cure.items())
        assert FilesDataset(path, columns=cure).train[0]


def test_a_response_ends_a_chat_that_waits_for_it(tmp_path: Path) -> None:
    row = {"messages": ASKED, "response": "It scatters.", "thinking": "Rayleigh"}
    answer = {"role": "assistant", "content": "It scatters.", "reasoning_content": "Rayleigh"}
    path = jsonl(tmp_path / "a.jsonl", row)
    assert FilesDataset(path).train[0] == {"messages": [*ASKED, answer]}
    path = jsonl(tmp_path / "b.jsonl", {"messages": CHAT, "response": "Another answer."})
    with pytest.raises(DataError, match="column response would be ignored: the messages end with"):
        FilesDataset(path).train[0]


def test_thoughts_become_those_of_the_answer(tmp_path: Path) -> None:
    row = {"question": "2+2?", "reasoning": "two and two", "answer": "4"}
    path = jsonl(tmp_path / "a.jsonl", row)
    asked = {"role": "user", "content": "2+2?"}
    answer = {"role": "assistant", "content": "4", "reasoning_content": "two and two"}
    assert FilesDataset(path).train[0] == {"messages": [asked, answer]}
    without = FilesDataset(path, format="question_answer").train[0]
    assert without == {"prompt": "2+2?", "completion": "4"}
    path = jsonl(tmp_path / "b.jsonl", {**row, "reasoning": "on"})
    with pytest.raises(DataError, match="column reasoning is 'on', which is no thought"):
        FilesDataset(path).train[0]


def test_messages_of_rows_without_a_known_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="speaker tells who speaks, so that each row is one"):
        detect(["speaker", "utterance"], None, None)


def test_a_list_of_messages_is_a_chat(tmp_path: Path) -> None:
    """Each message was a plain text, and the user's were trained on."""
    (tmp_path / "a.json").write_text(json.dumps(CHAT))
    (tmp_path / "b.json").write_text(json.dumps([CHAT, CHAT]))
    (tmp_path / "c.jsonl").write_text(f"{json.dumps(CHAT)}\n{json.dumps(SHARED)}\n")
    for name, num in {"a.json": 1, "b.json": 2, "c.jsonl": 2}.items():
        rows = FilesDataset(str(tmp_path / name)).train
        assert len(rows) == num
        assert rows[0] == {"messages": CHAT}


@pytest.mark.parametrize(
    ("name", "content", "cure"),
    [
        (
            "a.jsonl",
            '{\n "prompt": "hi",\n "completion": "yo"\n}\n',
            "goes on over lines: jq -c . ",
        ),
        ("a.json", '[{"prompt": "hi", "completion": "x"},]', r"\(char 37\): mend it there\.$"),
    ],
)
def test_broken_json_is_told_what_helps(tmp_path: Path, name: str, content: str, cure: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=cure):
        FilesDataset(str(tmp_path / name)).train[0]


@pytest.mark.parametrize(
    "content", ["sep=;\r\nprompt;completion\r\na;b,c\r\n", 'prompt, completion\na,"b,c"\n']
)
def test_csv_as_spreadsheets_write_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content, newline="")
    dataset = FilesDataset(str(tmp_path / "a.csv"))
    assert dataset.train[0] == {"prompt": "a", "completion": "b,c"}
    assert dataset.train.where(0) == f"a.csv:{3 if content.startswith('sep') else 2}"


def test_what_programs_write_beside_the_rows_is_left_out(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", {"prompt": "a", "completion": "b"})
    for name in ("dataset_infos.json", "config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text('{"default": {}}')
    (tmp_path / "sample_submission.csv").write_text("id,label\n1,2\n")
    dataset = FilesDataset(str(tmp_path))
    assert len(dataset.train) == 1
    assert "left out: 4 about the data (config.json, dataset_infos.json, " in dataset.description
