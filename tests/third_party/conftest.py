"""The packages here are not part of this distribution: test_downstream.py installs them and runs their own tests."""

from __future__ import annotations

collect_ignore = ["composer3d_nvtx"]
