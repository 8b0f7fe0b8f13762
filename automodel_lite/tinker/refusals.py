"""What is refused, by the service's errors with our sentences; and what is named as unused."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import httpx
import tinker

from automodel_lite.errors import ConfigError

T = TypeVar("T")
Call = TypeVar("Call", bound=Callable[..., Any])
_STATUS = {tinker.BadRequestError: 400, tinker.NotFoundError: 404, tinker.ConflictError: 409}
_said: set[str] = set()


def note(text: str) -> None:
    """Says once what is read and has no meaning here."""
    if text not in _said:
        _said.add(text)
        print(f"tinker     {text}", file=sys.stderr)


def of_service(*names: str) -> Callable[[Call], Call]:
    """Names those of a method's arguments that mean something to the service alone, where one is
    given; and all that only its `**kwargs` take.
    """

    def decorate(method: Call) -> Call:
        signature = inspect.signature(method)

        def tell(args: tuple[Any, ...], more: dict[str, Any]) -> None:
            given = signature.bind(*args, **more).arguments
            defaults = {name: signature.parameters[name].default for name in names}
            told = [name for name in names if given.get(name, defaults[name]) != defaults[name]]
            told += [name for name in more if name not in signature.parameters]
            if told:
                whose = method.__qualname__.removesuffix(".__init__")
                note(f"{', '.join(told)} of {whose}: of the service, and unused here")

        if inspect.iscoroutinefunction(method):

            @wraps(method)
            async def later(*args: Any, **more: Any) -> Any:
                tell(args, more)
                return await method(*args, **more)

            return later  # type: ignore[return-value]

        @wraps(method)
        def now(*args: Any, **more: Any) -> Any:
            tell(args, more)
            return method(*args, **more)

        return now  # type: ignore[return-value]

    return decorate


def refusal(kind: type[Exception], text: str) -> Exception:
    """Returns an error of the SDK."""
    request = httpx.Request("POST", "http://in.process/")
    return kind(text, response=httpx.Response(_STATUS[kind], request=request), body=None)  # type: ignore[call-arg]


def bad_request(text: str) -> Exception:
    return refusal(tinker.BadRequestError, text)


def refusing(call: Callable[..., T]) -> Callable[..., T]:
    """Raises what the client refuses as the service's errors."""

    @wraps(call)
    def refused(*args: Any, **more: Any) -> T:
        try:
            return call(*args, **more)
        except FileExistsError as error:
            raise refusal(tinker.ConflictError, str(error)) from error
        except FileNotFoundError as error:
            raise refusal(tinker.NotFoundError, str(error)) from error
        except (ConfigError, ValueError) as error:
            raise bad_request(str(error)) from error

    return refused
