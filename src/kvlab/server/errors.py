"""Errors as OpenAI's API reports them: a status and `{"error": {"message", "type", "param", "code"}}`."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from starlette.responses import JSONResponse

from kvlab.errors import EngineStoppedError, KvlabError, QueueFullError, RequestRefusedError, TooLongError, shown

RETRY_AFTER_S = 1  # what a client that finds the queue full should wait
_SHOWN = 20  # items of a list that is wrong, at most

_TYPES = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An answer that is an error. `code` is for programs; without one it is the status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = status if code is None else code

    def body(self) -> dict[str, Any]:
        """The error's JSON."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The answer."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else None
        return JSONResponse(self.body(), status_code=self.status, headers=headers)


def wrong(field: str, text: str) -> ApiError:
    """For a field that cannot be as it was sent: `text` goes on behind its name."""
    return ApiError(400, f"{field}{text}", field)


def api_error(error: KvlabError) -> ApiError:
    """What a client is told of an engine's error."""
    text = str(error)
    if isinstance(error, RequestRefusedError):
        # The client did not choose the request's name.
        text = text.partition(": ")[2] if text.startswith("request ") else text
        if isinstance(error, QueueFullError):
            return ApiError(503, text)
        if isinstance(error, TooLongError):
            return context_exceeded(error.most, text, error.parameter)
        return ApiError(400, text, error.parameter)
    return ApiError(503 if isinstance(error, EngineStoppedError) else 400, text)


def context_exceeded(most: int, what: str, param: str | None) -> ApiError:
    """For a request that is too long for the model, in words that clients look for; `what` was asked for."""
    text = f"This model's maximum context length is {most} tokens. However, {what}"
    return ApiError(400, text, param, "context_length_exceeded")


def no_json(reason: str = "") -> ApiError:
    """For a body that cannot be read, or is no object."""
    return ApiError(400, f"the body is no JSON object{f': {reason}' if reason else ''}")


def invalid_body(errors: Sequence[Mapping[str, Any]], content_type: str) -> ApiError:
    """The first thing that is wrong with a body or a query, of pydantic's errors."""
    first = errors[0]
    if first["loc"][0] == "query":
        name = str(first["loc"][-1])
        return ApiError(400, f"{shown(name)}={shown(first['input'], repr)}: {first['msg']}", name)
    if "json" not in content_type:
        return ApiError(415, "the body is no JSON object; send it with Content-Type: application/json")
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid" or not path:
        return no_json(first.get("ctx", {}).get("error", ""))
    if first["type"] == "missing":
        where = "".join(f"[{part}]" if part.isdecimal() else f".{part}" for part in path)
        return ApiError(400, f"{where[1:]} is missing", path[0])
    # A field that may be of several types reports each of them that the value is not, of some only an inner part.
    wrong = [error for error in errors if str(error["loc"][1]) == path[0]]
    value = min(wrong, key=lambda error: len(error["loc"]))["input"]
    text = "; or ".join(dict.fromkeys(error["msg"] for error in wrong))
    is_long = isinstance(value, Sized) and not isinstance(value, str) and len(value) > _SHOWN
    return ApiError(400, f"{path[0]}: {text}" if is_long else f"{path[0]}={shown(value, repr)}: {text}", path[0])
