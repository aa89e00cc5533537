"""Several processes that write one session: what they tell each other.

The first leads: it has the lock, names the folder, and puts the session in its place. Each writes
what its devices hold, and says whether it could. What fails anywhere is raised in all of them, and
none waits for one that will not come:

    lead: where to write, or why not    all: digests of what each wrote, or why not
    lead: the session stands, or why not
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvrt.errors import SaveError, reason


class Team:
    """The processes that hold parts of one snapshot; one alone says nothing to anybody."""

    def __init__(self, index: int = 0, count: int = 1):
        """Process `index` of `count`."""
        self.index, self._count = index, count
        self._is_whole = True  # while every process has answered

    @classmethod
    def of_jax(cls) -> "Team":
        """All processes of `jax.distributed`."""
        import jax

        return cls(jax.process_index(), jax.process_count())

    @property
    def leads(self) -> bool:
        """Whether this process has the lock and the last word."""
        return self.index == 0

    def say(self, said: dict[str, Any]) -> list[dict[str, Any]]:
        """What every process says at this point, by process; collective."""
        if self._count == 1:
            return [said]
        self._is_whole = False
        found = [json.loads(x) for x in _gathered(json.dumps(said).encode())]
        self._is_whole = True
        return found

    def hear(self) -> dict[str, Any]:
        """What the lead says; collective.

        Raises:
          SaveError: it says that it failed.
        """
        said = self.say({})[0]
        if "error" in said:
            raise SaveError(f"process 0: {said['error']}")
        return said

    def together(self, write: Callable[[], Any]) -> list[Any]:
        """What each process writes, by process; collective.

        Raises:
          SaveError: another process failed; where this one did, its own error.
        """
        failed, found = None, None
        try:
            found = write()
        except BaseException as error:
            failed = error
        all_said = self.say({"found": found} if failed is None else {"error": _line(failed)})
        if failed is not None:
            raise failed
        for i, said in enumerate(all_said):
            if "error" in said:
                raise SaveError(f"process {i}: {said['error']}")
        return [said["found"] for said in all_said]

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Tells the others how what the lead does here ends; collective on leaving."""
        try:
            yield
        except BaseException as error:
            if self._is_whole:
                self.say({"error": _line(error)})
            raise
        self.say({})


def _line(error: BaseException) -> str:
    said = reason(error) if isinstance(error, OSError) else " ".join(str(error).split())
    return said or type(error).__name__


def _gathered(data: bytes) -> list[bytes]:
    """The bytes of every process, by process."""
    from jax.experimental import multihost_utils

    sizes = multihost_utils.process_allgather(np.asarray(len(data), np.int32)).ravel()
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    found = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [x[:n].tobytes() for x, n in zip(found, sizes, strict=True)]
