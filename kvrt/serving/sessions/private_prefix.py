"""The beginning of a prompt whose keys and values a request brings along."""

import dataclasses
import secrets
from collections.abc import Callable, Sequence

from kvrt.session.snapshot import Snapshot


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PrivatePrefix:
    """The first tokens of a prompt, with keys and values that no other request finds.

    They may be approximate, such as those of a blend.

    Attributes:
      tokens: at least one, and fewer than the prompt has.
      read: gives a session whose first sequence begins with the tokens. It is called when the
        request is to be admitted, and again where its keys and values were evicted meanwhile.
    """

    tokens: tuple[int, ...]
    read: Callable[[], Snapshot]

    def wrong(self, prompt: Sequence[int]) -> str:
        """Why no prompt begins so, or an empty text."""
        n = len(self.tokens)
        if not 0 < n < len(prompt):
            return f"its private prefix has {n} tokens, and must have 1 to {len(prompt) - 1}"
        if tuple(prompt[:n]) != self.tokens:
            return "its prompt does not begin with the tokens of its private prefix"
        return ""


def new_salt() -> bytes:
    """A salt that no other request has, in this process or a later one that reads its tiers."""
    return b"private:" + secrets.token_bytes(16)
