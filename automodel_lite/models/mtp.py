"""Heads that predict tokens further ahead (multi-token prediction, arXiv:2412.19437), trained
beside the model.

    head k    hidden state of position t, token t + k  ->  decoder layer  ->  token t + k + 1
              head 1 reads the model's last hidden states, head k those of head k - 1

The loss of a step is the model's own plus `mtp_loss` / D times the sum over its D heads of their
cross-entropy, over the same number of labels. A head sees and predicts the tokens of one document
only. Of a tree it does so along the path of each row: next tokens differ where rows branch, so
paths are laid one after the other for the heads, and each label counts in the node that holds it.

The heads are modules of the model under the names that its family's checkpoints have, so that
reading, sharding, saving and exporting them is that of any other weight:

    model.layers.<N>.{enorm,hnorm,eh_proj,...}    behind the N layers     DeepSeek V3, GLM 4.5
    mtp.{fc,pre_fc_norm_*,layers.0.*,norm}        beside the model        Qwen3-Next, Qwen3.5

What a forward computes is that of transformers' `MtpLayer`.

Legend: T tokens of the stream (of this rank), D heads, R labels of all heads, C model dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from automodel_lite.attention.documents import NOW
from automodel_lite.attention.spec import FAMILIES, config_value
from automodel_lite.columns import IGNORE_INDEX, labeled_rows
from automodel_lite.errors import ConfigError
from automodel_lite.models.fused_head import chunk_rows, linear_cross_entropy
from automodel_lite.models.layers import text_decoder
from automodel_lite.models.loss import Head, LookAhead
from automodel_lite.thd import TargetsAhead, ThdBatch, to_thd


def copies_of_trained(keys: Iterable[str], trained: Collection[str]) -> dict[str, str]:
    """Returns which of these weights of a checkpoint are copies of trained ones that heads bring,
    of the embedding and of the output head: key -> the name of its original.
    """
    embedding = next(key for key in trained if key.endswith("model.embed_tokens.weight"))
    # a tied head is the embedding
    head = "lm_head.weight" if "lm_head.weight" in trained else embedding
    copies = {}
    for key in keys:
        if key.endswith(".embed_tokens.weight"):
            copies[key] = embedding
        elif key.endswith(".shared_head.head.weight"):
            copies[key] = head
    return copies


def add_heads(lm: transformers.PreTrainedModel) -> None:
    """Gives a model, in place and on the device of its weights, the heads of its family's
    checkpoints. Raises ConfigError for a family without any that are known here.
    """
    text = lm.config.get_text_config()
    behind = FAMILIES["heads_ahead"]["behind"]
    known = [*behind, *FAMILIES["heads_ahead"]["beside"]]
    if text.model_type not in known:
        raise ConfigError(
            "model.mtp_loss trains heads that predict further tokens, which are known of "
            f"{', '.join(sorted(known))}, not of {text.model_type}: set "
            "model.mtp_loss=0."
        )
    layers: Any = text_decoder(lm).layers
    kind = type(layers[0])
    device = next(lm.parameters()).device
    if text.model_type in behind:
        if not (depth := config_value(text, "num_nextn_predict_layers", 0)):
            raise ConfigError(
                "model.mtp_loss trains heads that predict further tokens, and the model's config "
                "has num_nextn_predict_layers=0: set model.mtp_loss=0."
            )
        made = type(f"{kind.__name__}Ahead", (HeadBehind, kind), {})
        with torch.device(device):
            heads = [made(text, layer) for layer in range(len(layers), len(layers) + depth)]
        layers.extend(heads)
    else:
        attending = len(layers) - 1 - text.layer_types[::-1].index("full_attention")
        with torch.device(device):
            heads = [HeadBeside(text, kind, attending)]
        lm.mtp = heads[0]
    for head in heads:
        head.to(next(lm.parameters()).dtype)
        if device.type != "meta":  # else its weights are read
            head.apply(lm._init_weights)


def heads_of(lm: transformers.PreTrainedModel) -> list[nn.Module]:
    """Returns the heads that `add_heads` has made, from the nearest token on."""
    return [x for x in lm.modules() if isinstance(x, (HeadBehind, HeadBeside))]


class HeadBehind(nn.Module):
    """A decoder layer with what a head has beside it; `add_heads` makes it a family's layer."""

    def __init__(self, text: transformers.PretrainedConfig, layer: int) -> None:
        super().__init__(text, layer)  # type: ignore[call-arg]
        size = text.hidden_size
        norm: Any = type(self.input_layernorm)
        self.enorm = norm(size, eps=text.rms_norm_eps)
        self.hnorm = norm(size, eps=text.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = norm(size, eps=text.rms_norm_eps)

    def forward(self, hidden: Tensor, embeds: Tensor, **arguments: Any) -> Tensor:
        joined = torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1)
        mixed = super().forward(self.eh_proj(joined), **arguments)  # type: ignore[misc]
        return self.shared_head.norm(mixed)  # type: ignore[no-any-return, operator]


class HeadBeside(nn.Module):
    """A decoder layer inside a module of its own."""

    def __init__(
        self, text: transformers.PretrainedConfig, kind: Callable[..., nn.Module], layer: int
    ) -> None:
        super().__init__()
        size = text.hidden_size
        self.layers = nn.ModuleList([kind(text, layer)])
        norm: Any = type(self.layers[0].input_layernorm)
        self.pre_fc_norm_embedding = norm(size, eps=text.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(size, eps=text.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.norm = norm(size, eps=text.rms_norm_eps)

    def forward(self, hidden: Tensor, embeds: Tensor, **arguments: Any) -> Tensor:
        joined = torch.cat(
            [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)], -1
        )
        mixed = self.layers[0](self.fc(joined), **arguments)
        return self.norm(mixed)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Ahead(TargetsAhead):
    """What the heads get of a micro-batch.

    ids, labels, weights  [T, D], of the k-th token further on; labels are IGNORE_INDEX and ids 0
                          where the document has none
    rows      int64 [R], the labeled ones among the D * T hidden states of all heads, head by head;
              found on the host, because their number is a shape
    paths     places in the stream of what the heads read, and the stream that they make; None of a
              stream without trees, which the heads read as it is
    """

    ids: Tensor
    labels: Tensor
    weights: Tensor | None
    rows: Tensor
    paths: Tensor | None = None
    unfolded: ThdBatch | None = None

    def shard(self, mine: Tensor) -> Ahead:
        if self.paths is not None:
            raise ConfigError(
                "model.mtp_loss reads the rows of trees one after the other, which mesh.cp > 1 "
                "does not share: set packed_sequence.tree=off, or mesh.cp=1."
            )
        labels = self.labels[mine]
        weights = None if self.weights is None else self.weights[mine]
        return Ahead(self.ids[mine], labels, weights, labeled_rows(labels.T.flatten()))


@dataclass(frozen=True)
class HeadsAhead(LookAhead):
    """The heads of a model, and the weight of their loss.

    lm  in a tuple: it is the loss model's submodule, not a second time this one's
    """

    coefficient: float
    lm: tuple[transformers.PreTrainedModel]
    depth: int

    @classmethod
    def of(cls, lm: transformers.PreTrainedModel, coefficient: float) -> HeadsAhead:
        return cls(coefficient, (lm,), len(heads_of(lm)))

    def targets(self, batch: ThdBatch) -> Ahead:
        """Returns what the heads get of a whole stream, on its device."""
        stream = batch
        paths = None
        if batch.attention.tree is not None:
            paths = batch.attention.tree.paths
            stream = _unfolded(batch)
        weights = stream.columns.get("loss_weights")
        ids = []
        labels = []
        of_labels = []
        for k in range(1, self.depth + 1):
            place, is_inside = _further_on(stream, k)
            ids.append(torch.where(is_inside, stream.input_ids[place], 0))
            labels.append(torch.where(is_inside, stream.labels[place], IGNORE_INDEX))
            if weights is not None:
                of_labels.append(weights[place])
        labels_DT = torch.stack(labels)
        return Ahead(
            torch.stack(ids, 1),
            labels_DT.T.contiguous(),
            None if weights is None else torch.stack(of_labels, 1),
            labeled_rows(labels_DT.flatten()),
            paths,
            None if paths is None else stream,
        )

    def hidden(self, hidden_TC: Tensor, batch: ThdBatch) -> Tensor:
        """Runs the heads; returns the rows that carry their labels, [R, C]."""
        lm = self.lm[0]
        ahead = batch.ahead
        assert isinstance(ahead, Ahead)
        stream = ahead.unfolded or batch
        hidden = hidden_TC if ahead.paths is None else hidden_TC.index_select(0, ahead.paths)
        hidden = hidden[None]
        out = []
        before = NOW.set(stream)
        rotate: Any = text_decoder(lm).rotary_emb
        try:
            for number, head in enumerate(heads_of(lm)):
                embeds = lm.get_input_embeddings()(ahead.ids[None, :, number])
                positions = stream.position_ids[None] + number + 1
                hidden = head(
                    hidden,
                    embeds,
                    position_embeddings=rotate(embeds, positions),
                    position_ids=positions,
                    attention_mask=None,
                )
                out.append(hidden[0])
        finally:
            NOW.reset(before)
        return torch.cat(out).index_select(0, ahead.rows)

    def loss(self, head: Head, batch: ThdBatch) -> Tensor:
        """Returns the sum over labels of the heads' mean cross-entropy; `head` has their rows."""
        ahead = batch.ahead
        assert isinstance(ahead, Ahead)
        assert head.weight_VC is not None
        labels_R = ahead.labels.T.flatten().index_select(0, ahead.rows)
        weights_R = None
        if ahead.weights is not None:
            weights_R = ahead.weights.T.flatten().index_select(0, ahead.rows)
        chunk = chunk_rows(None, *head.weight_VC.shape[::-1])
        total = linear_cross_entropy(
            head.rows, head.weight_VC, labels_R, chunk, head.softcap, head.backend, weights_R
        )
        return total / ahead.ids.shape[1]


def _further_on(stream: ThdBatch, k: int) -> tuple[Tensor, Tensor]:
    """Returns the place of the k-th token behind each, int64 [T]; and is it in its document?"""
    cu = stream.cu_seqlens_padded.long()
    ends = (cu[:-1] + stream.cu_seqlens.diff()).repeat_interleave(cu.diff())
    place = torch.arange(len(ends), device=ends.device) + k
    return place.clamp(max=len(ends) - 1), place < ends


def _unfolded(batch: ThdBatch) -> ThdBatch:
    """Returns the paths of a stream with trees as documents of their own. A label is that of its
    node: on the paths of other nodes its token carries none.
    """
    tree = batch.attention.tree
    segments = batch.attention.segments
    assert tree is not None
    ends = segments.cu_q[1:].long()
    path_lens = segments.cu_k.diff().long()
    own_lens = segments.cu_q.diff().long()
    # padding behind a document is the end of its last node
    cu = batch.cu_seqlens_padded.long()
    document = torch.searchsorted(cu, ends) - 1
    filled = cu[document] + batch.cu_seqlens.diff()[document]
    padding = torch.minimum((ends - filled).clamp(min=0), own_lens)
    places = torch.arange(len(tree.paths), device=ends.device)
    is_own = places >= (path_lens.cumsum(0) - own_lens).repeat_interleave(path_lens)
    columns = {"loss_weights"} & batch.columns.keys()
    row = {
        "input_ids": batch.input_ids[tree.paths],
        "labels": torch.where(is_own, batch.labels[tree.paths], IGNORE_INDEX),
        "position_ids": batch.position_ids[tree.paths],
        "seq_lens": path_lens - padding,
        "seq_lens_padded": path_lens,
        **{name: batch.columns[name][tree.paths] for name in columns},
    }
    return to_thd(row, with_mixers=False)
