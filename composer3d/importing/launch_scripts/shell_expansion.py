"""Variables of a shell script, and words with their values in place."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from composer3d.errors import Problem
from composer3d.importing.launch_scripts.shell_arrays import Arrays
from composer3d.importing.launch_scripts.shell_edits import edit_of
from composer3d.importing.launch_scripts.shell_pieces import Piece, blank, split_pieces
from composer3d.importing.launch_scripts.shell_tokens import Token, balanced_end, tokens_of
from composer3d.importing.leaves import UnreadableSource

__all__ = ["Environment"]

_NAME = re.compile(r"\$(\w+|[@*#?$!-])")
_BRACED = re.compile(r"^(\w+|[@*])(?:\[[@*]\])?(?:(:?[-=+?])(.*))?$", re.DOTALL)
_INDIRECT = re.compile(r"^!([A-Za-z_]\w*)$")
_EDITED = re.compile(r"^(\w+)([/#%^,:].*)$", re.DOTALL)
_MOST_PIECES = 5_000  # of a word
_MOST_EXPANDED = 200_000  # of a script
_OPEN = re.compile(r"^\$\{?(\w+)")
# 0x1f, 2#101, 017 and 17: a zero in front is of octal numbers.
_NUMBER = re.compile(r"(?<!\w)(?:0[xX](?P<hex>[0-9a-fA-F]+)|(?P<base>\d{1,2})#(?P<digits>\w+)|(?P<plain>\d+))(?!\w)")
_NUMBER_ALONE = re.compile(rf"-?{_NUMBER.pattern}")


@dataclass(kw_only=True)
class Environment:
    """Variables with their values.

    Args:
        given: By the user.
        uncertain: `${NAME:+...}` of a variable that is not known, with its line: taken as the script leaves it.
        indices: Of elements, of arrays that have holes.
        printed: Returns what the commands of a `$(...)` print; None where that is not known without running them.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    variables: dict[str, list[Piece]] = field(default_factory=dict)
    uncertain: dict[str, int] = field(default_factory=dict)
    indices: dict[str, list[int]] = field(default_factory=dict)
    printed: Callable[[str, int], list[Piece] | None] = lambda text, line: None
    num_shifted: int = field(init=False, default=0)  # arguments of the script that are gone
    num_expanded: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            self.variables[name] = [Piece(text=value, line=1, is_split=True)]

    def assign(self, name: str, value: Token, *, is_added: bool) -> None:
        """Set a variable to a word, or to an array in brackets; or add to it."""
        if value.text.startswith("("):
            pieces: list[Piece] = []
            for token in tokens_of(value.text[1:-1], "", line=value.line):
                if not token.is_operator:
                    pieces += [*self.expand(token), blank(token.line)]
        else:
            pieces = self.expand(value)
        if not is_added:
            self.indices.pop(name, None)
        before = self.variables.get(name, []) if is_added else []
        self.variables[name] = [*before, *pieces][:_MOST_PIECES]

    def open(self, name: str, line: int, *, is_added: bool) -> None:
        """Set a variable to what is not known, or add to it what may be further words."""
        if not is_added:
            self.indices.pop(name, None)
            self.variables[name] = [Piece(text=f"${name}", line=line, is_split=True)]
            return
        added = Piece(text=f"${{{name}[@]}}", line=line, is_split=True)
        self.variables[name] = [*self.variables.get(name, []), blank(line), added, blank(line)]

    @property
    def arrays(self) -> Arrays:
        """Elements of the arrays among the variables."""
        return Arrays(variables=self.variables, number=self.whole_number, text=self._unsplit, indices=self.indices)

    def argument_behind(self, name: str) -> str:
        """Return the variable of the outside, or the argument, that another is set from; else its own name."""
        pieces = self.variables.get(name, [])
        found = _OPEN.match(pieces[0].text) if len(pieces) == 1 else None
        return found[1] if found is not None else name

    def expand(self, token: Token) -> list[Piece]:
        """Return a word's pieces, with the values of variables in their place."""
        return self._pieces(token.text, token.line, is_quoted=False)

    def document(self, text: str, line: int, *, is_literal: bool) -> list[Piece]:
        """Return the lines of a document of the script, with the values of variables in them unless it is literal."""
        return [Piece(text=text, line=line)] if is_literal else self._pieces(text, line, is_quoted=True)

    def _pieces(self, text: str, line: int, *, is_quoted: bool) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while at < len(text):
            char = text[at]
            if text.startswith("\\\n", at):  # the shell removes both, in double quotes too
                at, line = at + 2, line + 1
                continue
            if char == "\\" and at + 1 < len(text):
                pieces.append(Piece(text=text[at + 1], line=line))
                at += 2
                continue
            if char == "'" and not is_quoted:
                stop = text.find("'", at + 1)
                stop = len(text) if stop < 0 else stop
                pieces.append(Piece(text=text[at + 1 : stop], line=line))
                at, line = stop + 1, line + text[at:stop].count("\n")
                continue
            if char == '"' and not is_quoted:
                stop = _closing(text, at)
                pieces += self._pieces(text[at + 1 : stop], line, is_quoted=True)
                at, line = stop + 1, line + text[at:stop].count("\n")
                continue
            if char in "$`":
                stop = _reference_end(text, at)
                pieces += self._value(text[at:stop], line, is_quoted=is_quoted)
                at, line = stop, line + text[at:stop].count("\n")
                continue
            stop = at + 1
            while stop < len(text) and text[stop] not in "\\'\"$`\n":
                stop += 1
            pieces.append(Piece(text=text[at:stop], line=line))
            line += text[at:stop].count("\n")
            at = stop
        return pieces[:_MOST_PIECES]

    def _value(self, reference: str, line: int, *, is_quoted: bool) -> list[Piece]:
        """Return what a `$...` stands for; its own text where that is not known."""
        itself = [Piece(text=re.sub(r"\s+", "", reference), line=line)]  # one word, whatever stands in it
        if reference.startswith("$(("):
            number = self.whole_number(reference[3:-2])
            return itself if number is None else [Piece(text=str(number), line=line)]
        if reference.startswith(("$(", "`")):
            printed = self.printed(reference[1:-1].removeprefix("("), line)
            return itself if printed is None else [replace(piece, is_split=not is_quoted) for piece in printed]
        if len(reference) < 2:
            return itself
        inner = reference[2:-1] if reference.startswith("${") else reference[1:]
        found = _BRACED.match(inner)
        if found is None:
            edited = self._edited(inner, line, is_quoted=is_quoted)
            return itself if edited is None else edited
        name, operator, other = found[1], found[2] or "", found[3] or ""
        if name in "@*" and name not in self.variables:
            return []
        value = self.variables.get(name)
        is_set = value is not None and (":" not in operator or any(piece.text.strip() for piece in value))
        if operator.endswith("?"):  # the script ends where it is not set
            operator = ""
        if operator.endswith("+"):
            if value is None or any(piece.text[:1] in ("$", "`") for piece in value):
                self.uncertain[reference] = line
            return self._pieces(other, line, is_quoted=is_quoted) if is_set else []
        if value is None and name.isdecimal() and self.num_shifted:  # by its number before `shift`
            itself = [Piece(text=f"${int(name) + self.num_shifted}", line=line)]
        if operator and value is None and not other:
            return [Piece(text=f"${name}", line=line)] if not name.isdecimal() else itself
        if operator and not is_set:
            return self._pieces(other, line, is_quoted=is_quoted)
        if value is None:
            return itself
        self.num_expanded += len(value)
        if self.num_expanded > _MOST_EXPANDED:
            raise UnreadableSource(Problem(message="its variables expand to too much", file="the script", line=line))
        as_list = "[" in inner
        return value if is_quoted and as_list else [replace(piece, is_split=not is_quoted) for piece in value]

    def _unsplit(self, text: str) -> str:
        return "".join(piece.text for piece in self._pieces(text, 1, is_quoted=False))

    def _edited(self, inner: str, line: int, *, is_quoted: bool) -> list[Piece] | None:
        """Return a variable's value as `${NAME/a/b}` and its like edit it; None where that is not known."""
        if inner == "#":
            return self.variables.get("#")
        if inner[:2] in ("@:", "*:") and inner[0] not in self.variables:
            return []  # arguments of the script, of which there are none
        if (named := _INDIRECT.match(inner)) is not None:
            name = "".join(piece.text for piece in self.variables.get(named[1], []))
            is_known = name.isidentifier() and name in self.variables
            return self._value(f"${{{name}}}", line, is_quoted=is_quoted) if is_known else None
        looked_up = self.arrays.looked_up(inner, line)
        if looked_up is not None:
            self.num_expanded += len(looked_up)
            is_list = "[@]" in inner or "[*]" in inner or inner[0] in "@*"
            return looked_up if is_list and is_quoted else [replace(p, is_split=not is_quoted) for p in looked_up]
        found = _EDITED.match(inner)
        value = self.variables.get(found[1]) if found is not None else None
        if found is None or value is None:
            return None
        edit = edit_of(found[2], self._unsplit)
        whole = edit("".join(piece.text for piece in value)) if edit is not None else None
        if edit is None or whole is None:
            return None
        self.num_expanded += len(value)
        # Where it stands in one piece the others keep their lines.
        for at, piece in enumerate(value):
            pieces = [*value[:at], replace(piece, text=edit(piece.text) or ""), *value[at + 1 :]]
            if piece.text and whole == "".join(each.text for each in pieces):
                break
        else:
            pieces = [Piece(text=whole, line=value[0].line if value else 1)]
        return [replace(piece, is_split=not is_quoted) for piece in pieces]

    def whole_number(self, text: str) -> int | None:
        """Return the value of an arithmetic expression: sums, products and quotients of numbers and variables."""
        words = split_pieces(self._pieces(text, 1, is_quoted=False))
        expression = " ".join(word for word, _ in words)
        try:
            expression = _NUMBER.sub(_decimal, expression)
            for name in set(re.findall(r"[A-Za-z_]\w*", expression)):
                value = "".join(piece.text for piece in self.variables.get(name, [])).strip()
                if len(value) > 20 or not _NUMBER_ALONE.fullmatch(value):
                    return None
                expression = re.sub(rf"\b{name}\b", f"({_NUMBER.sub(_decimal, value)})", expression)
            return _whole(ast.parse(expression.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return None


def _decimal(number: re.Match[str]) -> str:
    """Return a number of a script as Python writes it.

    Raises:
        ValueError: It has a digit that its base has not.
    """
    if number["hex"]:
        return str(int(number["hex"], 16))
    if number["base"]:
        return str(int(number["digits"], int(number["base"])))
    plain = number["plain"]
    return str(int(plain, 8 if plain.startswith("0") else 10))


def _whole(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _whole(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _whole(node.left), _whole(node.right)
        if max(abs(left), abs(right)) > 1 << 62:
            raise ValueError
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Pow | ast.LShift) and 0 <= right < 63 and abs(left) <= 1 << 20:
            return left**right if isinstance(node.op, ast.Pow) else left << right
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)  # towards zero
        if isinstance(node.op, ast.Div | ast.FloorDiv):
            return quotient
        if isinstance(node.op, ast.Mod):
            return left - right * quotient
    raise ValueError


def _closing(text: str, at: int) -> int:
    """Return where a double quotation that begins at an index ends; a quote in a substitution is not its end."""
    at += 1
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif text[at] == '"':
            return at
        elif text[at] == "$" and text[at + 1 : at + 2] in ("(", "{"):
            stop = balanced_end(text, at + 1)
            at = len(text) if stop < 0 else stop
        else:
            at += 1
    return len(text)


def _reference_end(text: str, at: int) -> int:
    if text[at] == "`":
        stop = text.find("`", at + 1)
        return len(text) if stop < 0 else stop + 1
    if text[at + 1 : at + 2] in ("(", "{"):
        stop = balanced_end(text, at + 1)
        return len(text) if stop < 0 else stop
    found = _NAME.match(text, at)
    if found is None:
        return at + 1
    digits = re.match(r"\$\d", found[0])
    return at + 2 if digits else found.end()
