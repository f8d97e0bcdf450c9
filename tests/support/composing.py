"""What Hydra composes of kvlab's own files, kept while tests run: each time takes a tenth of a second."""

from __future__ import annotations

import os
import pickle
from functools import wraps
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource

from kvlab.paths import CONF

_MOST = 1000  # compositions, of 23 kB each


def keep_compositions(patch: pytest.MonkeyPatch) -> None:
    """From here on the files in conf/ are read once, and each configuration is composed once. Others may change."""
    compose, read = ConfigLoaderImpl._load_configuration_impl, FileConfigSource.load_config
    composed: dict[Any, bytes] = {}
    files: dict[str, bytes] = {}

    @wraps(compose)
    def compose_once(
        self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *args: Any, **more: Any
    ) -> Any:
        sources = [path.path for path in self.config_search_path.get_path()]
        if str(CONF) not in sources or any("searchpath" in text for text in overrides):
            return compose(self, config_name, overrides, *args, **more)
        key = (config_name, *overrides, args, *sorted(more.items()), *sources, os.getcwd())
        if key not in composed:
            if len(composed) >= _MOST:
                composed.clear()
            composed[key] = pickle.dumps(compose(self, config_name, overrides, *args, **more))
        return pickle.loads(composed[key])

    @wraps(read)
    def read_once(self: FileConfigSource, config_path: str) -> Any:
        if self.path != str(CONF):
            return read(self, config_path)
        if config_path not in files:
            files[config_path] = pickle.dumps(read(self, config_path))
        return pickle.loads(files[config_path])

    patch.setattr(ConfigLoaderImpl, "_load_configuration_impl", compose_once)
    patch.setattr(FileConfigSource, "load_config", read_once)
