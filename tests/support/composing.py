"""What Hydra composes of kvlab's own files, kept while tests run: each time takes a tenth of a second."""

from __future__ import annotations

import inspect
import pickle
import re
from copy import copy
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra._internal.defaults_list import DefaultsList, Overrides, create_defaults_list
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import InputDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, _utils, base, grammar_parser, nodes, open_dict

from kvlab.paths import CONF

_OWN = {"pkg://hydra.conf", f"file://{CONF}", "structured://"}  # other sources may change


def _import_once(patch: pytest.MonkeyPatch) -> None:
    """OmegaConf asks four functions for each value, which import its classes in each call."""
    classes = {"Node": base.Node, "Container": base.Container, "UnionNode": base.UnionNode}
    for name, kind in (classes | {"ValueNode": nodes.ValueNode}).items():
        patch.setattr(_utils, name, kind, raising=False)
    for function in (_utils._is_missing_value, _utils._is_none, _utils._is_interpolation, _utils._get_value):
        names: dict[str, Any] = {}
        exec(re.sub(r"(?m)^ +from .*\n", "", inspect.getsource(function)), vars(_utils), names)
        patch.setattr(function, "__code__", names[function.__name__].__code__)


def keep_compositions(patch: pytest.MonkeyPatch) -> None:
    """From here on the files in conf/ are read once, and each choice of them is listed and merged once."""
    _import_once(patch)
    Plugins.instance()  # which loads the classes of sources anew
    source = SourcesRegistry.instance().resolve("file")
    mode, copy_parts = Hydra.get_mode, DictConfig.__deepcopy__
    parse, set_any_path = OverridesParser.parse_rule, ConfigLoaderImpl._process_config_searchpath
    merge, read = ConfigLoaderImpl._compose_config_from_defaults_list, source.load_config
    choices = defaults_list._create_interpolation_map
    lists: dict[Any, DefaultsList] = {}
    merged: dict[int, bytes | None] = {}  # of the lists above
    begun: dict[str, bytes] = {}
    files: dict[str, bytes] = {}
    parsed: dict[tuple[str, str], Any] = {}

    def parse_once(self: OverridesParser, text: str, rule: str) -> Any:
        if (text, rule) not in parsed:
            parsed[text, rule] = parse(self, text, rule)
        return copy(parsed[text, rule])  # who asked for it notes in it where choices are looked up

    def set_path(self: ConfigLoaderImpl, name: str | None, overrides: list[Override], repo: Any) -> None:
        # It reads run.yaml for a path that none of kvlab's own files has.
        asked = any(each.get_key_element() == "hydra.searchpath" for each in overrides)
        if asked or not {source.full_path() for source in repo.get_sources()} <= _OWN:
            set_any_path(self, name, overrides, repo)

    def list_once(repo: Any, config_name: str | None, overrides_list: list[Override], **more: Any) -> DefaultsList:
        sources = {each.full_path() for each in repo.get_sources()}
        settings = Overrides(repo, overrides_list).config_overrides
        choices = [override.input_line for override in overrides_list if override not in settings]
        key = (config_name, *choices, *sorted(more.items()), *sorted(sources))
        if key not in lists:
            found = create_defaults_list(repo, config_name, overrides_list, **more)
            if not sources <= _OWN:
                return found
            lists[key] = found
            merged[id(found.defaults)] = None
        kept = lists[key]
        return DefaultsList(kept.defaults, kept.defaults_tree, settings, kept.overrides)

    @wraps(merge)
    def merge_once(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        if id(defaults) not in merged:
            return merge(self, defaults, repo)
        if (kept := merged[id(defaults)]) is None:
            kept = merged[id(defaults)] = pickle.dumps(merge_behind_run(self, defaults, repo))
        return pickle.loads(kept)

    def merge_behind_run(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
        # Hydra's own files, the schema and run.yaml come first, and are most of the work.
        end = 1 + [each.config_path for each in defaults].index("run")
        key = repr(defaults[:end])
        if key not in begun:
            begun[key] = pickle.dumps(merge(self, defaults[:end], repo))
        start = SimpleNamespace(config=pickle.loads(begun[key]))
        load = self._load_single_config
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                self, "_load_single_config", lambda default, repo: load(default, repo) if default else start
            )
            rest: list[Any] = [None, *defaults[end:]]
            return merge(self, rest, repo)

    @wraps(read)
    def read_once(self: Any, config_path: str) -> Any:
        if self.path != str(CONF):
            return read(self, config_path)
        if config_path not in files:
            files[config_path] = pickle.dumps(read(self, config_path))
        return pickle.loads(files[config_path])

    def map_where_asked(overrides: Overrides, defaults: list[InputDefault], self_added: bool) -> DictConfig | None:
        # All that was chosen so far, anew for each file, though only defaults with ${...} look at it.
        asked = any(each.is_interpolation() for each in defaults)
        return choices(overrides, defaults, self_added) if asked else None

    def known_mode(self: Hydra, config_name: str | None, overrides: list[str]) -> Any:
        # It composes all to read one setting. Of kvlab's own settings, only these make a run a sweep.
        own = {source.full_path() for source in self.config_loader.get_sources()} <= _OWN
        keys = {text.partition("=")[0].strip("+~") for text in overrides}
        asked = keys & {"repeats", "sweep", "experiment", "hydra.mode", "hydra"}
        return mode(self, config_name, overrides) if asked or not own else None

    def copy_quickly(self: DictConfig, memo: dict[int, Any]) -> DictConfig:
        # Half of the time; a part of a configuration would take along the whole.
        whole = self._get_parent() is None
        return pickle.loads(pickle.dumps(self)) if whole else copy_parts(self, memo)

    def copy_for_job(config: DictConfig) -> DictConfig:
        # Hydra copies all of a configuration to leave out its own settings, which are most of it; then these once
        # more for a result that nobody reads.
        content = config._content
        if not isinstance(content, dict) or content.keys() == {"hydra"}:
            return config
        config.__dict__["_content"] = {key: node for key, node in content.items() if key != "hydra"}
        try:
            job = copy_quickly(config, {})
        finally:
            config.__dict__["_content"] = content
        with open_dict(job):
            job.hydra = None
        return job

    def share_sources(self: CachingConfigRepository, delegate: IConfigRepository) -> None:
        # A deep copy takes along all that was ever registered. Only the list of sources changes, which is set anew.
        self.delegate, self.cache = copy(delegate), {}

    patch.setattr(OverridesParser, "parse_rule", parse_once)
    patch.setattr(ConfigLoaderImpl, "_process_config_searchpath", set_path)
    patch.setattr("hydra.core.utils.copy", SimpleNamespace(deepcopy=copy_for_job))
    patch.setattr("omegaconf.base.parse", cache(grammar_parser.parse))  # interpolations: no tree is changed
    patch.setattr(defaults_list, "_create_interpolation_map", map_where_asked)
    patch.setattr(Hydra, "get_mode", known_mode)
    patch.setattr(DictConfig, "__deepcopy__", copy_quickly)
    patch.setattr(CachingConfigRepository, "__init__", share_sources)
    patch.setattr(config_loader_impl, "create_defaults_list", list_once)
    patch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
    patch.setattr(source, "load_config", read_once)
