"""Complete small programs that `composer3d init NAME` copies; each is a folder beside this file."""

from __future__ import annotations

from composer3d.examples.shipped_examples import Example, copy_example, shipped_examples, summary_of

__all__ = ["Example", "copy_example", "shipped_examples", "summary_of"]
