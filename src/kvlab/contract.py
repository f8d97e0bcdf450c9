"""Whether what a plugin registers can be called as kvlab calls it: said when it is registered, not in mid-run."""

import inspect
from collections.abc import Callable
from typing import Any


def misfit(implementation: object, contract: type | Callable[..., Any]) -> str | None:
    """Why kvlab cannot use an implementation; None: nothing is wrong that its definition shows.

    A `contract` that is a class asks for a subclass of it: without abstract methods, and with methods and a
    constructor that take what the contract's take. One that is a function asks for what can be called alike.
    """
    name = getattr(implementation, "__qualname__", repr(implementation))
    if not isinstance(contract, type):
        if not callable(implementation):
            return f"{name} has to be a function of {_written(contract)}"
        return _unlike(implementation, contract, name)
    if not (isinstance(implementation, type) and issubclass(implementation, contract)):
        return f"{name} has to be a subclass of {contract.__module__}.{contract.__qualname__}"
    if missing := sorted(getattr(implementation, "__abstractmethods__", ())):
        return f"{name} lacks {', '.join(missing)} of {contract.__qualname__}"
    made_with = {"__init__": vars(contract).get("__init__", vars(_Bare)["__init__"])}
    asked_as_class = (each for each in vars(contract).values() if isinstance(each, classmethod | staticmethod))
    if any(getattr(each, "__isabstractmethod__", False) for each in asked_as_class):
        made_with = {}  # it is asked as a class, and makes its objects itself
    for method, asked in {**vars(contract), **made_with}.items():
        own = inspect.getattr_static(implementation, method)
        is_called = method == "__init__" or not method.startswith("_")
        if isinstance(asked, classmethod | staticmethod) and is_called:  # called on the class itself
            own, asked = getattr(implementation, method), getattr(contract, method)
            if not callable(own):
                return f"{name}.{method} has to be a method of {_written(asked)}"
            if text := _unlike(own, asked, f"{name}.{method}"):
                return text
            continue
        if not is_called or not inspect.isfunction(asked) or own is asked:
            continue
        if not inspect.isfunction(own):
            # What is no function may become one when it is looked up on an object, as a property does.
            if not callable(getattr(implementation, method)) and not hasattr(own, "__get__"):
                return f"{name}.{method} has to be a method of {_written(asked)}"
            continue
        if text := _unlike(own, asked, f"{name}.{method}"):
            return text
    return None


class _Bare:
    """What a contract without a constructor is made like."""

    def __init__(self) -> None: ...


def _unlike(own: Callable[..., Any], asked: Callable[..., Any], name: str) -> str | None:
    """How a function is called that does not take all that the other takes; None: it does."""
    given = inspect.signature(asked).parameters.values()
    positional = [each.name for each in given if each.kind is each.POSITIONAL_OR_KEYWORD]
    named = {each.name: None for each in given if each.kind is each.KEYWORD_ONLY}
    try:
        inspect.signature(own, follow_wrapped=False).bind(*positional, **named)
    except TypeError:
        return f"{name}{_written(own)} is called with {_written(asked)}"
    except ValueError:  # written in C, without a signature
        return None
    return None


def _written(function: Callable[..., Any]) -> str:
    """The parameters of a function, without their types."""
    signature = inspect.signature(function, follow_wrapped=False)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
