"""The rules that hold for every source file, read from the sources themselves."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import composer3d

ROOT = Path(__file__).resolve().parent.parent
CORE, PLUGINS = ROOT / "composer3d", ROOT / "plugins" / "composer3d_plugins"
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

# Imports run from later layers to earlier ones. A module that is not listed has no layer of its own, and what it
# imports counts as imported by those that import it. "composer3d" is the public names, on which users' code stands.
LAYERS = (
    ("errors", "interfaces", "patterns", "torch_compat"),
    ("mesh", "transform", "processes"),
    ("initialisation", "observation"),
    ("registry",),
    ("manifest",),
    ("context",),
    ("propagation",),
    ("hookspecs", "linear_selection"),
    ("hooks",),
    ("checkpoint",),
    ("step",),
    ("composition",),
    ("composer3d",),
    ("models", "huggingface"),
    ("runner", "checking", "verification", "planning", "testing"),
    ("diagnostics",),
    ("cli",),
)
LAYER = {name: index for index, names in enumerate(LAYERS) for name in names}
PLANNING = (
    ("schedules", "hardware"),
    ("tracing",),
    ("costs",),
    ("formulas",),
    ("costing",),
    ("plan",),
    ("reports",),
    ("manifest_plan",),
    ("suggesting",),
)
PLANNING_LAYER = {name: index for index, names in enumerate(PLANNING) for name in names}


@dataclass(frozen=True)
class Import:
    """One imported name: `from module import name`, or `import module` with no name."""

    module: str
    name: str | None
    line: int
    relative: bool


def sources(*folders: Path) -> list[Path]:
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports(tree: ast.AST, *, typed: bool = False) -> Iterator[Import]:
    """Walk everything that runs, functions included; with `typed` also what only type checkers read."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno, False)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(node.module or "", alias.name, node.lineno, node.level > 0)
        children = node.orelse if is_type_checking(node) and not typed else ast.iter_child_nodes(node)
        nodes.extend(children)


def module_of(path: Path) -> str:
    parts = path.relative_to(CORE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(path: Path, modules: set[str], *, typed: bool = False) -> set[str]:
    """Return the composer3d modules that a file imports; `from package import name` may name a module or a value."""
    found = set()
    for item in imports(parse(path), typed=typed):
        full = f"{item.module}.{item.name}"
        found.add(full if full in modules else item.module)
    return {module for module in found if module.split(".")[0] == "composer3d"} - {module_of(path)}


def module_graph(*, typed: bool = False) -> dict[str, set[str]]:
    files = {module_of(path): path for path in sources(CORE)}
    return {module: imported_modules(path, set(files), typed=typed) for module, path in files.items()}


def top(module: str) -> str:
    """Return the module's name in LAYERS: the first below composer3d."""
    return (module.split(".") + ["composer3d"])[1] if "." in module else "composer3d"


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the layered names that a name imports, through names without a layer."""
    seen: set[str] = set()
    left = list(graph[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            if name not in LAYER:
                left.extend(graph.get(name, ()))
    return seen & LAYER.keys()


def test_imports_run_one_way():
    graph: dict[str, set[str]] = {}
    for module, imported in module_graph().items():
        graph.setdefault(top(module), set()).update({top(other) for other in imported} - {top(module)})
    upward = [
        f"{name} imports {other}"
        for name in sorted(graph.keys() & LAYER.keys())
        for other in sorted(reachable(graph, name))
        if LAYER[other] > LAYER[name]
    ]
    assert upward == []


def test_imports_inside_planning_run_one_way():
    own = "composer3d.planning."
    upward = [
        f"{module} imports {other}"
        for module, imported in module_graph().items()
        if module.startswith(own)
        for other in sorted(imported)
        if other.startswith(own)
        and PLANNING_LAYER[other.split(".")[2]] >= PLANNING_LAYER[module.split(".")[2]]
        and other.split(".")[2] != module.split(".")[2]
    ]
    assert upward == []


def test_imports_have_no_cycles():
    try:
        # The package itself lists the public names for type checkers, and everything may use those.
        graph = module_graph(typed=True)
        TopologicalSorter({module: others - {"composer3d"} for module, others in graph.items()}).prepare()
    except CycleError as error:
        pytest.fail("cycle of imports: " + " <- ".join(error.args[1]))


def test_no_module_hides_a_public_name():
    # Importing a submodule makes it an attribute of the package, in place of the name that is imported when it is used.
    names = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names & set(composer3d.__all__) == {"propagation", "torch_compat"}


def test_every_module_name_is_there_once():
    stems = Counter(path.stem for path in sources(CORE, PLUGINS) if path.parent.name != "cli")
    twice = {stem for stem, number in stems.items() if number > 1}
    assert twice <= {"__init__", "__main__"}
    loose = [path.name for path in CORE.glob("*.py")]
    assert len(loose) <= 12, loose


def test_every_import_of_the_project_is_absolute_and_exists():
    modules = {module_of(path) for path in sources(CORE)}
    wrong = [
        f"{place(path, item.line)}: {item.module}"
        for path in sources(CORE, PLUGINS)
        for item in imports(parse(path))
        if item.relative or (item.module.split(".")[0] == "composer3d" and item.module not in modules)
    ]
    assert wrong == []


def test_the_core_does_not_know_the_plugins():
    naming = [
        place(path, number)
        for path in sources(CORE)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "composer3d_plugins" in line
    ]
    assert naming == []


# Names of plugins that are words of the field too.
COMMON_WORDS = {"compile", "float8", "int8", "mixed", "mxfp8", "opentelemetry", "pipeline", "prometheus", "throughput"}
COMMON_WORDS |= {"compression", "replicas", "tensorboard", "wandb"}


def test_no_text_of_the_core_names_a_plugin():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    names = re.compile(rf"\b({'|'.join(sorted(points['composer3d'].keys() - COMMON_WORDS))})\b")
    naming = [
        f"{place(path, node.lineno)}: {node.value}"
        for path in sources(CORE)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") <= 3
        if names.search(node.value)
    ]
    assert naming == []


def plugin_of(path: Path) -> str:
    """Return the plugin's module: `composer3d_plugins.family.name`, be it a file or a package."""
    return ".".join(path.relative_to(PLUGINS.parent).with_suffix("").parts[:3])


def allowed_in_plugin(item: Import, plugin: str) -> bool:
    if item.module == "composer3d":
        return item.name in composer3d.__all__ or item.name == "torch_compat"
    if item.module == "composer3d.propagation":
        return item.name is None or item.name in composer3d.propagation.__all__
    if item.module.startswith("composer3d."):
        return item.module == "composer3d.torch_compat"
    if item.module.split(".")[0] == "composer3d_plugins":
        return f"{item.module}.{item.name}.".startswith(f"{plugin}.")
    return True


def test_plugins_import_only_public_names_and_no_other_plugin():
    wrong = [
        f"{place(path, item.line)}: {item.module} {item.name or ''}".rstrip()
        for path in sources(PLUGINS)
        for item in imports(parse(path))
        if not allowed_in_plugin(item, plugin_of(path))
    ]
    assert wrong == []


def test_type_checking_imports_of_plugins_are_public_too():
    wrong = [
        place(path, node.lineno)
        for path in sources(PLUGINS)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not allowed_in_plugin(Import(node.module or "", alias.name, node.lineno, False), plugin_of(path))
    ]
    assert wrong == []


def test_files_are_short():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in sources(CORE, PLUGINS)}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_FILE_LINES} == {}


def test_functions_are_short():
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {
        f"{place(path, node.lineno)} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for path in sources(CORE, PLUGINS)
        for node in ast.walk(parse(path))
        if isinstance(node, functions)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def is_private(dotted: str) -> bool:
    return re.match(r"torch(\.\w+)*\._(?!_)", dotted) is not None


def private_torch_names(path: Path) -> Iterator[str]:
    """Find private names that are imported, reached by attributes, or given to an importer as text."""
    tree = parse(path)
    torch_names = {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            torch_names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            torch_names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    torch_names = {name: full for name, full in torch_names.items() if full.split(".")[0] == "torch"}
    for node in ast.walk(tree):
        dotted = []
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            dotted = [f"{torch_names[first]}.{rest}"] if first in torch_names else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            dotted = [node.value]
        for name in filter(is_private, dotted):
            yield f"{place(path, node.lineno)} {name}"


def test_private_torch_names_are_in_one_package():
    files = [path for path in sources(CORE, PLUGINS, ROOT / "benchmarks") if path.parent != CORE / "torch_compat"]
    assert sorted({name for path in files for name in private_torch_names(path)}) == []


def test_private_names_are_recognised(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    file = tmp_path / "example.py"
    file.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch import _C, nn\nfrom torch.distributed import fsdp\n"
        "import torch._dynamo\ntorch._foreach_norm\ndist._coalescing_manager()\nnn.Linear.__init__\n"
        "load('torch.testing._internal.x')\ntorch.nn.Module\nx._private\n'text about torch._x in prose'\n"
    )
    assert sorted(private_torch_names(file)) == [
        "example.py:3 torch._C",
        "example.py:5 torch._dynamo",
        "example.py:6 torch._foreach_norm",
        "example.py:7 torch.distributed._coalescing_manager",
        "example.py:9 torch.testing._internal.x",
    ]


def test_sources_are_ascii():
    files = sources(CORE, PLUGINS, ROOT / "tests", ROOT / "benchmarks")
    assert [str(path.relative_to(ROOT)) for path in files if not path.read_bytes().isascii()] == []


def test_module_docstrings_name_their_subject():
    opening = re.compile(r"(What|Who|How|Where|Which|From what)\b")
    opened = {place(path, 1): ast.get_docstring(parse(path)) or "" for path in sources(CORE, PLUGINS)}
    assert [name for name, text in opened.items() if opening.match(text)] == []
