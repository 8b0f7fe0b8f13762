"""The training client's teachers: numbers of a frozen second model, and the sentences of wrong use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from automodel_lite import TrainingClient
from automodel_lite.errors import ConfigError
from tests.attention.families import VOCAB
from tests.clients import open_client
from tests.models.test_policy import make_groups, plain, save_model, save_tokenizer
from tests.ranks import run_ranks

pytestmark = pytest.mark.numbers
GROUPS = [
    [{name: row[name] for name in ("input_ids", "labels")} for row in group]
    for group in make_groups()
]


def save_teacher(folder: Path, seed: int = 1, **config: Any) -> str:
    """Another size than the student's, with its tokenizer."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB} | config
    made = transformers.LlamaConfig(**sizes, initializer_range=0.2)
    transformers.LlamaForCausalLM(made).save_pretrained(folder)
    save_tokenizer(folder, sizes["vocab_size"])
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    place = tmp_path_factory.mktemp("models")
    return save_model("llama", place / "student"), save_teacher(place / "teacher")


@pytest.fixture(scope="module")
def client(folders: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_client(folders[0], tmp_path_factory.mktemp("run")) as opened:
        yield opened


def truth_of(folder: str) -> list[np.ndarray]:
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return [plain(lm, row).detach().numpy() for group in GROUPS for row in group]


def check(found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    assert len(found) == len(wanted) == 12
    for ours, theirs in zip(found, wanted):
        np.testing.assert_allclose(ours[ours != 0], theirs, atol=2e-5)


def test_a_teacher_scores_rows_and_trees(folders: tuple[str, str], client: TrainingClient) -> None:
    student, teacher = folders
    with client.teacher(teacher):
        check(client.forward(GROUPS).log_probs, truth_of(teacher))
        likeliest = client.sample([[5, 6]], max_new_tokens=3, temperature=0, stop=[])
    check(client.forward(GROUPS).log_probs, truth_of(student))
    lm = transformers.AutoModelForCausalLM.from_pretrained(teacher)
    ids = torch.tensor([[5, 6]])
    wanted = lm.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert likeliest == [[wanted[0, 2:].tolist()]]


@pytest.mark.same_on_every_cpu
def test_a_teacher_is_loaded_once(folders: tuple[str, str], client: TrainingClient) -> None:
    kept = []
    for _ in range(2):
        with client.teacher(folders[1]):
            kept.append(client._scorer)
    assert kept[0] is kept[1]
    assert not any(p.requires_grad for p in kept[0].model.module.parameters())


@pytest.mark.same_on_every_cpu
def test_wrong_teachers_are_sentences(
    folders: tuple[str, str], client: TrainingClient, tmp_path: Path
) -> None:
    other = save_teacher(tmp_path / "other", vocab_size=VOCAB + 8)
    with (
        pytest.raises(ConfigError, match=r"has another vocabulary .* of the same family"),
        client.teacher(other),
    ):
        pass
    with pytest.raises(ConfigError, match=r"teacher\.pretrained"), client.teacher("no/such/folder"):
        pass
    short = save_teacher(tmp_path / "short", max_position_embeddings=32)
    with client.teacher(short), pytest.raises(ValueError, match="max_position_embeddings=32"):
        client.forward(GROUPS)
    with client.teacher(folders[1]), pytest.raises(RuntimeError, match="outside the block"):
        client.forward_backward(GROUPS)
    client.forward(GROUPS)  # the student's again


def on_ranks(rank: int, world: int, folders: tuple[str, str], *overrides: str) -> list[np.ndarray]:
    student, teacher = folders
    sizes = ("packed_sequence.packed_sequence_size=256", "training.num_threads=1")
    with (
        TrainingClient("policy", f"model.pretrained={student}", *sizes, *overrides) as client,
        client.teacher(teacher),
    ):
        return client.forward(GROUPS).log_probs


@pytest.mark.system
@pytest.mark.parametrize("layout", ["mesh.dp_shard=2", "mesh.cp=2", "mesh.tp=2"])
def test_every_layout_has_the_teachers_numbers(layout: str, folders: tuple[str, str]) -> None:
    for found in run_ranks(on_ranks, 2, folders, layout):
        check(found, truth_of(folders[1]))
