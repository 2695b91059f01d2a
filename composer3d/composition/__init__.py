"""Composition of a model by a manifest: preparing, agreeing, applying, assembling, and the object that a loop uses."""

from __future__ import annotations

from composer3d.composition.agreeing import agree, described, fingerprint, leaves
from composer3d.composition.applying import apply_transforms, give_memory, gradient_hooks
from composer3d.composition.assembling import build_mesh, freeze
from composer3d.composition.blocks import find_blocks
from composer3d.composition.experts.expert_contract import is_matrix, stacked_parameters
from composer3d.composition.experts.routed_lists import routed_lists
from composer3d.composition.loop.sampling import Sampler, indices, local_slice
from composer3d.composition.preparing import PlanRow, Preparation, layout_of, prepare
from composer3d.composition.run_state.rank_state import StoredState

__all__ = [
    "PlanRow",
    "Preparation",
    "Sampler",
    "StoredState",
    "agree",
    "apply_transforms",
    "build_mesh",
    "described",
    "find_blocks",
    "fingerprint",
    "freeze",
    "give_memory",
    "gradient_hooks",
    "indices",
    "is_matrix",
    "layout_of",
    "leaves",
    "local_slice",
    "prepare",
    "routed_lists",
    "stacked_parameters",
]
