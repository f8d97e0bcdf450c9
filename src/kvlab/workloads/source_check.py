"""What every source of requests has to keep, whoever wrote it: else requests would be lost, or wait for ever."""

import math

from kvlab.core import Request
from kvlab.errors import WorkloadError, shown
from kvlab.hashed_prompt import HashedPrompt


class SourceCheck:
    """Looks at the requests of a source, one after another."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._names: set[str] = set()
        self._followed: set[str] = set()

    def add(self, request: object) -> None:
        """The next one. Raises WorkloadError for what no run could drive."""
        if not isinstance(request, Request):
            raise self._error(f"request {len(self._names) + 1} is {shown(request, repr)}, no kvlab.core.Request")
        name, earlier = request.request_id, request.follows
        prompt: object = request.prompt_token_ids
        arrival: object = request.arrival_s
        if type(name) is not str:
            raise self._error(f"request_id={shown(name, repr)}: must be a string")
        if name in self._names:
            raise self._error(f"two requests have request_id={shown(name, repr)}")
        if not (isinstance(arrival, float | int) and 0 <= arrival < math.inf):
            text = f"request {shown(name)}: arrival_s={shown(arrival, repr)}: must be seconds, 0 or more"
            raise self._error(text)
        if not isinstance(prompt, tuple | list | HashedPrompt):
            text = f"request {shown(name)}: prompt_token_ids={shown(prompt, repr)}: must be a tuple of token ids"
            raise self._error(text)
        if earlier is not None and earlier not in self._names:
            raise self._error(f"request {shown(name)} follows {shown(earlier, repr)}, which is none before it")
        if earlier is not None and earlier in self._followed:
            raise self._error(f"request {shown(name)} follows {shown(earlier, repr)}, as another one does already")
        self._names.add(name)
        if earlier is not None:
            self._followed.add(earlier)

    def _error(self, text: str) -> WorkloadError:
        return WorkloadError(f"workload.source={self._source}: {text}")
