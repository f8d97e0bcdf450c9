"""Routers by name: one file each."""

from kvlab.fleet.base import Router
from kvlab.registry import Registry

ROUTERS: Registry[type[Router]] = Registry("fleet.router", __name__)

__all__ = ["ROUTERS", "Router"]
