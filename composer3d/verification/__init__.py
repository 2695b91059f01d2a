"""Verification that a composition computes what one device computes, on real ranks.

A reference without plugins runs on one device; the composition runs on its ranks; everything is compared in float64,
then in the run's own dtypes, and so are replicas, random streams and collectives. `composer3d verify` and
`composer3d.testing.assert_parity` are its two entry points.
"""

from __future__ import annotations

from composer3d.verification.manifest_run import read_manifest, subject_of
from composer3d.verification.prove import prove
from composer3d.verification.proven_world import ProvenWorld, proven_world
from composer3d.verification.shrink import shrink
from composer3d.verification.subject import Subject
from composer3d.verification.verdict import Verdict
from composer3d.verification.verdict_failures import failures_by_heading
from composer3d.verification.verdict_report import to_json, to_text
from composer3d.verification.verify import VerificationError, VerifyResult

__all__ = [
    "ProvenWorld",
    "Subject",
    "Verdict",
    "VerificationError",
    "VerifyResult",
    "failures_by_heading",
    "prove",
    "proven_world",
    "read_manifest",
    "shrink",
    "subject_of",
    "to_json",
    "to_text",
]
