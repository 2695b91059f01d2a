"""`composer3d export`: the weights of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer3d.cli.options import Subparsers, size
from composer3d.cli.output import say

__all__ = ["add", "execute"]

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEFAULT_SHARD_BYTES = 5 * 1024**3


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "export",
        help="write the weights of a checkpoint as safetensors",
        description="Write the weights of a checkpoint as safetensors: model.safetensors, or several files and "
        "model.safetensors.index.json. Needs no process group and no GPU, and executes nothing of the checkpoint. A "
        "run of a Hugging Face model becomes a folder that from_pretrained loads: configuration and tokenizer are "
        "copied.",
    )
    parser.add_argument(
        "source", metavar="RUN_OR_CHECKPOINT", type=Path, help="a run's folder (its newest checkpoint), or a checkpoint"
    )
    parser.add_argument("--to", metavar="DIR_OR_FILE", type=Path, required=True, help="folder, or .safetensors file")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="of a run that saved adapters alone: write the model that they were trained on, with them put in",
    )
    parser.add_argument(
        "--quantise",
        action="store_true",
        help="of a run that trained for quantised weights: write these, in the form that its plugin says",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="convert floating-point tensors; default: as saved")
    parser.add_argument(
        "--max-shard", metavar="SIZE", type=size, default=DEFAULT_SHARD_BYTES, help="largest file; default: 5GiB"
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="of a Hugging Face model: run Python that came with it"
    )
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Export, and print the files written."""
    from composer3d.runner import export_checkpoint

    written = export_checkpoint(
        arguments.source,
        to=arguments.to,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard,
        merge=arguments.merge,
        quantise=arguments.quantise,
        trust_remote_code=arguments.trust_remote_code,
    )
    files, mib = ", ".join(map(str, written.files)), written.size_bytes / 1024**2
    say(f"{written.checkpoint} -> {files}: {written.num_tensors} tensors, {mib:.1f} MiB")
    return 0
