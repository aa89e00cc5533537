"""The implementation of attention that a cache's programs use, decided once, on the host."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from kvrt.attention import registry
from kvrt.attention.choice.cases import Case
from kvrt.attention.choice.self_test import check_served
from kvrt.attention.choice.verdicts import Verdicts

# Called with whether a kernel passed here; whether it did in each process, in their order.
Agree = Callable[[bool], Sequence[bool]]

_verdicts = Verdicts()


@dataclasses.dataclass(frozen=True)
class AttentionChoice:
    """Which implementation computes attention, and why."""

    implementation: str
    reason: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.implementation}: {self.reason}"


def choose(
    named: str,
    platform: str,
    cases: Callable[[], Sequence[Case]],
    agree: Agree | None = None,
    verdicts: Verdicts | None = None,
) -> AttentionChoice:
    """The implementation that a config means on a platform.

    Args:
      named: of the config.
      platform: as `jax.default_backend` names it.
      cases: finds what a kernel has to get right; not called where none may be used.
      agree: of several processes, what all of them found; each calls it as often.
      verdicts: those given so far; None takes those of this process.

    Raises:
      NoKernel: what was named does not exist, or not for this platform or these layers.
    """
    kernels = registry.kernels(platform)
    if named != registry.AUTO:
        registry.require(named, platform)
        for case in cases() if named in kernels else ():
            check_served(case, named)
        return AttentionChoice(named, "named")
    if not kernels:
        return AttentionChoice(registry.ANYWHERE, f"no kernel for {platform}")
    wanted = cases()
    if not wanted:
        return AttentionChoice(registry.ANYWHERE, "no layer has attention")
    failed = []
    for kernel in kernels:
        passed, why = _judged(kernel, wanted, agree, verdicts or _verdicts)
        if passed:
            return AttentionChoice(kernel, why)
        failed.append(f"{kernel} {why}")
    return AttentionChoice(registry.ANYWHERE, "; ".join(failed))


def among_processes() -> Agree | None:
    """How the processes of a mesh agree; None where there is one."""
    if jax.process_count() == 1:
        return None
    # Imported where it is needed: a single process has no use for it.
    from jax.experimental import multihost_utils

    return lambda passed: multihost_utils.process_allgather(np.asarray(passed)).ravel().tolist()


def _judged(
    kernel: str, cases: Sequence[Case], agree: Agree | None, verdicts: Verdicts
) -> tuple[bool, str]:
    """Whether a kernel may be used in all cases, on all processes, and why."""
    found = []
    for case in cases:
        found.append(verdicts.of(case, kernel))
        if not found[-1].passed:
            break
    passed = found[-1].passed
    votes = agree(passed) if agree else [passed]
    cached = " (cached)" if all(x.kept for x in found) else ""
    if not passed:
        return False, f"{found[-1].why}{cached}"
    if not all(votes):
        return False, f"failed its self-test in process {list(votes).index(False)}"
    return True, f"self-test passed{cached}"
