"""Chat templates: jinja as transformers runs it, and which characters of a rendered chat are trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from composer3d.errors import DataError

__all__ = ["ChatTemplate", "RenderingError", "Span", "read_template"]

# Characters of a text, the second one not included.
Span = tuple[int, int]
Message = Mapping[str, Any]

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'"
    " }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_NAMED = {"chatml": _CHATML}
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class RenderingError(Exception):
    """A chat that its template cannot render, or of which it does not say what the assistant wrote."""


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`, which marks what the assistant wrote."""

    tags = {"generation"}

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        environment.extend(mark_generated=None)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return a call that passes the block's text on, between marks where they are asked for."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_passed_on"), [], [], body).set_lineno(line)

    def _passed_on(self, caller: Callable[[], str]) -> str:
        mark: Callable[[str], str] | None = self.environment.mark_generated  # type: ignore[attr-defined]
        return caller() if mark is None else mark(caller())


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template in jinja's sandbox: it reads the chat and nothing else.

    `strftime_now` is not there, on purpose: a template that writes the day's date would give other tokens when a run
    is resumed. Templates that ask whether it is defined, as Llama 3.1's does, have a date of their own.

    Args:
        text: The template; None where a tokenizer has special tokens alone, which is enough for texts.
        special: `bos_token`, `eos_token` and the like, as the template reads them.
        name: For messages.
    """

    text: str | None
    special: Mapping[str, str]
    name: str

    def compiled(self) -> Callable[..., tuple[str, list[Span]]]:
        """Return a function that renders messages: the text, and the spans between generation marks.

        Raises:
            DataError: The template is no jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            template = environment.from_string(self.text or "")
        except TemplateError as error:
            raise DataError(
                f'[data] chat.template = "{self.name}": line {getattr(error, "lineno", 1)}: {error}'
            ) from None

        def render(messages: Sequence[Message], *, prompts: bool = False, tools: Any = None) -> tuple[str, list[Span]]:
            # Marks that Unicode keeps out of every text ("noncharacters").
            environment.mark_generated = lambda text: f"\ufdd0{text}\ufdd1"  # type: ignore[attr-defined]
            try:
                marked = template.render(
                    messages=messages, add_generation_prompt=prompts, tools=tools, documents=None, **self.special
                )
            except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
                raise RenderingError(f"cannot be rendered by {self.name}: {error}") from None
            return _without_marks(marked)

        return render


def _without_marks(marked: str) -> tuple[str, list[Span]]:
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for number, piece in enumerate(marked.replace("\ufdd1", "\ufdd0").split("\ufdd0")):
        if number % 2:
            spans.append((length, length + len(piece)))
        pieces.append(piece)
        length += len(piece)
    return "".join(pieces), spans


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes what HTML would read.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def read_template(stated: str | None, *, folder: Path, tokenizer: Path | None) -> ChatTemplate | None:
    """Return the template that is stated, else that of the tokenizer's folder; None without a tokenizer.

    Args:
        stated: `[data] chat.template`: a name, or a path.
        folder: Of the manifest.
        tokenizer: The tokenizer.json, beside which a model's template and special tokens lie.

    Raises:
        DataError: There is no such file, or what lies beside the tokenizer cannot be read.
    """
    config = _config_beside(tokenizer)
    special = {key: text for key in _SPECIAL if (text := _token_text(config.get(key))) is not None}
    if stated is not None:
        if stated in _NAMED:
            return ChatTemplate(text=_NAMED[stated], special=special, name=stated)
        try:
            text = (folder / stated).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            choices = ", ".join(f'"{name}"' for name in _NAMED)
            raise DataError(
                f'[data] chat.template = "{stated}" cannot be read: {reason.lower()}; give a file, or {choices}'
            ) from None
        return ChatTemplate(text=text, special=special, name=stated)
    if tokenizer is None:
        return None
    beside = tokenizer.with_name("chat_template.jinja")
    try:
        text = beside.read_text(encoding="utf-8") if beside.is_file() else _default_of(config.get("chat_template"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f'[data] tokenizer = "{tokenizer}": {beside.name} beside it cannot be read: {error}') from None
    return ChatTemplate(text=text, special=special, name="the tokenizer's template")


def _config_beside(tokenizer: Path | None) -> Mapping[str, Any]:
    path = None if tokenizer is None else tokenizer.with_name("tokenizer_config.json")
    if path is None or not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f'[data] tokenizer = "{tokenizer}": {path.name} beside it cannot be read: {error}') from None
    return found if isinstance(found, Mapping) else {}


def _token_text(value: Any) -> str | None:
    """Return a special token's text: it is written as one, or as a table with its content."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_of(stated: Any) -> str | None:
    """Return the template of a configuration: a text, or that named "default" of several."""
    if isinstance(stated, list):
        named = {each.get("name"): each.get("template") for each in stated if isinstance(each, Mapping)}
        stated = named.get("default")
    return stated if isinstance(stated, str) else None
