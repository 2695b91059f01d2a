"""`read` of a shell script, from a document or a text of the script itself."""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["DOCUMENT", "LITERAL", "Reading"]

# Operators of documents, `<<END` and `<<'END'`: in the second one nothing is put in place of variables.
DOCUMENT, LITERAL = "<<", "<<'"
_NAME = re.compile(r"[A-Za-z_]\w*")
_VALUED = "dinNptu"  # options that take a value


class Reading:
    """The text that a `read` takes, and the variables that it fills.

    Args:
        words: Of the command, behind its name, without quotes.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.names: list[str] = []
        self.delimiter, self.is_array, self.is_raw = "\n", False, False
        left = list(words)
        while left and left[0].startswith("-") and len(left[0]) > 1:
            options = left.pop(0)[1:]
            for at, option in enumerate(options):
                self.is_array |= option == "a"
                self.is_raw |= option == "r"
                if option in _VALUED:
                    value = options[at + 1 :] or (left.pop(0) if left else "")
                    if option == "d":
                        self.delimiter = value[:1]
                    elif option in "nN":
                        self.delimiter = "?"  # so many characters, which is not followed
                    break
        self.names = [word for word in left if _NAME.fullmatch(word)] or ["REPLY"]

    @property
    def is_whole(self) -> bool:
        """Whether one variable takes all that is read."""
        return self.delimiter == "" and len(self.names) == 1 and not self.is_array

    def fields(self, text: str, separators: str) -> list[list[str]] | None:
        """Return the words of each variable; None where that is not followed.

        Args:
            text: What is read, with its last line's end.
            separators: `IFS`.
        """
        if not self.is_raw and "\\" in text:
            return None
        if self.delimiter not in ("\n", ""):
            return None
        record = text if not self.delimiter else text.partition("\n")[0]
        blanks = "".join(char for char in separators if char.isspace())
        record = record.strip(blanks) if blanks else record
        others = "".join(char for char in separators if not char.isspace())
        pattern = "|".join(filter(None, (f"[{blanks}]+" if blanks else "", f"[{re.escape(others)}]" if others else "")))
        if others and blanks:
            return None
        found = re.split(pattern, record) if pattern and record else [record] * bool(record)
        if self.is_array:
            return [found]
        if len(self.names) == 1:
            return [[record]]
        if len(found) > len(self.names):
            found = re.split(pattern, record, maxsplit=len(self.names) - 1)
        return [[each] for each in [*found, *[""] * (len(self.names) - len(found))]]
