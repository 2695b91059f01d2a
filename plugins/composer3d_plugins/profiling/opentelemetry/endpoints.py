"""Addresses of collectors: what an exporter could never reach is refused where the manifest is read."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

__all__ = ["refusal_of"]

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?|[0-9A-Fa-f:.%]+")  # a name, or an address of IPv6


def refusal_of(endpoint: str, protocol: str) -> str | None:
    """Return why an exporter of this protocol cannot send to an address; None where it can.

    Args:
        endpoint: A URL; of gRPC, `host:port` too.
        protocol: `http` or `grpc`.
    """
    shown = f'endpoint = "{_hidden(endpoint)[:200]}"'
    if protocol == "grpc" and "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    try:
        parts = urlsplit(endpoint)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        return f"{shown} is no URL: {str(error).splitlines()[0]}"
    example = "http://collector:4318" if protocol == "http" else "http://collector:4317"
    if parts.scheme not in ("http", "https"):
        return f'{shown} does not begin with http:// or https://, as "{example}" does'
    if host is None or not _HOST.fullmatch(host) or len(host) > 253 or endpoint != endpoint.strip():
        return f'{shown} names no host, as "{example}" does'
    if port == 0:
        return f"{shown} has port 0, on which nothing listens"
    if parts.query or parts.fragment:
        return f"{shown} has a query or a fragment, and is to be a base URL"
    if protocol == "http" and parts.path.rstrip("/").endswith(("/v1/traces", "/v1/metrics")):
        return f"{shown} names a path of one signal, which the exporter adds itself; leave it out"
    return None


def _hidden(endpoint: str) -> str:
    """Return an address without a password."""
    return re.sub(r"//[^/@]*@", "//...@", endpoint)
