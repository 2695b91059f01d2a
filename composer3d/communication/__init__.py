"""Options of process groups; collectives that change numbers on purpose: codecs, and what `verify` knows of them."""

from __future__ import annotations

from composer3d.communication.coded_collectives import Codec, CodedCollectives, CodedExchange
from composer3d.communication.group_options import GroupOptions, NCCLOptions

__all__ = ["Codec", "CodedCollectives", "CodedExchange", "GroupOptions", "NCCLOptions"]
