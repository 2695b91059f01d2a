"""Instruction data: chats as a template renders them, prompts without loss, several chats a row."""

from __future__ import annotations

from composer3d.runner.data.chats.chat_source import ChatSource, open_chats, probe_chats

__all__ = ["ChatSource", "open_chats", "probe_chats"]
