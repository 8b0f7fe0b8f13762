"""Draws pictures of shapes, asks for their color, and makes a tiny vision-language model for it.

    python examples/pictures.py pictures      writes pictures/{model,train.jsonl,val.jsonl,*.png}

The model is Idefics3 (the architecture of SmolVLM) with random weights, 0.3 M parameters. What is
asked cannot be known without the picture: colors, shapes and places are drawn by chance.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessorPil,
    PreTrainedTokenizerFast,
)

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 70, 220),
    "yellow": (240, 220, 50),
    "white": (245, 245, 245),
    "purple": (150, 50, 180),
}
SHAPES = ("circle", "square", "bar")
QUESTION = "What color is it?"
TEMPLATE = "".join(
    [
        "{% for turn in messages %}<|{{ turn['role'] }}|>",
        "{% if turn['content'] is string %}{{ turn['content'] }}{% else %}",
        "{% for part in turn['content'] %}",
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}",
        "{% endfor %}{% endif %}<|end|>{% endfor %}",
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    ]
)
SPECIALS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<image>"]
SPECIALS += ["<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
PATCH, SIDE = 8, 32


def draw(path: Path, color: str, shape: str, rng: random.Random) -> None:
    """Draws one shape somewhere on a dark picture of any size."""
    width, height = rng.choice([(48, 48), (64, 48), (48, 64), (80, 60)])
    picture = Image.new("RGB", (width, height), (rng.randrange(40),) * 3)
    size = rng.randrange(22, 34)
    x, y = rng.randrange(width - size), rng.randrange(height - size)
    pencil = ImageDraw.Draw(picture)
    box = (x, y, x + size, y + size)
    if shape == "circle":
        pencil.ellipse(box, COLORS[color])
    elif shape == "square":
        pencil.rectangle(box, COLORS[color])
    else:
        pencil.rectangle((x, y + size // 3, x + size, y + size // 2), COLORS[color])
    picture.save(path)


def write_chats(folder: Path, name: str, num: int, rng: random.Random) -> None:
    """Writes pictures, and a chat about each."""
    lines = []
    for number in range(num):
        color, shape = rng.choice([*COLORS]), rng.choice(SHAPES)
        picture = f"{name}_{number}.png"
        draw(folder / picture, color, shape, rng)
        asked = [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": color}]
        lines.append(json.dumps({"messages": messages}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines))


def write_model(
    folder: Path,
    words: Iterable[str] = (*COLORS, "What", "color", "is", "it", "?"),
    side: int = SIDE,
    patch: int = PATCH,
) -> None:
    """Writes the model, its tokenizer of words, and its processor.

    words        that it can read and write
    side, patch  of the picture that it sees, in pixels: (side / patch / 2) ** 2 tokens
    """
    vocab = {word: number for number, word in enumerate([*SPECIALS, "[UNK]", *sorted({*words})])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="")
    backend.add_special_tokens(SPECIALS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>", unk_token="[UNK]"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    text = {
        "model_type": "llama",
        "vocab_size": len(vocab),
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": side,
        "patch_size": patch,
    }
    config = Idefics3Config(
        vision_config=vision,
        text_config=text,
        scale_factor=2,
        image_token_id=vocab["<image>"],
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": side}, max_image_size={"longest_edge": side}, do_image_splitting=False
    )
    pictures.save_pretrained(folder)
    tokens = (side // patch // 2) ** 2
    (folder / "processor_config.json").write_text(json.dumps({"image_seq_len": tokens}))


if __name__ == "__main__":
    to, rng = Path(sys.argv[1]), random.Random(0)
    to.mkdir(parents=True, exist_ok=True)
    write_chats(to, "train", 600, rng)
    write_chats(to, "val", 60, rng)
    write_model(to / "model")
    print(
        f"{to}: 600 chats about drawn pictures, 60 to validate, and a model that knows nothing yet"
    )
