"""Attention backends by name: one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlab.registry import Registry

if TYPE_CHECKING:
    from kvlab.attention.base import AttentionBackend

ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry("attention.backend", __name__)
