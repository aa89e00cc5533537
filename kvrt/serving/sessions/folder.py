"""A folder of sessions that an engine begins its requests from."""

from collections.abc import Sequence
from pathlib import Path

from kvrt.errors import BadSession, KvrtError, UsageError
from kvrt.options.engine import SessionDir
from kvrt.session import io
from kvrt.session.library.library import Library
from kvrt.session.library.stored import Match
from kvrt.session.snapshot import Snapshot


class SessionFolder:
    """The sessions of a folder, as an engine asks for them."""

    def __init__(self, of: SessionDir):
        """Reads the index of a folder.

        Raises:
          UsageError: there is no such folder.
          BadSession: its index is damaged.
        """
        path, self._tell = of.path, of.tell
        if not path.is_dir():
            raise UsageError(f"{path}: no such folder of sessions; give one that is there")
        self._library = Library(path, tell=of.tell)
        self._library.entries()
        # By session, the longest beginning that nothing could be used of.
        self._useless: dict[Path, float] = {}
        self._told: set[Path] = set()

    def best(self, fingerprint_digest: str, tokens: Sequence[int]) -> Match | None:
        """The session that begins with most of some tokens; None if none serves."""
        match = self._library.best(fingerprint_digest, tokens)
        if match is None or match.n_common <= self._useless.get(match.entry.path, -1):
            return None
        return match

    def read(self, match: Match) -> Snapshot:
        """A session, every digest checked.

        Raises:
          BadSession: it is damaged, or gone.
        """
        try:
            return io.read(match.entry.path)
        except (OSError, UsageError) as error:
            raise BadSession(f"{match.entry.path}: {error}; it was there a moment ago") from error

    def used(self, match: Match) -> None:
        """Notes the use, for `kvrt prune`, where the folder can be written."""
        try:
            self._library.check_writable()
            self._library.touch(match.entry.path)
        except KvrtError:
            return  # it can only be read

    def leave_out(self, match: Match, error: KvrtError) -> None:
        """Does without a session: a damaged one for good, others where no more is in common."""
        path = match.entry.path
        self._useless[path] = float("inf") if isinstance(error, BadSession) else match.n_common
        if self._tell is not None and path not in self._told:
            self._told.add(path)
            why = str(error)
            self._tell(why if why.startswith(str(path)) else f"{path}: left out: {why}")
