"""Dockerfile of an image that a run can be started in."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["dockerfile"]

_TEXT = """\
# The GPU build of PyTorch with its CUDA libraries; the driver is the machine's.
FROM pytorch/pytorch:{torch}-cuda12.8-cudnn9-runtime
# What pip resolves must not replace the image's torch.
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \\
    && pip install --no-cache-dir --constraint /tmp/torch.txt {requirement}
WORKDIR /workspace
COPY . /workspace
ENV PYTHONUNBUFFERED=1
"""


def dockerfile() -> str:
    """Return a Dockerfile with this composer3d and torch, and the folder it is built in."""
    return _TEXT.format(torch=_version("torch").partition("+")[0], requirement=f"composer3d=={_version('composer3d')}")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # a checkout that is not installed
        import torch

        return str(torch.__version__) if name == "torch" else "0"
