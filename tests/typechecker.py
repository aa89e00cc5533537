"""The checker of annotations in tests: beartype, for which an int is a float as in PEP 484.

jaxtyping's own decorator binds arguments and checks them twice in each call, and makes two
functions anew whenever a nested one is defined: half of the time of tests that compile nothing.
This one checks once, names the sizes of axes only where an annotation has some, leaves nested
functions alone, and makes a check when its function is first called.
"""

import contextlib
import dataclasses
import functools
import inspect
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_names_sizes = jaxtyping.jaxtyped
_is_off = False


@contextlib.contextmanager
def switched_off():
    """Annotations go unchecked: calls may give arguments of other types, as users do."""
    global _is_off
    before, _is_off = _is_off, True
    try:
        yield
    finally:
        _is_off = before


def checked(fn=None, *, typechecker=None):
    """In the place of `jaxtyping.jaxtyped`, as the import hook applies it."""
    if fn is None:
        return checked
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and not getattr(fn, "__no_type_check__", False):
            fn.__init__ = checked(fn.__init__)
        return fn
    if isinstance(fn, classmethod | staticmethod):
        return type(fn)(checked(fn.__func__))
    if isinstance(fn, property):
        return property(*(f and checked(f) for f in (fn.fget, fn.fset, fn.fdel)))
    if "<locals>" in fn.__qualname__ or hasattr(fn, "__wrapped__"):
        return fn
    once = None

    @functools.wraps(fn)
    def guarded(*args, **kwargs):
        nonlocal once
        if _is_off:
            return fn(*args, **kwargs)
        # Made by the first call: most functions are never called by a process.
        once = once or _checking(fn)
        return once(*args, **kwargs)

    return guarded


def _checking(fn):
    """The function with its arguments and its result checked."""
    fn.__annotations__ = {k: _found(x, fn) for k, x in fn.__annotations__.items()}
    once = _check(fn)
    return _within_a_scope(once) if any(map(_has_sizes, fn.__annotations__.values())) else once


def _within_a_scope(once):
    """A function in whose call the axes that annotations name have one size each."""

    def named(*args, **kwargs):
        with _names_sizes("context"):
            return once(*args, **kwargs)

    return named


def _found(annotation, fn):
    """The annotation that a string stands for; any value where it is not defined yet."""

    def holds(value: annotation): ...

    try:
        return typing.get_type_hints(holds, fn.__globals__, include_extras=True)["value"]
    except Exception:
        return typing.Any


def _has_sizes(annotation):
    if inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray):
        return True
    return any(map(_has_sizes, typing.get_args(annotation)))
