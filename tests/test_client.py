"""The training client: steps, samples, the reference, what is saved, and the sentences of wrong use."""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file

from automodel_lite import TrainingClient
from automodel_lite.columns import Column
from automodel_lite.errors import ConfigError
from automodel_lite.models.loss import CrossEntropy, Loss, LossInputs, LossOutput
from automodel_lite.parts.losses.distillation import DistillTopK
from automodel_lite.parts.losses.policy import ImportanceSampling, Ppo
from automodel_lite.parts.losses.preference import SimPo
from recipes import export_hf
from tests.attention.families import VOCAB
from tests.clients import open_client
from tests.models.test_policy import Row, make_groups, plain, save_model
from tests.ranks import fork_server, run_ranks

pytestmark = pytest.mark.numbers

COLUMNS = ("input_ids", "labels", "advantages", "old_log_probs")
GROUPS = [[{name: row[name] for name in COLUMNS} for row in group] for group in make_groups()]
ROW = GROUPS[2][0]
LORA = ("peft=lora", "peft.r=4")
LAYOUTS_OF_TWO = ("mesh.cp=2", "mesh.dp_shard=2", "mesh.strategy=ddp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def client(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Any:
    with open_client(folder, tmp_path_factory.mktemp("run")) as opened:
        yield opened


@pytest.mark.same_on_every_cpu
def test_a_program_may_close_the_groups_that_a_client_opened(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(partial(*call)))
    open_client(folder, tmp_path, "mesh.strategy=fsdp")
    assert dist.is_initialized()
    dist.destroy_process_group()
    for call in at_exit:
        call()
    open_client(folder, tmp_path / "again", "mesh.strategy=fsdp")
    for call in at_exit:
        call()
    assert not dist.is_initialized()


def test_a_step_is_that_of_the_mean_over_all_calls(folder: str, tmp_path: Path) -> None:
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    sum(-plain(lm, row).sum() for group in GROUPS for row in group).backward()  # type: ignore[union-attr]
    num_labels = sum(label != -100 for group in GROUPS for row in group for label in row["labels"])
    parameters = {name: p for name, p in lm.named_parameters()}
    norm = torch.stack([p.grad.norm() for p in parameters.values()]).norm() / num_labels
    plain_adamw = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0)
    gradients = {name: p.grad / num_labels for name, p in parameters.items()}
    for name, p in parameters.items():
        p.grad = gradients[name].clone()
    plain_adamw.step()
    overrides = ("loss=cross_entropy", "optimizer.weight_decay=0", "optimizer.betas=[0.9,0.999]")
    with open_client(folder, tmp_path, *overrides) as client:
        bare = [
            [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in group]
            for group in GROUPS
        ]
        first, second = client.forward_backward(bare[:1]), client.forward_backward(bare[1:])
        step = client.optim_step(lr=1e-3, max_grad_norm=0)
        assert (step.num_items, client.num_steps) == (num_labels, 1)
        assert step.loss == pytest.approx((first.loss + second.loss) / num_labels)
        assert step.grad_norm == pytest.approx(float(norm), rel=1e-5)
        for name, weight in client.weights():
            has_gradient = (
                gradients[name].abs() > 1e-5
            )  # the first step is the sign of the gradient
            off = (weight - parameters[name])[has_gradient].abs()
            assert float(off.max()) < 1e-6, name


def test_forward_gives_what_forward_backward_does_and_keeps_no_gradient(
    client: TrainingClient,
) -> None:
    trained, found = client.forward_backward(GROUPS, ImportanceSampling()), client.forward(GROUPS)
    client.zero_grad()
    for one, other in zip(trained.log_probs, found.log_probs):
        np.testing.assert_allclose(one, other, atol=1e-6)
    alone = client.forward([row for group in GROUPS for row in group])
    assert found.num_tokens < alone.num_tokens
    for one, other in zip(alone.log_probs, found.log_probs):
        np.testing.assert_allclose(one, other, atol=5e-6)
    assert all(p.grad is None for p in client.engine.model.parameters())


def test_trees_over_a_pack_are_cut_between_rows(
    folder: str, client: TrainingClient, tmp_path: Path
) -> None:
    whole = client.forward_backward(GROUPS, Ppo(average="rows"))
    client.zero_grad()
    with open_client(folder, tmp_path, "packed_sequence.packed_sequence_size=96") as small:
        cut = small.forward_backward(GROUPS, Ppo(average="rows"))
    assert (cut.loss, cut.num_items) == (pytest.approx(whole.loss, abs=1e-5), whole.num_items)
    for one, other in zip(cut.log_probs, whole.log_probs):
        np.testing.assert_allclose(one, other, atol=5e-6)


class Colored(Loss):
    own_columns = {"colors": Column("int8", "int64", 0)}  # noqa: RUF012
    required = frozenset({"colors"})

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput((inputs.log_probs() * inputs.columns["colors"]).sum(), {})


def test_a_loss_brings_columns_of_its_own(client: TrainingClient) -> None:
    bare = {"input_ids": ROW["input_ids"], "labels": ROW["labels"]}
    colors = [7 if label != -100 else 0 for label in ROW["labels"]]
    out = client.forward_backward([bare | {"colors": colors}], Colored())
    client.zero_grad()
    assert out.loss == pytest.approx(7 * float(out.log_probs[0].sum()), rel=1e-6)
    with pytest.raises(ValueError, match="column colors is declared as"):

        class Other(Colored):
            own_columns = {"colors": Column("float32", "float32", 0.0)}  # noqa: RUF012


@pytest.mark.parametrize("average", ["labels", "rows"])
def test_the_balance_of_experts_is_a_mean_over_labels_beside_any_loss(
    average: str, tmp_path: Path
) -> None:
    """Rows without advantages learn nothing but the balance, whatever their loss is divided by."""
    experts = save_model("qwen3_moe", tmp_path / "model")
    rows = [row | {"advantages": [0.0] * len(row["labels"])} for group in GROUPS for row in group]
    lm = transformers.AutoModelForCausalLM.from_pretrained(experts, dtype=torch.float64)
    lm.config._experts_implementation = "eager"
    num_labels = 0
    for row in rows:
        own = sum(label != -100 for label in row["labels"])
        ids = torch.tensor([list(row["input_ids"])])
        (lm(input_ids=ids, output_router_logits=True).aux_loss * own).backward()
        num_labels += own
    norms = [p.grad.norm() for p in lm.parameters() if p.grad is not None]
    norm = 0.5 * float(torch.stack(norms).norm()) / num_labels
    settings = ("model.router_aux_loss=0.5", f"loss.average={average}", "training.precision=fp32")
    with open_client(experts, tmp_path / "run", *settings) as client:
        client.forward_backward(rows)
        assert client.optim_step().grad_norm == pytest.approx(norm, rel=1e-4)
        # in two calls it is that of all labels where both count alike, or is refused
        client.forward_backward(rows[:1])
        if average == "rows":
            with pytest.raises(ValueError, match="give all rows of a step to one forward_backward"):
                client.forward_backward(rows[1:])
            return
        client.forward_backward(rows[1:])
        assert client.optim_step(lr=0.0).grad_norm == pytest.approx(norm, rel=1e-4)


# ---------------------------------------------- answers
def sample_on(rank: int, world: int, folder: str, runs: Path, *overrides: str) -> list[Any]:
    with open_client(folder, runs, *overrides) as client:
        prompts = [row["input_ids"][:4] for row in GROUPS[0][:3]] + [[5, 6]]
        greedy = client.sample(prompts, max_new_tokens=3, temperature=0)
        return [greedy, client.sample(prompts, 3, 3), client.sample(prompts, 3, 3, seed=1)]


def test_samples_are_those_of_the_model_and_alike_on_all_ranks(folder: str, tmp_path: Path) -> None:
    greedy, drawn, other = sample_on(0, 1, folder, tmp_path / "one")
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[5, 6]])
    for token in greedy[-1][0]:
        assert int(lm(ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    assert [len(answers) for answers in drawn] == [3] * 4
    assert len({tuple(answer) for answer in drawn[0]}) == 3
    assert drawn != other
    first, second = run_ranks(sample_on, 2, folder, tmp_path / "two")
    assert first == second
    assert first[0] == greedy


def test_samples_are_drawn_by_the_weights_alone(client: TrainingClient) -> None:
    """A penalty on repetition in a model's generation_config.json, as Qwen's, changed what was drawn; the
    log-probabilities knew nothing of it.
    """
    prompts = [[5, 6, 5, 6], [7, 8]]
    plain_answers = client.sample(prompts, max_new_tokens=6, temperature=0)
    settings: Any = client.engine.model.loss_model.lm.generation_config
    try:
        settings.update(repetition_penalty=5.0, num_beams=2, num_return_sequences=2)
        assert client.sample(prompts, max_new_tokens=6, temperature=0) == plain_answers
        assert client.engine.model.loss_model.lm.generation_config is settings
    finally:
        settings.update(repetition_penalty=None, num_beams=None, num_return_sequences=None)


def test_samples_stop_where_the_template_ends_a_turn(folder: str, tmp_path: Path) -> None:
    """Neither the tokenizer nor the model knows that token."""
    template = "{% for m in messages %}{{ m.content }} w7 {% endfor %}"
    own = tmp_path / "model"
    shutil.copytree(folder, own)
    tokenizer = transformers.AutoTokenizer.from_pretrained(own)
    tokenizer.add_special_tokens({"additional_special_tokens": ["w7"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(own)
    with open_client(str(own), tmp_path / "run") as client:
        (answers,) = client.sample([[5, 6]], num_samples=40, max_new_tokens=40)
    assert all(7 not in answer[:-1] for answer in answers)
    ended = [answer for answer in answers if answer[-1] == 7]
    assert ended
    assert any(len(answer) < 40 for answer in ended)


def change(client: TrainingClient) -> None:
    client.forward_backward(GROUPS, ImportanceSampling())
    client.optim_step(lr=1e-2)


@pytest.mark.parametrize("peft", [(), LORA], ids=["full", "lora"])
def test_the_reference_is_the_start_model(
    peft: tuple[str, ...], folder: str, tmp_path: Path
) -> None:
    with open_client(folder, tmp_path, *peft) as client:
        start = client.forward(GROUPS).log_probs
        change(client)
        change(client)
        with client.reference():
            reference = client.forward(GROUPS).log_probs
            with pytest.raises(RuntimeError, match="the reference is frozen"):
                client.forward_backward(GROUPS)
        now = client.forward(GROUPS).log_probs
    for one, other, third in zip(start, reference, now):
        np.testing.assert_allclose(one, other, atol=1e-6)
        assert np.abs(one - third).max() > 1e-3


# ---------------------------------------------- what is saved
@pytest.mark.parametrize("peft", [(), LORA], ids=["full", "lora"])
def test_saved_weights_are_those_that_are_handed_over(
    peft: tuple[str, ...], folder: str, tmp_path: Path
) -> None:
    with open_client(folder, tmp_path / "run", *peft) as client:
        change(client)
        client.save_weights(tmp_path / "out")
        handed = dict(client.weights())
        now = client.forward([ROW]).log_probs[0]
    saved = load_file(
        tmp_path / "out" / ("adapter_model.safetensors" if peft else "model.safetensors")
    )
    assert {name: x.shape for name, x in handed.items()} == {
        name: x.shape for name, x in saved.items()
    }
    assert all(torch.equal(x, handed[name]) for name, x in saved.items())
    if not peft:
        lm = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        np.testing.assert_allclose(now[now != 0], plain(lm, ROW).detach().numpy(), atol=1e-5)


def train_on(folder: str, runs: Path, kill_in: int = 0) -> list[float]:
    """Continues to step 3, saving each; killed in the middle of a step after its gradients were there."""
    with open_client(folder, runs) as client:
        done = client.load_state() or {"losses": []}
        losses = done["losses"]
        assert client.num_steps == len(losses)
        while client.num_steps < 3:
            client.forward_backward(GROUPS, Ppo())
            if client.num_steps + 1 == kill_in:
                os.kill(os.getpid(), signal.SIGKILL)
            losses.append(client.optim_step(lr=1e-3).loss)
            client.save_state({"losses": losses})
        return losses


@pytest.mark.same_on_every_cpu
def test_a_killed_loop_loses_nothing_that_was_saved(folder: str, tmp_path: Path) -> None:
    process = fork_server().Process(target=train_on, args=(folder, tmp_path / "killed", 2))
    process.start()
    process.join(600)
    assert process.exitcode == -signal.SIGKILL
    assert train_on(folder, tmp_path / "killed") == train_on(folder, tmp_path / "whole")


def kill_before(kill_at: int, client: TrainingClient) -> None:
    """Kills this process before the client's call of that number, whichever it is."""
    num_calls = 0

    def counted(call: Any) -> Any:
        def counting(*args: Any, **more: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **more)

        return counting

    for name in ("load_state", "sample", "forward", "forward_backward", "optim_step", "save_state"):
        setattr(client, name, counted(getattr(client, name)))


def loop_on(folder: str, runs: Path, kill_at: int = 0) -> list[float]:
    """Every call of a loop, to step 3, each of which is saved."""
    with open_client(folder, runs) as client:
        kill_before(kill_at, client)
        losses = client.load_state() or []
        while client.num_steps < 3:
            client.sample([ROW["input_ids"][:4]], 1, 2)
            old = client.forward(GROUPS).log_probs
            rows = iter(old)
            groups = [[row | {"old_log_probs": next(rows)} for row in group] for group in GROUPS]
            client.forward_backward(groups, Ppo())
            losses.append(client.optim_step(lr=1e-3).loss)
            client.save_state(losses)
        return losses


@pytest.mark.system
def test_a_kill_between_any_two_calls_loses_nothing_that_was_saved(
    folder: str, tmp_path: Path
) -> None:
    whole = loop_on(folder, tmp_path / "whole")
    # a step is five calls, behind load_state: six starts end inside step 1, and each of the others
    # behind a step that is saved
    for kill_at in (1, 2, 3, 4, 5, 6, 7, 8):
        process = fork_server().Process(target=loop_on, args=(folder, tmp_path / "killed", kill_at))
        process.start()
        process.join(600)
        assert process.exitcode == -signal.SIGKILL, kill_at
    assert loop_on(folder, tmp_path / "killed") == whole


@pytest.mark.same_on_every_cpu
def test_what_a_checkpoint_cannot_hold_is_refused(
    client: TrainingClient, folder: str, tmp_path: Path
) -> None:
    client.forward_backward([ROW])
    with pytest.raises(RuntimeError, match="a checkpoint holds no gradients"):
        client.save_state()
    client.zero_grad()
    with open_client(folder, tmp_path) as other:
        assert other.load_state() is None
        other.save_state({"place": 1})
        assert other.save_state({"place": 1}).name == "step_00000000"
        with pytest.raises(RuntimeError, match="step 0 is saved already, with another `extra`"):
            other.save_state({"place": 2})
        with pytest.raises(ConfigError, match="is in use by"):
            open_client(folder, tmp_path).load_state()


def every_call(rank: int, world: int, folder: str, runs: Path, *overrides: str) -> dict[str, Any]:
    """What each call of the client gives, on any mesh."""
    with open_client(folder, runs, "optimizer.weight_decay=0", *overrides) as client:
        start = client.forward(GROUPS).log_probs
        out = client.forward_backward(GROUPS, Ppo(average="rows"))
        norm = client.optim_step(lr=1e-3).grad_norm
        client.save_state({"at": 1})
        with client.reference():
            reference = client.forward(GROUPS).log_probs
        now = client.forward(GROUPS).log_probs
        client.forward_backward(GROUPS, Ppo())
        client.optim_step(lr=1e-2)
        assert client.load_state() == {"at": 1}
        again = client.forward(GROUPS).log_probs
        drawn = client.sample([ROW["input_ids"][:4]], 2, 3, temperature=0)
        client.save_weights(runs / "out")
        handed = {name: float(x.double().abs().sum()) for name, x in client.weights()}
        name = "adapter_model.safetensors" if client.built.adapter else "model.safetensors"
        saved = {
            n: float(x.double().abs().sum()) for n, x in load_file(runs / "out" / name).items()
        }
    assert saved.keys() == handed.keys()
    return {
        "loss": [out.loss, norm],
        "weights": [handed[name] for name in sorted(handed)],
        "saved": [saved[name] for name in sorted(saved)],
        "sampled": drawn,
        **{
            name: np.concatenate(values).tolist()
            for name, values in (("start", start), ("reference", reference))
        },
        "now": np.concatenate(now).tolist(),
        "again": np.concatenate(again).tolist(),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "peft"),
    [
        *((layout, ()) for layout in (*LAYOUTS_OF_TWO, "mesh.tp=2")),
        *((layout, LORA) for layout in LAYOUTS_OF_TWO),
    ],
)
def test_every_call_on_two_ranks_is_that_of_one(
    layout: str, peft: tuple[str, ...], folder: str, tmp_path: Path
) -> None:
    one = every_call(0, 1, folder, tmp_path / "one", *peft)
    first, second = run_ranks(every_call, 2, folder, tmp_path / "two", layout, *peft)
    assert first == second
    for name in one.keys() - {"sampled"}:
        np.testing.assert_allclose(first[name], one[name], atol=2e-5, rtol=1e-5, err_msg=name)
    assert first["sampled"] == one["sampled"]
    np.testing.assert_allclose(one["start"], one["reference"], atol=1e-6)
    np.testing.assert_array_equal(first["now"], first["again"])


# ---------------------------------------------- wrong use
def but(**changes: Any) -> Row:
    return {name: value for name, value in (ROW | changes).items() if value is not None}


LENGTH = len(ROW["input_ids"])
SENTENCES: dict[str, tuple[list[Row], str]] = {
    "longer than a pack": (
        [ROW, {name: [2] * 300 for name in COLUMNS}],
        "row 1 has 300 tokens, and a pack holds packed_sequence.packed_sequence_size=256",
    ),
    "nothing to learn": (
        [but(labels=[-100] * LENGTH)],
        "no label in 1 row, so there is nothing to learn",
    ),
    "not finite": (
        [ROW, but(advantages=[0.0] * (LENGTH - 2) + [float("nan"), 0.0])],
        f"row 1: advantages is not finite at position {LENGTH - 2}",
    ),
    "a column is missing": (
        [but(advantages=None)],
        "loss=Ppo needs the per-token column advantages",
    ),
    "a column is missing in one row": ([ROW, but(advantages=None)], "row 1 lacks advantages"),
    "one that others bring": ([ROW, but(old_log_probs=None)], "row 1 lacks old_log_probs"),
    "a column is ignored": (
        [but(answers=[0] * LENGTH)],
        "the per-token column answers, which loss=Ppo does not use",
    ),
    "a column that nobody knows": (
        [but(advantage=[0.0] * LENGTH)],
        "the rows bring advantage, which no loss declares",
    ),
    "unequal lengths": ([but(advantages=[0.0])], f"row 0 has {LENGTH} input_ids and 1 advantages"),
    "labels are not shifted": ([but(labels=ROW["input_ids"])], "row 0: its labels are its own ids"),
    "another tokenizer": (
        [but(input_ids=[VOCAB] * LENGTH)],
        f"row 0 has the id {VOCAB} in input_ids, and the model's embedding has {VOCAB} rows",
    ),
    "a label of another tokenizer": (
        [ROW, but(labels=[VOCAB] * LENGTH)],
        f"row 1 has the id {VOCAB} in labels, and the model's embedding has {VOCAB} rows",
    ),
    "a negative label": ([but(labels=[-5] * LENGTH)], "row 0 has the id -5 in labels"),
    "no ids": ([but(input_ids=[0.5] * LENGTH)], "row 0: input_ids must be whole numbers"),
    "no rows": ([], "there are no rows"),
}


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(("rows", "sentence"), SENTENCES.values(), ids=SENTENCES)
def test_wrong_rows_get_a_sentence(rows: list[Row], sentence: str, client: TrainingClient) -> None:
    with pytest.raises(ValueError) as caught:
        client.forward_backward(rows)
    assert sentence in str(caught.value)
    with pytest.raises(RuntimeError, match="optim_step without gradients"):
        client.optim_step()


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize("answers", [[1], [2], [1, 1], [1, 2, 1, 2], [1, 2, 2], [0, 2]], ids=str)
def test_a_group_that_is_not_a_pair_is_refused(answers: list[int], client: TrainingClient) -> None:
    """Rows of two pairs, or a row alone, would be compared with whatever lies beside them."""
    bare = {"input_ids": ROW["input_ids"], "labels": ROW["labels"]}
    pair, group = ([bare | {"answers": [x] * LENGTH} for x in given] for given in ([1, 2], answers))
    assert client.forward_backward([pair], SimPo()).num_items == 1
    client.zero_grad()
    with pytest.raises(ValueError, match=rf"group 1 of {len(answers)} rows? must be one pair"):
        client.forward_backward([pair, group], SimPo())


def test_what_a_teacher_leaves_to_the_rest_is_brought_by_all_rows_or_none(
    client: TrainingClient,
) -> None:
    """Where it is missing it follows from the stored tokens, and not from those of one row."""
    stored = {"teacher_ids": ROW["input_ids"], "teacher_log_probs": [-0.5] * LENGTH}
    row = {name: ROW[name] for name in ("input_ids", "labels")} | stored
    whole = row | {"teacher_rest": [1 - math.exp(-0.5)] * LENGTH}
    loss = DistillTopK(teacher="another", top_k=1)
    losses = [client.forward_backward(rows, loss).loss for rows in ([row, row], [whole, whole])]
    client.zero_grad()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    with pytest.raises(ValueError, match="row 1 lacks teacher_rest"):
        client.forward_backward([whole, row], loss)


@pytest.mark.same_on_every_cpu
def test_wrong_arguments_get_a_sentence(client: TrainingClient) -> None:
    for prompt in ([], [VOCAB], [-1]):
        with pytest.raises(ValueError, match="prompt 1 must be at least one id"):
            client.sample([[1], prompt])
    with pytest.raises(TypeError, match="lists of ids"):
        client.sample(["text"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"\[row\]"):
        client.forward(ROW)


class Failing(CrossEntropy):
    def __call__(self, inputs: LossInputs) -> LossOutput:
        raise KeyboardInterrupt


def test_a_call_that_was_interrupted_is_not_stepped_on(client: TrainingClient) -> None:
    bare = {"input_ids": ROW["input_ids"], "labels": ROW["labels"]}
    with pytest.raises(KeyboardInterrupt):
        client.forward_backward([bare], Failing())
    for retry in (client.optim_step, lambda: client.forward_backward([bare], CrossEntropy())):
        with pytest.raises(
            RuntimeError, match="did not end, and its gradients are those of some rows only"
        ):
            retry()
    client.zero_grad()
    client.forward_backward([bare], CrossEntropy())
    client.zero_grad()


def interrupt(*_: Any, **more: Any) -> None:
    raise KeyboardInterrupt


def test_a_sample_that_was_interrupted_leaves_no_dropout_out(
    client: TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = client.engine.model
    monkeypatch.setattr(type(model), "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.sample([[1, 2, 3]])
    assert not model.module.training
    client.forward_backward(GROUPS)
    client.zero_grad()
    assert model.module.training


def on_ranks(rank: int, world: int, folder: str, runs: Path) -> list[str]:
    """What each rank raises when rank 1 brings other rows, wrong ones, and another seed."""
    found = []
    with open_client(folder, runs) as client:
        for rows in ([GROUPS[2][rank]], [but(labels=[-100] * LENGTH) if rank else ROW]):
            with pytest.raises(ValueError) as caught:
                client.forward_backward(rows)
            found.append(str(caught.value))
        with pytest.raises(ValueError) as caught:
            client.sample([[5, 6]], seed=rank)
        found.append(str(caught.value))
        assert client.forward_backward([ROW]).num_items > 0
    return found


@pytest.mark.same_on_every_cpu
def test_ranks_that_differ_all_say_so(folder: str, tmp_path: Path) -> None:
    first, second = run_ranks(on_ranks, 2, folder, tmp_path)
    assert first == second
    assert "rank 1 was called with other rows than rank 0" in first[0]
    assert "nothing to learn" in first[1]
    assert "rank 1 was called with other prompts than rank 0" in first[2]


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "packed_sequence=wrapped",
            "packed_sequence.strategy=wrapped: rows of loss=Ppo stay whole",
        ),
        ("training.ema_decay=0.9", "the client keeps no average"),
        ("loss=fused_linear_cross_entropy model.mtp_loss=0.1", "train no heads"),
    ],
)
def test_settings_that_mean_nothing_here(
    override: str, sentence: str, folder: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_client(folder, tmp_path, *override.split())


def test_groups_of_equal_rewards_are_a_step_without_advantages(client: TrainingClient) -> None:
    def rewarded(first: float, second: float) -> list[Row]:
        rows = [{x: row[x] for x in ("input_ids", "labels")} for row in GROUPS[0][:2]]
        return [row | {"reward": reward} for row, reward in zip(rows, (first, second))]

    equal = [rewarded(1.0, 1.0), rewarded(0.1 + 0.2, 0.3), rewarded(0.0, 0.0)[:1]]
    out = client.forward_backward(equal, Ppo())
    assert (out.loss, out.parts["equal_groups"]) == (0.0, 3)
    assert client.optim_step(lr=0.0).grad_norm == 0
    out = client.forward_backward([*equal, rewarded(1.0, 0.0)], Ppo())
    assert out.parts["equal_groups"] == 3
    client.zero_grad()

    # a divergence is learned all the same
    apart = [
        [
            row | {"reference_log_probs": np.where(np.array(row["labels"]) == -100, 0.0, -9.0)}
            for row in group
        ]
        for group in equal
    ]
    out = client.forward_backward(apart, Ppo(kl=0.1))
    assert out.loss == pytest.approx(0.1 * out.parts["kl"], rel=1e-5)
    assert out.loss > 0
    assert client.optim_step(lr=0.0).grad_norm > 0


# ---------------------------------------------- the guards of the recipe
def changed_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def scaled_weights(path: Path) -> None:
    save_file({name: x * 1.5 for name, x in load_file(path).items()}, path, {"format": "pt"})


@pytest.fixture(scope="module")
def adapter(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that is far from its base."""
    runs = tmp_path_factory.mktemp("adapter")
    with open_client(folder, runs / "run", *LORA) as client:
        for _ in range(3):
            change(client)
        client.save_weights(runs / "saved")
    return runs / "saved"


def start_on_a_node(rank: int, world: int, files: Path, changed: str, *overrides: str) -> str:
    """Each rank's node has files of its own under the same relative names."""
    node = files.parent / f"node_{rank}"
    shutil.copytree(files, node)
    if rank == 1 and changed.endswith(".json"):
        changed_json(node / changed, lora_alpha=3.0)
    elif rank == 1 and changed.endswith(".safetensors"):
        scaled_weights(node / changed)
    elif rank == 1:
        overrides = (*overrides, changed)
    os.chdir(node)
    try:
        open_client("model", files.parent / "run", *overrides)
    except ConfigError as error:
        return str(error)
    return "started"


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("changed", "peft", "sentence"),
    [
        ("model/model.safetensors", (), "  model model.safetensors: "),
        ("model/tokenizer_config.json", (), "  tokenizer tokenizer_config.json: "),
        (
            "adapter/adapter_config.json",
            ("peft=lora", "peft.adapter=adapter"),
            "  adapter adapter_config.json: ",
        ),
        (
            "adapter/adapter_model.safetensors",
            ("peft=lora", "peft.adapter=adapter"),
            "  adapter adapter_model.safetensors: ",
        ),
        ("optimizer.lr=0.5", (), "  optimizer.lr: 1e-06 on rank 0"),
    ],
    ids=["weights", "tokenizer", "alpha", "adapter", "setting"],
)
def test_nodes_with_other_files_or_settings_do_not_start(
    changed: str,
    peft: tuple[str, ...],
    sentence: str,
    folder: str,
    adapter: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(folder, tmp_path / "files" / "model")
    shutil.copytree(adapter, tmp_path / "files" / "adapter")
    for text in run_ranks(start_on_a_node, 2, tmp_path / "files", changed, *peft):
        assert sentence in text


@pytest.mark.same_on_every_cpu
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ("model.safetensors", "model model.safetensors, reference model.safetensors: not what"),
        ("peft.alpha=64", "was started with different settings:\n  peft.alpha: was"),
        ("peft.r=2", "was started with different settings:\n  peft.r: was 4, now 2"),
        ("optimizer=muon", "different settings:\n  optimizer._target_: was"),
    ],
)
def test_a_checkpoint_goes_on_with_its_own_files_and_settings(
    changed: str, sentence: str, folder: str, tmp_path: Path
) -> None:
    model = shutil.copytree(folder, tmp_path / "model")
    with open_client(str(model), tmp_path / "run", *LORA) as client:
        change(client)
        client.save_state({"i": 1})
    overrides: tuple[str, ...] = LORA
    if "=" in changed:
        overrides = (*LORA, changed)
    else:
        scaled_weights(model / changed)
    with open_client(str(model), tmp_path / "run", *overrides) as client:
        before = client.forward(GROUPS).log_probs
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            client.load_state()
        for one, other in zip(before, client.forward(GROUPS).log_probs):
            np.testing.assert_array_equal(one, other)
    if changed in ("model.safetensors", "peft.alpha=64"):
        accepts = (*overrides, "checkpoint.accept_changes=true")
        with open_client(str(model), tmp_path / "run", *accepts) as client:
            assert client.load_state() == {"i": 1}


def test_the_folder_of_a_client_is_that_of_a_run(folder: str, tmp_path: Path) -> None:
    with open_client(folder, tmp_path / "run") as client:
        assert client.load_state() is None
        assert "name: client" in (tmp_path / "run" / "config.yaml").read_text()
        change(client)
        client.save_state()
        expected = {name: weight.clone() for name, weight in client.weights()}
    assert export_hf.main([str(tmp_path / "run")]) == 0
    exported = load_file(tmp_path / "run" / "hf" / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        assert torch.equal(weight, expected[name].to(weight.dtype))


def test_the_reference_of_a_continued_adapter_has_it(
    folder: str, adapter: Path, tmp_path: Path
) -> None:
    peft = ("peft=lora", f"peft.adapter={adapter}")
    with open_client(folder, tmp_path / "bare") as client:
        bare = client.forward(GROUPS).log_probs
    with open_client(folder, tmp_path / "run", *peft) as client:
        start = client.forward(GROUPS).log_probs
        change(client)
        with client.reference():
            reference = client.forward(GROUPS).log_probs
    for one, other, third in zip(start, reference, bare):
        np.testing.assert_allclose(one, other, atol=1e-6)
        assert np.abs(one - third).max() > 1e-3


def test_a_step_without_a_rate_has_that_of_the_configuration(folder: str, tmp_path: Path) -> None:
    settings = ("optimizer.lr=1e-4", "optimizer.weight_decay=0", "training.precision=fp32")
    moved = []
    with open_client(folder, tmp_path, *settings) as client:
        for lr in (None, 1e-2, None):
            before = [p.detach().clone() for p in client.engine.model.parameters()]
            client.forward_backward(GROUPS, ImportanceSampling())
            client.optim_step(lr=lr)
            after = client.engine.model.parameters()
            moved.append(max(float((x - y).abs().max()) for x, y in zip(before, after)))
    # no step of AdamW's first three moves a weight by more than a few times its rate
    assert moved[0] == pytest.approx(1e-4, rel=0.05)
    assert moved[1] > 5e-3
    assert moved[2] < 4e-4
