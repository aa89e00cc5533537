"""What `--chunk FILE` names: a text that was computed alone, or one that is still to be."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvrt.arrays import Int32
from kvrt.cli.report.exactness import Approximation
from kvrt.cli.run.prompt import read_text
from kvrt.cli.session.open_session import open_existing
from kvrt.errors import BadSession, UsageError, reason
from kvrt.session import OpenedSession
from kvrt_models.tokenizer.encode import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkFile:
    """A file of a chunk.

    Attributes:
      path: of it.
      opened: a session.
      text: in place of a session.
    """

    path: Path
    opened: OpenedSession | None
    text: str = ""

    def tokens(self, lead: list[int], tokenizer: Tokenizer) -> Int32[np.ndarray, " n"]:
        """Its tokens, the lead first.

        Raises:
          UsageError: a text without a token.
        """
        if self.opened is not None:
            return self.opened.held[1]
        ids = tokenizer.encode(self.text, add_special=False)
        if not ids:
            raise UsageError(f"{self.path}: the text is empty; give at least one character")
        return np.array([*lead, *ids], np.int32)


def joined(chunks: Sequence[Sequence[int]], n_lead: int) -> list[int]:
    """Tokens of chunks one behind the other; of each but the first without its n_lead first."""
    return [t for i, ids in enumerate(chunks) for t in ids[n_lead if i else 0 :]]


def blended_part(tokens: Sequence[Sequence[int]], ratio: float) -> Approximation | None:
    """What of blended chunks is approximate: all behind the first; None if all was recomputed."""
    if len(tokens) == 1 or ratio >= 1:
        return None
    return Approximation(by="chunks", from_token=len(tokens[0]))


def open_chunk(name: str) -> ChunkFile:
    """A file as a session, or as a text.

    Raises:
      UsageError: nothing is there.
      BadSession: it is a damaged session, or neither.
    """
    path = Path(name)
    try:
        path.stat()
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}; give a text file, or a chunk") from error
    try:
        return ChunkFile(path, open_existing(path))
    except BadSession:
        if path.is_dir():
            raise
        with path.open("rb") as file:
            if b"\0" in file.read(4096):
                raise
        return ChunkFile(path, None, read_text("--chunk", name))
