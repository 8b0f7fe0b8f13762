"""What a wheel carries beside the package: the pages of docs/, which `automodel-lite docs` prints.

Pictures and the scripts that write pages stay in the checkout.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Pages(BuildHookInterface):  # type: ignore[type-arg]
    """Adds each page at its place in automodel_lite/docs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # a checkout has them
            return
        docs = Path(self.root, "docs")
        for page in docs.rglob("*.md"):
            place = page.relative_to(docs).as_posix()
            build_data["force_include"][str(page)] = f"automodel_lite/docs/{place}"
