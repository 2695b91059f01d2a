"""`composer3d export`: the weights of a checkpoint as safetensors, or a manifest as another system's configuration."""

from __future__ import annotations

import argparse
from pathlib import Path

from composer3d.cli.options import Subparsers, add_json, add_overrides, path, positive, size
from composer3d.cli.output import coloured, complain, print_problems, refuse_unwritable, say, say_json

__all__ = ["add", "execute"]

DTYPES = ("float32", "bfloat16", "float16", "float64")
DEFAULT_SHARD_BYTES = 5 * 1024**3


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "export",
        help="write the weights of a checkpoint as safetensors, or a manifest as another system's configuration",
        description="Write the weights of a checkpoint as safetensors: model.safetensors, or several files and "
        "model.safetensors.index.json. Needs no process group and no GPU, and executes nothing of the checkpoint. A "
        "run of a Hugging Face model becomes a folder that from_pretrained loads: configuration and tokenizer are "
        "copied. A manifest, which is a file ending in .toml or the name of a shipped one, becomes a configuration of "
        "DeepSpeed, Accelerate or torchtitan, with a verdict for every key; exit code 1 if a key is refused.",
    )
    parser.add_argument(
        "source",
        metavar="SOURCE",
        type=path,
        help="a run's folder (its newest checkpoint), or a checkpoint; or a manifest",
    )
    parser.add_argument(
        "--to",
        metavar="TARGET",
        required=True,
        help="of a checkpoint: a folder, or .safetensors file; of a manifest: deepspeed, accelerate or torchtitan",
    )
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
    parser.add_argument("--max-shard", metavar="SIZE", type=size, help="largest file; default: 5GiB")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="of a Hugging Face model: run Python that came with it"
    )
    group = parser.add_argument_group("manifests", "SOURCE is a manifest")
    group.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks of the run, where the manifest is silent"
    )
    group.add_argument(
        "--allow", metavar="KEY", action="append", default=[], help="go on without a key that is refused; repeatable"
    )
    group.add_argument("--output", metavar="FILE", type=path, help="where to write the file; default: printed")
    add_overrides(group)
    add_json(group)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Export, and print the files written; what SOURCE is decides what `--to` means."""
    from composer3d.exporting import targets
    from composer3d.manifest import shipped

    source: Path = arguments.source
    is_manifest = source.suffix == ".toml" or (not source.exists() and str(source) in shipped())
    given = _given(arguments, of_manifests=not is_manifest)
    if given:
        complain(f"{given} is of {'checkpoints' if is_manifest else 'manifests'}, and {source} is none")
        return 2
    if is_manifest:
        return _export_config(arguments)
    if arguments.to in targets():
        complain(
            f"--to {arguments.to} names a system, and {source} is no manifest: write composer3d export run.toml "
            f"--to {arguments.to}, or --to ./{arguments.to} for a folder of that name"
        )
        return 2
    try:
        target = path(arguments.to)
    except argparse.ArgumentTypeError as error:
        complain(f"--to: {error}")
        return 2
    return _export_weights(arguments, target)


def _given(arguments: argparse.Namespace, *, of_manifests: bool) -> str | None:
    """Return an option that is given and is of the other kind of source."""
    manifests = ("world_size", "allow", "output", "overrides", "json")
    others = manifests if of_manifests else ("merge", "quantise", "dtype", "max_shard", "trust_remote_code")
    names = {"overrides": "set"}
    found = next((name for name in others if getattr(arguments, name)), None)
    return None if found is None else f"--{names.get(found, found).replace('_', '-')}"


def _export_config(arguments: argparse.Namespace) -> int:
    """Write a manifest as another system's configuration, and print the report."""
    from composer3d.exporting import export_config

    output: Path | None = arguments.output
    if output is not None and output.exists():
        complain(f"{output} exists and is not overwritten; name another file with --output FILE")
        return 2
    refuse_unwritable(output)
    result = export_config(
        str(arguments.source),
        to=arguments.to,
        world_size=arguments.world_size,
        overrides=arguments.overrides,
        allow=arguments.allow,
    )
    if result.text and output is not None:
        try:
            with output.open("x", encoding="utf-8") as file:
                file.write(result.text)
        except OSError as error:
            complain(f"{output} cannot be written: {(error.strerror or str(error)).lower()}")
            return 2
    if arguments.json:
        say_json(result.to_json())
        return 0 if result.ok else 1
    complain("\n".join(result.lines()))
    if result.problems:
        print_problems(result.problems)
    if result.text and output is None:
        say(result.text.rstrip("\n"))
    elif result.text:
        say(coloured(f"wrote {output}", good=True))
    return 0 if result.ok else 1


def _export_weights(arguments: argparse.Namespace, target: Path) -> int:
    """Write the weights of a checkpoint."""
    from composer3d.runner import export_checkpoint

    written = export_checkpoint(
        arguments.source,
        to=target,
        dtype=arguments.dtype,
        max_shard_bytes=arguments.max_shard or DEFAULT_SHARD_BYTES,
        merge=arguments.merge,
        quantise=arguments.quantise,
        trust_remote_code=arguments.trust_remote_code,
    )
    files, mib = ", ".join(map(str, written.files)), written.size_bytes / 1024**2
    say(f"{written.checkpoint} -> {files}: {written.num_tensors} tensors, {mib:.1f} MiB")
    return 0
