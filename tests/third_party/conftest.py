"""Plugins of others: modules that manifests name, and packages that test_downstream.py installs and tests."""

from __future__ import annotations

collect_ignore = ["composer3d_nvtx"]
