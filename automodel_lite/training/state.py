"""Where a run stands: what the next step depends on, beside tensors and settings."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from automodel_lite.data.feeding.source import Cursor, PackSource
from automodel_lite.parallel.mesh import Mesh, world_size


@dataclass
class TrainState:
    """Kept in each checkpoint: small, and JSON."""

    num_steps: int = 0
    cursor: Cursor = field(default_factory=Cursor)
    pending_validation: bool = False  # of this step: it is due, or was interrupted
    val_loss: float | None = None  # of this step
    sources: dict[str, str] = field(default_factory=dict)  # digests of model files and validation sets

    def advance(self, after: Cursor) -> None:
        """A step is finished, and `after` is the position in the data."""
        self.num_steps, self.cursor, self.val_loss = self.num_steps + 1, after, None

    def to_json(self, data: PackSource, mesh: Mesh, extra: dict[str, Any]) -> dict[str, Any]:
        """The content of state.json; every rank calls it. `extra` is what the callbacks keep."""
        return {
            "data": data.fingerprint(),
            "world_size": world_size(),
            "step": self.num_steps,
            "cursor": asdict(self.cursor.gather(mesh)),
            "extra": extra,
            "owes_validation": self.pending_validation,
            "val_loss": self.val_loss,
            "sources": self.sources,
        }
