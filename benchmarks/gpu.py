"""Tokens a second, utilisation and peak memory of one GPU: composer3d beside the same loop written by hand.

Llama-shaped models at sequence 4096: `1b` is a whole model of 1.2e9 parameters, `8b_blocks` has four blocks of an 8e9
one. Cells: bf16 (float32 weights, bfloat16 compute by FSDP2's policy), the same compiled block by block, and compiled
with each of torchao's float8 recipes in the blocks. Every cell is measured in fresh processes that take turns, with
`--rounds 2`: by hand, composer3d, by hand, composer3d, by hand.

tokens_per_s: tokens of a step over the step time: the median of four windows of steps after the warm-up, the device
    synchronised around a window and not within; of several rounds the median.
mfu: (6 x parameters that multiply + 12 x width x seq_len x layers) x tokens a second over the peak of dense bfloat16
    products (`--peak-tflops`, default 989, H100 and H200): the convention of PaLM, appendix B. Float8 cells are over
    the same peak, so their figures compare with the others.
peak_gib: torch.cuda.max_memory_allocated after the warm-up, in which compilers measure kernels.
ratio: composer3d's tokens a second over the mean of those by hand before and after it; of several rounds the median.
control: the last by hand over the first.
float8_gain: tokens a second of a float8 cell over compiled bf16, both composer3d's.

Where there is no CUDA device every cell is told as skipped, and with `--limit-s` what is not begun within so many
seconds; a cell that fails is told as failed, and the rest goes on. All of it takes 50 processes, `--rounds 1` 30.
`--tiny` runs the same loops with small sizes on whatever there is, without compiling: it tests the script, and its
figures mean nothing.
Usage: python benchmarks/gpu.py [--shapes 8b_blocks] [--cells bf16_compile] [--steps 20] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import conditions, fail, note, say

from composer3d.selftest.compared_loops import Loop, composed_loop, handwritten_loop

SEQ_LEN, NUM_WARMUP, NUM_WINDOWS, TIMEOUT_S = 4096, 5, 4, 1200.0
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {
        "dim": 2048,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_dim": 8192,
        "vocab_size": 128256,
        "tie_embeddings": True,
    },
    "8b_blocks": {
        "dim": 4096,
        "num_layers": 4,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_dim": 14336,
        "vocab_size": 32768,
    },
}
TINY: dict[str, Any] = {"dim": 32, "num_layers": 2, "num_heads": 2, "ffn_dim": 64, "vocab_size": 64}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured.

    Args:
        compiled: Blocks are compiled.
        recipe: Of float8, or none.
    """

    compiled: bool
    recipe: str | None = None


CELLS = {
    "bf16": Cell(compiled=False),
    "bf16_compile": Cell(compiled=True),
    "tensorwise_compile": Cell(compiled=True, recipe="tensorwise"),
    "rowwise_compile": Cell(compiled=True, recipe="rowwise"),
    "rowwise_with_gw_hp_compile": Cell(compiled=True, recipe="rowwise_with_gw_hp"),
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one process found.

    Args:
        step_s: Median of windows.
        peak_gib: Of the device's memory after the warm-up, 0 where there is none.
        loss: Of the last step.
        flops_per_token: By the convention above.
    """

    step_s: float
    peak_gib: float
    loss: float
    flops_per_token: int


# ---- one process -----------------------------------------------------------------------------------------------------


def measure(author: str, shape: str, cell: Cell, *, steps: int, batch: int, tiny: bool) -> Measured:
    """Train for some steps and time them."""
    import torch

    from composer3d.models import llama
    from composer3d.models.flops import num_flops_per_token

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(0)
    sizes, seq_len = (TINY, 32) if tiny else (SHAPES[shape], SEQ_LEN)

    def build() -> Any:
        return llama(**sizes, max_seq_len=seq_len)

    with torch.device("meta"):
        flops = num_flops_per_token(build(), seq_len)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, sizes["vocab_size"], (batch, seq_len + 1), generator=generator).to(device)
    step, close = (by_hand if author == "hand" else composed)(build, cell, tokens, device, tiny)
    num_warmup, window = (1 if tiny else NUM_WARMUP), max(steps // NUM_WINDOWS, 1)
    for number in range(num_warmup):
        step(number)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for begin in range(num_warmup, num_warmup + NUM_WINDOWS * window, window):
        synchronise(device)
        began = time.perf_counter()
        for number in range(begin, begin + window):
            loss = step(number)
        synchronise(device)
        times.append((time.perf_counter() - began) / window)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    result = Measured(step_s=statistics.median(times), peak_gib=peak, loss=float(loss), flops_per_token=flops)
    close()
    return result


def synchronise(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def by_hand(build: Callable[[], Any], cell: Cell, tokens: Any, device: Any, tiny: bool) -> Loop:
    """Return the step that one writes with torch's own calls, in a cell's recipe with torchao's."""
    import dataclasses

    def convert(model: Any) -> None:
        from composer3d.torch_compat import import_torchao

        float8 = import_torchao("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(cell.recipe)
        config = dataclasses.replace(config, emulate=device.type != "cuda")
        float8.convert_to_float8_training(model, config=config, module_filter_fn=lambda m, f: f.startswith("layers."))

    return handwritten_loop(
        build,
        tokens,
        device,
        convert=None if cell.recipe is None else convert,
        compiled=cell.compiled and not tiny,
    )


def composed(build: Callable[[], Any], cell: Cell, tokens: Any, device: Any, tiny: bool) -> Loop:
    """Return composer3d's step."""
    lines = ["composer3d = 1", "[sharding.fsdp2]", "[precision.mixed]"]
    if cell.compiled and not tiny:
        lines.append("[scheduling.compile]")
    if cell.recipe is not None:
        lines += ["[precision.float8]", f'recipe = "{cell.recipe}"', 'modules = ["layers"]']
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "gpu.toml"
        path.write_text("\n".join(lines) + "\n")
        return composed_loop(build, tokens, device, path)


# ---- all of them -----------------------------------------------------------------------------------------------------


class Failed(Exception):
    """A process that measures ended otherwise than with a measurement."""


def start(author: str, shape: str, cell: str, arguments: argparse.Namespace) -> Measured:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--worker", author, "--shapes", shape, "--cells", cell]
    command += [
        "--steps",
        str(arguments.steps),
        "--batch",
        str(arguments.batch),
        *(["--tiny"] if arguments.tiny else []),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Failed(f"{author}, {shape}, {cell} took longer than {TIMEOUT_S:g} s") from None
    if done.returncode:
        raise Failed(f"{author}, {shape}, {cell} failed:\n{done.stderr[-4000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def row(shape: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one cell."""
    turns = ["hand", *["composer3d", "hand"] * arguments.rounds]
    measured = [start(author, shape, name, arguments) for author in turns]
    tokens = arguments.batch * (32 if arguments.tiny else SEQ_LEN)
    rates = [tokens / each.step_s for each in measured]
    rate, hand = statistics.median(rates[1::2]), statistics.median(rates[::2])
    ratio = statistics.median(2 * rates[turn] / (rates[turn - 1] + rates[turn + 1]) for turn in range(1, len(rates), 2))
    first, mine = measured[0], measured[1]
    return {
        "shape": shape,
        "cell": name,
        "tokens_per_s": round(rate, 1),
        "tokens_per_s_by_hand": round(hand, 1),
        "ratio": round(ratio, 4),
        "control": round(rates[-1] / rates[0], 4),
        "mfu": round(mine.flops_per_token * rate / (arguments.peak_tflops * 1e12), 4),
        "mfu_convention": "PaLM appendix B, over the peak of dense bfloat16",
        "peak_gib": round(mine.peak_gib, 2),
        "peak_gib_by_hand": round(first.peak_gib, 2),
        "loss": mine.loss,
        "loss_by_hand": first.loss,
    }


def lacking(cell: Cell, *, tiny: bool) -> str | None:
    """Return why a cell cannot be measured here, None where it can."""
    import torch

    if tiny:
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if cell.recipe is not None and torch.cuda.get_device_capability() < (8, 9):
        return f"{torch.cuda.get_device_name()} has no float8 products"
    return None


def main() -> None:
    """Measure what can be measured here, and say what was skipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=list(CELLS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2, help="of composer3d, each between two by hand; default 2")
    parser.add_argument("--batch", type=int, default=2, help="sequences a step")
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="of dense bfloat16 products")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="no cell is begun after so many seconds")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=("hand", "composer3d"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        cell = CELLS[arguments.cells[0]]
        measured = measure(
            arguments.worker,
            arguments.shapes[0],
            cell,
            steps=arguments.steps,
            batch=arguments.batch,
            tiny=arguments.tiny,
        )
        say(json.dumps(asdict(measured)))
        return
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for shape in arguments.shapes:
        compiled: float | None = None
        for name in arguments.cells:
            reason = lacking(CELLS[name], tiny=arguments.tiny)
            if reason is None and time.monotonic() - began >= arguments.limit_s:
                reason = f"{arguments.limit_s:g} s were over"
            if reason is not None:
                rows.append({"shape": shape, "cell": name, "skipped": reason})
                note(f"skipped {shape}, {name}: {reason}")
                continue
            try:
                rows.append(row(shape, name, arguments))
            except Failed as error:
                rows.append({"shape": shape, "cell": name, "failed": str(error)})
                note(str(error))
                continue
            if name == "bf16_compile":
                compiled = rows[-1]["tokens_per_s"]
            elif compiled is not None and CELLS[name].recipe is not None:
                rows[-1]["float8_gain"] = round(rows[-1]["tokens_per_s"] / compiled, 4)
            note(f"{shape}, {name}: {rows[-1]['tokens_per_s']} tokens/s, ratio {rows[-1]['ratio']}")
    report(rows, arguments)
    if any("failed" in each for each in rows):
        fail("some cells failed")


def machine() -> dict[str, Any]:
    """Return what the conditions of the other benchmarks do not say."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {"machine": f"1 x {torch.cuda.get_device_name()}, one rank", "cuda": torch.version.cuda}


def report(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print the results."""
    if arguments.json:
        say(json.dumps({"benchmark": "gpu", "conditions": conditions() | machine(), "rows": rows}, indent=1))
        return
    for each in rows:
        head = f"{each['shape']:<10} {each['cell']:<28}"
        if "skipped" in each or "failed" in each:
            say(f"{head} skipped: {each['skipped']}" if "skipped" in each else f"{head} failed, as told above")
            continue
        gain = f"  {each['float8_gain']:.3f} x compiled bf16" if "float8_gain" in each else ""
        memory = f"{each['peak_gib']:.1f} GiB ({each['peak_gib_by_hand']:.1f})"
        say(
            f"{head} {each['tokens_per_s']:>10.0f} tokens/s  {each['ratio']:.3f} of by hand (control "
            f"{each['control']:.3f})  MFU {each['mfu']:.3f}  {memory}{gain}"
        )


if __name__ == "__main__":
    main()
