"""Heads that predict further tokens: document by document as plain transformers computes them, in fp64."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from automodel_lite.attention.interface import install
from automodel_lite.attention.kernel import ReferenceAttention
from automodel_lite.columns import IGNORE_INDEX
from automodel_lite.errors import ConfigError
from automodel_lite.models.flops import model_size, step_flops
from automodel_lite.models.loss import FusedLinearCrossEntropy, Loss
from automodel_lite.models.loss_model import LossModel
from automodel_lite.models.mtp import HeadsAhead, add_heads
from automodel_lite.parallel.context_parallel import cp_shard
from automodel_lite.parallel.mesh import MeshShape, open_mesh
from automodel_lite.parallel.sharding import parallelize
from automodel_lite.parts.losses.distillation import Distill, DistillTopK
from automodel_lite.run.weight_files import as_saved
from automodel_lite.thd import ThdBatch, to_thd
from tests.attention.hybrids import InFloat64
from tests.ranks import run_ranks
from tests.runs import QUICK, rows_of, train, train_on

COEFFICIENT = 0.3
SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
BEHIND = {
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
FAMILIES = {
    "deepseek_v3": {**SMALL, **BEHIND, **LATENT, "num_nextn_predict_layers": 2},
    "glm4_moe": {**SMALL, **BEHIND, "num_nextn_predict_layers": 1},
    "qwen3_next": {**SMALL, **DELTA, **EXPERTS},
    "qwen3_5_text": {**SMALL, **DELTA},
    "qwen3_5_moe_text": {**SMALL, **DELTA, **EXPERTS},
}


def build(kind: str, **more: Any) -> PreTrainedModel:
    """A tiny model with heads, whose weights are far from their start."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**FAMILIES[kind], **more})
    config._experts_implementation = "eager"  # the others have no fp64
    lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    add_heads(lm)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.2)
    return lm.double()


def loss_model(lm: PreTrainedModel) -> LossModel:
    heads = HeadsAhead.of(lm, COEFFICIENT)
    install(lm, ReferenceAttention())
    return LossModel(lm, FusedLinearCrossEntropy(), heads=heads).train()


def draw(lens: list[int], seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ids, labels (a third of them masked) and weights of documents."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for n in lens:
        ids = torch.randint(3, 40, (n,), generator=generator)
        labels = F.pad(ids[1:], (0, 1), value=IGNORE_INDEX)
        labels[torch.rand(n, generator=generator) < 0.3] = IGNORE_INDEX
        found.append((ids, labels, torch.rand(n, generator=generator) + 0.5))
    return found


def pack(documents: list[tuple[Tensor, Tensor, Tensor]], multiple: int = 1) -> ThdBatch:
    """One row of documents in slots of a multiple, and padding behind them."""
    lens = torch.tensor([len(ids) for ids, *_ in documents])
    slots = -(-lens // multiple) * multiple
    parts = zip(documents, (slots - lens).tolist())
    filled = [
        [
            F.pad(ids, (0, n)),
            F.pad(labels, (0, n), value=IGNORE_INDEX),
            F.pad(weights, (0, n)),
            torch.arange(len(ids) + n),
        ]
        for (ids, labels, weights), n in parts
    ]
    ids, labels, weights, positions = (torch.cat(column)[None] for column in zip(*filled))
    row = {"input_ids": ids, "labels": labels, "loss_weights": weights, "position_ids": positions}
    return to_thd({**row, "seq_lens": lens[None], "seq_lens_padded": slots[None]})


def plain(lm: PreTrainedModel, folder: Path) -> tuple[PreTrainedModel, MtpModel]:
    """The same weights, read by transformers alone from a folder as checkpoints have them."""
    lm.config.save_pretrained(folder)
    saved = {name: value.contiguous() for name, value in as_saved(lm, lm.state_dict()).items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    config = AutoConfig.from_pretrained(folder)
    config._experts_implementation = "eager"
    if "mtp" in dict(lm.named_children()):  # transformers does not know that these have one
        config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    main = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float64
    )
    if "mtp" not in str(main._keys_to_ignore_on_load_unexpected):  # the published size's
        main._keys_to_ignore_on_load_unexpected = [rf"layers\.[{config.num_hidden_layers}-9]\."]
    return main.double(), MtpModel.from_pretrained(main).double()


def plain_loss(
    main: PreTrainedModel, mtp: MtpModel, documents: list[tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """The model's loss and that of its heads, document by document."""
    total = torch.zeros((), dtype=torch.float64)
    for ids, labels, weights in documents:
        out = main(input_ids=ids[None])
        nll = F.cross_entropy(out.logits[0], labels, reduction="none", ignore_index=IGNORE_INDEX)
        total = total + (nll * weights).sum()
        hidden = main.get_decoder()(input_ids=ids[None]).last_hidden_state
        for k in range(1, mtp.num_mtp_layers + 1):
            left = len(ids) - k
            if left < 1:
                break
            hidden = mtp.forward_layer(
                k - 1,
                hidden[:, :left],
                torch.arange(k, len(ids))[None],
                None,
                input_ids=ids[None, k:],
            )
            nll = F.cross_entropy(
                mtp._project_to_logits(hidden)[0],
                labels[k:],
                reduction="none",
                ignore_index=IGNORE_INDEX,
            )
            of_head = (nll * weights[k:]).sum() / mtp.num_mtp_layers
            total = total + COEFFICIENT * of_head
    return total


def plain_gradient(name: str, main: PreTrainedModel, mtp: MtpModel) -> Tensor | None:
    """The gradient of what transformers calls otherwise in its heads."""
    layers = main.get_decoder().config.num_hidden_layers
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    head, rest = 0, name.removeprefix("mtp.")
    if match and int(match[1]) >= layers:
        head, rest = int(match[1]) - layers, match[2]
    elif rest == name:
        return main.get_parameter(name).grad
    for ours, theirs in (
        ("shared_head.norm", "post_norm"),
        ("pre_fc_norm_embedding", "enorm"),
        ("pre_fc_norm_hidden", "hnorm"),
        ("fc", "eh_proj"),
        ("norm", "post_norm"),
        ("layers.0", "mtp_block"),
    ):
        if rest.startswith(f"{ours}."):
            rest = rest.replace(ours, theirs, 1)
            break
    if rest.split(".")[0] not in ("enorm", "hnorm", "eh_proj", "post_norm", "mtp_block"):
        rest = f"mtp_block.{rest}"
    return mtp.get_parameter(f"layers.{head}.{rest}").grad


def check_gradients(lm: PreTrainedModel, main: PreTrainedModel, mtp: MtpModel) -> None:
    for name, parameter in lm.named_parameters():
        want = plain_gradient(name, main, mtp)
        assert want is not None, name
        torch.testing.assert_close(
            parameter.grad, want, rtol=1e-8, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(
    "kind",
    [
        "glm4_moe",
        *[pytest.param(kind, marks=pytest.mark.system) for kind in FAMILIES if kind != "glm4_moe"],
    ],
)
def test_packed_heads_are_those_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    lm = build(kind)
    main, mtp = plain(lm, tmp_path)
    documents = draw([9, 2, 12, 1, 3, 7])
    model = loss_model(lm)
    with InFloat64():
        value, parts = model(model.look_ahead(pack(documents, multiple=4)))
        want = plain_loss(main, mtp, documents)
    value.backward()
    want.backward()
    whole = value + COEFFICIENT * parts["mtp_loss"]
    torch.testing.assert_close(whole, want, rtol=1e-10, atol=0)
    check_gradients(lm, main, mtp)


@pytest.mark.parametrize(
    "distilled", [Distill(), DistillTopK("stored", top_k=3)], ids=["in memory", "stored"]
)
def test_heads_train_beside_a_teacher(distilled: Loss) -> None:
    """Their gradients add to those of the distillation; the teacher's own heads are not asked."""
    batch = pack(draw([9, 2, 12, 3]))
    with_values = batch
    if isinstance(distilled, DistillTopK):
        ids = torch.arange(batch.num_tokens)[:, None] % 5 + torch.arange(distilled.top_k)
        stored = {"teacher_ids": ids, "teacher_log_probs": -1.5 - torch.rand(ids.shape)}
        with_values = replace(batch, columns={**batch.columns, **stored})
    teacher = loss_model(build("glm4_moe").requires_grad_(False))
    with torch.no_grad():
        teacher.lm.get_output_embeddings().weight.mul_(0.8)

    def gradients(loss: Loss, has_heads: bool) -> dict[str, Tensor]:
        model = loss_model(build("glm4_moe"))
        model.loss = loss
        model.heads = model.heads if has_heads else None
        if loss.needs_teacher:
            model.set_teacher(teacher)
        with InFloat64():
            model(model.look_ahead(with_values if loss is distilled else batch)).sum.backward()
        named = model.lm.named_parameters()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named}

    plain = FusedLinearCrossEntropy()
    of_both = gradients(distilled, has_heads=True)
    of_loss = gradients(distilled, has_heads=False)
    with_heads = gradients(plain, has_heads=True)
    without = gradients(plain, has_heads=False)
    assert any((grad != without[name]).any() for name, grad in of_loss.items())
    for name, grad in of_both.items():
        want = of_loss[name] + with_heads[name] - without[name]
        torch.testing.assert_close(grad, want, rtol=1e-8, atol=1e-12, msg=name)


def draw_tree() -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
    """A row of a tree between two documents, and its rows as documents of their own: a label that
    rows share counts in the first of them.

    The tree of prefix_trees.py: rows a b c d e, a b c x y and a b c x z w.
    """
    (first, tree, last), positions = draw([6, 11, 5]), [0, 1, 2, 3, 4, 2, 3, 4, 3, 4, 5]
    ids, labels, weights = tree
    ids[5], ids[8] = ids[2], ids[6]  # copies of the last shared token
    for start, stop in ((0, 5), (5, 8), (8, 11)):
        labels[start : stop - 1] = ids[start + 1 : stop]
        labels[stop - 1] = IGNORE_INDEX
    labels[1] = IGNORE_INDEX  # of a shared beginning, one label is trained on and one is not
    rows = []
    for place, own in (([0, 1, 2, 3, 4], 0), ([0, 1, 5, 6, 7], 2), ([0, 1, 5, 8, 9, 10], 3)):
        row_labels = labels[place].clone()
        row_labels[:own] = IGNORE_INDEX
        rows.append((ids[place], row_labels, weights[place]))
    parts = [first, tree, last]
    columns = [torch.cat(column)[None] for column in zip(*parts)]
    places = torch.cat([torch.arange(6), torch.tensor(positions), torch.arange(5)])[None]
    lens = torch.tensor([[6, 11, 5]])
    row = dict(zip(("input_ids", "labels", "loss_weights"), columns))
    row |= {"position_ids": places, "seq_lens": lens, "seq_lens_padded": lens}
    return row, [first, *rows, last]


@pytest.mark.parametrize(
    "kind",
    [
        "glm4_moe",
        *[pytest.param(x, marks=pytest.mark.system) for x in ("deepseek_v3", "qwen3_5_text")],
    ],
)
def test_heads_of_a_tree_read_the_path_of_each_row(kind: str, tmp_path: Path) -> None:
    lm = build(kind)
    main, mtp = plain(lm, tmp_path)
    row, rows = draw_tree()
    model = loss_model(lm)
    with InFloat64():
        value, parts = model(model.look_ahead(to_thd(row)))
        want = plain_loss(main, mtp, rows)
    value.backward()
    want.backward()
    whole = value + COEFFICIENT * parts["mtp_loss"]
    torch.testing.assert_close(whole, want, rtol=1e-10, atol=0)
    check_gradients(lm, main, mtp)


AXES = {
    "fsdp": MeshShape(1, 2, 1, 1),
    "ddp": MeshShape(1, 2, 1, 1),
    "cp": MeshShape(1, 1, 2, 1),
    "tp": MeshShape(1, 1, 1, 2),
    "ep": MeshShape(1, 2, 1, 1, 2),
}


def over_ranks(rank: int, world: int, cases: list[tuple[str, str, bool]]) -> dict[str, float]:
    """The largest difference of loss and gradients from one process, relative to the largest; one
    rank of two has a document of a token, and padding.
    """
    found = {}
    for kind, axis, tied in cases:
        mesh = open_mesh(AXES[axis], torch.device("cpu"))
        alone = loss_model(build(kind, tie_word_embeddings=tied))
        lm = build(kind, tie_word_embeddings=tied)
        install(lm, ReferenceAttention())
        spread = LossModel(lm, FusedLinearCrossEntropy(), heads=HeadsAhead.of(lm, COEFFICIENT))
        strategy = "ddp" if axis == "ddp" else "fsdp"
        model = parallelize(spread.train(), mesh, strategy, torch.float64)
        given = [pack(draw([9, 2, 12], seed=3), 4), pack(draw([1, 14, 1, 8], seed=4), 4)]
        want, total = torch.zeros(()), torch.zeros(())
        for batch in given:
            part, parts = alone(alone.look_ahead(batch))
            part.backward()
            want = want + part.detach() + parts["mtp_loss"]
        is_split = axis in ("fsdp", "ddp", "ep")
        own = [given[rank]] if is_split else given
        for number, batch in enumerate(own, start=1):
            with model.accumulate(is_last=number == len(own)):
                own_batch = cp_shard(spread.look_ahead(batch), mesh.cp, "all_gather")
                part, parts = model(own_batch)
                (part * model.mean_ranks).backward()
            total = total + part.detach() + parts["mtp_loss"]
        total = mesh.sum(total)
        grads = [p.grad for p in spread.parameters()]
        wanted = [p.grad for p in alone.parameters()]
        assert not any(g is None for g in (*grads, *wanted)), (kind, axis)
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]
        largest = max(g.abs().max() for g in wanted)
        worst = max(float((a - b).abs().max() / largest) for a, b in zip(whole, wanted))
        found[f"{kind} {axis} {tied}"] = max(worst, float(abs(total / want - 1)))
    return found


@pytest.mark.system
def test_heads_on_two_ranks_are_those_of_one() -> None:
    """glm4_moe with a tied head; the last has no experts to deal out."""
    cases = [("glm4_moe", axis, True) for axis in AXES]
    cases += [("qwen3_next", axis, False) for axis in AXES]
    cases += [("qwen3_5_text", axis, False) for axis in ("fsdp", "cp", "tp")]
    for of_rank in run_ranks(over_ranks, 2, cases):
        assert max(of_rank.values()) < 1e-6, of_rank


def test_trees_are_not_shared_by_ranks() -> None:
    row, _ = draw_tree()
    model = LossModel(build("glm4_moe"), FusedLinearCrossEntropy())
    model.heads = HeadsAhead.of(model.lm, COEFFICIENT)
    ahead = model.look_ahead(to_thd(row)).ahead
    assert ahead is not None
    with pytest.raises(ConfigError, match=r"packed_sequence\.tree=off, or mesh\.cp=1"):
        ahead.shard(torch.arange(4))


def test_a_family_without_heads_is_refused() -> None:
    config = AutoConfig.for_model("llama", **{**SMALL, "num_hidden_layers": 1})
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"are known of .*glm4_moe.*, not of llama: set model"):
        add_heads(lm)


def write_checkpoint(folder: Path, kind: str, tokenizer: Path) -> dict[str, Tensor]:
    """As the published ones: heads, and with GLM's copies of embedding and output head."""
    lm = build(kind, vocab_size=384).float()
    for path in tokenizer.iterdir():
        if path.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(path, folder)
    lm.config.save_pretrained(folder)
    saved = {name: value.contiguous() for name, value in as_saved(lm, lm.state_dict()).items()}
    if kind == "glm4_moe":
        saved["model.layers.2.embed_tokens.weight"] = saved["model.embed_tokens.weight"].clone()
        saved["model.layers.2.shared_head.head.weight"] = saved["lm_head.weight"].clone()
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    return saved


def is_of_heads(name: str) -> bool:
    return name.startswith(("mtp.", "model.layers.2.", "model.layers.3."))


@pytest.mark.system
@pytest.mark.parametrize(("kind", "ranks"), [("glm4_moe", 1), ("qwen3_next", 2)])
def test_an_export_has_the_heads(kind: str, ranks: int, tmp_path: Path) -> None:
    """Bit for bit when they are not trained; trained, with copies that are those of the export, and
    a stopped run goes on to the same weights.
    """
    quick = [*QUICK, "checkpoint.export_hf=true", "packed_sequence.packed_sequence_size=64"]
    train("smoke", tmp_path / "first", *quick, "training.max_steps=1")
    source = tmp_path / "source"
    source.mkdir()
    before = write_checkpoint(source, kind, tmp_path / "first" / "hf")
    quick += ["model=pretrained", f"model.pretrained={source}", "training.max_steps=4"]

    def export(name: str, *overrides: str) -> dict[str, Tensor]:
        train("smoke", tmp_path / name, *quick, *overrides, world_size=ranks)
        found: dict[str, Tensor] = {}
        for path in (tmp_path / name / "hf").glob("*.safetensors"):
            found |= load_file(path)
        return found

    off = export("off")
    of_heads = {n for n in before if is_of_heads(n)} - (
        {n for n in before if kind == "qwen3_next" and n.startswith("model.")}
    )
    assert off.keys() == before.keys()
    assert len(of_heads) > 20
    assert all(torch.equal(off[n], before[n]) for n in of_heads)
    on = export("on", "model.mtp_loss=0.1")
    assert on.keys() == before.keys()
    rows = [rows_of(tmp_path / name) for name in ("off", "on")]
    off_step, on_step = (next(row for row in found if "loss" in row) for found in rows)
    of_layer = sum(
        before[n].numel() * (0.5 if ".experts." in n else 1)
        for n in of_heads
        if before[n].ndim > 1 and "embed_tokens" not in n and "shared_head.head" not in n
    )
    more = 6 * of_layer * on_step["num_tokens"]
    more += 6 * before["lm_head.weight"].numel() * on_step["num_label_tokens"]
    work = [row["tflops_per_s"] * row["step_s"] * 1e12 for row in (off_step, on_step)]
    # what the layers alone leave of the work is their attention
    config = AutoConfig.from_pretrained(source)
    size = model_size(config)
    alone = step_flops(config, size, None)
    labels = off_step["num_label_tokens"]
    num_pairs = (work[0] - alone.of(off_step["num_tokens"], labels, 0)) / alone.attention.per_pair
    more += num_pairs * 12 * config.num_attention_heads * config.head_dim
    assert work[1] - work[0] == pytest.approx(more, rel=1e-6)
    kept = {n for n in of_heads if torch.equal(on[n], before[n])}
    assert kept <= {"model.layers.2.mlp.gate.e_score_correction_bias"}
    if kind == "glm4_moe":
        assert torch.equal(
            on["model.layers.2.embed_tokens.weight"], on["model.embed_tokens.weight"]
        )
        assert torch.equal(on["model.layers.2.shared_head.head.weight"], on["lm_head.weight"])
    stopped = train_on(ranks, tmp_path / "again", *quick, "model.mtp_loss=0.1", stop_at=2)
    assert stopped[0] == 75
    resumed = export("again", "model.mtp_loss=0.1")
    assert all(torch.equal(resumed[n], on[n]) for n in on)
