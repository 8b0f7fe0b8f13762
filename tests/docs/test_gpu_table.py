"""The table of what one GPU can train is the planner's."""

from __future__ import annotations

import pytest

from docs.write_gpus import BEGIN, CARDS, END, METHODS, MODELS, PAGE, head, rows


def table() -> list[str]:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()


def cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def test_every_model_and_method_has_a_row() -> None:
    assert table()[:2] == head()
    found = [cells(line)[:2] for line in table()[2:]]
    names = [model.split("/")[1].removesuffix("-Instruct") for model in MODELS]
    assert found == [[name, method] for name in names for method in METHODS]


def test_a_larger_card_takes_longer_packs() -> None:
    for line in table()[2:]:
        found = cells(line)[2:]
        assert len(found) == len(CARDS)
        packs = [0 if cell == "-" else int(cell.split(":")[0].replace(",", "")) for cell in found]
        assert packs == sorted(packs), line


def test_what_fits_is_what_is_known_to_fit() -> None:
    """By weights alone: 16 bytes a weight of 8B in fp32 are 128 GB, 2 are 16, and half a byte is 4."""
    found = {tuple(cells(line)[:2]): cells(line)[2:] for line in table()[2:]}
    assert found["Llama-3.1-8B", "full"] == ["-"] * 5
    assert found["Llama-3.1-8B", "LoRA"][:2] == ["-", "-"]
    assert found["Llama-3.1-8B", "LoRA"][2] != "-"
    assert found["Llama-3.1-8B", "QLoRA"][1] != "-"
    assert found["Qwen3-0.6B", "LoRA"][0] != "-"


@pytest.mark.slow
def test_the_rows_are_what_the_planner_counts() -> None:
    """Of one model; the others by `python docs/write_gpus.py`."""
    assert rows(MODELS[0]) == [line for line in table() if line.startswith("| Qwen3-0.6B ")]
