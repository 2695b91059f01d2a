"""Processes and their groups: forks, stores in which ranks meet, JSON between ranks, private folders."""

from __future__ import annotations

from composer3d.processes.child import Child, ChildError, ForeignCodeError
from composer3d.processes.fake_process_group import fake_world, zeros_from_others
from composer3d.processes.foreign_code import own_attribute, running
from composer3d.processes.foreign_peers import refuse_foreign_peers
from composer3d.processes.forking import (
    Gate,
    die_with,
    flush_output,
    fork,
    limit_ranks,
    prewarm,
    refuse_open_group,
    refuse_side_thread,
    refuse_unsafe_fork,
)
from composer3d.processes.garbage import collect_new_objects, end_without_collecting, scanning_new_objects_only
from composer3d.processes.host_memory import keep_freed_memory
from composer3d.processes.json_exchange import all_gather_json, broadcast_json
from composer3d.processes.late_imports import late_imports
from composer3d.processes.launchers import (
    device_index,
    find_launch,
    join_launcher,
    launch_id,
    launch_round,
    note_round,
)
from composer3d.processes.machine_errors import machine_error
from composer3d.processes.neutral_state import neutral_state
from composer3d.processes.private_folder import private_folder_in, user_folder, write_private
from composer3d.processes.process_group import default_device, join_world
from composer3d.processes.rendezvous import INTERFACES, LAUNCH, keep_to_loopback, private_attempt
from composer3d.processes.single_thread import single_threaded
from composer3d.processes.temporary_folder import is_at, remove_if_abandoned, temporary_folder
from composer3d.processes.versions import installed_version
from composer3d.processes.write_probes import file_objection, folder_objection

__all__ = [
    "Child",
    "ChildError",
    "ForeignCodeError",
    "Gate",
    "INTERFACES",
    "LAUNCH",
    "all_gather_json",
    "broadcast_json",
    "collect_new_objects",
    "default_device",
    "device_index",
    "die_with",
    "end_without_collecting",
    "fake_world",
    "file_objection",
    "find_launch",
    "flush_output",
    "folder_objection",
    "fork",
    "installed_version",
    "is_at",
    "join_launcher",
    "join_world",
    "keep_freed_memory",
    "keep_to_loopback",
    "late_imports",
    "launch_id",
    "launch_round",
    "limit_ranks",
    "machine_error",
    "neutral_state",
    "note_round",
    "own_attribute",
    "prewarm",
    "private_attempt",
    "private_folder_in",
    "refuse_foreign_peers",
    "refuse_open_group",
    "refuse_side_thread",
    "refuse_unsafe_fork",
    "remove_if_abandoned",
    "running",
    "scanning_new_objects_only",
    "single_threaded",
    "temporary_folder",
    "user_folder",
    "write_private",
    "zeros_from_others",
]
