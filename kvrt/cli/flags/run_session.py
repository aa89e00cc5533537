"""The flags by which a run names its session, and says what may become of it."""

import functools

from kvrt.cli.flags.mesh import MeshFlags
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.options.option import Flag, Options, flag, flag_group

_session = functools.partial(flag, "Session")


@flag_group
class NameFlags(Options):
    """A session to reuse and to save."""

    session: str | None = _session(
        None,
        "reuse what this file has of the prompt, and save the prompt there; a folder keeps many "
        "sessions, and the best is reused",
        "FILE",
        aliases=("prompt_cache",),
        file=kinds.SESSION,
    )
    session_ro: bool = _session(False, "never write the session", aliases=("prompt_cache_ro",))
    session_all: bool = _session(
        False,
        "save the generated tokens as well, every 45 s and at the end; on with --chat in a "
        "file, for the next turn",
        aliases=("prompt_cache_all",),
    )
    reuse_chunks: bool = _session(
        False,
        "reuse chunks behind a change as well; their keys and values were computed under "
        "another prefix, so the output is an approximation",
        advanced=True,
    )


@flag_group
class SequenceFlags(Options):
    """Which sequence of a session."""

    seq: int | None = _session(
        None,
        "which sequence of a session that holds several (kvrt inspect lists them); the others stay "
        "as they are, and a number that it lacks begins another one",
        "N",
        most=MAX_SEQUENCES - 1,
        advanced=True,
    )


@flag_group
class ReplaceFlags(SequenceFlags):
    """What becomes of a session that holds another text than the prompt."""

    append: bool = _session(
        False,
        "append the prompt to all that the session holds, as it stands, without a blank "
        "line; with --chat that is so where it holds a conversation",
    )
    overwrite: bool = _session(
        False,
        "replace a damaged session, or one of another text, even where more than 64 tokens and a "
        "tenth of it go; the former one stays as FILE~",
    )

    def check(self) -> None:
        """Refuses both at once, and several writers of one sequence among others."""
        super().check()
        joins = isinstance(self, MeshFlags) and self.coordinator is not None
        if joins and self.seq is not None:
            raise UsageError("--seq is written by one process; leave out --coordinator, or --seq")
        if self.append and self.overwrite:
            raise UsageError("--append keeps what the session holds, --overwrite not; choose one")


@flag_group
class SessionFlags(ReplaceFlags, NameFlags):
    """A session to reuse and to save, and what may become of it."""

    def file_kind(self, flag: Flag) -> kinds.FileKind | None:
        """As `Options.file_kind`; with --session_ro the session is an input."""
        is_input = flag.name == "session" and self.session_ro
        return kinds.INPUT if is_input else super().file_kind(flag)

    def check(self) -> None:
        """Refuses what says something of a session where none is named."""
        super().check()
        if self.seq is not None and self.session is None:
            raise UsageError(f"--seq {self.seq} needs --session FILE")
        for name in ("session_ro", "session_all", "reuse_chunks", "append", "overwrite"):
            if getattr(self, name) and self.session is None:
                raise UsageError(f"--{name} needs --session FILE")
        if self.session_ro and self.session_all:
            raise UsageError("--session_ro never writes, --session_all writes more; choose one")
        if self.session_ro and self.overwrite:
            raise UsageError("--session_ro never writes, --overwrite replaces; choose one")
