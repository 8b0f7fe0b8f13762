"""The client of runs and their checkpoints."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import tinker
from tinker import types

from automodel_lite.parallel.control import all_ranks
from automodel_lite.tinker import paths
from automodel_lite.tinker.engines import SETTINGS
from automodel_lite.tinker.futures import done
from automodel_lite.tinker.refusals import bad_request, of_service, refusing

Scope = Literal["owned", "accessible"]
_THEIRS = tinker.RestClient  # before `install` puts ours in its place


class RestClient:
    """Checkpoints and runs, as the folders that they are."""

    @of_service("base_url", "api_key")
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

    @of_service("access_scope")
    def get_training_run(self, training_run_id: str, access_scope: Scope = "owned") -> Any:
        return done(refusing(lambda: self._run(training_run_id)))

    @of_service("access_scope")
    async def get_training_run_async(
        self, training_run_id: str, access_scope: Scope = "owned"
    ) -> types.TrainingRun:
        return await self.get_training_run(training_run_id)

    @of_service("access_scope")
    def get_training_run_by_tinker_path(
        self, tinker_path: str, access_scope: Scope = "owned"
    ) -> Any:
        return done(
            refusing(lambda: self._run(paths.folder_of(self.root, tinker_path).parent.parent.name))
        )

    @of_service("access_scope")
    async def get_training_run_by_tinker_path_async(
        self, tinker_path: str, access_scope: Scope = "owned"
    ) -> types.TrainingRun:
        return await self.get_training_run_by_tinker_path(tinker_path)

    @of_service("access_scope", "project_id")
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

    @of_service("access_scope", "project_id")
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
        def call() -> None:
            folder = paths.folder_of(self.root, tinker_path)
            all_ranks().on_first(lambda: paths.delete(folder))

        return done(refusing(call))

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        await self.delete_checkpoint_from_tinker_path(tinker_path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in dir(_THEIRS):
            raise AttributeError(name)
        raise bad_request(
            f"RestClient.{name} is of the service: here runs and checkpoints are the folders in "
            f"{self.root}."
        )
