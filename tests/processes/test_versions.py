"""Versions of distributions, as ranks compare them."""

from __future__ import annotations

import torch

from composer3d.processes.versions import installed_version


def test_versions_are_those_of_installed_distributions():
    assert installed_version("torch").partition("+")[0] == torch.__version__.partition("+")[0]


def test_a_copy_that_nobody_has_installed_has_no_version():
    assert installed_version("no-such-distribution") == "unknown"
