"""Loads reward functions: binds their options, and adapts their signatures.

Imports only the standard library, so that worker processes start fast.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlhf_triton.errors import FunctionError
from rlhf_triton.rewards.trl_function import COMPLETIONS, OF_THE_TRAINER, TRL_ARGUMENTS, TrlFunction
from rlhf_triton.user_code import TIMEOUT_OPTION, UserFunction, describe, import_function

ScoreFunction = Callable[[Any], Any]  # receives a `Sample`; a groupwise function receives a list of samples


def load_function(
    spec: str,
    options: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 0.0,
    columns: Collection[str] | None = None,
) -> ScoreFunction:
    """Import the function or class that `spec` names; return it as a function of one argument.

    A function receives `options` as keyword arguments of every call. A class is instantiated once with `options`, and
    the instance is called; its constructor's parameter `timeout_s`, if any, receives the time limit of a call. A
    function with TRL's signature is called as TRL calls it. Awaitable results are awaited.

    Raises FunctionError if any of this fails, an option is unknown or missing, or a function with TRL's signature needs
    an argument that is not in `columns` (None: any column may exist).
    """
    return _of_samples(spec, configured(spec, import_function(spec), dict(options or {}), timeout_s), columns)


def configured(spec: str, function: UserFunction, options: dict[str, Any], timeout_s: float) -> ScoreFunction:
    """Bind a function's options, or instantiate a class with them. Raises FunctionError as `load_function`."""
    is_class = isinstance(function, type)
    if not is_class and not options:
        return function  # whatever its signature
    try:
        signature = inspect.signature(function)
        if is_class:
            limit = {TIMEOUT_OPTION: timeout_s} if TIMEOUT_OPTION in signature.parameters else {}
            return function(**options, **limit)
        if COMPLETIONS in signature.parameters:  # its other arguments are columns
            signature.bind_partial(**options)
        else:
            signature.bind(None, **options)
        return functools.partial(function, **options)
    except FunctionError as error:
        raise FunctionError(f"{spec}: {error}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # user code may even call sys.exit
        raise FunctionError(f"{spec} cannot be used with its options: {describe(error)}") from error


def _of_samples(spec: str, function: UserFunction, columns: Collection[str] | None) -> ScoreFunction:
    """Wrap a function: convert samples to the arguments of TRL's signature, if it has that, and await its results."""
    call = functools.partial(_awaited, function)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature
        return call
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    if COMPLETIONS not in parameters and "completion_ids" not in needed:
        return call
    if trainers := [name for name in needed if name in OF_THE_TRAINER]:
        raise FunctionError(f"{spec}: only TRL's trainer can pass {trainers[0]}; give the parameter a default")
    missing = [name for name in needed if columns is not None and name not in (*columns, *TRL_ARGUMENTS)]
    if missing:
        names = ", ".join(columns or ()) or "none"
        raise FunctionError(
            f"{spec}: {missing[0]} is not a column of the prompts (columns: {names}); rename the parameter, or give it "
            "a default"
        )
    return TrlFunction(call, parameters, needed)


def _awaited(function: UserFunction, /, *arguments: Any, **named: Any) -> Any:
    """Call a function and return its result; as in TRL, one event loop awaits the coroutines of all calls."""
    result = function(*arguments, **named)
    return _event_loop().run_until_complete(result) if inspect.isawaitable(result) else result


@functools.cache
def _event_loop() -> Any:
    import asyncio  # slow to import, and rarely needed

    return asyncio.new_event_loop()
