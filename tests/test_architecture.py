"""The rules that hold for every source file, read from the sources themselves."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import house
import pytest
import source_tree
from source_tree import (
    CORE,
    PLUGINS,
    ROOT,
    Import,
    imports,
    length,
    module_graph,
    module_of,
    parse,
    place,
    plugin_of,
    reachable,
    sources,
)

import composer3d
from composer3d.mesh import AXES
from composer3d.registry import FAMILIES, Catalogue, info_of

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

# Imports run from later layers to earlier ones. A module that is not listed has no layer of its own, and what it
# imports counts as imported by those that import it. "composer3d" is the public names, on which users' code stands.
LAYERS = (
    ("errors", "interfaces", "patterns", "torch_compat"),
    ("communication", "mesh", "transform", "processes"),
    ("initialisation", "observation", "replicas"),
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
    ("diagnostics", "examples", "exporting", "importing", "integrations", "jobs", "scaffolding", "selftest"),
    ("cli",),
)
LAYER = {name: index for index, names in enumerate(LAYERS) for name in names}
PLANNING = (
    ("schedules", "hardware"),
    ("tracing",),
    ("costs",),
    ("formulas",),
    ("traced_manifest",),
    ("costing", "kept_manifest", "manifest_tracer"),
    ("plan",),
    ("reports",),
    ("manifest_notes",),
    ("manifest_plan", "manifest_schedule"),
    ("suggesting",),
    ("tuning",),
)
PLANNING_LAYER = {name: index for index, names in enumerate(PLANNING) for name in names}


def top(module: str) -> str:
    """Return the module's name in LAYERS: the first below composer3d."""
    return (module.split(".") + ["composer3d"])[1] if "." in module else "composer3d"


def layered(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the layered names that a name imports, through names without a layer."""
    return reachable({name: others for name, others in graph.items() if name not in LAYER or name == start}, start)


@pytest.fixture(scope="module")
def modules():
    """Every module of the core with those that it imports."""
    return module_graph()


def test_imports_run_one_way(modules):
    graph: dict[str, set[str]] = {}
    for module, imported in modules.items():
        graph.setdefault(top(module), set()).update({top(other) for other in imported} - {top(module)})
    upward = [
        f"{name} imports {other}"
        for name in sorted(graph.keys() & LAYER.keys())
        for other in sorted(layered(graph, name) & LAYER.keys())
        if LAYER[other] > LAYER[name]
    ]
    assert upward == []


def test_imports_inside_planning_run_one_way(modules):
    own = "composer3d.planning."
    upward = [
        f"{module} imports {other}"
        for module, imported in modules.items()
        if module.startswith(own)
        for other in sorted(imported)
        if other.startswith(own)
        and PLANNING_LAYER[other.split(".")[2]] >= PLANNING_LAYER[module.split(".")[2]]
        and other.split(".")[2] != module.split(".")[2]
    ]
    assert upward == []


def test_imports_have_no_cycles():
    assert house.cycles() == []


def test_no_module_hides_a_public_name():
    # Importing a submodule makes it an attribute of the package, in place of the name that is imported when it is used.
    names = {path.stem for path in CORE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert names & set(composer3d.__all__) == {"propagation", "torch_compat"}
    lazy = [file for file in CORE.rglob("*/__init__.py") if "__getattr__" in file.read_text(encoding="utf-8")]
    hidden = [
        path for file in lazy for path in file.parent.iterdir() if path.stem in house.public_names(module_of(file))
    ]
    assert hidden == []


def test_every_module_name_is_there_once():
    assert house.names_twice() == []


def test_few_files_are_loose():
    loose = [path.name for path in CORE.glob("*.py")]
    assert len(loose) <= house.MAX_LOOSE, loose


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


# Names of plugins that are words of the field too: these are not to be named as tables alone.
COMMON_WORDS = {"compile", "float8", "int8", "mixed", "mxfp8", "opentelemetry", "pipeline", "prometheus", "throughput"}
COMMON_WORDS |= {"compression", "csv", "replicas", "tensorboard", "wandb"}
# Their keys, modules and packages are the same words; and what is copied for users is written like theirs.
FOREIGN_WORDS = ("importing", "integrations", "examples")


def texts(path: Path) -> Iterator[ast.Constant]:
    """Yield the strings of a file; of docstrings only what is no example."""
    nodes = list(ast.walk(parse(path)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {id(each.body[0].value) for each in nodes if isinstance(each, documented) and ast.get_docstring(each)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings or ">>>" not in node.value:
                yield node


def test_no_text_of_the_core_names_a_plugin():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    names = points["composer3d"].keys()
    word = re.compile(rf"\b({'|'.join(sorted(names - COMMON_WORDS))})\b")
    table = re.compile(rf"\b({'|'.join(FAMILIES)})\.({'|'.join(sorted(names))})\b")
    naming = [
        f"{place(path, node.lineno)}: {node.value}"
        for path in sources(CORE)
        for node in texts(path)
        if table.search(node.value)
        or (path.relative_to(CORE).parts[0] not in FOREIGN_WORDS and word.search(node.value))
    ]
    assert naming == []


def test_what_stands_above_composition_is_written_on_public_names():
    assert house.private_imports() == []


def test_every_package_above_composition_is_counted():
    later = [name for names in LAYERS[LAYERS.index(("composer3d",)) + 1 :] for name in names]
    assert set(later) == set(house.ABOVE_COMPOSITION)


# Besides `composer3d` itself.
PUBLIC_PACKAGES = ("composer3d.propagation", "composer3d.planning.hardware")


def allowed_in_plugin(item: Import, plugin: str) -> bool:
    if item.module == "composer3d":
        return item.name in composer3d.__all__ or item.name == "torch_compat"
    if item.module in PUBLIC_PACKAGES:
        return item.name is None or item.name in importlib.import_module(item.module).__all__
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


def test_plugins_name_no_axis_that_they_do_not_own():
    """They ask the context: for the axes of shards and of replicas, for those of a role, for a parameter's mesh."""
    named: dict[str, dict[str, str]] = {}
    for path in sources(PLUGINS):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Constant) and node.value in [axis.name for axis in AXES]:
                named.setdefault(plugin_of(path), {})[node.value] = place(path, node.lineno)
    catalogue = Catalogue.installed()
    owned = {plugin: info_of(catalogue.load(plugin.rpartition(".")[2])).owns for plugin in named}
    assert (
        named
        and {where: axis for plugin, axes in named.items() for axis, where in axes.items() if axis not in owned[plugin]}
        == {}
    )


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): length(path) for path in sources(CORE, PLUGINS)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


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


def dotted_name(node: ast.AST) -> list[str]:
    """Return the parts of `first.second.third`; something that begins otherwise begins with nothing."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *reversed(parts)]


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
            first, *rest = dotted_name(node)
            dotted = [".".join((torch_names[first], *rest))] if first in torch_names else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            dotted = [node.value]
        for name in filter(is_private, dotted):
            yield f"{place(path, node.lineno)} {name}"


def test_private_torch_names_are_in_one_package():
    files = [path for path in sources(CORE, PLUGINS, ROOT / "benchmarks") if CORE / "torch_compat" not in path.parents]
    assert sorted({name for path in files for name in private_torch_names(path)}) == []


def test_private_names_are_recognised(tmp_path, monkeypatch):
    monkeypatch.setattr(source_tree, "ROOT", tmp_path)
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


def test_what_the_figures_of_the_tree_count(tmp_path, monkeypatch):
    core, plugins = tmp_path / "composer3d", tmp_path / "composer3d_plugins"
    written = {
        core / "__init__.py": "",
        core / "first.py": "from composer3d.inner.second import x\n",
        core / "inner" / "__init__.py": "",
        core / "inner" / "second.py": "if TYPE_CHECKING:\n    from composer3d.first import y\n",
        core / "inner" / "third.py": '"""How it is done."""\nfrom composer3d.first import y\n',
        plugins / "sharding" / "__init__.py": "",
        plugins / "sharding" / "large" / "__init__.py": "x = 1\n" * 100,
        plugins / "sharding" / "large" / "third.py": "x = 1\n" * 301,
        plugins / "sharding" / "small.py": "x = 1\n" * 400,
    }
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name, value in {"ROOT": tmp_path, "CORE": core, "PLUGINS": plugins}.items():
        monkeypatch.setattr(source_tree, name, value)
        monkeypatch.setattr(house, name, value)
    assert house.cycles() == [["composer3d.first", "composer3d.inner.second"]]
    assert house.names_twice() == ["third"]
    assert house.question_openings() == ["composer3d/inner/third.py:1"]
    assert house.large_plugins() == [
        {"name": "large", "lines": 401, "files": 2, "largest": "sharding/large/third.py", "largest_lines": 301}
    ]
