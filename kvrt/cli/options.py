"""The flags of `kvrt run`, one table: name, type, default, range and help of each in one place."""

import dataclasses
import math
from typing import Annotated, Any, Literal, get_args, get_origin

from kvrt.config import ExtendKind, RopeMode, RowType

_INT_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Info:
    """What a flag is beside its name, type and default.

    Attributes:
      group: heading it stands under in the help.
      help: a line or two for people.
      value: what the help calls its value.
      short: one letter, or "".
      low: least number.
      high: greatest number.
    """

    group: str
    help: str
    value: str = ""
    _: dataclasses.KW_ONLY
    short: str = ""
    low: float = 0
    high: float = math.inf


_MODEL = "Model"
_PROMPT = "Prompt (exactly one of -p, -f, --tokens)"
_LENGTH = "Length"
_DRAW = "Sampling"
_CACHE = "Cache"
_OUT = "Output"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Values of the flags of `kvrt run`, each within its range."""

    model: Annotated[
        str,
        Info(
            _MODEL,
            "a .gguf file, a folder with Hugging Face safetensors, or a known name, fetched once",
            "NAME",
            short="m",
        ),
    ] = "smollm2-135m"
    dtype: Annotated[RowType, Info(_MODEL, "type of the weights in memory")] = "f32"

    prompt: Annotated[str | None, Info(_PROMPT, "the text to go on", "TEXT", short="p")] = None
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
        bool, Info(_PROMPT, "take the text as a user's message, by the model's chat template")
    ] = False

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
    n_ctx: Annotated[
        int,
        Info(
            _LENGTH,
            "cells of the context; 0 takes the length the model was trained for, 4096 at most",
            "N",
            short="c",
            high=_INT_MAX,
        ),
    ] = 0
    context_shift: Annotated[
        bool, Info(_LENGTH, "drop older text when the context is full, and go on")
    ] = True
    keep: Annotated[
        int,
        Info(
            _LENGTH,
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
            _LENGTH,
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
            _LENGTH,
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
            _LENGTH,
            "by moving cells, without context shift, or as in the paper, which needs --rope read",
        ),
    ] = "cache"
    ignore_eos: Annotated[bool, Info(_LENGTH, "go on after an end-of-text token")] = False
    stop: Annotated[
        tuple[str, ...], Info(_LENGTH, "end before this text; may be given several times", "TEXT")
    ] = ()

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
    seed: Annotated[int, Info(_DRAW, "the same seed gives the same text", "N", high=2**32 - 1)] = 0

    cache_type_k: Annotated[RowType, Info(_CACHE, "type of cached keys")] = "f32"
    cache_type_v: Annotated[RowType, Info(_CACHE, "type of cached values")] = "f32"
    rope: Annotated[
        RopeMode,
        Info(_CACHE, "rotate keys when they are written, or when read: shifts are then exact"),
    ] = "write"
    n_ubatch: Annotated[
        int,
        Info(_CACHE, "tokens of the prompt that are evaluated at once", "N", low=1, high=_INT_MAX),
    ] = 512

    swa_full: Annotated[
        bool,
        Info(
            _CACHE, "windowed layers get all cells too; otherwise rows out of sight are used again"
        ),
    ] = False
    defrag_thold: Annotated[
        float,
        Info(
            _CACHE,
            "pack the cache when more than this share of its used part is empty; 1 is off",
            "X",
            high=1,
        ),
    ] = 0.1

    json: Annotated[bool, Info(_OUT, "print one JSON object instead of the text")] = False
    logprobs: Annotated[
        int,
        Info(
            _OUT,
            "with --json: the K best ids and their log-probabilities of each token",
            "K",
            high=_INT_MAX,
        ),
    ] = 0
    cells: Annotated[bool, Info(_OUT, "print a map of the cells on standard error")] = False
    quiet: Annotated[bool, Info(_OUT, "no progress, no summary")] = False


@dataclasses.dataclass(frozen=True)
class Flag:
    """A row of the table, taken apart."""

    name: str
    type: Any
    default: Any
    info: Info

    @property
    def choices(self) -> tuple[str, ...]:
        """The only words it takes, those of its Literal; none for other types."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def table() -> list[Flag]:
    """All flags, in the order of the help."""
    fields = dataclasses.fields(RunOptions)
    rows = [(f.name, get_args(f.type), f.default) for f in fields]
    return [Flag(name, kind, default, info) for name, (kind, info), default in rows]
