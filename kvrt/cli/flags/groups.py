"""Groups of flags that commands share: devices, cells, what a full context drops, sessions."""

import functools
from typing import Annotated, Literal, get_args

from msgspec import Meta

from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.files.named import NamedFile
from kvrt.options.option import Flag, Options, flag, flag_group, flags_of, flags_of_config
from kvrt.options.policies import BY_SCORE, OF_SIZES, ScoredName
from kvrt.options.select import DoubleSparsity
from kvrt.policies import POLICIES

AUTO = "auto"
_devices = functools.partial(flag, "Devices", advanced=True)
_processes = functools.partial(
    flag, "Several processes (each is given the same flags but for --process_id)", advanced=True
)


@flag_group
class DeviceFlags(Options):
    """Which devices divide the cache and the weights."""

    mesh: str | None = _devices(
        None,
        "divide over devices, as in tensor=4,context=2: tensor divides heads and weights, "
        "context the cells",
        "SIZES",
    )


@flag_group
class MeshFlags(DeviceFlags):
    """The same, and the processes that have devices."""

    coordinator: str | None = _processes(
        None,
        f"where process 0 listens for the others, or {AUTO} where the cluster says (Slurm, "
        "MPI, Cloud TPU)",
        "HOST:PORT",
    )
    n_processes: int = _processes(0, "how many processes there are", "N")
    process_id: int = _processes(0, "which of them this is; the first, 0, prints and writes", "I")

    def files(self) -> list[NamedFile]:
        """As `Options.files`; none of a process that is not the first."""
        return [] if self.process_id else super().files()

    def check(self) -> None:
        """Refuses processes that have no place to meet, or have no place among the others."""
        super().check()
        apart = bool(self.n_processes or self.process_id)
        if self.coordinator is None:
            if apart:
                raise UsageError("--n_processes and --process_id need --coordinator HOST:PORT")
            return
        if self.mesh is None:
            raise UsageError("--coordinator joins processes for a mesh; add --mesh")
        if self.coordinator == AUTO:
            if apart:
                raise UsageError(
                    f"--coordinator {AUTO} finds the processes itself; leave out theirs"
                )
            return
        _, _, port = self.coordinator.rpartition(":")
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
            raise UsageError(f"--coordinator {self.coordinator} has no port; HOST:PORT is wanted")
        if self.process_id >= self.n_processes:
            raise UsageError(
                f"--process_id {self.process_id} of --n_processes {self.n_processes}: processes "
                "are numbered from 0"
            )


_more = functools.partial(flag, "Cache", advanced=True)


@flag_group
class PlacementFlags(Options):
    """How a text gets its cells."""

    blocks: bool = _more(
        False,
        "place the text in blocks of --block_size cells, as paged mode does, and keep it there in "
        "its session; needs --nocontext_shift",
    )


@flag_group
class SelectFlags(flags_of_config(DoubleSparsity)):
    """Which cells a decode step reads."""

    select: Literal["none", "quest", "double_sparsity"] = _more(
        "none",
        "each sampled token reads --select_cells cells of a layer and kv head, chosen by labels "
        "beside the keys, and of a longer text the answer is an approximation; prompts read all",
        "NAME",
        decides=("select",),
    )
    select_channels: str | None = _more(
        None,
        "with --select double_sparsity: the file of heavy channels of this model, which "
        "scripts/calibrate_channels.py writes",
        "FILE",
        file=kinds.INPUT,
        decides=("select_channels",),
    )

    def check(self) -> None:
        """Refuses sizes of no sparse read, and channels that none or too many ask for."""
        super().check()
        given = sorted(x for x in self.given if x.startswith("select_"))
        if self.select == "none" and given:
            raise UsageError(f"--{given[0]} sizes sparse reads; add --select quest")
        by_channel = {"select_channels", "select_labels", "select_by_cell"} & self.given
        if self.select == "quest" and by_channel:
            raise UsageError(
                f"--{min(by_channel)} is for --select double_sparsity; leave it out, or take that"
            )
        if self.select == "double_sparsity" and self.select_channels is None:
            raise UsageError(
                "--select double_sparsity compares heavy channels of the model; add "
                "--select_channels FILE, which scripts/calibrate_channels.py writes"
            )


DropName = Literal["none", "context_shift", "attention_sinks"]
PolicyName = Literal[DropName, ScoredName]
BY_POSITION = get_args(DropName)
_DROPS = f"{' or '.join(BY_POSITION)}, for one by score is that of all requests, --policy,"
_LineDrop = Annotated[DropName, Meta(extra={"wanted": _DROPS})]
# By what has settings: the policies that they are of.
_SETTINGS = {**{kind: (name,) for name, kind in POLICIES.items()}, **OF_SIZES}
# The policies that a flag is of.
_OF = {x.name: of for kind, of in _SETTINGS.items() for x in flags_of(kind)}
_OF["n_sink"] += BY_SCORE
_context = functools.partial(flag, "Context")
_policy = functools.partial(flag, "Context", advanced=True)


@flag_group
class KeepFlags(*map(flags_of_config, reversed(_SETTINGS))):
    """What of a text stays when older tokens go: the settings of all policies."""

    @property
    def policy_name(self) -> PolicyName:
        """The policy that is meant."""
        raise NotImplementedError  # of the groups of flags with a --policy

    @property
    def policy_elsewhere(self) -> bool:
        """Whether a session, or a line of requests, may say the policy."""
        return False

    def check(self) -> None:
        """Refuses flags of another policy, and heads that stream without a file of them."""
        super().check()
        if self.policy_name == "duo_attention" and self.streaming_heads is None:
            raise UsageError(
                "--policy duo_attention wants to know which heads stream; add --streaming_heads "
                "FILE, which scripts/streaming_heads.py writes"
            )
        for name, policies in _OF.items():
            if (
                name in self.given - {"keep"}
                and self.policy_name not in policies
                and not self.policy_elsewhere
            ):
                some = " or ".join(policies[:2]) + (" or another of them" if policies[2:] else "")
                raise UsageError(
                    f"--{name} says nothing with --policy {self.policy_name}; add --policy {some}"
                )
        if "refresh_every" in self.given and not self.n_read:
            raise UsageError("--refresh_every is of --n_read; add --n_read N")

    def window(self, n_ctx: int) -> int:
        """Newest tokens that attention sinks keep in a context; a policy's window is at least 2."""
        return self.n_window or max(n_ctx - self.n_sink, 2)


@flag_group
class RunPolicyFlags(KeepFlags):
    """What a run keeps that goes on beyond its context."""

    context_shift: bool = _context(True, "drop older tokens when the context is full, and continue")
    policy: PolicyName | None = _context(
        None,
        "what a full context drops: context_shift (the default) half of what --keep leaves, "
        "attention_sinks all but --n_sink first and --n_window last tokens, none ends there; "
        "others keep --policy_budget tokens a kv head by score, from the start; if not given, a "
        "session's",
        "NAME",
    )

    @property
    def policy_name(self) -> PolicyName:
        """The policy that is meant."""
        return self.policy or ("context_shift" if self.context_shift else "none")

    def check(self) -> None:
        """Refuses two policies at once."""
        super().check()
        if self.policy not in (None, "none") and not self.context_shift:
            raise UsageError(f"--policy {self.policy} drops tokens, --nocontext_shift drops none")


@flag_group
class BatchPolicyFlags(KeepFlags):
    """What a request keeps that goes on beyond its context."""

    policy: PolicyName = _context(
        "none",
        "what a request keeps beyond its share of the context (none refuses it), or by score",
        "NAME",
        line=_LineDrop,
        decides=("policy",),
    )

    @property
    def policy_name(self) -> PolicyName:
        """The policy that is meant."""
        return self.policy


@flag_group
class CompressFlags(KeepFlags):
    """Whether a prompt is compressed once, for commands with a --mesh."""

    compress: bool = _policy(
        False,
        "with a --policy by score: read the prompt whole and let go of tokens once, behind it, as "
        "SnapKV's paper does; kvzip always does, and has the prompt repeated",
        decides=("by_score", "compress"),
    )

    @property
    def compresses(self) -> bool:
        """Whether prompts are read whole and compressed once."""
        return self.compress or self.policy_name == "kvzip"

    def check(self) -> None:
        """Refuses to compress without a policy by score, and on a mesh."""
        super().check()
        if self.compress and self.policy_name in BY_POSITION:
            raise UsageError("--compress chooses by scores; add --policy snapkv or another of them")
        if self.compresses and self.mesh is not None:
            raise UsageError(
                "a prompt that is compressed at its end is held on one device meanwhile; leave out "
                "--mesh, or take a policy by score without --compress"
            )


@flag_group
class WindowFlags(Options):
    """What windowed layers see beside their window."""

    window_sinks: int = _policy(
        0,
        "first tokens that windowed layers go on seeing behind their window; they keep all cells "
        "then, and the answers are not those that the model was trained for",
        "N",
        decides=("window_sinks",),
    )


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
