"""What the processes of `kvrt batch --coordinator` have to know of each other.

The first alone reads what results there are, and writes; the others compute the same requests.
"""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from kvrt.cli.flags.serving import BatchOptions
from kvrt.errors import KvrtError


def is_first(options: BatchOptions) -> bool:
    """Whether this process writes; they have met."""
    if options.coordinator is None:
        return True
    import jax  # late: results that are there need none

    return jax.process_index() == 0


def first_says(options: BatchOptions, decide: Callable[[], Any]) -> Any:
    """What the first process decides, in all of them; collective where there are several.

    Args:
      options: of the command.
      decide: called in the first process; its result goes through JSON.

    Raises:
      KvrtError: the first process raised one, which is raised in the others as well.
    """
    if options.coordinator is None:
        return decide()
    if not is_first(options):
        said = json.loads(_broadcast(b""))
        if "error" in said:
            raise KvrtError(f"process 0: {said['error']}")
        return said["found"]
    try:
        found = decide()
    except KvrtError as error:
        _broadcast(json.dumps({"error": str(error)}).encode())
        raise
    return json.loads(_broadcast(json.dumps({"found": found}).encode()))["found"]


def any_asks(options: BatchOptions, asked: bool) -> bool:
    """Whether any process was asked to end; collective where there are several."""
    if options.coordinator is None:
        return asked
    from jax.experimental import multihost_utils

    # sync: whoever goes on alone would wait for the others
    return bool(np.any(multihost_utils.process_allgather(np.asarray(asked))))


def _broadcast(data: bytes) -> bytes:
    """The bytes of the first process."""
    from jax.experimental import multihost_utils

    size = int(multihost_utils.broadcast_one_to_all(np.asarray(len(data), np.int32)))
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes()
