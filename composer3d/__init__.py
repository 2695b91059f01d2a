"""composer3d: compose parallelism onto any module from a TOML manifest, and prove the composition first.

The public API. Names are imported when they are first used, so that `composer3d --help` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d import propagation as propagation
    from composer3d import torch_compat as torch_compat
    from composer3d.checking.checked import CheckResult, check
    from composer3d.communication import (
        Codec,
        CodedCollectives,
        CodedExchange,
        GroupOptions,
        InPlaceCodec,
        NCCLOptions,
        ReplicaReduction,
        ReplicaReductions,
        SequenceProjection,
        SequenceProjections,
        block_codec,
    )
    from composer3d.composition.compose import compose
    from composer3d.composition.composition import Composition
    from composer3d.composition.experts.expert_contract import (
        ExpertForm,
        expert_counts,
        expert_form,
        has_stacked_experts,
        shared_by_experts,
        stacked_layers,
        stacked_number,
    )
    from composer3d.composition.experts.expert_products import multiply_experts, standing_in, summed_dims
    from composer3d.composition.experts.routed_lists import caller_of, chosen_by_values, listed_experts
    from composer3d.composition.loop.sampling import Sampler
    from composer3d.composition.model_findings import ModelFindings
    from composer3d.composition.preparing import PlanRow
    from composer3d.context import RunContext
    from composer3d.errors import (
        BatchError,
        CheckpointError,
        ComposerError,
        DataError,
        ForkError,
        InitialisationError,
        LossError,
        ManifestError,
        MeshError,
        ModelError,
        OrderError,
        PatternError,
        PluginError,
        Problem,
        QueryError,
        RankError,
        StepError,
        TransformError,
    )
    from composer3d.hookspecs import hookimpl
    from composer3d.importing.importer import import_config
    from composer3d.importing.verdicts import ImportResult, KeyVerdict
    from composer3d.initialisation import place, seed_of
    from composer3d.initialisation.parameter_order import StoredOrders
    from composer3d.interfaces import (
        Action,
        Batch,
        DataDependent,
        Decisions,
        Dtypes,
        Exports,
        GradScaler,
        LayoutOffer,
        LayoutTraits,
        Loss,
        Metric,
        Microbatches,
        ParameterMesh,
        Part,
        PlannedShards,
        Recorder,
        Schedule,
        Split,
        Stateful,
        Unit,
        Units,
    )
    from composer3d.jobs.job import Job, launch
    from composer3d.linear_selection import (
        ConvertedLayers,
        LinearSharding,
        linear_layers,
        linear_sharding,
        on_local_shards,
    )
    from composer3d.manifest import Manifest, resolve_reference
    from composer3d.manifest.secret import Secret
    from composer3d.mesh import Axis, Layout, Role
    from composer3d.mesh.batch_pieces import SampleWeights, pieces_of
    from composer3d.observation.torch_errors import TorchErrors
    from composer3d.patterns import select as select_fqns
    from composer3d.planning.manifest_plan import PlanResult, plan
    from composer3d.planning.schedules.planned_stages import StageForms, WarmUp
    from composer3d.planning.suggesting.manifest_suggestions import SuggestResult, suggest
    from composer3d.processes.json_exchange import all_gather_json, broadcast_json, receive_json, send_json
    from composer3d.registry import plugin
    from composer3d.replicas import ReplicaPolicy
    from composer3d.runner.loaded_manifest import load_manifest
    from composer3d.runner.run import RunResult, run
    from composer3d.step.evaluation import EvaluatedWeights, Evaluation
    from composer3d.step.gradients import average_whole, averaging_action, reducing_point
    from composer3d.step.host_storages import HostMemory
    from composer3d.step.losses.inside_values import InsideValues
    from composer3d.step.microbatches import map_tensors, units_of
    from composer3d.step.optimizers.unit_steps import SteppedUnit, SteppedUnits
    from composer3d.step.rank_numbers import RankNumbers
    from composer3d.step.received_values import ReceivedValues
    from composer3d.step.step_state import StepState
    from composer3d.step.units.gathered_units import make_unit
    from composer3d.step.units.own_meshes import own_meshes, whole_in_own_meshes
    from composer3d.step.units.unit_dtypes import divide_by_dtype
    from composer3d.transform import Phase, StepAction, StepPoint, Transform
    from composer3d.verification.verify import VerifyResult, verify

_MODULES = {
    "checking.checked": ("CheckResult", "check"),
    "planning.manifest_plan": ("PlanResult", "plan"),
    "planning.schedules.planned_stages": ("StageForms", "WarmUp"),
    "planning.suggesting.manifest_suggestions": ("SuggestResult", "suggest"),
    "runner.loaded_manifest": ("load_manifest",),
    "runner.run": ("RunResult", "run"),
    "jobs.job": ("Job", "launch"),
    "verification.verify": ("VerifyResult", "verify"),
    "step.microbatches": ("map_tensors", "units_of"),
    "communication": (
        "Codec",
        "CodedCollectives",
        "CodedExchange",
        "GroupOptions",
        "InPlaceCodec",
        "NCCLOptions",
        "ReplicaReduction",
        "ReplicaReductions",
        "SequenceProjection",
        "SequenceProjections",
        "block_codec",
    ),
    "composition.compose": ("compose",),
    "composition.model_findings": ("ModelFindings",),
    "composition.composition": ("Composition",),
    "context": ("RunContext",),
    "errors": (
        "BatchError",
        "CheckpointError",
        "ComposerError",
        "DataError",
        "ForkError",
        "InitialisationError",
        "LossError",
        "ManifestError",
        "MeshError",
        "ModelError",
        "OrderError",
        "PatternError",
        "PluginError",
        "Problem",
        "QueryError",
        "RankError",
        "StepError",
        "TransformError",
    ),
    "step.evaluation": ("EvaluatedWeights", "Evaluation"),
    "step.optimizers.unit_steps": ("SteppedUnit", "SteppedUnits"),
    "step.losses.inside_values": ("InsideValues",),
    "step.rank_numbers": ("RankNumbers",),
    "step.host_storages": ("HostMemory",),
    "step.received_values": ("ReceivedValues",),
    "step.units.gathered_units": ("make_unit",),
    "step.gradients": ("average_whole", "averaging_action", "reducing_point"),
    "step.units.own_meshes": ("own_meshes", "whole_in_own_meshes"),
    "step.units.unit_dtypes": ("divide_by_dtype",),
    "linear_selection": ("ConvertedLayers", "LinearSharding", "linear_layers", "linear_sharding", "on_local_shards"),
    "manifest": ("Manifest", "resolve_reference"),
    "mesh": ("Axis", "Layout", "Role"),
    "mesh.batch_pieces": ("SampleWeights", "pieces_of"),
    "processes.json_exchange": ("all_gather_json", "broadcast_json", "receive_json", "send_json"),
    "composition.preparing": ("PlanRow",),
    "composition.experts.expert_contract": (
        "ExpertForm",
        "expert_counts",
        "expert_form",
        "has_stacked_experts",
        "shared_by_experts",
        "stacked_layers",
        "stacked_number",
    ),
    "composition.experts.expert_products": ("multiply_experts", "standing_in", "summed_dims"),
    "composition.experts.routed_lists": ("caller_of", "chosen_by_values", "listed_experts"),
    "interfaces": (
        "Action",
        "Batch",
        "DataDependent",
        "Decisions",
        "Dtypes",
        "Exports",
        "GradScaler",
        "LayoutOffer",
        "LayoutTraits",
        "Loss",
        "Metric",
        "Microbatches",
        "ParameterMesh",
        "Part",
        "PlannedShards",
        "Recorder",
        "Schedule",
        "Split",
        "Stateful",
        "Unit",
        "Units",
    ),
    "hookspecs": ("hookimpl",),
    "importing.importer": ("import_config",),
    "importing.verdicts": ("ImportResult", "KeyVerdict"),
    "initialisation": ("place", "seed_of"),
    "initialisation.parameter_order": ("StoredOrders",),
    "registry": ("plugin",),
    "replicas": ("ReplicaPolicy",),
    "composition.loop.sampling": ("Sampler",),
    "manifest.secret": ("Secret",),
    "step.step_state": ("StepState",),
    "observation.torch_errors": ("TorchErrors",),
    "transform": ("Phase", "StepAction", "StepPoint", "Transform"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Action",
    "Axis",
    "Batch",
    "BatchError",
    "CheckResult",
    "CheckpointError",
    "Codec",
    "CodedCollectives",
    "CodedExchange",
    "ComposerError",
    "Composition",
    "ConvertedLayers",
    "DataDependent",
    "DataError",
    "Decisions",
    "Dtypes",
    "EvaluatedWeights",
    "Evaluation",
    "ExpertForm",
    "Exports",
    "ForkError",
    "GradScaler",
    "GroupOptions",
    "HostMemory",
    "ImportResult",
    "InPlaceCodec",
    "InitialisationError",
    "InsideValues",
    "Job",
    "KeyVerdict",
    "Layout",
    "LayoutOffer",
    "LayoutTraits",
    "LinearSharding",
    "Loss",
    "LossError",
    "Manifest",
    "ManifestError",
    "MeshError",
    "Metric",
    "Microbatches",
    "ModelError",
    "ModelFindings",
    "NCCLOptions",
    "OrderError",
    "ParameterMesh",
    "Part",
    "PatternError",
    "Phase",
    "PlanResult",
    "PlanRow",
    "PlannedShards",
    "PluginError",
    "Problem",
    "QueryError",
    "RankError",
    "RankNumbers",
    "ReceivedValues",
    "Recorder",
    "ReplicaPolicy",
    "ReplicaReduction",
    "ReplicaReductions",
    "Role",
    "RunContext",
    "RunResult",
    "SampleWeights",
    "Sampler",
    "Schedule",
    "Secret",
    "SequenceProjection",
    "SequenceProjections",
    "Split",
    "Stateful",
    "StepAction",
    "StepError",
    "StepPoint",
    "StepState",
    "SteppedUnit",
    "SteppedUnits",
    "StoredOrders",
    "SuggestResult",
    "TorchErrors",
    "Transform",
    "TransformError",
    "Unit",
    "Units",
    "VerifyResult",
    "StageForms",
    "WarmUp",
    "all_gather_json",
    "average_whole",
    "averaging_action",
    "block_codec",
    "broadcast_json",
    "caller_of",
    "check",
    "chosen_by_values",
    "compose",
    "divide_by_dtype",
    "expert_counts",
    "expert_form",
    "has_stacked_experts",
    "hookimpl",
    "import_config",
    "launch",
    "linear_layers",
    "linear_sharding",
    "listed_experts",
    "load_manifest",
    "make_unit",
    "map_tensors",
    "multiply_experts",
    "on_local_shards",
    "own_meshes",
    "pieces_of",
    "place",
    "plan",
    "plugin",
    "propagation",
    "receive_json",
    "reducing_point",
    "resolve_reference",
    "run",
    "seed_of",
    "select_fqns",
    "send_json",
    "shared_by_experts",
    "stacked_layers",
    "stacked_number",
    "standing_in",
    "suggest",
    "summed_dims",
    "torch_compat",
    "units_of",
    "verify",
    "whole_in_own_meshes",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        metadata = import_module("importlib.metadata")
        try:
            return metadata.version("composer3d")
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            return "0+unknown"
    if name == "select_fqns":
        return import_module("composer3d.patterns").select
    if name in ("propagation", "runner", "torch_compat"):
        return import_module(f"composer3d.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'composer3d' has no attribute '{name}'")
    return getattr(import_module(f"composer3d.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
