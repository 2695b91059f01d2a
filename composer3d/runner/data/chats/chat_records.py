"""Records of instruction data: chats, prompts with completions, instructions with outputs, and text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from composer3d.errors import DataError
from composer3d.runner.data.data_table import ChatTable

__all__ = ["ChatRecord", "read_records"]

# Names of fields and roles as they are common: OpenAI's, and ShareGPT's.
_CHATS, _ROLES, _CONTENTS = ("messages", "conversations", "conversation"), ("role", "from"), ("content", "value")
_SPEAKERS = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
_LINES = "lines of JSON end in .jsonl"
_FORMS = '"messages" (or "conversations"), "prompt" with "completion", "instruction" with "output", or "text"'


@dataclass(frozen=True, kw_only=True)
class ChatRecord:
    """One chat, or one text with a prompt.

    Args:
        place: The file and line, for messages.
        messages: Of a chat: role and content of each, and what else it says; empty for a text.
        num_given: Messages that are a prompt, whoever speaks.
        tools: As the template reads them.
        prompt: Of a text.
        completion: Of a text: what is trained.
    """

    place: str
    messages: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    num_given: int = 0
    tools: Any = None
    prompt: str = ""
    completion: str = ""


def read_records(files: Sequence[Path], table: ChatTable, *, use: str) -> Iterator[ChatRecord]:
    """Yield the records of files in their order: one JSON object a line, or one list of them in a .json file.

    Raises:
        DataError: A line is no JSON, or no record of instruction data; with its place.
    """
    for file in files:
        for line, value in _values(file, use):
            place = f"{file.name}:{line}"
            try:
                yield _record(value, table, place)
            except _Wrong as error:
                raise DataError(f'[data] use = "{use}": {place} {error}') from None


class _Wrong(Exception):
    """Fault of a record, without its place."""


def _values(file: Path, use: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, or number of the element, value)."""
    if file.suffix == ".json":
        try:
            listed = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataError(
                f'[data] use = "{use}": {file.name} is no JSON: {error}; lines of JSON end in .jsonl'
            ) from None
        if not isinstance(listed, list):
            raise DataError(f'[data] use = "{use}": {file.name} holds no list of records; lines of JSON end in .jsonl')
        yield from enumerate(listed, 1)
        return
    if file.suffix != ".jsonl":
        raise DataError(f'[data] use = "{use}": {file.name} is no .jsonl or .json, in which chats are')
    with file.open("rb") as lines:  # of which one that is no UTF-8 is no JSON either
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise DataError(f'[data] use = "{use}": {file.name}:{number} is no JSON: {error}') from None


def _record(value: Any, table: ChatTable, place: str) -> ChatRecord:
    if not isinstance(value, Mapping):
        raise _Wrong(f"is of type {type(value).__name__}, and a record is an object with {_FORMS}")
    tools = value.get("tools")
    try:
        tools = json.loads(tools) if isinstance(tools, str) and tools.startswith("[") else tools
    except ValueError as error:
        raise _Wrong(f'has tools that begin with "[" and are no JSON: {error}') from None
    name = table.messages or next((name for name in _CHATS if name in value), None)
    if name is not None:
        return ChatRecord(place=place, messages=_messages(value.get(name), table, name), tools=tools)
    if isinstance(value.get("prompt"), list):
        prompt = _messages(value["prompt"], table, "prompt")
        messages = [*prompt, *_messages(value.get("completion"), table, "completion")]
        return ChatRecord(place=place, messages=messages, num_given=len(prompt), tools=tools)
    if "prompt" in value and "completion" in value:
        return ChatRecord(
            place=place, prompt=_text(value, "prompt"), completion=_text(value, "completion") or _empty("completion")
        )
    if "instruction" in value and "output" in value:
        asked = "\n\n".join(filter(None, (_text(value, "instruction"), _text(value, "input"))))
        said = [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(value, "output")}]
        system = [{"role": "system", "content": _text(value, "system")}] if value.get("system") else []
        return ChatRecord(place=place, messages=[*system, *said])
    if "text" in value:
        return ChatRecord(place=place, completion=_text(value, "text") or _empty("text"))
    shown = ", ".join(sorted(map(str, value))) or "nothing"
    raise _Wrong(f"has {shown}; a record has {_FORMS}, or name its field as chat.messages")


def _empty(key: str) -> str:
    raise _Wrong(f'has an empty "{key}"')


def _text(value: Mapping[Any, Any], key: str) -> str:
    found = value.get(key)
    if found is not None and not isinstance(found, str):
        raise _Wrong(f'has a value of type {type(found).__name__} as "{key}", which is a text')
    return found or ""


def _messages(value: Any, table: ChatTable, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _Wrong(f'has no list of messages as "{name}"')
    return [_message(each, table, f"{name}[{number}]") for number, each in enumerate(value)]


def _message(value: Any, table: ChatTable, name: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _Wrong(f"has a value of type {type(value).__name__} as {name}, which is an object with role and content")
    role = table.role or next((key for key in _ROLES if key in value), _ROLES[0])
    content = table.content or next((key for key in _CONTENTS if key in value), _CONTENTS[0])
    if not isinstance(value.get(role), str) or (not isinstance(value.get(content), str) and "tool_calls" not in value):
        raise _Wrong(
            f'has {name} without texts "{role}" and "{content}"; name its fields as chat.role and chat.content'
        )
    others = {str(key): each for key, each in value.items() if key not in (role, content)}
    speaker = value[role]
    return {**others, "role": _SPEAKERS.get(speaker, speaker), "content": value.get(content) or ""}
