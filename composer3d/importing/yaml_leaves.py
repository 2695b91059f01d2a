"""YAML 1.1 as `yaml.safe_load` reads it, with the line of every key, built from events: nothing recurses or multiplies.

Of the safe constructor scalars alone are used. An anchor's value counts each time it is named, so a file whose aliases
multiply ends at the largest number of keys, and not when memory does.
"""

from __future__ import annotations

import datetime
from typing import Any

from composer3d.errors import Problem
from composer3d.importing.leaves import MAX_DEPTH, MOST_LEAVES, SourceTree, TreeBuilder, UnreadableSource

__all__ = ["read_yaml"]


class _Node:
    """A value while it is built: a scalar, a list of nodes, or pairs of a key and a node."""

    __slots__ = ("column", "line", "size", "value")

    def __init__(self, value: Any, line: int, column: int) -> None:
        self.value, self.line, self.column, self.size = value, line, column, 1


class _Table(list["tuple[str, _Node, int, int]"]):
    """Keys with their nodes and places, as they stand: a key may be there twice."""


def read_yaml(text: str, file: str) -> SourceTree:
    """Read a YAML file of one document into leaves; of keys that are there twice the last counts, as in PyYAML.

    Args:
        text: Of the file.
        file: Named in problems.

    Raises:
        UnreadableSource: It is no YAML, no table, nested too deeply, or has too many keys; or PyYAML is missing.
    """
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        message, hint = "is YAML, and PyYAML is not installed", 'pip install "composer3d[import]"'
        raise UnreadableSource(Problem(message=message, file=file, hint=hint)) from None
    builder = TreeBuilder(file=file)
    try:
        root = _Composer(builder, yaml).compose(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        said = (error.problem or "cannot be parsed").strip()
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise builder.fail(f"is not valid YAML: {said}", line, column) from None
    except yaml.YAMLError as error:
        raise builder.fail(f"is not valid YAML: {str(error).splitlines()[0]}", 1) from None
    if root is None:
        return builder.tree(text)
    if not isinstance(root.value, _Table):
        raise builder.fail("is no table of keys", root.line, root.column)
    _add(builder, (), root)
    return builder.tree(text)


class _Composer:
    """Builds nodes from PyYAML's events with a stack of its own."""

    def __init__(self, builder: TreeBuilder, yaml: Any) -> None:
        self._builder, self._yaml = builder, yaml
        self._anchors: dict[str, _Node] = {}
        self._constructor = yaml.constructor.SafeConstructor()
        self._resolver = yaml.resolver.Resolver()

    def compose(self, text: str) -> _Node | None:
        yaml, root = self._yaml, None
        open_nodes: list[tuple[_Node, list[_Node], str | None]] = []
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        for event in yaml.parse(text, Loader=loader):
            line, column = event.start_mark.line + 1, event.start_mark.column + 1
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise self._builder.fail("holds a second document", line, hint="import one document")
            if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                if len(open_nodes) >= MAX_DEPTH:
                    raise self._builder.fail(f"keys are nested deeper than {MAX_DEPTH} levels", line, column)
                is_table = isinstance(event, yaml.MappingStartEvent)
                open_nodes.append((_Node(_Table() if is_table else [], line, column), [], event.anchor))
                continue
            if isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                node, children, anchor = open_nodes.pop()
                self._close(node, children)
            elif isinstance(event, yaml.ScalarEvent):
                node, anchor = _Node(self._scalar(event, line, column), line, column), event.anchor
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in self._anchors:
                    raise self._builder.fail(f"*{event.anchor} names no anchor", line, column)
                node, anchor = self._anchors[event.anchor], None
            else:
                continue
            if anchor is not None:
                self._anchors[anchor] = node
            if open_nodes:
                open_nodes[-1][1].append(node)
            else:
                root = node
        return root

    def _close(self, node: _Node, children: list[_Node]) -> None:
        node.size = 1 + sum(child.size for child in children)
        if node.size > MOST_LEAVES:
            raise self._builder.fail(f"there are more than {MOST_LEAVES} keys", node.line, node.column)
        if not isinstance(node.value, _Table):
            node.value.extend(children)
            return
        inherited: list[tuple[str, _Node, int, int]] = []
        for key, value in zip(children[::2], children[1::2], strict=True):
            if isinstance(key.value, list):
                raise self._builder.fail("a key is a table or a list", key.line, key.column)
            if key.value == "<<":
                sources = value.value if type(value.value) is list else [value]
                for source in sources:
                    inherited += source.value if isinstance(source.value, _Table) else []
            else:
                node.value.append((_name(key.value), value, key.line, key.column))
        own = {entry[0] for entry in node.value}
        node.value[:0] = {entry[0]: entry for entry in reversed(inherited) if entry[0] not in own}.values()

    def _scalar(self, event: Any, line: int, column: int) -> Any:
        tag = event.tag
        if tag is None or tag == "!":
            tag = self._resolver.resolve(self._yaml.ScalarNode, event.value, event.implicit)
        if tag == "tag:yaml.org,2002:merge":
            return "<<"
        try:
            value = self._constructor.construct_object(self._yaml.ScalarNode(tag, event.value))
        except self._yaml.YAMLError:
            raise self._builder.fail(f"{tag} is a tag that nothing safe is made of", line, column) from None
        except (ValueError, OverflowError):
            raise self._builder.fail(f"{event.value[:40]} is no value", line, column) from None
        if isinstance(value, datetime.date | bytes):
            return event.value
        return value


def _name(key: Any) -> str:
    return str(key).lower() if isinstance(key, bool) else str(key)


def _plain(node: _Node) -> Any:
    if isinstance(node.value, _Table):
        return {key: _plain(value) for key, value, _, _ in node.value}
    return [_plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def _add(builder: TreeBuilder, path: tuple[str, ...], node: _Node) -> None:
    for key, value, line, column in node.value:
        if isinstance(value.value, _Table) and value.value:
            _add(builder, (*path, key), value)
        else:
            builder.add((*path, key), _plain(value), line, column, severity="warning")
