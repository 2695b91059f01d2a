"""Diagnosis: every rule is asked, in the order in which their sentences are read."""

from __future__ import annotations

from composer3d.verification.causes.forward_causes import forward
from composer3d.verification.causes.gradient_causes import GRADIENT_RULES, backward
from composer3d.verification.causes.input_causes import INPUT_RULES, kept_by_loss
from composer3d.verification.causes.microbatch_shares import explain_shares
from composer3d.verification.causes.random_causes import streams
from composer3d.verification.causes.rounding_causes import roundings
from composer3d.verification.causes.update_causes import UPDATE_RULES, initial, stale
from composer3d.verification.restored_run import causes_of_restored
from composer3d.verification.verdict import Evidence

__all__ = ["UNREPEATABLE", "diagnose"]

UNREPEATABLE = (
    "the model computes something else each time, on one device too, with torch's random numbers out of the way: it "
    "draws others (random, numpy, the clock), or keeps something from one run to the next; nothing compares with it"
)


def diagnose(evidence: Evidence) -> list[str]:
    """Return the likely causes, each once, the most telling first."""
    if evidence.reference.unrepeatable:
        return [*kept_by_loss(evidence)] or [UNREPEATABLE]
    first = (*INPUT_RULES, initial, stale, explain_shares, *GRADIENT_RULES)
    lines = [line for rule in first for line in rule(evidence)]
    # What narrows a cause down is said beside it; what only says where to look, where there is none.
    lines += backward(evidence, is_explained=bool(lines))
    last = (forward, *UPDATE_RULES, streams, causes_of_restored)
    lines += [line for rule in last for line in rule(evidence)]
    return list(dict.fromkeys(lines or roundings(evidence)))
