"""The flags by which a run names its session, and says what may become of it."""

import dataclasses
from typing import Annotated

from kvrt.cli.flags.field import Info, Options
from kvrt.errors import UsageError

_SESSION = "Session"


@dataclasses.dataclass(frozen=True, kw_only=True)
class NameFlags(Options):
    """A session to begin with and to keep."""

    session: Annotated[
        str | None,
        Info(
            _SESSION,
            "go on from this file as far as it fits, and keep there what was read; a folder keeps "
            "many and finds the best",
            "FILE",
            aliases=("prompt_cache",),
        ),
    ] = None
    session_ro: Annotated[
        bool, Info(_SESSION, "never write the session", aliases=("prompt_cache_ro",))
    ] = False
    session_all: Annotated[
        bool,
        Info(
            _SESSION,
            "keep the generated text as well, every 45 s and at the end; given with --chat in a "
            "file, for the next turn",
            aliases=("prompt_cache_all",),
        ),
    ] = False
    reuse_chunks: Annotated[
        bool,
        Info(
            _SESSION,
            "after a change, take over what follows it as well; its rows were computed under "
            "another text, so what is written is an approximation",
        ),
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplaceFlags(Options):
    """What becomes of a session that holds another text than the prompt."""

    append: Annotated[
        bool,
        Info(
            _SESSION,
            "read the prompt behind all that the session holds, as it stands, without a blank "
            "line; with --chat that is so where it holds a conversation",
        ),
    ] = False
    overwrite: Annotated[
        bool,
        Info(
            _SESSION,
            "replace a session of another text, even where more than 64 tokens and a tenth of it "
            "go; the former one stays as FILE~",
        ),
    ] = False

    def check(self) -> None:
        """Refuses both at once."""
        super().check()
        if self.append and self.overwrite:
            raise UsageError("--append keeps what the session holds, --overwrite not; choose one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionFlags(ReplaceFlags, NameFlags):
    """A session to begin with and to keep, and what may become of it."""

    def check(self) -> None:
        """Refuses what says something of a session where none is named."""
        super().check()
        for name in ("session_ro", "session_all", "reuse_chunks", "append", "overwrite"):
            if getattr(self, name) and self.session is None:
                raise UsageError(f"--{name} needs --session FILE")
        if self.session_ro and self.session_all:
            raise UsageError("--session_ro never writes, --session_all writes more; choose one")
        if self.session_ro and self.overwrite:
            raise UsageError("--session_ro never writes, --overwrite replaces; choose one")
