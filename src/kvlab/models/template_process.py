"""The process that renders chat templates, which are programs of strangers. It knows what it is given alone, and
imports little, since it has to start soon.
"""

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvlab.confined import serve

_MOST_CHARS = 16 << 20  # of a prompt


def _environment() -> ImmutableSandboxedEnvironment:
    """As transformers sets it up."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise, strftime_now=lambda text: datetime.now().strftime(text))
    return environment


def _raise(message: object) -> NoReturn:
    raise TemplateError(str(message))


def _to_json(value: Any, indent: int | None = None, **_options: Any) -> str:
    """Without the escapes of HTML that Jinja's own has."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


@lru_cache(maxsize=2)
def _template(text: str) -> Template:
    return _environment().from_string(text)


def _render(template: Template, variables: dict[str, Any]) -> str:
    parts, size = [], 0
    for part in template.generate(**variables):
        parts.append(part)
        size += len(part)
        if size > _MOST_CHARS:
            raise SecurityError(f"more than {_MOST_CHARS} characters")
    return "".join(parts)


def _answer(question: bytes) -> bytes:
    """A template with `variables`: what it makes of them as `text`. Without them: whether it is one. Where it fails
    an `error`, and the `line` of one that is no template.
    """
    asked, answer = json.loads(question), dict[str, Any]()
    try:
        template = _template(asked["template"])
        if "variables" in asked:
            answer["text"] = _render(template, asked["variables"])
    except TemplateSyntaxError as error:
        answer |= {"error": str(error), "line": error.lineno}
    except MemoryError:
        raise
    except Exception as error:  # whatever a stranger's text does
        answer["error"] = str(error)[:1000] or type(error).__name__
    return json.dumps(answer).encode()


if __name__ == "__main__":
    serve(_answer)
