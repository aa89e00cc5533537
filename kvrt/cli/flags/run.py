"""The flags of `kvrt run`, in groups that other commands share."""

import dataclasses
import secrets
from typing import Annotated, Literal

from kvrt.cli.flags.field import Info, Options
from kvrt.cli.flags.mesh import MeshFlags
from kvrt.cli.flags.session import SessionFlags
from kvrt.config import ExtendKind, RopeMode
from kvrt.errors import UsageError
from kvrt.kv_types import FloatType, KeyTypes, RowTypes

RANDOM = -1  # as a seed
_INT_MAX = 2**31 - 1
_MODEL = "Model"
_PROMPT = "Prompt (-p, -f, both, or --tokens; with a session also none, to go on)"
_LENGTH = "Length"
_CONTEXT = "Context"
_DRAW = "Sampling"
_CACHE = "Cache"
_OUT = "Output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelFlags(Options):
    """Which model."""

    model: Annotated[
        str,
        Info(
            _MODEL,
            "a .gguf file, a folder with Hugging Face safetensors, or a known name, fetched once",
            "NAME",
            short="m",
        ),
    ] = "smollm2-135m"
    dtype: Annotated[FloatType, Info(_MODEL, "type of the weights in memory")] = "f32"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptFlags(Options):
    """What to read."""

    prompt: Annotated[
        str | None,
        Info(
            _PROMPT,
            "the text to go on; with -f it follows the file's text and a blank line",
            "TEXT",
            short="p",
        ),
    ] = None
    file: Annotated[
        str | None,
        Info(
            _PROMPT,
            "read the text from a file, - for standard input; a newline at its end is left out",
            "FILE",
            short="f",
        ),
    ] = None
    tokens: Annotated[
        str | None,
        Info(_PROMPT, "read ids from a file with a JSON list, - for standard input", "FILE"),
    ] = None
    chat: Annotated[
        bool,
        Info(
            _PROMPT,
            "take the text as a user's message, by the model's chat template; with --session it "
            "is the next turn of the conversation there",
        ),
    ] = False

    system: Annotated[
        str | None, Info(_PROMPT, "with --chat: the system message that it begins with", "TEXT")
    ] = None

    def check(self) -> None:
        """Wants one prompt; a file and a text after it are one."""
        super().check()
        given = {"-p": self.prompt, "-f": self.file, "--tokens": self.tokens}
        found = [name for name, value in given.items() if value is not None]
        more = found == ["-p", "-f"] or (self.with_session and not found)
        if len(found) != 1 and not more:
            raise UsageError(
                "the prompt is wanted once, as -p TEXT, -f FILE, both or --tokens FILE; found "
                f"{' and '.join(found) or 'none'}"
            )
        if self.chat and self.tokens is not None:
            raise UsageError("--chat needs text, --tokens gives ids; use -p or -f")
        if self.system is not None and not self.chat:
            raise UsageError("--system begins a conversation; add --chat")

    @property
    def with_session(self) -> bool:
        """Whether a session may hold the prompt."""
        return False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthFlags(Options):
    """How much to write."""

    n_predict: Annotated[
        int,
        Info(
            _LENGTH,
            "tokens to write at most; -1 without end, -2 until the context is full",
            "N",
            short="n",
            low=-2,
            high=_INT_MAX,
        ),
    ] = 256
    ignore_eos: Annotated[bool, Info(_LENGTH, "go on after an end-of-text token")] = False
    stop: Annotated[
        tuple[str, ...], Info(_LENGTH, "end before this text; may be given several times", "TEXT")
    ] = ()

    def check(self) -> None:
        """Refuses an empty stop text."""
        super().check()
        if "" in self.stop:
            raise UsageError("flag --stop= is empty; give at least one character")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SizeFlags(Options):
    """How much it holds."""

    n_ctx: Annotated[
        int,
        Info(
            _CONTEXT,
            "cells of the context; 0 takes a session's, or the length the model was trained for if "
            "that needs at most a quarter of the free memory, else less, but what the prompt needs",
            "N",
            short="c",
            high=_INT_MAX,
        ),
    ] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextFlags(SizeFlags):
    """How far it reaches."""

    context_shift: Annotated[
        bool, Info(_CONTEXT, "drop older text when the context is full, and go on")
    ] = True
    keep: Annotated[
        int,
        Info(
            _CONTEXT,
            "tokens of the prompt that a shift never drops, a begin-of-text token not counted; "
            "-1 keeps all",
            "N",
            low=-1,
            high=_INT_MAX,
        ),
    ] = 0
    grp_attn_n: Annotated[
        int,
        Info(
            _CONTEXT,
            "SelfExtend: tokens that share a position, so that a model reads so many times "
            "further; 1 is off",
            "N",
            short="gan",
            low=1,
            high=_INT_MAX,
        ),
    ] = 1
    grp_attn_w: Annotated[
        int,
        Info(
            _CONTEXT,
            "SelfExtend: window of tokens with positions of their own",
            "N",
            short="gaw",
            low=1,
            high=_INT_MAX,
        ),
    ] = 512
    self_extend: Annotated[
        ExtendKind,
        Info(
            _CONTEXT,
            "by moving cells, without context shift, or as in the paper, which needs --rope read",
        ),
    ] = "cache"


def random_seed() -> int:
    """A seed that nobody has chosen."""
    return secrets.randbelow(2**32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawFlags(Options):
    """How tokens are drawn."""

    temp: Annotated[float, Info(_DRAW, "temperature; 0 takes the most probable token", "X")] = 0.8
    top_k: Annotated[
        int, Info(_DRAW, "draw from the K most probable tokens; 0 is off", "K", high=_INT_MAX)
    ] = 40
    top_p: Annotated[
        float, Info(_DRAW, "draw from the fewest tokens of this probability; 1 is off", "P", high=1)
    ] = 0.95
    min_p: Annotated[
        float, Info(_DRAW, "leave out tokens below this share of the best; 0 is off", "P", high=1)
    ] = 0.05
    repeat_penalty: Annotated[
        float, Info(_DRAW, "make recent tokens less probable; 1 is off", "X", low=1e-6)
    ] = 1.0
    repeat_last_n: Annotated[int, Info(_DRAW, "how many tokens are recent", "N", high=1 << 20)] = 64
    seed: Annotated[
        int,
        Info(
            _DRAW,
            "the same seed gives the same text; -1 takes a random one, and says which",
            "N",
            low=RANDOM,
            high=2**32 - 1,
        ),
    ] = 0

    def settled(self) -> Options:
        """The options with a number for a random seed."""
        found = super().settled()
        return found if self.seed != RANDOM else dataclasses.replace(found, seed=random_seed())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFlags(Options):
    """What decides how many bytes the cache takes."""

    cache_type_k: Annotated[
        KeyTypes,
        Info(
            _CACHE,
            "type of cached keys, or one a group of layers that see alike, by commas",
            "TYPE",
            several=True,
        ),
    ] = "f32"
    cache_type_v: Annotated[
        RowTypes, Info(_CACHE, "type of cached values, likewise", "TYPE", several=True)
    ] = "f32"
    hadamard: Annotated[
        bool, Info(_CACHE, "rotate rows before they become int8, q8_0, int4 or int2")
    ] = False
    swa_full: Annotated[
        bool,
        Info(
            _CACHE, "windowed layers get all cells too; otherwise rows out of sight are used again"
        ),
    ] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepFlags(Options):
    """How much a step does."""

    n_ubatch: Annotated[
        int,
        Info(_CACHE, "tokens of the prompt that are evaluated at once", "N", low=1, high=_INT_MAX),
    ] = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrameFlags(Options):
    """How keys lie in the cache, and what reads them."""

    rope: Annotated[
        RopeMode,
        Info(_CACHE, "rotate keys when they are written, or when read: shifts are then exact"),
    ] = "write"
    attention: Annotated[
        Literal["chunked", "pallas_gpu", "pallas_tpu"],
        Info(
            _CACHE,
            "compute attention by XLA (chunked), or by a kernel for GPUs (pallas_gpu) or TPUs "
            "(pallas_tpu)",
            "WAY",
        ),
    ] = "chunked"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFlags(StepFlags, FrameFlags, RowFlags):
    """How the cache is kept."""

    defrag_thold: Annotated[
        float,
        Info(
            _CACHE,
            "pack the cache when more than this share of its used part is empty; 1 is off",
            "X",
            high=1,
        ),
    ] = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalFlags(MeshFlags, CacheFlags, ContextFlags, ModelFlags):
    """What every command shares that evaluates tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteFlags(DrawFlags, LengthFlags):
    """What every command shares that writes text."""

    json: Annotated[
        bool, Info(_OUT, "print one JSON object instead of the text, or one a line for several")
    ] = False
    quiet: Annotated[bool, Info(_OUT, "no progress, no summary")] = False

    def check(self) -> None:
        """Refuses a random seed where processes would each take another one."""
        super().check()
        joins = isinstance(self, MeshFlags) and self.coordinator is not None
        if joins and self.seed == RANDOM:
            raise UsageError("--seed -1 is another one in each process of --coordinator; give it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions(WriteFlags, EvalFlags, SessionFlags, PromptFlags):
    """Values of the flags of `kvrt run`, each within its range."""

    logprobs: Annotated[
        int,
        Info(
            _OUT,
            "with --json: of each token the K best candidates, their text and log-probabilities",
            "K",
            high=_INT_MAX,
        ),
    ] = 0
    cells: Annotated[bool, Info(_OUT, "print a map of the cells on standard error")] = False

    @property
    def with_session(self) -> bool:
        """Whether a session may hold the prompt."""
        return self.session is not None and not self.append

    def check(self) -> None:
        """Refuses log-probabilities in text."""
        super().check()
        if self.logprobs and not self.json:
            raise UsageError(f"--logprobs {self.logprobs} has no place in the text; add --json")
