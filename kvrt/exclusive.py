"""One call at a time, in the process that began: the guard of a `Runtime` and of an `Engine`.

Each call runs under kvrt's settings of JAX (`kvrt.jax_settings`), whatever the process has.

A call plans on the host, runs on the device and then notes what was done. A second call in between
would plan on what is no longer there. It is refused at once instead of being made to wait: who
shares such an object between threads has to say in which order calls are made, and a lock of their
own or a queue does.

A fork copies none of JAX's threads: a step in a forked process would wait for them for ever.
"""

import functools
import os
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from types import FrameType, FunctionType
from typing import Any, TypeVar

import numpy as np

from kvrt.errors import Busy, UsageError
from kvrt.jax_settings import own_settings
from kvrt.whole_numbers import python_int

T = TypeVar("T")
# Arguments that may be, or hold, NumPy's integers.
_NUMPYS = (np.generic, Mapping)
# The attribute of a guarded object that holds its guard.
_NAME = "_exclusive"


class _Process:
    """Whether JAX was started here, and whether in a process that this one was forked from."""

    started = forked = False


def _note_fork() -> None:
    _Process.forked = _Process.started


if hasattr(os, "register_at_fork"):  # Windows does not fork.
    os.register_at_fork(after_in_child=_note_fork)


def start_jax(call: str) -> None:
    """Notes that this process uses JAX from here on.

    Raises:
      UsageError: it was forked from a process that did.
    """
    if _Process.forked:
        raise _in_a_fork(call)
    _Process.started = True


def _in_a_fork(call: str) -> UsageError:
    return UsageError(
        f"{call} was called in process {os.getpid()}, which was forked from one that used JAX, "
        "whose threads no fork copies: it would wait for ever; fork before a model is loaded, or "
        'start processes by "spawn" or "forkserver"'
    )


class Exclusive:
    """The guard of one object; taking it costs a lock that never waits.

    Attributes:
      is_closed: calls are refused, for what they need was freed.
    """

    def __init__(self, what: str):
        """Begins to guard; JAX runs in this process from here on.

        Args:
          what: the object's class, for messages.

        Raises:
          UsageError: this process was forked from one where it ran.
        """
        start_jax(what)
        self._what, self._lock = what, threading.Lock()
        self._call, self._thread, self._in_callback = "", 0, False
        self.is_closed = False

    def enter(self, call: str, *, reads: bool = False) -> bool:
        """Begins a call; whether `leave` has to end it.

        Args:
          call: the method, for messages.
          reads: the call leaves what is held as it is, so that a callback of another call may make
            it.

        Raises:
          Busy: another call has not returned.
          UsageError: the object was closed, or this process was forked from the one that made it.
        """
        if _Process.forked:
            raise _in_a_fork(f"{self._what}.{call}")
        if self.is_closed:
            raise UsageError(f"{self._what}.{call}: the {self._what} is closed; make another")
        if self._lock.acquire(blocking=False):
            self._call, self._thread = call, threading.get_ident()
            return True
        mine = self._thread == threading.get_ident()
        if mine and reads and self._in_callback:
            return False
        raise Busy(self._why(call, mine))

    def leave(self) -> None:
        """Ends the call."""
        self._thread = 0
        self._lock.release()

    def callback(self, function: Callable[..., Any]) -> Callable[..., None]:
        """A function of the caller's that is called within a call, and may look but not change."""

        def run(*args: Any) -> None:
            self._in_callback = True
            try:
                function(*args)
            finally:
                self._in_callback = False

        return run

    def _why(self, call: str, mine: bool) -> str:
        here, there = f"{self._what}.{call}", f"{self._what}.{self._call}"
        if mine:
            return (
                f"{here} was called within {there} of the same thread, by a callback or a signal "
                "handler; call it when that one has returned"
            )
        return (
            f"{here} was called while another thread is in {there}, and a {self._what} takes one "
            f"call at a time; call again when that one has returned, or guard the {self._what} "
            "with a lock"
        )


class Guarded(Iterator[T]):
    """An iterator of which each item is a call; between two items other calls may be made."""

    def __init__(self, guard: Exclusive, call: str, items: Generator[T, None, None]):
        """Takes the items, from `items`."""
        self._guard, self._call, self._items = guard, call, items

    def __next__(self) -> T:
        """The next item.

        Raises:
          Busy: another call has not returned; the item is still to come.
        """
        self._guard.enter(self._call)
        try:
            with own_settings():
                return next(self._items)
        finally:
            self._guard.leave()

    def close(self) -> None:
        """Ends it early, which is a call as well.

        Raises:
          Busy: another call has not returned; it is as it was.
        """
        self._guard.enter(self._call)
        try:
            with own_settings():
                self._items.close()
        finally:
            self._guard.leave()


def one_call_at_a_time(
    *, free: Collection[str], reads: Collection[str] = ()
) -> Callable[[type[T]], type[T]]:
    """Guards every public method and property of a class but those that are named.

    The class makes itself an `Exclusive`, `self._exclusive`, before anything else. A guarded method
    must not call another one, but what lies beneath.

    Args:
      free: members that may be used at any time, by any thread.
      reads: guarded ones that a callback of another call may use.
    """

    def guarded(cls: type[T]) -> type[T]:
        unknown = {*free, *reads} - set(vars(cls))
        assert not unknown, f"{cls.__name__} has no {unknown}"
        for name, member in list(vars(cls).items()):
            if name.startswith("_") or name in free:
                continue
            if isinstance(member, property):
                assert member.fget is not None and member.fset is None
                setattr(cls, name, property(_guarded(member.fget, name, name in reads)))
            elif isinstance(member, FunctionType):
                setattr(cls, name, _guarded(member, name, name in reads))
        cls.__init__ = own_settings()(cls.__init__)
        return cls

    return guarded


def _guarded(method: Callable[..., Any], name: str, reads: bool) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard: Exclusive = getattr(self, _NAME)
        entered = guard.enter(name, reads=reads)
        try:
            with own_settings():
                if any(isinstance(x, _NUMPYS) for x in (*args, *kwargs.values())):
                    args = tuple(map(_plain, args))
                    kwargs = {k: _plain(x) for k, x in kwargs.items()}
                return method(self, *args, **kwargs)
        finally:
            if entered:
                guard.leave()

    return call


def _plain(x: Any) -> Any:
    """NumPy's integers as Python's, which go into JSON and wrap at no size."""
    if isinstance(x, Mapping):
        return {python_int(k): python_int(v) for k, v in x.items()}
    return python_int(x)


class HeldInterrupts:
    """Ctrl-C waits until this ends: within, a step has taken arrays that others still name.

    It is for the main thread, where Python raises KeyboardInterrupt, and for a step: a second
    Ctrl-C does not wait.
    """

    def __enter__(self) -> None:
        """Waits from here on, if a handler of Python's is there."""
        self._came, self._handler = False, signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        self._holds = is_main and callable(self._handler)
        if self._holds:
            signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *error: object) -> None:
        """Raises what has come."""
        if self._holds:
            signal.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            self._came = False
            signal.signal(signal.SIGINT, self._handler)
            signal.raise_signal(signal.SIGINT)
        self._came = True
