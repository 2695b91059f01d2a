"""Metrics in Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from composer3d import PluginError, RunContext, Secret, hookimpl, plugin

__all__ = ["Wandb"]


@plugin(family="profiling", extra="wandb")
class Wandb:
    """Log every metric of every step to Weights & Biases, with the resolved manifest as the run's configuration.

    Memory: that of the library's process on the first rank's machine.
    Collectives: none; the first rank logs.

    Args:
        project: The project; default: the library's.
        name: The run's; default: the library makes one.
        entity: The team or user whose project it is; default: the library's, of `WANDB_ENTITY` or the login.
        group: What the run is grouped with.
        tags: Of the run.
        mode: `online` sends, `offline` writes into the run's folder for `wandb sync`.
        api_key: A secret, which is neither shown nor written: a string, `{ env = "NAME" }` or `{ file = "PATH" }`;
            default: `WANDB_API_KEY`, or where the library's login put it.
    """

    project: str | None = None
    name: str | None = None
    entity: str | None = Field(default=None, min_length=1)
    group: str | None = Field(default=None, min_length=1)
    tags: tuple[Annotated[str, Field(min_length=1, max_length=64)], ...] = ()
    mode: Literal["online", "offline"] = "online"
    api_key: Secret | None = None

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse a run without the library."""
        if importlib.util.find_spec("wandb") is None:
            raise PluginError("wandb is not installed", hint='pip install "composer3d[wandb]"')
        if context.purpose == "run":
            self._key(context)

    @hookimpl
    def composer3d_metrics(self, context: RunContext, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a step's row to the library, which sends it in its own time."""
        if context.rank != 0 or context.purpose != "run":
            return
        if self not in context.state:
            context.state[self] = self._start(context)
        context.state[self].log(dict(metrics), step=step)

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Say how the run ended, and wait until the library has written it."""
        if self in context.state:
            context.state[self].finish(exit_code=0 if error is None else 1)

    def _key(self, context: RunContext) -> str | None:
        return None if self.api_key is None else self.api_key.reveal(context.manifest.document.folder)

    def _start(self, context: RunContext) -> Any:
        context.output.mkdir(parents=True, exist_ok=True)
        wandb = importlib.import_module("wandb")
        key = self._key(context)
        return wandb.init(
            project=self.project,
            name=self.name,
            entity=self.entity,
            group=self.group,
            tags=self.tags or None,
            mode=self.mode,
            settings=None if key is None else wandb.Settings(api_key=key),
            dir=str(context.output),
            config={"manifest": context.manifest.document.to_toml(), "layout": str(context.layout)},
        )
