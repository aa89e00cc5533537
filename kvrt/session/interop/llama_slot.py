"""The tokens of a slot that llama.cpp's server saves to a file of one sequence.

    -1, version, how many, the tokens, how many pieces of media

Source: llama.cpp `server-task.cpp` (server_tokens).
"""

from collections.abc import Sequence

import numpy as np

from kvrt.errors import BadSession, SessionMismatch
from kvrt.session.interop.llama_format import SLOT_MARK, SLOT_VERSION
from kvrt.session.interop.source import Source


def read_tokens(at: Source) -> Sequence[int]:
    """The tokens, also where a server has packed them.

    Raises:
      BadSession: they are damaged.
      SessionMismatch: of a version that is not known, or with media.
    """
    n = at.number("u4", "the number of tokens")
    words = at.array(n, np.dtype("<i4"), "the tokens").tolist()
    if not words or words[0] != SLOT_MARK:
        return words
    if len(words) < 4:
        raise BadSession(f"{at.name}: the server's tokens end after {n} words; make it again")
    version, n_tokens = words[1:3]
    if version != SLOT_VERSION:
        raise SessionMismatch(
            f"{at.name}: version {version} of the server's tokens is not supported, only "
            f"{SLOT_VERSION}; save the slot again with another llama.cpp"
        )
    if not 0 <= n_tokens <= n - 4:
        raise BadSession(
            f"{at.name}: the server names {n_tokens} tokens in {n} words; the file is damaged, "
            "make it again"
        )
    rest = words[3 + n_tokens :]
    if rest[0] > 0:
        raise SessionMismatch(
            f"{at.name}: {rest[0]} pieces of pictures or sound are not supported, only text"
        )
    if rest != [0]:
        raise BadSession(f"{at.name}: {len(rest)} words follow the server's tokens, 1 is allowed")
    return words[3 : 3 + n_tokens]
