"""Verification that a composition computes what one device computes, on real ranks.

A reference without plugins runs on one device; the composition runs on its ranks; everything is compared in float64,
then in the run's own dtypes, and so are replicas, random streams and collectives. `composer3d verify` and
`composer3d.testing.assert_parity` are its two entry points.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from composer3d.verification.manifest_run import read_manifest, subject_of
    from composer3d.verification.prove import prove
    from composer3d.verification.proven_world import ProvenWorld, proven_world
    from composer3d.verification.shrink import shrink
    from composer3d.verification.subject import Subject
    from composer3d.verification.verdict import Verdict
    from composer3d.verification.verdict_report import to_json, to_text
    from composer3d.verification.verify import VerificationError, VerifyResult

_MODULES = {
    "manifest_run": ("read_manifest", "subject_of"),
    "prove": ("prove",),
    "proven_world": ("ProvenWorld", "proven_world"),
    "shrink": ("shrink",),
    "subject": ("Subject",),
    "verdict": ("Verdict",),
    "verdict_report": ("to_json", "to_text"),
    "verify": ("VerificationError", "VerifyResult"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ProvenWorld",
    "Subject",
    "Verdict",
    "VerificationError",
    "VerifyResult",
    "prove",
    "proven_world",
    "read_manifest",
    "shrink",
    "subject_of",
    "to_json",
    "to_text",
]


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: some of these modules import torch, which takes a second."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
