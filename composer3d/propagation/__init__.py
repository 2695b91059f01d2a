"""Propagation of shards through a model's own code: global sizes to the code, a placement per mesh axis to tensors.

`Propagation` is a mode of torch functions. While it is entered, a tensor that carries a mark is this rank's shard of a
larger one: code that asks for its shape gets the global one, functions work on the shard, and their results are marked
in turn. Whatever needs other ranks' elements is gathered where that is exact, or refused with the function's name.
`PropagatedModule` enters it in every forward of a module, and again where a part of that is recomputed. `dry_run` does
the same on meta, without ranks and weights: what a plugin selects, and refuses, is found there.

A plugin marks what it shards (`mark`, `Marks`), wraps modules, and reads marks back (`spec_of`, `strip`, `unmark`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.processes.late_imports import late_imports
from composer3d.torch_compat.multihead_attention import call_of

if TYPE_CHECKING:
    from composer3d.propagation.captured_forward import repeatable
    from composer3d.propagation.decision_cache import Memory
    from composer3d.propagation.dry_run.attribute_state import KeptState, attributes_of
    from composer3d.propagation.dry_run.block_flow import Flow, blocks_beside, blocks_of
    from composer3d.propagation.dry_run.held_objects import PLAIN, held_by, reached_from, tensors_of
    from composer3d.propagation.dry_run.meta_forward import VALUES, device_of, in_mode, on_meta, patched, unseen
    from composer3d.propagation.dry_run.meta_records import Record
    from composer3d.propagation.dry_run.meta_trace import Traced, outside, plain, trace
    from composer3d.propagation.dry_run.outside_state import OutsideState
    from composer3d.propagation.dry_run.registered_hooks import RegisteredHooks
    from composer3d.propagation.function_mode import Propagation
    from composer3d.propagation.functions.contractions import Products
    from composer3d.propagation.functions.dropping_attention import attend_drawing
    from composer3d.propagation.functions.function_dims import dims_of, name_of
    from composer3d.propagation.functions.random_functions import eagerly, may_draw, site_of
    from composer3d.propagation.functions.view_shapes import Placed
    from composer3d.propagation.functions.whole_operands import is_in_place
    from composer3d.propagation.jit_functions import (
        attributes_in_use,
        compiled_functions,
        is_elementwise,
        scripted_functions,
    )
    from composer3d.propagation.module_calls import SMALL, Call, activation_of, first_of, replaced
    from composer3d.propagation.module_kinds import Kind, kind_of, reader_of
    from composer3d.propagation.propagated_module import PropagatedModule
    from composer3d.propagation.sequences.attention_call import AttentionCall, Reach, SequenceRules
    from composer3d.propagation.sequences.closed_shards import closing_shards
    from composer3d.propagation.sequences.loss_mode import LossPropagation, Relation
    from composer3d.propagation.sequences.outside_values import OutsideValues
    from composer3d.propagation.sequences.position_draws import PositionDraws, SequenceDraws
    from composer3d.propagation.sequences.propagated_sequence import PropagatedSequence, Sharded
    from composer3d.propagation.sequences.sequence_begins import Begins
    from composer3d.propagation.sequences.sequence_mode import SequencePropagation
    from composer3d.propagation.sequences.sequence_operands import gather_along, gather_parts
    from composer3d.propagation.shards import (
        SEQUENCE,
        TENSOR_AXIS,
        KeptShardError,
        Marks,
        PropagationError,
        Ranges,
        ShardSpec,
        attach,
        copy_mark,
        exchanged,
        mark,
        restated,
        spec_of,
        strip,
        unmark,
    )

_MODULES = {
    "captured_forward": ("repeatable",),
    "decision_cache": ("Memory",),
    "dry_run.attribute_state": ("KeptState", "attributes_of"),
    "dry_run.block_flow": ("Flow", "blocks_beside", "blocks_of"),
    "dry_run.held_objects": ("PLAIN", "held_by", "reached_from", "tensors_of"),
    "dry_run.meta_forward": ("VALUES", "device_of", "in_mode", "on_meta", "patched", "unseen"),
    "dry_run.meta_records": ("Record",),
    "dry_run.meta_trace": ("Traced", "outside", "plain", "trace"),
    "dry_run.outside_state": ("OutsideState",),
    "dry_run.registered_hooks": ("RegisteredHooks",),
    "function_mode": ("Propagation",),
    "functions.contractions": ("Products",),
    "functions.dropping_attention": ("attend_drawing",),
    "functions.function_dims": ("dims_of", "name_of"),
    "functions.random_functions": ("eagerly", "may_draw", "site_of"),
    "functions.view_shapes": ("Placed",),
    "functions.whole_operands": ("is_in_place",),
    "module_calls": ("Call", "SMALL", "activation_of", "first_of", "replaced"),
    "module_kinds": ("Kind", "kind_of", "reader_of"),
    "propagated_module": ("PropagatedModule",),
    "jit_functions": ("attributes_in_use", "compiled_functions", "is_elementwise", "scripted_functions"),
    "sequences.attention_call": ("AttentionCall", "Reach", "SequenceRules"),
    "sequences.closed_shards": ("closing_shards",),
    "sequences.loss_mode": ("LossPropagation", "Relation"),
    "sequences.outside_values": ("OutsideValues",),
    "sequences.position_draws": ("PositionDraws", "SequenceDraws"),
    "sequences.propagated_sequence": ("PropagatedSequence", "Sharded"),
    "sequences.sequence_begins": ("Begins",),
    "sequences.sequence_mode": ("SequencePropagation",),
    "sequences.sequence_operands": ("gather_along", "gather_parts"),
    "shards": (
        "KeptShardError",
        "Marks",
        "PropagationError",
        "Ranges",
        "SEQUENCE",
        "ShardSpec",
        "TENSOR_AXIS",
        "attach",
        "copy_mark",
        "exchanged",
        "mark",
        "restated",
        "spec_of",
        "strip",
        "unmark",
    ),
}

__all__ = [
    "AttentionCall",
    "Begins",
    "Call",
    "ShardSpec",
    "Flow",
    "KeptShardError",
    "KeptState",
    "Kind",
    "LossPropagation",
    "Marks",
    "Memory",
    "Placed",
    "OutsideState",
    "OutsideValues",
    "PLAIN",
    "PositionDraws",
    "Products",
    "PropagatedModule",
    "PropagatedSequence",
    "Propagation",
    "PropagationError",
    "Ranges",
    "Reach",
    "Record",
    "RegisteredHooks",
    "Relation",
    "SEQUENCE",
    "SMALL",
    "SequenceDraws",
    "SequencePropagation",
    "SequenceRules",
    "Sharded",
    "TENSOR_AXIS",
    "Traced",
    "VALUES",
    "activation_of",
    "attach",
    "attend_drawing",
    "attributes_in_use",
    "attributes_of",
    "blocks_beside",
    "blocks_of",
    "call_of",
    "closing_shards",
    "compiled_functions",
    "copy_mark",
    "spec_of",
    "device_of",
    "dims_of",
    "eagerly",
    "exchanged",
    "first_of",
    "gather_along",
    "gather_parts",
    "held_by",
    "in_mode",
    "is_elementwise",
    "is_in_place",
    "kind_of",
    "mark",
    "may_draw",
    "name_of",
    "on_meta",
    "outside",
    "patched",
    "plain",
    "reached_from",
    "reader_of",
    "repeatable",
    "replaced",
    "restated",
    "scripted_functions",
    "site_of",
    "strip",
    "tensors_of",
    "trace",
    "unmark",
    "unseen",
]

__getattr__ = late_imports(__name__, _MODULES)
