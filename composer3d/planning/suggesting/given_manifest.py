"""Layouts of a given manifest: checked, planned, and traced for the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from composer3d import ModelFindings
from composer3d.checking import Inspection, device_of, inspect, open_manifest
from composer3d.errors import ComposerError, ManifestError

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.manifest import InspectedManifest, Manifest
    from composer3d.planning.formulas.layout_numbers import Setup
    from composer3d.planning.formulas.manifest_setup import Offered
    from composer3d.planning.hardware.cluster import Hardware
    from composer3d.planning.suggesting.layout_costs import LayoutCosts
    from composer3d.planning.suggesting.traced_costs import TracedCosts
    from composer3d.planning.suggesting.trials import Planned

__all__ = ["GivenManifest"]

GIB = 2**30


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenManifest:
    """The given manifest, and other layouts of it.

    Args:
        source: Path, or the name of a shipped manifest.
        overrides: As given to `--set`.
        world_size: Ranks of the run.
        hardware: The cluster, with the manifest's nodes.
        found: What `check` says of it.
        preparation: It joined with its model.
        findings: Of its model, for all layouts.
    """

    source: str
    overrides: Sequence[str]
    world_size: int
    hardware: Hardware
    found: Inspection
    manifest: Manifest
    preparation: Preparation
    findings: ModelFindings
    _planned: dict[tuple[str, ...], Planned] = field(default_factory=dict)

    @classmethod
    def of(cls, source: str, overrides: Sequence[str], world_size: int, hardware: Hardware) -> GivenManifest:
        """Open and inspect a manifest.

        Raises:
            ManifestError: Nothing is known of its model: its reference or a plugin's option is wrong.
        """
        from composer3d.planning.tracing.fake_composition import is_fused

        inspected = open_manifest(source, overrides)
        if inspected.problems:
            raise ManifestError(inspected.problems)
        findings, device = ModelFindings(), device_of(inspected.manifest, else_of=hardware.device.kind)
        found = inspect(inspected, world_size=world_size, rank=0, device=device, findings=findings)
        if found.preparation is None:
            raise ManifestError(found.ordered())
        return cls(
            source=source,
            overrides=tuple(overrides),
            world_size=world_size,
            hardware=hardware.with_nodes(inspected.manifest.mesh.gpus_per_node).with_stack(
                "compiled" if is_fused(found.preparation) else "eager"
            ),
            found=found,
            manifest=inspected.manifest,
            preparation=found.preparation,
            findings=findings,
        )

    @cached_property
    def own(self) -> Setup:
        """The manifest in numbers; degrees that do not fit the world stay as they are stated."""
        from composer3d.mesh import Role
        from composer3d.planning.formulas.manifest_setup import setup_of

        degrees = {axis: degree for axis, degree in self.manifest.degrees.items() if degree is not None and degree > 0}
        layout = self.found.layout
        if layout is None:
            return setup_of(self.manifest, degrees)
        models = layout.degree(Role.INDEPENDENT, Role.REPLICA)
        return setup_of(self.manifest, dict(layout.degrees), num_models=models)

    @cached_property
    def offers(self) -> tuple[Offered, ...]:
        """Layouts that installed plugins can make."""
        from composer3d.planning.formulas.manifest_setup import installed_offers

        return installed_offers(self.manifest)

    @property
    def num_parameters(self) -> int:
        """Of the model; tied ones count once."""
        return sum(parameter.numel() for parameter in self.preparation.model.parameters())

    @cached_property
    def costs(self) -> LayoutCosts:
        """Costs of its layouts."""
        from composer3d.planning.suggesting.layout_costs import LayoutCosts

        blocks = self._blocks()
        sizes = [(fqn, parameter.numel()) for fqn, parameter in self.preparation.model.named_parameters()]
        inside = [any(fqn.startswith(f"{block}.") for block in blocks) for fqn, _ in sizes]
        before = inside.index(True) if True in inside else 0
        outer = sum(size for (_, size), is_inside in zip(sizes, inside, strict=True) if not is_inside)
        return LayoutCosts(
            trace=self._trace,
            hardware=self.hardware,
            own=self.own,
            num_blocks=max(1, len(blocks)),
            first_part=sum(size for _, size in sizes[:before]) / outer if outer else 0.5,
        )

    def _blocks(self) -> Sequence[str]:
        from composer3d import patterns

        try:
            return patterns.select(self.preparation.context.blocks, self.preparation.context.fqns)
        except ComposerError:  # no single list of equal blocks
            return ()

    def changes_to(self, setup: Setup) -> tuple[str, ...]:
        """Return what `--set` has to say for the manifest to become another layout."""
        from composer3d.planning.formulas.manifest_setup import patch

        return patch(self.manifest, self.own, setup, self.offers)

    def _inspected(self, setup: Setup) -> tuple[InspectedManifest, Inspection]:
        """Ask `check` for a layout, in this process.

        Raises:
            ComposerError: It is refused.
        """
        inspected = open_manifest(self.source, [*self.overrides, *self.changes_to(setup)])
        where = device_of(inspected.manifest, else_of=self.hardware.device.kind)
        found = inspect(inspected, world_size=setup.world_size, rank=0, device=where, findings=self.findings)
        if not found.ok(strict=False) or found.preparation is None:
            raise ComposerError("; ".join(map(str, found.ordered())))
        return inspected, found

    def planned(self, setup: Setup) -> Planned:
        """Check and plan a layout, in this process.

        Raises:
            ComposerError: It is refused, or cannot be planned.
        """
        from composer3d.planning.manifest_plan import traced_manifest
        from composer3d.planning.plan import plan_of
        from composer3d.planning.suggesting.trials import Planned

        changes = self.changes_to(setup)
        if changes not in self._planned:
            overrides = [*self.overrides, *changes]
            traced = traced_manifest(
                self.source,
                overrides,
                world_size=setup.world_size,
                device=self.hardware.device.kind,
                findings=self.findings,
            )
            made = plan_of(traced, hardware=self.hardware)
            assert made.time is not None, "planned on hardware"
            fullest = max((rank.allocation for rank in made.ranks), key=lambda allocation: allocation.total)
            self._planned[changes] = Planned(peak=fullest.allocated, total=fullest.total, time=made.time)
        return self._planned[changes]

    def _trace(self, setup: Setup) -> TracedCosts:
        from composer3d.planning.manifest_plan import inspected_job
        from composer3d.planning.suggesting.traced_costs import traced_costs
        from composer3d.planning.tracing.model_errors import tracing_model
        from composer3d.planning.tracing.rank_tracer import Tracer

        parameters = list(self.preparation.model.parameters())
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        inspected, found = self._inspected(setup)
        job = replace(inspected_job(inspected, found), num_microbatches=1)
        with tracing_model(job.manifest, found, in_full=False):
            return traced_costs(
                Tracer(job),
                self.hardware,
                microbatch=setup.microbatch,
                parameter_size=size / self.num_parameters,
            )

    @cached_property
    def as_given(self) -> Planned | str:
        """Its own costs, or why it has none."""
        errors = [problem for problem in self.found.ordered() if problem.severity == "error"]
        if errors:
            return f"cannot run: {errors[0]}"
        if self.own.world_size != self.world_size:
            return f"is for {self.own.world_size} ranks"
        try:
            return self.planned(self.own)
        except ComposerError as error:
            return f"cannot be planned: {error}"

    def verdict(self, memory_bytes: float) -> str:
        """Return whether the given manifest fits on a device, and how long a step takes."""
        if isinstance(self.as_given, str):
            return f"the given manifest {self.as_given}"
        mine = self.as_given.of(self.own)
        needs = f"{mine.reserved_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB, {mine.step_s:.3g} s a step"
        return f"the given manifest {mine.verdict(memory_bytes)}: {needs}"
