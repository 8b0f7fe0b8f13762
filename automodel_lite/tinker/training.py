"""The client that trains, and saves what it has trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tinker
from tinker import types
from tinker.lib.public_interfaces.custom_loss import (
    LossHandle,
    check_loss_inputs,
    run_loss_handle,
)

from automodel_lite.parallel.control import all_ranks
from automodel_lite.tinker import paths
from automodel_lite.tinker.engines import Engine, Source, new_folder
from automodel_lite.tinker.futures import ClientFuture, Future, done
from automodel_lite.tinker.paths import Metadata
from automodel_lite.tinker.refusals import bad_request, note, of_service, refusing
from automodel_lite.tinker.rows import loss_of, output_of, rows_of, values_of
from automodel_lite.tinker.sampling import SamplingClient, sampler_of


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
        all_ranks().on_first(lambda: paths.write_facts(self.run, facts))
        self._request_error: BaseException | None = None

    def _do(self, call: Callable[[], Any], kind: type[Future[Any]] = Future) -> Any:
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

        return done(checked, kind)

    # ---------------------------------------------- training
    def forward(
        self, data: list[Any], loss_fn: str, loss_fn_config: Mapping[str, float | str] | None = None
    ) -> Any:
        """Computes log-probabilities and the loss, without gradients."""

        def call() -> Any:
            loss_of(loss_fn, loss_fn_config)
            rows, _ = rows_of(data, loss_fn)
            self._check_spans(data)
            with self.engine.of(self) as client:
                out = client.forward(rows)
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
            metrics: dict[str, float] = {}

            def of_rows(found: list[Any]) -> Any:
                own = [values_of(datum, values) for datum, values in zip(data, found)]
                if isinstance(loss_fn, LossHandle):
                    loss, more = run_loss_handle(loss_fn, data, own)
                else:
                    found_of_fn = loss_fn(data, own)
                    if not isinstance(found_of_fn, tuple) or len(found_of_fn) != 2:
                        raise TypeError(
                            "a custom loss returns (loss, metrics): a scalar tensor and a dict of "
                            f"numbers, which may be empty, not {type(found_of_fn).__name__}."
                        )
                    loss, more = found_of_fn
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
            raise TypeError(
                f"optim_step({type(given).__name__}): Expected AdamParams, such as "
                "types.AdamParams(learning_rate=1e-4): the optimizer is adamw here"
            )

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
            metrics = {"unclipped_grad_l2:mean": step.grad_norm} | self.engine.take_gap()
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
                if all_ranks().on_first(folder.exists):
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
        all_ranks().on_first(lambda: paths.write_metadata(folder, metadata))
        return path

    def _load(self, path: str, optimizer: bool) -> Any:
        folder = paths.folder_of(self.root, path).absolute()
        if optimizer and folder.parent.name == "sampler_weights":
            raise ValueError(
                f"{path} holds weights alone, and no optimizer: load what save_state has saved, or "
                "load the weights without the optimizer (load_state, or "
                "create_training_client_from_state)."
            )
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

    @of_service("weights_access_token")
    def load_state(self, path: str, weights_access_token: str | None = None) -> Any:
        return self._do(lambda: self._load(path, optimizer=False))

    @of_service("weights_access_token")
    async def load_state_async(self, path: str, weights_access_token: str | None = None) -> Any:
        return self.load_state(path)

    @of_service("weights_access_token")
    def load_state_with_optimizer(self, path: str, weights_access_token: str | None = None) -> Any:
        return self._do(lambda: self._load(path, optimizer=True))

    @of_service("weights_access_token")
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
    @of_service("retry_config", "record_stability_info")
    def create_sampling_client(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> ClientFuture[SamplingClient]:
        return done(refusing(lambda: sampler_of(self.root, model_path)), ClientFuture)  # type: ignore[no-any-return]

    @of_service("retry_config", "record_stability_info")
    async def create_sampling_client_async(
        self, model_path: str, retry_config: Any = None, record_stability_info: bool = False
    ) -> SamplingClient:
        return await self.create_sampling_client(model_path)

    @of_service("retry_config", "record_stability_info")
    def save_weights_and_get_sampling_client(
        self,
        name: str | None = None,
        retry_config: Any = None,
        record_stability_info: bool = False,
        kind: str = "snapshot",
    ) -> ClientFuture[SamplingClient]:
        """Makes a client of the weights as they are now; an inference server gets them when the
        first answer is wanted.
        """

        def call() -> SamplingClient:
            if name is not None:
                note("save_weights_and_get_sampling_client(name=...) is unused, as in the SDK")
            if kind not in ("snapshot", "inflight"):
                raise bad_request(f"kind={kind!r} is neither 'snapshot' nor 'inflight'.")
            with self.engine.of(self) as client:
                source = Source(client.snapshot(), self)
            return SamplingClient(self.engine, source, self.facts["base_model"])

        return self._do(call, ClientFuture)  # type: ignore[no-any-return]

    @of_service("retry_config", "record_stability_info")
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
