"""Jobs on other threads, whose results are handled on the owner's thread."""

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

Result = TypeVar("Result")


class _Job(NamedTuple):
    future: Future
    end: Callable[[Future], None]


class Jobs:
    """Jobs in flight.

    Args:
      n_workers: threads.
    """

    def __init__(self, n_workers: int) -> None:
        """Starts with none; `close` ends the threads."""
        self._workers = ThreadPoolExecutor(n_workers, "kvrt-tiers")
        self._jobs: list[_Job] = []

    def __len__(self) -> int:
        """How many have not been ended."""
        return len(self._jobs)

    def start(self, work: Callable[[], Result], end: Callable[[Result | None], None]) -> None:
        """Runs `work` on another thread; a later poll gives `end` its result, None if it raised."""

        def ended(done: Future) -> None:
            end(None if done.exception() else done.result())

        self._jobs.append(_Job(self._workers.submit(work), ended))

    def poll(self) -> None:
        """Ends the jobs that are done; raises what one of them raised, when all have ended."""
        over = [job for job in self._jobs if job.future.done()]
        self._jobs = [job for job in self._jobs if job not in over]
        for job in over:
            job.end(job.future)
        for job in over:
            if error := job.future.exception():
                raise error

    def wait(self, timeout_s: float | None, *, for_all: bool = False) -> None:
        """Waits until a job, or every one, is done, or for so long."""
        when = concurrent.futures.ALL_COMPLETED if for_all else concurrent.futures.FIRST_COMPLETED
        concurrent.futures.wait([job.future for job in self._jobs], timeout_s, return_when=when)

    def close(self) -> None:
        """Ends the threads, when they have nothing left to do."""
        self._workers.shutdown()
