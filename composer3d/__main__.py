"""`python -m composer3d`, the form that torchrun starts."""

from __future__ import annotations

import sys

from composer3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
