"""Values of a manifest that are never shown or written: passwords, keys, headers that carry them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from pydantic_core import core_schema

from composer3d.errors import PluginError

__all__ = ["HIDDEN", "WANTED", "Secret", "hide", "hide_passwords", "names_a_secret", "redacted", "remember_secrets"]

HIDDEN = "**********"
WANTED = 'a string, { env = "NAME" } or { file = "PATH" }'

_NAMES = re.compile(
    r"token|auth|(.*_)?(password|passwd|passphrase|secret|credentials?|authorization|headers|cookie"
    r"|(api|access|private|secret)_?key|(access|auth|bearer|hf|secret)_?token)"
)
# Passwords of URLs, their parameters that are named for one, and what an `Authorization` header carries.
_IN_TEXT = (
    re.compile(r"(?<=://)(?P<kept>[^/@\s:]*:)(?P<secret>[^/@\s]+)(?=@)"),
    re.compile(r"(?<=[?&])(?P<kept>[\w-]*(?:token|key|secret|password|signature|sig)=)(?P<secret>[^&#\s\"']+)", re.I),
    re.compile(r"\b(?P<kept>(?:bearer|basic)\s+)(?P<secret>[\w.~+/=-]{8,})", re.I),
)
# Shorter ones are parts of words.
_SHORTEST = 6
_known: set[str] = set()


@final
class Secret:
    """A secret as a manifest states it: itself, or better the environment variable or the file that holds it.

    In a manifest `"value"`, `{ env = "NAME" }` or `{ file = "PATH" }`, a path relative to the manifest's folder. It is
    read when it is revealed, so `check` needs none. Shown and written it is asterisks.

    Args:
        value: The secret itself.
        env: The environment variable that holds it.
        file: The file that holds it; one line break at its end does not count.
    """

    __slots__ = ("_env", "_file", "_value")

    def __init__(self, value: str | None = None, *, env: str | None = None, file: str | None = None) -> None:
        if sum(source is not None for source in (value, env, file)) != 1:
            raise ValueError(f"must be {WANTED}")
        self._value, self._env, self._file = value, env, file

    def reveal(self, folder: Path) -> str:
        """Return the secret.

        Args:
            folder: From where a relative path counts: the manifest's.

        Raises:
            PluginError: The variable is not set, the file cannot be read, or the manifest is a record of a run, which
                holds no secrets.
        """
        if self._env is not None:
            found = os.environ.get(self._env)
            if found is None:
                raise PluginError(f'the environment variable "{self._env}" is not set', hint="export it on every host")
            _known.add(found)
            return found
        if self._file is not None:
            try:
                found = (folder / self._file).read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
                _known.add(found)
                return found
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or type(error).__name__
                raise PluginError(f'the file "{self._file}" of a secret cannot be read: {reason}') from None
        assert self._value is not None, "one of three is there"
        if self._value == HIDDEN:
            raise PluginError(
                "the record of a run holds no secrets",
                hint='write { env = "NAME" } or { file = "PATH" }, which it holds',
            )
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> core_schema.CoreSchema:
        """Return how pydantic makes one."""
        return core_schema.no_info_plain_validator_function(
            cls._parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> dict[str, Any]:
        """Return the JSON schema that editors read."""
        text = {"type": "string", "minLength": 1}
        sources = [
            {"type": "object", "additionalProperties": False, "required": [key], "properties": {key: text}}
            for key in ("env", "file")
        ]
        return {"anyOf": [text, *sources]}

    @classmethod
    def _parse(cls, value: Any) -> Secret:
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value:
            return cls(value)
        if isinstance(value, Mapping) and len(value) == 1 and all(isinstance(v, str) and v for v in value.values()):
            ((key, text),) = value.items()
            if key in ("env", "file"):
                return cls(**{key: text})
        raise ValueError(f"must be {WANTED}")


def names_a_secret(key: Any) -> bool:
    """Return whether a key's name implies a secret value: `api_key`, `db_password`, `headers`."""
    return isinstance(key, str) and _NAMES.fullmatch(key.lower().replace("-", "_")) is not None


def hide_passwords(text: str) -> str:
    """Return a text without the passwords and keys of URLs in it, and without what follows `Bearer`.

    >>> hide_passwords("http://me:mine@host/path?token=mine&page=2")
    'http://me:**********@host/path?token=**********&page=2'
    """
    for pattern in _IN_TEXT:
        text = pattern.sub(rf"\g<kept>{HIDDEN}", text)
    return text


def remember_secrets(value: Any, paths: Collection[tuple[str | int, ...]] = ()) -> None:
    """Let `redacted` know the secrets of a manifest from now on: what `hide` hides in it.

    Args:
        value: As for `hide`.
        paths: As for `hide`.
    """
    _known.update(_secrets_in(value, paths, ()))


def redacted(text: str) -> str:
    """Return a text of others, such as an exception's, without the secrets of this process's manifests.

    Secrets of fewer than 6 characters are parts of words, and stay.
    """
    for secret in sorted(_known, key=len, reverse=True):
        if len(secret) >= _SHORTEST:
            text = text.replace(secret, HIDDEN)
    return hide_passwords(text)


def _secrets_in(value: Any, paths: Collection[tuple[str | int, ...]], path: tuple[str | int, ...]) -> Iterator[str]:
    is_secret = path in paths or any(map(names_a_secret, path))
    if isinstance(value, Mapping):
        if not (is_secret and len(value) == 1 and next(iter(value)) in ("env", "file")):
            for key, item in value.items():
                yield from _secrets_in(item, paths, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _secrets_in(item, paths, (*path, index))
    elif isinstance(value, str):
        yield from [value] if is_secret else (m["secret"] for pattern in _IN_TEXT for m in pattern.finditer(value))


def hide(value: Any, paths: Collection[tuple[str | int, ...]] = (), path: tuple[str | int, ...] = ()) -> Any:
    """Return nested tables and lists without secrets, for a record or a log.

    Hidden are the strings at the given paths, those under a key whose name says that it is a secret, and what
    `hide_passwords` finds in others. Where a secret is to be found, `{ env = "NAME" }` or `{ file = "PATH" }`, is none.

    Args:
        value: Mappings, lists and plain values.
        paths: Key paths of secrets.
        path: Key path of the value.
    """
    is_secret = path in paths or any(map(names_a_secret, path))
    if isinstance(value, Mapping):
        if is_secret and len(value) == 1 and next(iter(value)) in ("env", "file"):
            return dict(value)
        return {key: hide(item, paths, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(hide(item, paths, (*path, index)) for index, item in enumerate(value))
    if isinstance(value, str):
        return HIDDEN if is_secret else hide_passwords(value)
    return value
