"""Reports of commands for programs."""

from __future__ import annotations

import json


def report(command, *arguments):
    code, out, err = command("check", *arguments, "--json")
    assert err == ""
    return code, json.loads(out)
