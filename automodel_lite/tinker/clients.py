"""Tinker's clients by the names, arguments and units of its SDK, over the training client.

Legend: N positions of a prompt, K tokens of each.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import tinker
from tinker import types
from tinker.lib.public_interfaces.custom_loss import (
    LossHandle,
    check_loss_inputs,
    run_loss_handle,
    trace_loss,
)
from tinker.types.topk_logprobs import MASK_LOGPROB, TopkLogprobs

from automodel_lite.extras.client.sampling import Request
from automodel_lite.seed import derive_seed
from automodel_lite.tinker import paths
from automodel_lite.tinker.engines import SETTINGS, Engine, Source, Waiting, compare, new_folder
from automodel_lite.tinker.futures import ClientFuture, Future, done
from automodel_lite.tinker.refusals import bad_request, refusing
from automodel_lite.tinker.rows import OURS, loss_of, output_of, rows_of, token_ids

Metadata = dict[str, str] | None
Scope = Literal["owned", "accessible"]
_said: set[str] = set()


def note(text: str) -> None:
    """Says once what is read and has no meaning here."""
    if text not in _said:
        _said.add(text)
        print(f"tinker     {text}", file=sys.stderr)


class ServiceClient:
    """Makes clients of models in this process; see `install` for what their names stand for."""

    def __init__(
        self,
        user_metadata: Metadata = None,
        project_id: str | None = None,
        *,
        display_name: str | None = None,
        base_url: str | None = None,
        api_key: str | None = None,
        default_headers_overrides: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        if base_url or api_key or project_id:
            note("base_url, api_key and project_id are of the service, and unused here")
        self.user_metadata = user_metadata
        self.display_name = display_name
        self.root = SETTINGS.folder

    def __enter__(self) -> ServiceClient:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close("errored" if exc_type else "success")

    def close(
        self, status: Literal["success", "errored", "interrupted"], detail: str | None = None
    ) -> Any:
        """Draws what still waits; runs and models stay until the process ends."""

        def call() -> None:
            for engine in SETTINGS.engines.values():
                engine.draw_waiting()

        return done(call)

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        return self._rest_client().get_server_capabilities().result()

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        return self.get_server_capabilities()

    def get_console_url(self) -> str:
        return self.root.resolve().as_uri()

    def get_telemetry(self) -> None:
        return None

    # ---------------------------------------------- clients that train
    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Metadata = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> ClientFuture[TrainingClient]:
        """Makes a client of a new adapter; of all weights where the base model's overrides have
        peft=none.
        """

        @refusing
        def make() -> TrainingClient:
            if not train_mlp or not train_attn:
                raise bad_request(
                    "train_mlp=False and train_attn=False are not told by names here: write "
                    "peft.target_modules=[q_proj,...] into the base model's overrides."
                )
            if optimizer is not None and optimizer.type != "adamw":
                raise bad_request(f"optimizer={optimizer.type}: here it is adamw.")
            trains_all = "peft=none" in SETTINGS.given(base_model)[1]
            more = [] if trains_all or not rank else ["peft=lora", f"peft.r={rank}"]
            if seed is not None:
                more.append(f"seed={seed}")
            engine = SETTINGS.engine(base_model, more)
            if engine.has_adapter and train_unembed:
                note("train_unembed=True is unused: the output head gets no adapter")
            if rank != engine.adapter_rank:
                note(
                    f"rank={rank} is unused: the overrides of {base_model} "
                    f"make it {engine.adapter_rank} (0 = all weights)"
                )
            facts = {
                "base_model": base_model,
                "rank": engine.adapter_rank,
                "more": more,
                "user_metadata": user_metadata or self.user_metadata,
                "made": datetime.now(UTC).isoformat(),
            }
            return TrainingClient(engine, self.root, facts)

        return done(make, ClientFuture)  # type: ignore[no-any-return]

    async def create_lora_training_client_async(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        train_mlp: bool = True,
        train_attn: bool = True,
        train_unembed: bool = True,
        user_metadata: Metadata = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> TrainingClient:
        made = self.create_lora_training_client(
            base_model,
            rank,
            seed,
            train_mlp,
            train_attn,
            train_unembed,
            user_metadata,
            optimizer,
        )
        return await made

    def _from_state(
        self, path: str, base_model: str | None, metadata: Metadata, optimizer: bool
    ) -> ClientFuture[TrainingClient]:
        @refusing
        def make() -> TrainingClient:
            folder = paths.folder_of(self.root, path)
            facts = paths.read_facts(folder.parent.parent)
            if base_model not in (None, facts["base_model"]):
                raise bad_request(
                    f"base_model={base_model}, and {path} is of {facts['base_model']}: leave "
                    "base_model out."
                )
            engine = SETTINGS.engine(facts["base_model"], facts["more"])
            facts |= {
                "user_metadata": metadata or self.user_metadata,
                "made": datetime.now(UTC).isoformat(),
            }
            client = TrainingClient(engine, self.root, facts)
            client._load(path, optimizer)
            return client

        return done(make, ClientFuture)  # type: ignore[no-any-return]

    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> ClientFuture[TrainingClient]:
        return self._from_state(path, base_model, user_metadata, optimizer=False)

    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, optimizer=False)

    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
    ) -> ClientFuture[TrainingClient]:
        return self._from_state(path, base_model, user_metadata, optimizer=True)

    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, optimizer=True)

    # ---------------------------------------------- clients that sample
    def create_sampling_client(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> ClientFuture[SamplingClient]:
        """Makes a client of a saved state, or of a base model as it is."""

        @refusing
        def make() -> SamplingClient:
            if model_path is not None:
                return _sampler_of(self.root, model_path)
            if base_model is None:
                raise ValueError("Either model_path or base_model must be provided")
            # a model that is in memory has its start model inside, without the adapter
            _, own = SETTINGS.given(base_model)
            for key, engine in SETTINGS.engines.items():
                if engine.has_adapter and set(own) <= {*key}:
                    return SamplingClient(engine, Source(None, None), base_model)
            engine = SETTINGS.engine(base_model, [])
            if engine.owner is None:
                engine.owner = engine
            if engine.owner is engine:
                return SamplingClient(engine, Source(engine.client.snapshot(), engine), base_model)
            return SamplingClient(engine, Source(None, None), base_model)

        return done(make, ClientFuture)  # type: ignore[no-any-return]

    async def create_sampling_client_async(
        self,
        model_path: str | None = None,
        base_model: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
    ) -> SamplingClient:
        return await self.create_sampling_client(model_path, base_model)

    # ---------------------------------------------- the rest
    def create_custom_loss(self, fn: Any, input_ranks: Mapping[str, Any]) -> Future[LossHandle]:
        """Traces a loss of one datum, which `forward_backward_custom` takes."""
        return done(lambda: trace_loss(fn, input_ranks, _SESSION))  # type: ignore[no-any-return]

    def copy_weights(
        self, path: str, *, ttl_seconds: int | None = None, weights_access_token: str | None = None
    ) -> Future[str]:
        def refuse() -> str:
            raise bad_request(
                "copy_weights is for other accounts' checkpoints: here each is a folder: "
                f"{paths.folder_of(self.root, path)}."
            )

        return done(refuse)  # type: ignore[no-any-return]

    def _rest_client(self) -> RestClient:
        return RestClient()

    def create_rest_client(self) -> RestClient:
        return RestClient()


_SESSION = "in-process"


class TrainingClient:
    """A run: an adapter, or all weights, of a model in this process.

    Made by `ServiceClient`; every call is done when it is made, and its future raises its error.
    """

    def __init__(self, engine: Engine, root: Path, facts: dict[str, Any]) -> None:
        engine.open_seat(self)
        self.engine = engine
        self.root = root
        self.facts = facts
        self.run = new_folder(root, "run-")
        self.model_id = self.run.name
        with engine.of(self) as client:
            client._ranks.on_first(lambda: paths.write_facts(self.run, facts))
        self._request_error: BaseException | None = None

    def _do(self, call: Callable[[], Any]) -> Any:
        """Returns the future of a call; after one that failed, others do not pretend to go on."""

        def checked() -> Any:
            if self._request_error is not None:
                raise RuntimeError(
                    "A previous request failed; this TrainingClient is poisoned and cannot accept "
                    f"further requests: {self._request_error}"
                ) from self._request_error
            try:
                return refusing(call)()
            except tinker.ConflictError:
                raise
            except BaseException as error:
                self._request_error = error
                raise

        return done(checked)

    # ---------------------------------------------- training
    def forward(
        self, data: list[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Any:
        """Computes log-probabilities and the loss, without gradients."""

        def call() -> Any:
            loss_of(loss_fn, loss_fn_config)
            rows, _ = rows_of(data, loss_fn)
            self._check_spans(data)
            bare = [{k: v for k, v in row.items() if k not in UNUSED} for row in rows]
            with self.engine.of(self) as client:
                out = client.forward(bare)
            metrics = {}
            if loss_fn == "cross_entropy":
                total = 0.0
                for row, found in zip(rows, out.log_probs):
                    weights: Any = row.get("target_weights", row.get("loss_weights", 1.0))
                    total -= float((found.astype(np.float64) * weights).sum())
                metrics["loss:sum"] = total
            else:
                note(f"forward({loss_fn!r}) gives log-probabilities alone, and no loss:sum")
            return output_of(out, data, metrics)

        return self._do(call)

    async def forward_async(
        self, data: list[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Any:
        return self.forward(data, loss_fn, loss_fn_config)

    def forward_backward(
        self, data: list[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Any:
        """Adds the gradients of the loss's sum."""

        def call() -> Any:
            loss = loss_of(loss_fn, loss_fn_config)
            rows, many = rows_of(data, loss_fn)
            self._check_spans(data)
            with self.engine.of(self) as client:
                out = client.forward_backward(rows, many or loss)
            return output_of(out, data, {"loss:sum": out.loss})

        return self._do(call)

    async def forward_backward_async(
        self, data: list[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Any:
        return self.forward_backward(data, loss_fn, loss_fn_config)

    def forward_backward_custom(
        self, data: list[Any], loss_fn: Any, *, loss_type_input: Literal["logprobs"] | None = None
    ) -> Any:
        """Adds the gradients of a function (data, log-probabilities) -> (loss, metrics)."""
        if loss_type_input not in (None, "logprobs"):
            raise ValueError(
                f"Unsupported loss_type_input={loss_type_input!r}. Supported values are: logprobs"
            )
        if isinstance(loss_fn, LossHandle):
            check_loss_inputs(loss_fn, data)

        def call() -> Any:
            targets = [
                types.Datum(
                    model_input=datum.model_input,
                    loss_fn_inputs={
                        key: value
                        for key, value in datum.loss_fn_inputs.items()
                        if key == "target_tokens"
                    },
                )
                for datum in data
            ]
            rows, _ = rows_of(targets, "cross_entropy")
            shapes = [datum.loss_fn_inputs["target_tokens"].to_numpy().shape for datum in data]
            metrics: dict[str, float] = {}

            def of_rows(found: list[Any]) -> Any:
                own = [
                    x[:, : shape[1]] if len(shape) > 1 else x.reshape(len(x), -1)[:, 0]
                    for x, shape in zip(found, shapes)
                ]
                if isinstance(loss_fn, LossHandle):
                    loss, more = run_loss_handle(loss_fn, data, own)
                else:
                    loss, more = loss_fn(data, own)
                metrics.update({key: float(value) for key, value in more.items()})
                return loss

            bare = [{k: v for k, v in row.items() if k != "target_weights"} for row in rows]
            with self.engine.of(self) as client:
                out = client.forward_backward_custom(bare, of_rows)
            return output_of(out, data, metrics | {"loss:sum": out.loss})

        return self._do(call)

    async def forward_backward_custom_async(
        self, data: list[Any], loss_fn: Any, *, loss_type_input: Literal["logprobs"] | None = None
    ) -> Any:
        return self.forward_backward_custom(data, loss_fn, loss_type_input=loss_type_input)

    def optim_step(
        self,
        optim_params: Any = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> Any:
        """Applies the sum of the gradients, divided by nothing."""
        if optim_params is not None and adam_params is not None:
            raise ValueError("Specify optim_params or legacy adam_params, not both")
        given = optim_params if optim_params is not None else adam_params
        if not isinstance(given, types.AdamParams):
            raise TypeError("Expected AdamParams: the optimizer is adamw here")

        def call() -> Any:
            # what was asked of these weights is drawn before they change: nothing is copied
            self.engine.draw_waiting()
            with self.engine.of(self) as client:
                step = client.optim_step(
                    lr=given.learning_rate,
                    max_grad_norm=max(0.0, given.grad_clip_norm),
                    divide_by=1,
                    betas=(given.beta1, given.beta2),
                    eps=given.eps,
                    weight_decay=given.weight_decay,
                )
            metrics = {"unclipped_grad_l2:mean": step.grad_norm}
            if step.is_skipped:
                metrics["nonfinite_step:max"] = 1.0
            return types.OptimStepResponse(metrics=metrics)

        return self._do(call)

    async def optim_step_async(
        self, optim_params: Any = None, *, adam_params: types.AdamParams | None = None
    ) -> Any:
        return self.optim_step(optim_params, adam_params=adam_params)

    def _check_spans(self, data: list[Any]) -> None:
        if any(datum.model_input_spans is not None for datum in data):
            note("the provenance of datums is unused: it is for stable_reinforce")

    # ---------------------------------------------- checkpoints
    def _save(
        self, kind: str, name: str, metadata: Metadata, overwrite: bool, ttl: int | None
    ) -> str:
        if ttl is not None:
            note("ttl_seconds is unused: a checkpoint stays until it is deleted")
        path = paths.path_of(self.run, kind, name)
        folder = paths.folder_of(self.root, path).absolute()
        with self.engine.of(self) as client:
            if kind == "external_weights":
                compare("save_weights_external", path)
                if client._ranks.on_first(folder.exists):
                    raise FileExistsError(f"{path} is there already: take another name.")
                client.save_weights(folder)
            else:
                if client._has_gradients:
                    note("a checkpoint holds no gradients: those of forward_backward stay here")
                client.save_state(
                    name=folder,
                    overwrite=overwrite,
                    optimizer=kind == "weights",
                    with_pending=True,
                )
            client._ranks.on_first(lambda: paths.write_metadata(folder, metadata))
        return path

    def _load(self, path: str, optimizer: bool) -> Any:
        folder = paths.folder_of(self.root, path).absolute()
        with self.engine.of(self) as client:
            client.load_state(folder, optimizer=optimizer)
        return types.LoadWeightsResponse(path=path, model_id=self.model_id)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Metadata = None,
    ) -> Any:
        """Saves weights and optimizer, whole or not at all."""
        return self._do(
            lambda: types.SaveWeightsResponse(
                path=self._save("weights", name, user_metadata, overwrite, ttl_seconds)
            )
        )

    async def save_state_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        user_metadata: Metadata = None,
    ) -> Any:
        return self.save_state(name, ttl_seconds, overwrite, user_metadata)

    def load_state(self, path: str, weights_access_token: str | None = None) -> Any:
        return self._do(lambda: self._load(path, optimizer=False))

    async def load_state_async(self, path: str, weights_access_token: str | None = None) -> Any:
        return self.load_state(path)

    def load_state_with_optimizer(self, path: str, weights_access_token: str | None = None) -> Any:
        return self._do(lambda: self._load(path, optimizer=True))

    async def load_state_with_optimizer_async(
        self, path: str, weights_access_token: str | None = None
    ) -> Any:
        return self.load_state_with_optimizer(path)

    def save_weights_for_sampler(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Metadata = None
    ) -> Any:
        """Saves weights alone, for a sampling client."""
        return self._do(
            lambda: types.SaveWeightsForSamplerResponse(
                path=self._save("sampler_weights", name, user_metadata, False, ttl_seconds)
            )
        )

    async def save_weights_for_sampler_async(
        self, name: str, ttl_seconds: int | None = None, user_metadata: Metadata = None
    ) -> Any:
        return self.save_weights_for_sampler(name, ttl_seconds, user_metadata)

    def save_weights_external(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> Any:
        """Writes a folder that `from_pretrained`, or an inference server, loads."""

        def call() -> Any:
            if age_encryption_recipients:
                raise bad_request("age_encryption_recipients: nothing is encrypted here.")
            path = self._save("external_weights", name, None, False, ttl_seconds)
            return types.SaveWeightsExternalResponse(path=path)

        return self._do(call)

    async def save_weights_external_async(
        self,
        name: str,
        ttl_seconds: int | None = None,
        age_encryption_recipients: list[str] | None = None,
    ) -> Any:
        return self.save_weights_external(name, ttl_seconds, age_encryption_recipients)

    # ---------------------------------------------- samplers
    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> ClientFuture[SamplingClient]:
        return done(refusing(lambda: _sampler_of(self.root, model_path)), ClientFuture)  # type: ignore[no-any-return]

    async def create_sampling_client_async(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        return await self.create_sampling_client(model_path)

    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> ClientFuture[SamplingClient]:
        """Makes a client of the weights as they are now; nothing is written."""

        def call() -> SamplingClient:
            if name is not None:
                note("save_weights_and_get_sampling_client(name=...) is unused, as in the SDK")
            if kind not in ("snapshot", "inflight"):
                raise bad_request(f"kind={kind!r} is neither 'snapshot' nor 'inflight'.")
            with self.engine.of(self) as client:
                source = Source(client.snapshot(), self)
            return SamplingClient(self.engine, source, self.facts["base_model"])

        made = self._do(call)
        found: ClientFuture[SamplingClient] = ClientFuture()
        if made.future().exception() is not None:
            found.fail(made.future().exception())
        else:
            found.settle(made.result())
        return found

    async def save_weights_and_get_sampling_client_async(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> SamplingClient:
        return await self.save_weights_and_get_sampling_client(name, kind=kind)

    # ---------------------------------------------- what it is
    def get_info(self) -> types.GetInfoResponse:
        base_model = self.facts["base_model"]
        config = self.engine.client.engine.model.loss_model.lm.config
        data = types.ModelData(
            arch=str(config.model_type), model_name=base_model, tokenizer_id=base_model
        )
        rank = self.facts["rank"]
        return types.GetInfoResponse(
            model_data=data,
            model_id=self.model_id,
            is_lora=bool(rank),
            lora_rank=rank or None,
            model_name=base_model,
        )

    async def get_info_async(self) -> types.GetInfoResponse:
        return self.get_info()

    def get_tokenizer(self) -> Any:
        return self.engine.client.tokenizer

    def get_console_url(self) -> str:
        return self.run.resolve().as_uri()

    def get_telemetry(self) -> None:
        return None


UNUSED = frozenset(OURS.values()) | {"target_weights"}


def _sampler_of(root: Path, path: str) -> SamplingClient:
    folder = paths.folder_of(root, path).absolute()
    facts = paths.read_facts(folder.parent.parent)
    engine = SETTINGS.engine(facts["base_model"], facts["more"])
    with engine.lock:
        source = Source(engine.client.read_snapshot(folder), None)
    return SamplingClient(engine, source, facts["base_model"])


class SamplingClient:
    """Draws and scores by the weights of one moment. Prompts that are asked one after another, and
    waited for later, are drawn as one batch.
    """

    _numbers = itertools.count()

    def __init__(self, engine: Engine, source: Source, base_model: str) -> None:
        self.engine = engine
        self.source = source
        self.base_model = base_model
        self._number = next(self._numbers)
        self._num_asked = 0

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> Any:
        """Draws answers with their log-probabilities, by the weights as they are."""
        asked = self._num_asked
        self._num_asked += 1
        future: Future[types.SampleResponse] = Future(
            self.engine.draw_waiting, lambda: len(self.engine.waiting)
        )

        @refusing
        def ask() -> None:
            if prompt_alt_tokens_k:
                raise bad_request("prompt_alt_tokens_k is not done here: leave it 0.")
            if sampling_params.max_tokens is None:
                room = self.engine.client.most_tokens - prompt.length
            else:
                room = sampling_params.max_tokens
            seed = sampling_params.seed
            if seed is None:
                # alike on all ranks, other in each call, and in each step of a run that goes on
                seed = derive_seed(self._number, asked, self.engine.client.num_steps)
            request = Request(
                prompt=token_ids(prompt, "the prompt"),
                num_samples=num_samples,
                max_new_tokens=room,
                temperature=sampling_params.temperature,
                top_p=sampling_params.top_p,
                top_k=max(0, sampling_params.top_k),
                stop=sampling_params.stop,  # type: ignore[arg-type]
                seed=seed,
            )

            def settle(answers: list[Any]) -> None:
                def respond() -> types.SampleResponse:
                    sequences = [
                        types.SampledSequence(
                            stop_reason="stop" if answer.is_ended else "length",
                            sequence_id=f"sampler-{self._number}-{asked}-{number}",
                            tokens_np=np.asarray(answer.ids, np.int32),
                            logprobs_np=answer.log_probs,
                            topk_logprobs_np=self._top_of_answer(
                                request.prompt, answer.ids, topk_sample_logprobs
                            ),
                        )
                        for number, answer in enumerate(answers)
                    ]
                    about = self._about_prompt(
                        list(request.prompt),
                        include_prompt_logprobs,
                        topk_prompt_logprobs,
                        target_prompt_logprobs,
                        prompt_logprobs_last_n,
                    )
                    return types.SampleResponse(sequences=sequences, **about)

                try:
                    future.settle(refusing(respond)())
                except Exception as error:
                    future.fail(error)

            def fail(error: BaseException) -> None:
                if isinstance(error, ValueError) and not isinstance(error, tinker.TinkerError):
                    error = bad_request(str(error))
                future.fail(error)

            self.engine.waiting.append(Waiting(request, self.source, settle, fail))

        try:
            ask()
        except Exception as error:
            future.fail(error)
        return future

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: types.TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> types.SampleResponse:
        return await self.sample(
            prompt,
            num_samples,
            sampling_params,
            include_prompt_logprobs,
            topk_prompt_logprobs,
            topk_sample_logprobs,
            target_prompt_logprobs,
            prompt_alt_tokens_k,
            prompt_logprobs_last_n,
        )

    def compute_logprobs(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> Any:
        """Scores a prompt: None for its first token."""

        @refusing
        def call() -> list[float | None]:
            ids = token_ids(prompt, "the prompt")
            about = self._about_prompt(ids, True, 0, None, prompt_logprobs_last_n)
            found: np.ndarray = about["prompt_logprobs_np"]
            return [None if np.isnan(x) else float(x) for x in found]

        return done(call)

    async def compute_logprobs_async(
        self, prompt: types.ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> list[float | None]:
        found: list[float | None] = await self.compute_logprobs(prompt, prompt_logprobs_last_n)
        return found

    def _about_prompt(
        self,
        ids: list[int],
        has_log_probs: bool,
        top_k: int,
        targets: types.TensorData | None,
        last: int | None,
    ) -> dict[str, Any]:
        """Returns the fields of a response that are the prompt's."""
        length = len(ids)
        if last is not None and not (has_log_probs and 1 <= last <= length - 1):
            raise ValueError(
                f"prompt_logprobs_last_n={last} is from 1 to len(prompt) - 1 = {length - 1}, with "
                "include_prompt_logprobs=True."
            )
        found: dict[str, Any] = {}
        if not has_log_probs and not top_k and targets is None:
            return found
        if length < 2:
            if has_log_probs:
                found["prompt_logprobs_np"] = np.full(length, np.nan, np.float32)
            return found
        first = 1 if last is None else length - last
        with self.engine.weights_of(self.source) as client:
            if has_log_probs or top_k:
                row = {"input_ids": ids[:-1], "labels": ids[1:]}
                out = client.forward([row], top_k)
                values = np.full(length, np.nan, np.float32)
                values[first:] = out.log_probs[0][first - 1 :]
                if has_log_probs:
                    found["prompt_logprobs_np"] = values
                if top_k:
                    found["topk_prompt_logprobs_np"] = _top(out, length, first)
            if targets is not None:
                ids_NK = targets.to_numpy(pad_value=-1)
                if ids_NK.ndim != 2 or len(ids_NK) != length - 1:
                    raise ValueError(
                        f"target_prompt_logprobs has the shape {list(ids_NK.shape)}, and must be "
                        f"[len(prompt) - 1, K] = [{length - 1}, K]."
                    )
                out = client.forward([{"input_ids": ids[:-1], "target_ids": ids_NK}])
                found["target_prompt_logprobs"] = types.TensorData.from_numpy(out.log_probs[0])
        return found

    def _top_of_answer(self, prompt: Any, answer: list[int], top_k: int) -> Any:
        if not top_k:
            return None
        ids = [*prompt, *answer]
        labels = [-100] * (len(prompt) - 1) + list(answer)
        with self.engine.weights_of(self.source) as client:
            out = client.forward([{"input_ids": ids[:-1], "labels": labels}], top_k)
        return TopkLogprobs(
            token_ids=out.top_ids[0][len(prompt) - 1 :].astype(np.int32),
            logprobs=out.top_log_probs[0][len(prompt) - 1 :],
        )

    def get_tokenizer(self) -> Any:
        return self.engine.client.tokenizer

    def get_base_model(self) -> str:
        return self.base_model

    async def get_base_model_async(self) -> str:
        return self.base_model

    def get_telemetry(self) -> None:
        return None


def _top(out: Any, length: int, first: int) -> TopkLogprobs:
    """Returns the likeliest tokens of each position; the SDK's marks where there is none."""
    width = out.top_ids[0].shape[1]
    ids_NK = np.zeros((length, width), np.int32)
    log_probs_NK = np.full((length, width), MASK_LOGPROB, np.float32)
    ids_NK[first:] = out.top_ids[0][first - 1 :]
    log_probs_NK[first:] = out.top_log_probs[0][first - 1 :]
    return TopkLogprobs(token_ids=ids_NK, logprobs=log_probs_NK)


class RestClient:
    """Checkpoints and runs, as the folders that they are."""

    def __init__(
        self, _holder: Any = None, *, base_url: str | None = None, api_key: str | None = None
    ) -> None:
        self.root = SETTINGS.folder

    def get_server_capabilities(self) -> Any:
        models = [types.SupportedModel(model_name=name) for name in SETTINGS.models]
        return done(lambda: types.GetServerCapabilitiesResponse(supported_models=models))

    def get_telemetry(self) -> None:
        return None

    # ---------------------------------------------- runs
    def _run(self, run_id: str) -> types.TrainingRun:
        run = self.root / run_id
        facts = paths.read_facts(run)
        found = paths.checkpoints(run)
        of_training = [x for x in found if x.checkpoint_type == "training"]
        of_samplers = [x for x in found if x.checkpoint_type == "sampler"]
        times = [x.time for x in found] or [datetime.fromisoformat(facts["made"])]
        return types.TrainingRun(
            training_run_id=run_id,
            base_model=facts["base_model"],
            model_owner="",
            is_lora=bool(facts["rank"]),
            lora_rank=facts["rank"] or None,
            last_request_time=max(times),
            last_checkpoint=of_training[-1] if of_training else None,
            last_sampler_checkpoint=of_samplers[-1] if of_samplers else None,
            user_metadata=facts["user_metadata"],
        )

    def get_training_run(self, training_run_id: str, access_scope: Scope = "owned") -> Any:
        return done(refusing(lambda: self._run(training_run_id)))

    async def get_training_run_async(
        self, training_run_id: str, access_scope: Scope = "owned"
    ) -> types.TrainingRun:
        return await self.get_training_run(training_run_id)

    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: Scope = "owned"
    ) -> Any:
        return done(
            refusing(lambda: self._run(paths.folder_of(self.root, tinker_path).parent.parent.name))
        )

    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: Scope = "owned"
    ) -> types.TrainingRun:
        return await self.get_training_run_by_tinker_path(tinker_path)

    def list_training_runs(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: Scope = "owned",
        project_id: str | None = None,
    ) -> Any:
        def call() -> types.TrainingRunsResponse:
            names = sorted(
                (x.parent.name for x in self.root.glob(f"*/{paths.FACTS}")), reverse=True
            )
            return types.TrainingRunsResponse(
                training_runs=[self._run(name) for name in names[offset : offset + limit]],
                cursor=types.Cursor(offset=offset, limit=limit, total_count=len(names)),
            )

        return done(refusing(call))

    async def list_training_runs_async(
        self,
        limit: int = 20,
        offset: int = 0,
        access_scope: Scope = "owned",
        project_id: str | None = None,
    ) -> types.TrainingRunsResponse:
        return await self.list_training_runs(limit, offset)

    def get_weights_info_by_tinker_path(self, tinker_path: str) -> Any:
        def call() -> types.WeightsInfoResponse:
            facts = paths.read_facts(paths.folder_of(self.root, tinker_path).parent.parent)
            return types.WeightsInfoResponse(
                base_model=facts["base_model"],
                is_lora=bool(facts["rank"]),
                lora_rank=facts["rank"] or None,
            )

        return done(refusing(call))

    # ---------------------------------------------- checkpoints
    def list_checkpoints(self, training_run_id: str) -> Any:
        def call() -> types.CheckpointsListResponse:
            paths.read_facts(self.root / training_run_id)
            found = paths.checkpoints(self.root / training_run_id)
            return types.CheckpointsListResponse(checkpoints=found)

        return done(refusing(call))

    async def list_checkpoints_async(self, training_run_id: str) -> types.CheckpointsListResponse:
        return await self.list_checkpoints(training_run_id)

    def list_user_checkpoints(self, limit: int = 100, offset: int = 0) -> Any:
        def call() -> types.CheckpointsListResponse:
            runs = [path.parent for path in self.root.glob(f"*/{paths.FACTS}")]
            found = [checkpoint for run in runs for checkpoint in paths.checkpoints(run)]
            found.sort(key=lambda checkpoint: checkpoint.time, reverse=True)
            return types.CheckpointsListResponse(
                checkpoints=found[offset : offset + limit],
                cursor=types.Cursor(offset=offset, limit=limit, total_count=len(found)),
            )

        return done(refusing(call))

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> types.CheckpointsListResponse:
        return await self.list_user_checkpoints(limit, offset)

    def delete_checkpoint(self, training_run_id: str, checkpoint_id: str) -> Any:
        return self.delete_checkpoint_from_tinker_path(
            f"{paths.SCHEME}{training_run_id}/{checkpoint_id}"
        )

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        await self.delete_checkpoint(training_run_id, checkpoint_id)

    def delete_checkpoint_from_tinker_path(self, tinker_path: str) -> Any:
        @refusing
        def call() -> None:
            folder = paths.folder_of(self.root, tinker_path)
            for engine in itertools.islice(SETTINGS.engines.values(), 1):
                engine.client._ranks.on_first(lambda: paths.delete(folder))
                return
            paths.delete(folder)

        return done(call)

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in dir(_THEIRS):
            raise AttributeError(name)
        raise bad_request(
            f"RestClient.{name} is of the service: here runs and checkpoints are the folders in "
            f"{self.root}."
        )


_THEIRS = tinker.RestClient  # before `install` puts ours in its place
