"""Manifests that are nearly right, shipped ones and larger ones changed at random, and the folder they live in."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli

from composer3d.manifest.sources import shipped
from composer3d.manifest.toml_writer import dump, inline

__all__ = ["Case", "make_case", "make_folder", "schema_of_all"]

WHOLE = """
composer3d = 1
[run]
output = "out"
device = "cpu"
timeout_s = 60.0
[mesh]
pp = 2
dp_shard = 2
tp = 2
gpus_per_node = 8
[model]
use = "user_models:build"
blocks = "layers.*"
args = { dim = 8, num_layers = 4 }
[data]
use = "synthetic"
seq_len = 8
vocab_size = 32
[train]
steps = 10
global_batch = 16
microbatch = 2
grad_clip = 1.0
seed = 3
frozen = ["embedding"]
[train.batch_ramp]
start = 8
step = 4
every = 1
[optimizer]
use = "adamw"
lr = 1e-3
betas = [0.9, 0.95]
no_decay = "norm|bias"
[[optimizer.groups]]
match = "embedding"
lr = 1e-4
args = { eps = 1e-9 }
[lr_schedule]
use = "wsd"
warmup = 2
decay = 0.2
[checkpoint]
every = 5
[evaluation]
every = 5
[stability]
on_nonfinite = "skip"
[ema]
decay = 0.99
[sharding.fsdp2]
zero = 2
[sharding.tensor_parallel]
plan = "auto"
[scheduling.pipeline]
schedule = "1F1B"
[scheduling.activation_checkpoint]
[precision.mixed]
[profiling.opentelemetry]
[profiling.throughput]
"""
SMALL = """
composer3d = 1
train.steps = 3
model.use = "user_models:build"
model.args = { dim = 8, num_layers = 2 }
data.use = "synthetic"
data.vocab_size = 32
data.seq_len = 8
"""
DATA = """
composer3d = 1
extends = "base.toml"
[data]
use = "text.txt"
seq_len = 16
tokenizer = "bytes"
[sharding.ddp]
"""

MODULES = {
    "user_models.py": """\
from torch import nn
class Model(nn.Module):
    def __init__(self, dim=8, num_layers=2, vocab_size=32):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size)
    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = x + layer(x).relu()
        return self.head(self.norm(x))
def build(dim=8, num_layers=2, vocab_size=32): return Model(dim, num_layers, vocab_size)
def exits(): raise SystemExit(0)
def interrupts(): raise KeyboardInterrupt
def ends(): raise GeneratorExit("end")
class Strange(BaseException):
    def __str__(self): raise RuntimeError("no text")
def strange(): raise Strange
def recurses(): return recurses()
def exhausts(): raise MemoryError
def nothing(): return None
def prints(): print("printed by a factory"); return Model()
def silent_text(): raise ValueError
def __getattr__(name): raise RuntimeError(f"no {name} here")
""",
    "user_data.py": """\
import torch
class Good:
    def __len__(self): return 40
    def __getitem__(self, index): return torch.arange(9)
class Raises(Good):
    def __getitem__(self, index): raise SystemExit(1)
class Strange(Good):
    def __getitem__(self, index): return {"a": [None]}
class Empty(Good):
    def __len__(self): return 0
class Infinite:
    def __iter__(self):
        while True: yield torch.arange(9)
def exits(): raise SystemExit
def interrupts(): raise KeyboardInterrupt
def nothing(): return None
class Example(Good):
    def example(self): raise KeyboardInterrupt
class Optimizer:
    def __init__(self, params, lr): raise SystemExit("optimizer")
class Plugin:
    pass
""",
    "user_plugins.py": """\
from composer3d import plugin, hookimpl, Transform, Phase
@plugin(family="profiling")
class Raises:
    every: int = 1
    @hookimpl
    def composer3d_configure(self, context): raise ZeroDivisionError("by a plugin")
@plugin(family="sharding")
class Exits:
    @hookimpl
    def composer3d_shard(self, context): raise SystemExit
@plugin(family="precision")
class Selects:
    @hookimpl
    def composer3d_convert(self, context):
        def select(model, context): raise KeyError("a module")
        return Transform(name="selects", phase=Phase.CONVERT, select=select, apply=lambda *_: [])
@plugin(family="communication")
class Answers:
    @hookimpl
    def composer3d_reschedule(self, context): return "no transform"
""",
    "user_exits.py": "raise SystemExit(0)\n",
    "user_interrupts.py": "raise KeyboardInterrupt\n",
    "user_strange.py": "class Strange(BaseException): pass\nraise Strange('at import')\n",
    "user_broken.py": "def f(:\n",
    "user_null.py": "x = 1\0\n",
    "user_prints.py": "print('printed at import')\nfrom user_models import build\n",
    "json.py": "raise ImportError('the json.py of the folder')\n",
    "torch.py": "raise ImportError('the torch.py of the folder')\n",
    "composer3d.py": "raise ImportError('the composer3d.py of the folder')\n",
}
REFERENCES = (
    *(f"user_models:{name}" for name in ("build", "Model", "exits", "interrupts", "ends", "strange", "recurses")),
    *(f"user_models:{name}" for name in ("exhausts", "nothing", "prints", "silent_text", "absent", "build.x")),
    *(f"user_data:{name}" for name in ("Good", "Raises", "Strange", "Empty", "Infinite", "exits", "interrupts")),
    *(f"user_data:{name}" for name in ("nothing", "Example", "Optimizer", "Plugin")),
    *(f"user_plugins:{name}" for name in ("Raises", "Exits", "Selects", "Answers")),
    *(f"user_{name}:x" for name in ("exits", "interrupts", "strange", "broken", "null", "prints", "absent")),
    *("user_prints:build", "sys:exit", "os:_exit", "os:abort", "builtins:exit", "builtins:print", "builtins:list"),
    *("torch.nn:Linear", "torch.nn:Module", "torch.optim:SGD", "torch.optim:Adam", "torch.optim:LBFGS", "json:loads"),
    *("composer3d.models:llama", "torch:x", "a:b", ":", "a.b", "user_models.py:build", "antigravity:x" * 50),
    *("user_models", "user_models:", "a b:c", "../x:y", "\u00e9:\u00fc", "typing:Any", "math:pi", "re:compile"),
)
PATHS = (
    *("/proc/self/mem", "/dev/zero", "/dev/tty", "/dev/full", "/", ".", "..", "~nobody/x", "~", "~/x", "pipe"),
    *("folder", "latin.txt", "latin.toml", "large.toml", "large.txt", "closed.toml", "base.toml", "self.toml"),
    *("chain-0.toml", "empty.txt", "text.txt", "tokens.npy", "bad.npy", "bad.bin", "tokenizer.json", "a" * 300),
    *("/".join("a" * 200 for _ in range(30)), "text.txt/x", "quickstart", "quickstart-3d", "nothing.csv", "s.csv"),
    *("model", "socket", "loop", "\u202e", "a\nb", "x\0y", "https://example.org/x", "s3://bucket/key", "text.txt\0"),
)
EXPRESSIONS = (
    *("(a+)+$", "(.*)*x", "(?:e|e)*z", ".*.*.*.*.*.*.*.*.*.*z", "(", "[", "(?P<x>a)(?P=x)", r"(\w+)\1", "a{1000000}"),
    *("((a{1000}){1000}){1000}", "a{99999999999999999999}", "(" * 500, "(" * 500 + ")" * 500, "(?!norm)", "^", ""),
    *("(?i)EMB", "embedding", "**.**.**.**.**.**.**.**.**.x", "*" * 300, "layers.*", "**", "[!", "[z-a]", ".", ".."),
    *("(((((((((.*)*)*)*)*)*)*)*)*)*z", r"(\w|\w\w|\w\w\w)*!", "layers.0", "layers.[0-9]", "(?(1)a|b)", "layers.1@2"),
)
NUMBERS = (
    *(0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 100, 1000, -1, -2, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 10**6, 10**9),
    *(0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-9, 1e9, 1e30, 1e308, 5e-324, float("inf"), float("-inf"), float("nan")),
)
RAW = (
    *("9" * 5000, "0x" + "f" * 5000, str(2**70), "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "1e99999"),
    *("[" * 500 + "]" * 500, "{a={b={c={d=1}}}}", '"""\n"""', "''", "[[], {}]", "[1, 'a', {}]", "{ '' = 1 }", "@", ""),
    *('"' + "x" * 70_000 + '"', "[" + "1," * 20_000 + "]", "-9223372036854775809", "0b1", "1_000", "[{}, {}]", "nan"),
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A manifest to be checked.

    Args:
        text: Its bytes.
        overrides: What `--set` is given.
        options: Further options of `check`.
    """

    text: bytes
    overrides: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def make_folder(folder: Path) -> None:
    """Fill a folder with what manifests name: modules that misbehave, files that are none, bases, chains."""
    for name, text in MODULES.items():
        (folder / name).write_text(text)
    (folder / "folder").mkdir()
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": 3}')
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to("loop")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 500)
    (folder / "latin.toml").write_bytes(b"# caf\xe9\ncomposer3d = 1\n")
    (folder / "large.toml").write_text("composer3d = 1\n" + "# filler\n" * 400_000)
    with (folder / "large.txt").open("wb") as file:
        file.truncate(1 << 36)  # a hole: nothing on disk
    (folder / "closed.toml").write_text("composer3d = 1\n")
    (folder / "closed.toml").chmod(0)
    (folder / "base.toml").write_text("composer3d = 1\n" + SMALL.partition("composer3d = 1")[2])
    (folder / "self.toml").write_text('composer3d = 1\nextends = "self.toml"\n')
    for index in range(2000):
        (folder / f"chain-{index}.toml").write_text(f'composer3d = 1\nextends = "chain-{index + 1}.toml"\n')
    (folder / "chain-2000.toml").write_text("composer3d = 1\n")
    (folder / "empty.txt").write_text("")
    (folder / "text.txt").write_text("a text of some length, " * 100)
    (folder / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00" + b"\xff" * 40)
    (folder / "bad.bin").write_bytes(b"\x01\x02\x03")
    (folder / "tokenizer.json").write_text('{"model": 3}')
    (folder / "s.csv").write_text("0F0,0B0\nx,y\n")


def schema_of_all() -> dict[str, dict[str, Any]]:
    """Return the properties of every table and plugin table by its dotted name."""
    from composer3d.manifest import CORE_TABLES, json_schema
    from composer3d.registry import FAMILIES, Catalogue, info_of
    from composer3d.runner.runner_tables import TABLES

    catalogue = Catalogue.installed()
    plugins: dict[str, dict[str, type]] = {family: {} for family in FAMILIES}
    for name in catalogue.names():
        cls = catalogue.load(name)
        plugins[info_of(cls).family][name] = cls
    definitions = json_schema({**CORE_TABLES, **TABLES}, plugins)["$defs"]
    classes = {**{name: cls for name, cls in {**CORE_TABLES, **TABLES}.items()}}
    classes |= {f"{family}.{name}": cls for family, members in plugins.items() for name, cls in members.items()}
    by_name = {name.rpartition("__")[2]: value for name, value in definitions.items()}
    return {name: by_name.get(cls.__name__, {}).get("properties", {}) for name, cls in classes.items()}


def make_case(seed: int, index: int, schema: dict[str, dict[str, Any]]) -> Case:
    """Return a case as a function of seed and index alone."""
    draw = random.Random(f"{seed}/{index}")
    texts = [content.read_text(encoding="utf-8") for content in shipped().values()]
    tree = tomli.loads(draw.choice([WHOLE, WHOLE, WHOLE, SMALL, SMALL, DATA, *texts]))
    overrides: list[str] = []
    for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 6))):
        draw.choice(MUTATIONS)(draw, tree, schema)
    while draw.random() < 0.15:
        overrides.append(_override(draw, tree, schema))
    text = _with_raw(draw, dump(tree)).encode(errors="surrogatepass")
    if draw.random() < 0.1:
        text = _damage(draw, text)
    options = draw.choice(((), (), (), ("--world-size", draw.choice("12478")), ("--strict",), ("--rank", "1")))
    return Case(text=text, overrides=tuple(overrides), options=tuple(options))


def _value(draw: random.Random, about: Any = None) -> Any:
    """Return a value: often one that the key may have, often one that no key should."""
    about = about if isinstance(about, dict) else {}
    allowed = [
        value
        for part in (about, *about.get("anyOf", []))
        for value in (*part.get("enum", []), *part.get("examples", []))
    ]
    if allowed and draw.random() < 0.4:
        return draw.choice(allowed)
    kinds: list[Callable[[], Any]] = [
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(NUMBERS),
        lambda: draw.choice(REFERENCES),
        lambda: draw.choice(PATHS),
        lambda: draw.choice(EXPRESSIONS),
        lambda: draw.choice((True, False)),
        lambda: draw.choice(
            ("", "x", "auto", "bf16", "bfloat16", "none", "AdamW", "layers.*", "localhost", "x" * 5000)
        ),
        lambda: [_value(draw) for _ in range(draw.randrange(4))],
        lambda: {draw.choice(("a", "", "layers.*", "use", "x" * 300)): _value(draw) for _ in range(draw.randrange(3))},
        lambda: RawToml(draw.choice(RAW)),
    ]
    return draw.choice(kinds)()


class RawToml(str):
    """TOML that no Python value gives; its place in the text is taken by a mark until the tree is written."""

    MARK = "composer3d-fuzz-raw:"


def _marked(value: Any) -> Any:
    if isinstance(value, RawToml):
        return RawToml.MARK + value.encode().hex()
    if isinstance(value, dict):
        return {key: _marked(item) for key, item in value.items()}
    return [_marked(item) for item in value] if isinstance(value, list) else value


def _with_raw(draw: random.Random, text: str) -> str:
    pieces = text.split(f'"{RawToml.MARK}')
    for place, piece in enumerate(pieces[1:], 1):
        written, _, rest = piece.partition('"')
        pieces[place] = bytes.fromhex(written).decode() + rest
    return "".join(pieces)


def _tables(tree: dict[str, Any]) -> list[dict[str, Any]]:
    found = [tree]
    for value in tree.values():
        if isinstance(value, dict):
            found += _tables(value)
    return found


def _replace(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    """Give a key that is there another value, or a whole table a scalar."""
    table = draw.choice(_tables(tree))
    if table:
        table[draw.choice(list(table))] = _marked(_value(draw))


def _state(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    """State a key that the schema knows, in its table."""
    name = draw.choice(list(schema))
    table: Any = tree
    for part in name.split("."):
        if not isinstance(table.get(part), dict):
            table[part] = {}
        table = table[part]
    known = schema[name]
    for key in draw.sample(sorted(known), min(len(known), draw.choice((0, 1, 1, 1, 2, 3)))):
        table[key] = _marked(_value(draw, known[key]))


def _invent(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    """Add a key that nobody knows, or misspell one."""
    table = draw.choice(_tables(tree))
    if table and draw.random() < 0.5:
        key = draw.choice(list(table))
        place = draw.randrange(len(key) + 1)
        table[key[:place] + draw.choice(("", "x", ".", "_", "\u00e9")) + key[place + 1 :]] = table.pop(key)
        return
    name = draw.choice(("lr", "batch_size", "epochs", "dp", "precision", "", "a.b", "\n", "use", "x" * 400, "0"))
    table[name] = _marked(_value(draw))


def _remove(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    table = draw.choice(_tables(tree))
    if table:
        del table[draw.choice(list(table))]


def _move(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    """Put a copy of a table somewhere else."""
    tables = _tables(tree)
    source = copy.deepcopy(draw.choice(tables))
    draw.choice(tables)[draw.choice((*list(tree), *schema)).rpartition(".")[2]] = source


def _extend(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    tree["extends"] = _marked(draw.choice((draw.choice(PATHS), _value(draw))))


def _point(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    """Name something that is no good where code, data, a path or an expression belongs."""
    table, key, choices = draw.choice(
        (
            ("model", "use", REFERENCES),
            ("data", "use", REFERENCES),
            ("data", "use", PATHS),
            ("data", "tokenizer", PATHS),
            ("model", "hf", PATHS),
            ("run", "output", PATHS),
            ("optimizer", "use", REFERENCES),
            ("lr_schedule", "use", REFERENCES),
            ("optimizer", "no_decay", EXPRESSIONS),
            ("optimizer", "matrices", EXPRESSIONS),
            ("model", "blocks", EXPRESSIONS),
            ("model", "build", ("host",)),
        )
    )
    if not isinstance(tree.get(table), dict):
        tree[table] = {}
    tree[table][key] = draw.choice(choices)
    if table in ("model", "data") and draw.random() < 0.6:
        tree[table].pop("args", None)


def _plug(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    """Switch on a plugin by reference."""
    family = draw.choice(("sharding", "scheduling", "precision", "communication", "profiling", "strange"))
    tables = tree.setdefault(family, {})
    if isinstance(tables, dict):
        tables[draw.choice(("own", "fsdp2", "", "a.b"))] = {"use": draw.choice(REFERENCES)}


def _deepen(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> None:
    """Nest keys deeply."""
    depth = draw.choice((3, 30, 80))
    value: Any = 1
    for _ in range(depth):
        value = {"k": value}
    draw.choice(_tables(tree))["deep"] = value


def _override(draw: random.Random, tree: dict[str, Any], schema: dict[str, dict[str, Any]]) -> str:
    name = draw.choice((*schema, *tree, "a.b.c", "", "mesh.dp", ".".join("k" * 2000)))
    known = schema.get(name, {})
    key = draw.choice((*known, "x")) if draw.random() < 0.7 else None
    value = _value(draw, known.get(key or ""))
    try:
        written = value if isinstance(value, RawToml) else draw.choice((inline, json.dumps, str))(value)
    except TypeError:
        written = str(value)
    return f"{name}{f'.{key}' if key else ''}{draw.choice('====:')}{written}".replace("\0", "")


def _damage(draw: random.Random, text: bytes) -> bytes:
    """Change bytes: cut, double, overwrite."""
    place = draw.randrange(len(text) + 1)
    return draw.choice(
        (
            text[:place],
            text[:place] + text[: draw.randrange(len(text) + 1)],
            text[:place] + bytes([draw.randrange(256)]) + text[place + 1 :],
            text[:place] + draw.choice((b"\0", b"\r", b"\xff", b'"', b"[", b"=", b"\xef\xbb\xbf", b"#")) + text[place:],
            b"",
            text.replace(b"\n", b"\r\n"),
            text + b".".join([b"k"] * draw.choice((10, 2000))) + b" = 1\n",
            text.replace(b"[", b"[[").replace(b"]", b"]]"),
        )
    )


MUTATIONS = (
    _replace,
    _replace,
    _state,
    _state,
    _state,
    _state,
    _invent,
    _remove,
    _move,
    _extend,
    _point,
    _point,
    _plug,
    _deepen,
)
