"""Every two features of the program at once: the numbers of plain transformers, or a sentence that refuses them."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from automodel_lite.errors import ConfigError, DataError
from tests.properties.crossings import (
    ALONE,
    FEATURES,
    FEEDS,
    NUM_PROMPTS,
    OF_TRAINING,
    ON_RANKS,
    VAL_PROMPTS,
    Job,
    Seen,
    crossings,
    job_of,
    run,
    save_models,
    settings_of,
    store_teacher,
    truth,
)
from tests.properties.explore import check_sentence
from tests.ranks import run_ranks

pytestmark = pytest.mark.numbers

NOT_KNOWN = "a stream, whose tokens are not known|a stream is not known"
NO_BALANCE = "router_aux_loss=0.5: transformers has no load-balancing loss"
NO_HEADS = "model.mtp_loss trains heads that predict further tokens, which are known of"
REFUSED: dict[tuple[str, str], str] = {
    ("stored teacher", "stream"): NOT_KNOWN,
    ("mixture", "stream"): NOT_KNOWN,
    ("router balance", "by rows"): NO_BALANCE,
    ("router balance", "latent attention"): NO_BALANCE,
    ("pairs", "stored teacher"): "column answers, which loss=DistillTopK does not use",
    ("pairs", "teacher in memory"): "column answers, which loss=Distill does not use",
    ("stored teacher", "teacher in memory"): "loss=DistillTopK does not use it",
    ("stored teacher", "mixture"): "computed for one set of documents",
    ("stored teacher", "resize"): "another vocabulary than the student",
    ("teacher in memory", "resize"): "another vocabulary than the student",
    ("weights", "stream"): "contains token ids, but streams are tokenized during training",
    ("resize", "lora"): "resize_embeddings=true with peft",
    ("by rows", "tp"): "FalconForCausalLM` has no `tp_plan`: set mesh.tp=1.$",
    ("by rows", "ep"): "FalconForCausalLM` has no `ep_plan`: set mesh.ep=1.$",
    ("lora", "tp"): "with peft is not supported",
    ("lora", "ep"): "with peft is not supported",
    ("val_frac", "stream"): "dataset.val_frac=0.25: unknown key",
    ("val_frac", "validation"): "set only one of them",
    ("pairs", "heads ahead"): "and loss=SimPo compares answers",
    ("lora", "heads ahead"): "an adapter holds no such heads",
    ("router balance", "heads ahead"): NO_HEADS,
    ("by rows", "heads ahead"): NO_HEADS,
    ("ep", "heads ahead"): NO_HEADS,
    ("heads ahead", "reference"): "and loss=Dpo compares answers",
    ("heads ahead", "policy"): "and loss=Ppo compares answers",
    ("mixture", "reference"): "computed for one set of documents",
    ("stream", "reference"): NOT_KNOWN,
    ("stream", "policy"): "contains token ids, but streams are tokenized during training",
}
"""What cannot be, and a part of the sentence that says so; all others train."""


def marks(one: str, other: str, number: int) -> list[pytest.MarkDecorator]:
    if {one, other} & {"reference", "policy"} and number % 6:
        return [pytest.mark.slow]
    if {one, other} & {*ON_RANKS}:
        return [pytest.mark.system if number % 4 == 0 else pytest.mark.slow]
    if number % 12 == 0:
        return []
    # a second of one core each: what is refused takes a tenth of that
    is_in_ci = number % 3 == 0 or (one, other) in REFUSED
    return [pytest.mark.system if is_in_ci else pytest.mark.slow]


PAIRS = [
    pytest.param(one, other, id=f"{one} x {other}", marks=marks(one, other, number))
    for number, (one, other) in enumerate(crossings())
]


TRAINING_PAIRS = [
    pytest.param(
        one,
        other,
        id=f"{one} x {other}",
        marks=[pytest.mark.system] if other in ON_RANKS or number % 3 else [],
    )
    for number, (one, other) in enumerate(product(OF_TRAINING, FEEDS))
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    return folder


def _on_rank(
    rank: int, world_size: int, work: Callable[..., Any], job: Job, raw: DictConfig, folder: Path
) -> Any:
    try:
        return work(job, raw, folder)
    except (ConfigError, DataError) as error:
        return str(error)


def seen_of(job: Job, models: Path, folder: Path) -> Seen:
    """The run on its ranks; raises ConfigError for what each of them refuses in a sentence."""
    raw = settings_of(job, models, folder)
    if job.num_ranks == 1 or job.simulates:  # one process answers for any mesh
        return run(job, raw, folder)
    if job.loss == "distill_topk":
        for said in run_ranks(_on_rank, job.num_ranks, store_teacher, job, raw, folder):
            if said is not None:
                raise ConfigError(said)
    first, *others = run_ranks(_on_rank, job.num_ranks, run, job, raw, folder)
    if isinstance(first, str):
        assert all(isinstance(other, str) for other in others)
        raise ConfigError(first)
    return first


@pytest.mark.parametrize(("one", "other"), [*PAIRS, *TRAINING_PAIRS])
def test_two_features_at_once(one: str, other: str, models: Path, tmp_path: Path) -> None:
    job = job_of(one, other)
    refusal = REFUSED.get((one, other))
    if refusal is not None:
        with pytest.raises((ConfigError, DataError), match=refusal) as raised:
            seen_of(job, models, tmp_path)
        check_sentence(str(raised.value))
        return
    check(job, models, tmp_path)


def several(seed: int) -> list[str]:
    """Five features that one job may be asked for, on four ranks at most, in the order of the list."""
    while True:
        drawn = random.Random(seed).sample(list(FEATURES), 5)
        names = [name for name in FEATURES if name in drawn]
        pairs = [{*pair} for pair in combinations(names, 2)]
        if job_of(*names).num_ranks <= 4 and not any(pair in ALONE for pair in pairs):
            return names
        seed += 1_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_five_features_at_once(seed: int, models: Path, tmp_path: Path) -> None:
    names = several(seed)
    refusals = [REFUSED[pair] for pair in combinations(names, 2) if pair in REFUSED]
    if refusals:
        with pytest.raises((ConfigError, DataError), match="|".join(refusals)) as raised:
            seen_of(job_of(*names), models, tmp_path)
        check_sentence(str(raised.value))
        return
    check(job_of(*names), models, tmp_path)


def check(job: Job, models: Path, tmp_path: Path) -> None:
    """Trains the job and compares its numbers with plain transformers, and a resumed run with itself."""
    seen = seen_of(job, models, tmp_path)
    if job.simulates:
        assert ", simulated" in seen.screen
        assert "fit together" in seen.screen
        return
    trained = range(NUM_PROMPTS)
    loss, norm = truth(job, models, seen, trained)
    stored = job.loss == "distill_topk"  # in fp16
    assert seen.of_step(1) == pytest.approx((loss, norm), rel=1e-3 if stored else 2e-5)
    if job.validates and not job.resumes:
        want = truth(job, models, seen, range(NUM_PROMPTS, NUM_PROMPTS + VAL_PROMPTS))[0]
        name = "a" if job.is_mixed else "val"
        assert seen.value(f"val_loss/{name}") == pytest.approx(want, rel=1e-3 if stored else 2e-5)
        if job.loss == "fused_linear_cross_entropy" and not job.averages_documents:
            perplexity = seen.value(f"val_perplexity/{name}")
            assert perplexity == pytest.approx(math.exp(seen.value(f"val_loss/{name}")), rel=1e-6)
    if job.resumes:
        shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000002")
        (tmp_path / "run" / "STATUS.json").unlink()
        again = seen_of(job, models, tmp_path)
        assert again.of_step(2) == seen.of_step(2)
