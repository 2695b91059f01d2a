"""`python -m composer3d`, the form that torchrun starts."""

from __future__ import annotations

import os
import sys

# `python -m` looks into the working folder first, where a file json.py or torch.py of the user's would stand in for the
# module that everybody else means.
if sys.path[:1] == [os.getcwd()] and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))

from composer3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
