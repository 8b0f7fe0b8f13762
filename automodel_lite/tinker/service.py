"""The client that makes the others.

Clients have the names, arguments and units of Tinker's SDK, over the training client.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, trace_loss

from automodel_lite.tinker import paths
from automodel_lite.tinker.engines import SETTINGS, Engine, Source
from automodel_lite.tinker.futures import ClientFuture, Future, done
from automodel_lite.tinker.paths import Metadata
from automodel_lite.tinker.refusals import bad_request, note, of_service, refusing
from automodel_lite.tinker.rest import RestClient
from automodel_lite.tinker.sampling import SamplingClient, sampler_of
from automodel_lite.tinker.training import TrainingClient

_SESSION = "in-process"


class ServiceClient:
    """Makes clients of models in this process; see `install` for what their names stand for."""

    @of_service("project_id", "display_name", "base_url", "api_key", "default_headers_overrides")
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
        self.user_metadata = user_metadata
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
        return self.create_rest_client().get_server_capabilities().result()

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
            _check_optimizer(optimizer)
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
        self,
        path: str,
        base_model: str | None,
        metadata: Metadata,
        optimizer: bool,
        asked: types.OptimizerConfig | None = None,
    ) -> ClientFuture[TrainingClient]:
        @refusing
        def make() -> TrainingClient:
            folder = paths.folder_of(self.root, path)
            facts = paths.read_facts(folder.parent.parent)
            paths.check_base_model(base_model, facts, path)
            _check_optimizer(asked)
            engine = SETTINGS.engine(facts["base_model"], facts["more"])
            facts |= {
                "user_metadata": metadata or self.user_metadata,
                "made": datetime.now(UTC).isoformat(),
            }
            client = TrainingClient(engine, self.root, facts)
            client._load(path, optimizer)
            return client

        return done(make, ClientFuture)  # type: ignore[no-any-return]

    @of_service("weights_access_token")
    def create_training_client_from_state(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> ClientFuture[TrainingClient]:
        return self._from_state(path, base_model, user_metadata, False, optimizer)

    @of_service("weights_access_token")
    async def create_training_client_from_state_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
        optimizer: types.OptimizerConfig | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, False, optimizer)

    @of_service("weights_access_token")
    def create_training_client_from_state_with_optimizer(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
    ) -> ClientFuture[TrainingClient]:
        return self._from_state(path, base_model, user_metadata, optimizer=True)

    @of_service("weights_access_token")
    async def create_training_client_from_state_with_optimizer_async(
        self,
        path: str,
        base_model: str | None = None,
        user_metadata: Metadata = None,
        weights_access_token: str | None = None,
    ) -> TrainingClient:
        return await self._from_state(path, base_model, user_metadata, optimizer=True)

    # ---------------------------------------------- clients that sample
    @of_service("retry_config", "record_stability_info")
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
                return sampler_of(self.root, model_path, base_model)
            if base_model is None:
                raise ValueError("Either model_path or base_model must be provided")
            # a model that is in memory has its start model inside, without the adapter
            for engine in SETTINGS.loaded(base_model):
                if engine.has_adapter:
                    return _of_start_model(engine, base_model)
            engine = SETTINGS.engine(base_model, [])
            if engine.owner is None:
                engine.owner = engine
            if engine.owner is engine:
                return SamplingClient(engine, Source(engine.client.snapshot(), engine), base_model)
            return _of_start_model(engine, base_model)

        return done(make, ClientFuture)  # type: ignore[no-any-return]

    @of_service("retry_config", "record_stability_info")
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

    def create_rest_client(self) -> RestClient:
        return RestClient()


def _of_start_model(engine: Engine, base_model: str) -> SamplingClient:
    if engine.server is not None:
        note(f"answers of {base_model} before training are drawn here: --sampler has later weights")
    return SamplingClient(engine, Source(None, None), base_model)


def _check_optimizer(optimizer: types.OptimizerConfig | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise bad_request(f"optimizer={optimizer.type}: here it is adamw.")
