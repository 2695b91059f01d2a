"""Self-test of a user's own machine: proofs on its ranks, its network, and step times beside hand-written ones."""

from __future__ import annotations

from composer3d.selftest.self_test import SelfTest, SelfTestItem, self_test

__all__ = ["SelfTest", "SelfTestItem", "self_test"]
