"""Ask a trained model; the answer streams to the screen, or the answers to a file of prompts are
written to another.

python recipes/generate.py runs/llama_packed "What is the capital of France?"
python recipes/generate.py runs/llama_packed                     (a chat; an empty line ends it)
python recipes/generate.py meta-llama/Llama-3.2-1B-Instruct "Hello" --temperature 0.7
python recipes/generate.py runs/llama_packed --prompts questions.jsonl --out answers.jsonl
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_lite.cli import argument_parser, run_tool
from automodel_lite.cli.line import rewrite_program_name
from automodel_lite.config.rules import PATH, Range, argument
from automodel_lite.errors import ConfigError, counted, harmless, listed, one_line
from automodel_lite.launched import check_alone
from automodel_lite.progress import Progress, activity
from automodel_lite.run.checkpoint_folder import exported_folder, older_export
from automodel_lite.run.durable import rename, sync
from automodel_lite.run.folder import RunFolder

if TYPE_CHECKING:
    from automodel_lite.data.reading.columns import Detected
    from automodel_lite.data.reading.documents import Question
    from automodel_lite.evaluation.generator import Generator

# prompts of so many batches are sorted by length, so that a batch has little padding
_SORTED_BATCHES = 16


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code; raises ConfigError."""
    args = parser().parse_args(argv)
    check_alone()
    if (args.prompts is None) != (args.out is None) or (args.prompts and args.prompt):
        raise ConfigError(
            "--prompts in.jsonl and --out out.jsonl must be given together, without a prompt."
        )
    if args.image and args.prompt is None:
        raise ConfigError("--image stands before a prompt: give one.")
    if args.out and args.out.exists():
        raise ConfigError(f"--out {args.out} exists already: choose another file.")

    folder = exported_folder(args.model, args.checkpoint)
    if not args.checkpoint and (note := older_export(Path(folder))):
        print(note, file=sys.stderr)
    with activity("loading the model"):
        from transformers import set_seed  # --help needs no torch

        from automodel_lite.tools.load_generator import load_exported

        generator = load_exported(args.model, args.trust_remote_code, checkpoint=args.checkpoint)
    set_seed(args.seed)
    if args.prompts:
        answer_file(generator, args)
    else:
        chat(generator, args)
    return 0


def parser() -> argparse.ArgumentParser:
    found = argument_parser(__doc__)
    found.add_argument(
        "model", type=argument(str, PATH), help="a run, a model or adapter folder, or a hub name"
    )
    found.add_argument(
        "prompt", nargs="?", type=argument(str), help="the prompt; without it, an interactive chat"
    )
    found.add_argument(
        "--checkpoint",
        help="which one the run's export must be of: latest, best, or step_00000500",
    )
    found.add_argument(
        "--prompts", type=argument(str, PATH), help="a file with messages, prompt or question"
    )
    found.add_argument(
        "--out",
        type=argument(Path),
        help="the file to write: each row of --prompts with `generated`",
    )
    found.add_argument(
        "--batch-size", type=argument(int, Range(1, 65_536)), default=16, help="of --prompts"
    )
    found.add_argument(
        "--image", type=argument(str, PATH), action="append", help="a picture before the prompt"
    )
    found.add_argument("--system", type=argument(str), help="a system message")
    found.add_argument("--max-new-tokens", type=argument(int, Range(1)), default=256)
    of_temperature = "0 (the default): greedy decoding"
    found.add_argument(
        "--temperature", type=argument(float, Range(0, 1000)), default=0.0, help=of_temperature
    )
    found.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without the chat template"
    )
    found.add_argument(
        "--seed", type=argument(int, Range(0, 2**32 - 1)), default=0, help="with --temperature"
    )
    found.add_argument(
        "--trust-remote-code", action="store_true", help="run the code of the model's repository"
    )
    return found


def chat(generator: Generator, args: argparse.Namespace) -> None:
    """One prompt, or a dialogue at the terminal."""
    messages = _system(args)
    if args.prompt is None:
        print(*how_to_ask(args.model), sep="\n", file=sys.stderr)
    prompts = [args.prompt] if args.prompt is not None else iter(_ask, "")
    for prompt in prompts:
        said: Any = prompt
        if args.image:
            images = [{"type": "image", "image": path} for path in args.image]
            said = [*images, {"type": "text", "text": prompt}]
        messages.append({"role": "user", "content": said})
        (answer,) = generator.answers(
            [messages],
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            is_chat=not args.raw,
            write=_write,
        )
        messages.append({"role": "assistant", "content": answer})


def how_to_ask(model: str) -> Iterator[str]:
    """Yields what a chat takes, other ways to ask, and a question of the run's held-out ones."""
    yield "a chat: type a prompt and press Enter; an empty line ends it"
    start = rewrite_program_name(f"python recipes/generate.py {shlex.quote(model)}")
    yield f'one answer: {start} "your prompt"'
    yield f"a file:     {start} --prompts in.jsonl --out out.jsonl"
    for row in reversed(RunFolder(Path(model).expanduser()).rows()):
        asked = [key.removeprefix("text/") for key in row if key.startswith("text/")]
        if asked:
            yield f"the data ask, for instance: {one_line(harmless(asked[0]))}"
            return


def answer_file(generator: Generator, args: argparse.Namespace) -> None:
    """Writes each row of --prompts with what the model says to it, in their order: as they come
    to FILE.part, which is --out once it is whole.
    """
    from automodel_lite.parts.evaluation.exact_match import (
        answers_to,  # torch is not imported for --help
    )

    # and a bad row is named before the first answer
    num_rows = sum(1 for _ in read_questions(args.prompts, generator))
    rows = read_questions(args.prompts, generator)
    part = args.out.with_name(f"{args.out.name}.part")
    with (
        Progress("answering", num_rows, "questions") as progress,
        part.open("w", encoding="utf-8") as file,
    ):
        while window := list(islice(rows, args.batch_size * _SORTED_BATCHES)):
            questions = [asked_by(question, args) for _, question in window]
            options = (args.batch_size, args.max_new_tokens, args.temperature)
            for (row, _), text in zip(window, answers_to(questions, generator, *options, progress)):
                file.write(
                    json.dumps({**row, "generated": text}, ensure_ascii=False, default=str) + "\n"
                )
            file.flush()
    sync(part)
    rename(part, args.out)
    print(f"{counted(num_rows, 'answer')} written to {args.out}")


def read_questions(path: str, generator: Generator) -> Iterator[tuple[dict[str, Any], Question]]:
    """Yields the rows of a file, and what each asks: `messages`, `prompt`, `question` or
    `instruction`, or a `text` to go on with, with its images where the model sees them. An answer
    beside it is the expected one.

    Raises ConfigError for columns of no known format, DataError for a row that does not fit.
    """
    from automodel_lite.data.reading.documents import question_of
    from automodel_lite.data.reading.files import ReadOptions, open_rows, sniff_columns
    from automodel_lite.data.reading.readers import placed
    from automodel_lite.evaluation.questions import with_images
    from automodel_lite.models.layers import towers

    source = open_rows(path, None, "train", "--prompts", ReadOptions(text_unit="line"))
    rows: Any = source.rows
    sees = bool(towers(generator.model))
    if sees:
        # with Pillow
        from automodel_lite.parts.images.dataset import marked_rows
        from automodel_lite.parts.images.rows import placed_images
        from automodel_lite.parts.images.sources import ImageLimits

        rows = marked_rows(source)
        limits = ImageLimits(Path.cwd(), generator.most_pixels)
    columns = sniff_columns(placed(rows), f"{source.description}: the file")
    detected, missing = format_of_questions(columns, path)
    for index in range(len(rows)):
        row = rows[index]
        question = question_of(
            detected.document({**dict.fromkeys(missing, ""), **row}, rows.where(index))
        )
        if question is None:
            raise ConfigError(
                f"--prompts {path}: {detected.description} has no question: it needs prompt or "
                "messages."
            )
        images: Sequence[Any] = ()
        if sees:
            images = placed_images(0, index, rows.images(index), limits)
        yield source.rows[index], with_images(question, images)


def format_of_questions(columns: Sequence[str], path: str) -> tuple[Detected, Sequence[str]]:
    """Returns the format of rows that ask, and the columns of an answer that they lack.

    Raises ConfigError for columns of no known format; --prompts has no settings that name them.
    """
    from automodel_lite.data.reading.beside import part_of
    from automodel_lite.data.reading.columns import detect

    with suppress(ConfigError):
        return detect(columns, None, None), ()
    missing = [name for name in ("completion", "output", "answer") if name not in columns]
    try:
        return detect([*columns, *missing], None, None), missing
    except ConfigError as error:
        if any(part_of(name) in ("prompt", "chat", "text") for name in columns):
            raise  # what asks is there, and something else beside it
        raise ConfigError(
            f"--prompts {path}: of its columns {listed(columns, 8)} none asks",
            cure="rename the one that does to prompt, or to messages where it holds chats",
        ) from error


def asked_by(question: Question, args: argparse.Namespace) -> Question:
    """The question with what the command line says of all of them."""
    system = _system(args) if question.messages[0]["role"] != "system" else []
    return replace(
        question, messages=[*system, *question.messages], is_chat=question.is_chat and not args.raw
    )


def _system(args: argparse.Namespace) -> list[dict[str, Any]]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _write(text: str) -> None:
    sys.stdout.write(harmless(text))
    sys.stdout.flush()


if __name__ == "__main__":
    run_tool(main)
