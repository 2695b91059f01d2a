"""Spans of a rendered chat that are trained, in characters and then in tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from composer3d.runner.data.chats.chat_records import ChatRecord
from composer3d.runner.data.chats.chat_template import RenderingError, Span

__all__ = ["byte_offsets", "rendered", "trained_tokens"]

Render = Callable[..., tuple[str, list[Span]]]
_MEND = "mark what it writes with {% generation %} in the template, or set chat.trained = "


def rendered(
    record: ChatRecord, render: Render | None, *, trained: Literal["assistant", "last", "all"], end: str
) -> tuple[str, list[Span]]:
    """Return the text of a record and the spans that are trained.

    Where the template has no generation marks, a turn is what it adds to the chat so far with the prompt for an
    answer, white space at its end left out: the token that ends a turn is trained, a line end after it is not.

    Args:
        record: A chat, or a text with its prompt.
        render: Of the template; None where there is none, for texts alone.
        trained: Every turn of the assistant, its last one, or all tokens.
        end: The token that ends a text, "" where unknown.

    Raises:
        RenderingError: There is no template, or a turn has another text as soon as others follow it.
    """
    if not record.messages:
        text = record.prompt + record.completion + ("" if not end or record.completion.endswith(end) else end)
        return text, [(0 if trained == "all" else len(record.prompt), len(text))]
    if render is None:
        raise RenderingError('has messages, and there is no template; set chat.template = "chatml", or give a file')
    text, marked = render(record.messages, tools=record.tools)
    if trained == "all":
        return text, [(0, len(text))]
    turns = [
        number
        for number, message in enumerate(record.messages)
        if message["role"] == "assistant" and number >= record.num_given
    ]
    if trained == "last":
        turns = turns[-1:]
    if marked:
        every = sum(message["role"] == "assistant" for message in record.messages)
        if len(marked) == every:
            first = every - len(turns)
            return text, marked[first:]
        return text, marked if trained == "assistant" else marked[-1:]
    return text, [_turn(record, render, number, text) for number in turns]


def _turn(record: ChatRecord, render: Render, number: int, text: str) -> Span:
    given, _ = render(record.messages[:number], prompts=True, tools=record.tools)
    so_far = text
    if number + 1 < len(record.messages):
        so_far, _ = render(record.messages[: number + 1], tools=record.tools)
    for part in (given, so_far):
        if not text.startswith(part):
            what = f"message {number} is rendered otherwise when more messages follow, so its tokens cannot be found"
            raise RenderingError(f'{what}; {_MEND}"last" or "all"')
    return len(given), len(given) + len(so_far[len(given) :].rstrip())


def trained_tokens(offsets: Sequence[tuple[int, int]], spans: Sequence[Span]) -> list[bool]:
    """Return for each token whether a character of it is trained.

    Args:
        offsets: The characters of each token, ascending.
        spans: What is trained, ascending.
    """
    result: list[bool] = []
    place = 0
    for start, end in offsets:
        while place < len(spans) and spans[place][1] <= start:
            place += 1
        result.append(place < len(spans) and end > spans[place][0] and end > start)
    return result


def byte_offsets(text: str) -> list[tuple[int, int]]:
    """Return the character of every byte of a text in UTF-8."""
    return [(number, number + 1) for number, letter in enumerate(text) for _ in letter.encode()]
