"""The flags by which a run names its session, and says what may become of it."""

import functools

from kvrt.cli.flags.declare import Options, flag, flag_group
from kvrt.errors import UsageError

_session = functools.partial(flag, "Session")


@flag_group
class NameFlags(Options):
    """A session to begin with and to keep."""

    session: str | None = _session(
        None,
        "go on from this file as far as it fits, and keep there what was read; a folder keeps "
        "many and finds the best",
        "FILE",
        aliases=("prompt_cache",),
    )
    session_ro: bool = _session(False, "never write the session", aliases=("prompt_cache_ro",))
    session_all: bool = _session(
        False,
        "keep the generated text as well, every 45 s and at the end; given with --chat in a "
        "file, for the next turn",
        aliases=("prompt_cache_all",),
    )
    reuse_chunks: bool = _session(
        False,
        "after a change, take over what follows it as well; its rows were computed under "
        "another text, so what is written is an approximation",
    )


@flag_group
class ReplaceFlags(Options):
    """What becomes of a session that holds another text than the prompt."""

    append: bool = _session(
        False,
        "read the prompt behind all that the session holds, as it stands, without a blank "
        "line; with --chat that is so where it holds a conversation",
    )
    overwrite: bool = _session(
        False,
        "replace a session of another text, even where more than 64 tokens and a tenth of it "
        "go; the former one stays as FILE~",
    )

    def check(self) -> None:
        """Refuses both at once."""
        super().check()
        if self.append and self.overwrite:
            raise UsageError("--append keeps what the session holds, --overwrite not; choose one")


@flag_group
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
