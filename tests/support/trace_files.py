"""Readers of a run's trace files."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass
class Span:
    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    attributes: dict
    links: list


def value(holder):
    ((kind, content),) = holder.items()
    return int(content) if kind == "intValue" else content


def read(path):
    """Return (resource, spans) of a rank's file."""
    resource, spans = {}, []
    for line in path.read_text().splitlines():
        (group,) = json.loads(line)["resourceSpans"]
        resource = {item["key"]: value(item["value"]) for item in group["resource"]["attributes"]}
        for span in group["scopeSpans"][0]["spans"]:
            attributes = {item["key"]: value(item["value"]) for item in span["attributes"]}
            times = int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])
            spans.append(
                Span(
                    span["name"],
                    span["traceId"],
                    span["spanId"],
                    span["parentSpanId"],
                    *times,
                    attributes,
                    span.get("links", []),
                )
            )
    return resource, spans


def tree(spans, span):
    """Return a span as (name with its group, children in order of time)."""
    inside = sorted((child for child in spans if child.parent == span.id), key=lambda child: child.start)
    label = " ".join(filter(None, [span.name, span.attributes.get("group")]))
    return (label, [tree(spans, child) for child in inside])
