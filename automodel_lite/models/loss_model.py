"""`LossModel`: a causal LM and a loss in one module, whose forward returns the sum of a batch.

It is the root for FSDP. Only rows that carry a label meet the head. What is summed: `loss.py`.

Legend: T tokens of the stream (of this rank), R rows that carry a label, C model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from automodel_lite.attention.documents import MixerForward, runs_by_rows
from automodel_lite.attention.spec import FAMILIES, config_value
from automodel_lite.models.fused_head import RowFunction
from automodel_lite.models.layers import has_score_head, output_head, text_decoder
from automodel_lite.models.loss import (
    Head,
    LookAhead,
    Loss,
    LossInputs,
    LossOutput,
    PlainLoss,
    check_columns,
)
from automodel_lite.models.neftune import EmbeddingNoise, with_keys
from automodel_lite.models.routing import RouterLogits
from automodel_lite.thd import ThdBatch


class LossModel(nn.Module):
    """A Hugging Face causal LM and a loss. `forward(batch)` returns the loss and its parts, SUMS
    over this rank's rows.

    A loss runs inside the head's own forward: only there has FSDP gathered its weight.

    has_plain_head   logits are `softcap(hidden @ weight.T)`; of any other head (`probe` sees it)
                     every loss takes the logits that the head computes itself
    loss_backend     of torch.compile, for what a loss compiles; None = nothing
    noise            of embeddings in training; None = none
    judged_rows      `Loss.rows_to_judge` of the last forward outside training
    items_per_label  of the whole step: what the loss is divided by over what a balance is, which
                     counts labels
    """

    def __init__(
        self,
        lm: transformers.PreTrainedModel,
        loss: Loss,
        balance: Callable[[Sequence[Tensor], ThdBatch], Tensor] | None = None,
        heads: LookAhead | None = None,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.loss = loss
        self.balance = balance
        self.heads = heads
        # in a tuple, it is no submodule: neither trained, sharded nor saved
        self._teacher: tuple[LossModel, ...] = ()
        self.items_per_label = 1.0
        self.judged_rows: Tensor | None = None
        self.noise: EmbeddingNoise | None = None
        self.has_plain_head = True
        self.loss_backend: str | None = None
        caps = (config_value(lm.config.get_text_config(), key) for key in FAMILIES["softcaps"])
        # scores are not capped, whatever the logits of the family's tokens are
        self.scores = has_score_head(lm)
        self.softcap: float | None = None if self.scores else next(filter(None, caps), None)
        self.wrap_head()
        self.routers = RouterLogits(self._decoder_and_head[0]) if balance else None

    def wrap_head(self) -> None:
        """Lets the head compute a loss in place of its product; again when something else has
        replaced its forward.
        """
        # Both are looked for among all modules, once and not in every forward; in a tuple they are
        # not registered as submodules a second time.
        self._decoder_and_head = text_decoder(self.lm), output_head(self.lm)
        head = self._decoder_and_head[1]
        product = head.forward

        def forward(hidden: Tensor, compute: Callable[[Head], Any] | None = None) -> Any:
            if compute is None:
                return product(hidden)
            weight = head.weight
            if isinstance(weight, DTensor):
                weight = weight.full_tensor()
            return compute(Head(hidden, weight, self.softcap, self.loss_backend))

        head.forward = forward

    def set_teacher(self, teacher: LossModel) -> None:
        """Gives the loss the rows of a frozen second model's head."""
        self._teacher = (teacher,)

    @property
    def needs_mixer_metadata(self) -> bool:
        """Whether it reads `ThdBatch.mixers`."""
        for lm in (self.lm, *(teacher.lm for teacher in self._teacher)):
            forwards = (vars(module).get("forward") for module in lm.modules())
            if runs_by_rows(lm) or any(isinstance(x, MixerForward) for x in forwards):
                return True
        return self.balance is not None or self.loss.needs_documents

    def look_ahead(self, batch: ThdBatch, loss: Loss | None = None) -> ThdBatch:
        """Returns a whole stream with what the loss, or another `loss`, and the heads for further
        tokens get of it.
        """
        batch = (loss or self.loss).prepare(batch)
        if self.noise:
            batch = with_keys(batch)
        return replace(batch, ahead=self.heads.targets(batch)) if self.heads else batch

    def forward(self, batch: ThdBatch, loss: Loss | None = None) -> LossOutput:
        """Returns the loss, or another `loss` of the same rows. Outside training the parts of one
        of text also hold `token_accuracy`, the number of labels that are the likeliest token, and,
        where the loss is not plain, `cross_entropy`, its sum over the label tokens. Heads for
        further tokens are trained beside the model's own loss.
        """
        if self.noise and self.training:
            with self.noise.of(batch):
                return self._forward(batch, loss)
        return self._forward(batch, loss)

    def _forward(self, batch: ThdBatch, loss: Loss | None) -> LossOutput:
        heads = self.heads if self.training and loss is None else None
        loss = loss or self.loss
        teacher_rows = None
        if self._teacher:
            with torch.no_grad():
                teacher_rows = self._teacher[0].before_head(batch)
        balance = self.balance if self.training else None
        router_logits: list[Tensor] = []
        if balance is None:
            rows = self.before_head(batch, loss, heads)
        else:
            rows = self._record_routing(router_logits, batch, loss, heads)
        evaluate = partial(self._evaluate, batch, loss, heads)
        output: LossOutput
        if teacher_rows is None:
            output = self._at_head(rows, evaluate, loss)
        else:

            def at_own_head(teacher_head: Head) -> Any:
                return self._at_head(rows, partial(evaluate, teacher=teacher_head), loss)

            # inside the teacher's: both weights are whole there, and in the backward pass
            output = self._teacher[0]._at_head(teacher_rows, at_own_head)
        if balance is None:
            return output
        # gradients in training, but no part of the value
        of_experts = self.items_per_label * balance(router_logits, batch)
        return output._replace(sum=output.sum + (of_experts - of_experts.detach()))

    def _record_routing(
        self, router_logits: list[Tensor], batch: ThdBatch, loss: Loss, heads: LookAhead | None
    ) -> Tensor:
        """Returns what `before_head` does; adds the logits of the routers, layer by layer."""
        routers = self.routers
        assert routers is not None
        # of families that do not say where they are: transformers records them, uncompiled
        options = {} if routers.is_found else {"output_router_logits": True}

        def record(module: nn.Module, args: Any, output: Any) -> None:
            router_logits.extend(routers.taken() if routers.is_found else output.router_logits)

        # before heads for further tokens run, which may have routers, too; removed where the model
        # raises, too
        with self._decoder_and_head[0].register_forward_hook(record), routers.recording():
            return self.before_head(batch, loss, heads, **options)

    def _evaluate(
        self,
        batch: ThdBatch,
        loss: Loss,
        heads: LookAhead | None,
        head: Head,
        teacher: Head | None = None,
    ) -> LossOutput:
        """Evaluates the loss at the head."""
        rows = batch.label_rows
        # A pack of padding alone, of a rank that runs short, was made of no rows, and brings no
        # columns.
        brought = batch.columns if len(rows) else loss.example_columns(batch) | batch.columns
        check_columns(loss, brought)
        labels_R = batch.labels.index_select(0, rows)
        columns = {name: column.index_select(0, rows) for name, column in brought.items()}
        # rows of the heads that predict further ahead stand behind those of the labels
        own = replace(head, rows=head.rows[: len(rows)]) if heads else head
        inputs = LossInputs(own, labels_R, columns, batch, teacher)
        total, parts = loss(inputs)
        if heads:
            # gradients in training, but no part of the value; counts labels, and is divided by the
            # items of the loss
            ahead = heads.loss(replace(head, rows=head.rows[len(rows) :]), batch)
            ahead = self.items_per_label * ahead
            total = total + heads.coefficient * (ahead - ahead.detach())
            parts = {**parts, "mtp_loss": ahead}
        # by which runs of different losses compare
        if not self.training:
            self.judged_rows = loss.rows_to_judge(inputs)
        if not self.training and loss.of_text:
            losses_R, hits_R = inputs.rows(_loss_and_hit, labels_R).unbind(-1)
            weights_R = columns.get("loss_weights", torch.ones_like(hits_R))
            parts = {**parts, "token_accuracy": (hits_R * weights_R).sum()}
            if not (isinstance(loss, PlainLoss) and loss.is_plain):
                parts["cross_entropy"] = (losses_R * weights_R).sum()
        return LossOutput(total, {name: part.detach() for name, part in parts.items()})

    def _takes_logits(self, loss: Loss) -> bool:
        return loss.needs_logits or not self.has_plain_head

    def before_head(
        self,
        batch: ThdBatch,
        loss: Loss | None = None,
        heads: LookAhead | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the labeled rows before the head [R, C], behind them those of `heads`; or logits
        [R, V].
        """
        inputs = {**self._inputs(batch), **options}
        if self._takes_logits(loss or self.loss):
            if self.scores:
                return self._scores_of(inputs, batch.label_rows)
            logits = self.lm(**inputs, logits_to_keep=batch.label_rows).logits.squeeze(0)
            is_whole = len(logits) != len(batch.label_rows)  # of families without that argument
            return logits.index_select(0, batch.label_rows) if is_whole else logits
        decoder = self._decoder_and_head[0]
        if batch.images is None:
            output = decoder(**inputs)
        elif self.lm.base_model is not self.lm:
            # features of images take their places inside the composite's own forward
            output = self.lm.base_model(**inputs)
        else:  # Llama 4 has its head in there, too
            outputs = []
            hook = decoder.register_forward_hook(lambda *call: outputs.append(call[2]))
            with hook:
                self.lm(**inputs, logits_to_keep=1)
            output = outputs[0]
        hidden_TC: Tensor = output.last_hidden_state.squeeze(0)
        rows = hidden_TC.index_select(0, batch.label_rows)
        if heads:  # their rows go through the output head, too
            rows = torch.cat([rows, heads.hidden(hidden_TC, batch)])
        return rows

    def _inputs(self, batch: ThdBatch) -> dict[str, Any]:
        if batch.images is None:
            return batch.model_inputs()
        return batch.images.model_inputs(self.lm, batch)

    def _at_head(
        self, rows: Tensor, compute: Callable[[Head], Any], loss: Loss | None = None
    ) -> Any:
        """Evaluates `compute` at the head of such rows: inside its forward, unless
        they are logits.
        """
        if self._takes_logits(loss or self.loss):
            return compute(Head(rows))
        return self._decoder_and_head[1](rows, compute=compute)

    @torch.no_grad()
    def values(self, batch: ThdBatch, function: RowFunction, columns: Sequence[str] = ()) -> Tensor:
        """Returns `function(logits, labels, *columns)` of the labeled rows, [R, K]."""
        labels_R = batch.labels.index_select(0, batch.label_rows)
        others = [batch.columns[name].index_select(0, batch.label_rows) for name in columns]

        def evaluate(head: Head) -> Tensor:
            return LossInputs(head, labels_R).rows(function, labels_R, *others)

        return self._at_head(self.before_head(batch), evaluate)

    def _scores_of(self, inputs: dict[str, Any], rows: Tensor | None = None) -> Tensor:
        """Returns the scores of tokens [T, K], or of some of them. The model's own forward keeps
        those of the last token of a row, and a stream is one row.
        """
        decoder, head = self._decoder_and_head
        hidden_1TC: Tensor = decoder(**inputs).last_hidden_state
        if rows is not None:
            hidden_1TC = hidden_1TC.index_select(1, rows)
        scores_1TK: Tensor = head(hidden_1TC)
        return scores_1TK.squeeze(0)

    def logits(self, batch: ThdBatch, num_last: int = 0) -> Tensor:
        """Returns those of the stream's last tokens, [num_last, V]; 0 = of all."""
        if self.scores:
            scores_TK = self._scores_of(self._inputs(batch))
            return scores_TK[-num_last:] if num_last else scores_TK
        return self.lm(**self._inputs(batch), logits_to_keep=num_last).logits.squeeze(0)

    @torch.no_grad()
    def plain_logits(self, ids_T: Tensor) -> Tensor:
        """Returns those of one document [T, V], by a model with an attention of
        transformers' own.
        """
        if self.scores:
            return self._scores_of({"input_ids": ids_T[None], "use_cache": False})
        return self.lm(input_ids=ids_T[None], use_cache=False).logits[0]

    @torch.no_grad()
    def generate(self, **options: Any) -> Tensor:
        """Returns what transformers' `generate` does, on an attention of its own, with its
        caches.
        """
        configs = {id(x): x for x in (self.lm.config, self.lm.config.get_text_config())}.values()
        packed = [(config, config._attn_implementation) for config in configs]
        try:
            for config in configs:
                config._attn_implementation = "eager"
            generate: Any = self.lm.generate
            return generate(**options)  # type: ignore[no-any-return]
        finally:
            for config, name in packed:
                config._attn_implementation = name

    @torch.no_grad()
    def probe(self, batch: ThdBatch) -> tuple[Tensor, bool]:
        """Returns logits [T, V], and whether they are `softcap(hidden @ weight.T)`: those of
        Granite, Cohere, MiniCPM and of heads with a bias or an adapter are not.
        """
        # What enters the head and leaves the layers in a forward of the model itself, scaled or
        # not.
        inputs = []
        outputs = []
        head = self._decoder_and_head[1]
        hooks = [
            head.register_forward_pre_hook(lambda _, args: inputs.append(args[0])),
            self._decoder_and_head[0].register_forward_hook(
                lambda *call: outputs.append(call[2].last_hidden_state)
            ),
        ]
        logits_TV: Tensor
        if self.scores:
            logits_TV = self._scores_of(batch.model_inputs())
        else:
            logits_TV = self.lm(**batch.model_inputs()).logits[0]
        for hook in hooks:
            hook.remove()
        # a fresh adapter adds no value yet, but its name
        names = [name for name, _ in head.named_parameters()]
        # MiniCPM scales in between
        is_plain = names == ["weight"] and torch.equal(inputs[0], outputs[0])
        if not is_plain:
            return logits_TV, False
        # The product alone: a head that scales or biases its logits gives others.
        got_TV: Tensor = head(inputs[0][0], compute=lambda own: own.logits(own.rows))
        # autocast rounds the product of fp32 states to bf16, and two products may round apart
        is_fp32 = inputs[0].dtype == torch.float32 and not torch.is_autocast_enabled(
            got_TV.device.type
        )
        tolerance = 1e-4 if is_fp32 else 5e-2
        if got_TV.shape != logits_TV.shape:  # Inkling 2 cuts those of rows that have no token
            return logits_TV, False
        off_TV = got_TV - logits_TV.float()
        error = off_TV.abs().max() / logits_TV.abs().max().clamp(min=1)
        # a bound far above the logits (of an unknown name) hides in bf16's rounding, but for that
        # all of them are less
        bias = (off_TV * got_TV).sum() / got_TV.square().sum().clamp(min=1)
        return logits_TV, bool(error <= tolerance and bias.abs() <= 2e-3)


def _loss_and_hit(logits: Tensor, labels: Tensor) -> Tensor:
    is_hit = logits.argmax(-1) == labels
    losses = F.cross_entropy(logits, labels, reduction="none")
    return torch.stack([losses, is_hit.to(logits.dtype)], 1)
