"""The flags of the commands that work on sessions."""

import dataclasses
from typing import Annotated, Literal, get_args

from kvrt.cli.flags.field import Info, Options
from kvrt.cli.flags.run import EvalFlags, ModelFlags, PromptFlags, WriteFlags
from kvrt.cli.flags.session import ReplaceFlags
from kvrt.cli.report.size import parse_size
from kvrt.errors import UsageError
from kvrt.kv_types import RowType

Target = Literal[
    "f32", "bf16", "f16", "int8", "q8_0", "int4", "int2", "llama.cpp", "llama.cpp-slot", "mlx"
]

_SESSION = "Session"
_OUT = "Output"
_INT_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileFlags(Options):
    """A session that is there."""

    session: Annotated[
        str | None, Info(_SESSION, "the session file", "SESSION", place=True, needed=True)
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class NewFileFlags(Options):
    """A session that is made."""

    output: Annotated[
        str | None,
        Info(_SESSION, "the session file to write", "FILE", short="o", needed=True),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuietFlags(Options):
    """Less on standard error."""

    quiet: Annotated[bool, Info(_OUT, "no progress, no summary")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonFlags(Options):
    """For other programs."""

    json: Annotated[bool, Info(_OUT, "print JSON")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillOptions(QuietFlags, EvalFlags, PromptFlags, ReplaceFlags, NewFileFlags):
    """Values of the flags of `kvrt prefill`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuestionFlags(Options):
    """What to ask."""

    question: Annotated[
        str | None,
        Info(_SESSION, "what to ask; a blank line is put before it", "QUESTION", place=True),
    ] = None
    questions: Annotated[
        str | None,
        Info(
            _SESSION,
            "read questions from a file, one a line, - for standard input; each is printed with "
            "its answer, not with --quiet",
            "FILE",
            short="F",
        ),
    ] = None

    def check(self) -> None:
        """Wants a question or a file of them."""
        super().check()
        if (self.question is None) == (self.questions is None):
            raise UsageError("a question is wanted, or a file of them with -F; one of both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskOptions(WriteFlags, EvalFlags, QuestionFlags, FileFlags):
    """Values of the flags of `kvrt ask`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedModel(Options):
    """A model where one is needed for a part only."""

    model: Annotated[
        str | None,
        Info(
            "Model",
            "a .gguf file, a folder with Hugging Face safetensors, or a known name",
            "NAME",
            short="m",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectOptions(JsonFlags, NamedModel, FileFlags):
    """Values of the flags of `kvrt inspect`."""

    cells: Annotated[bool, Info(_OUT, "a map of the cells of each group")] = False
    tokens: Annotated[
        bool, Info(_OUT, "ids of the tokens of each sequence; their text too with -m")
    ] = False
    html: Annotated[str | None, Info(_OUT, "write a page with the map of the cells", "FILE")] = None

    def check(self) -> None:
        """Wants a model for texts only."""
        super().check()
        if self.model is not None and not self.tokens:
            raise UsageError("-m gives the text of tokens; add --tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedWeights(NamedModel):
    """A model whose weights count, where one is needed for a part only."""

    dtype: Annotated[
        Literal["f32", "bf16", "f16"] | None,
        Info("Model", "type of the weights in memory, f32 if it is not given"),
    ] = None

    def check(self) -> None:
        """Wants a model for its weights."""
        super().check()
        if self.dtype is not None and self.model is None:
            raise UsageError("--dtype needs a model; add -m NAME")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions(QuietFlags, NamedWeights, FileFlags):
    """Values of the flags of `kvrt verify`."""

    probe: Annotated[
        bool, Info(_OUT, "evaluate the last token again and compare its logits; needs -m")
    ] = False

    def check(self) -> None:
        """Wants a model for a probe."""
        super().check()
        if self.probe and self.model is None:
            raise UsageError("--probe needs a model; add -m NAME")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions(JsonFlags, ModelFlags, PromptFlags, FileFlags):
    """Values of the flags of `kvrt explain`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkOptions(QuietFlags, NewFileFlags, FileFlags):
    """Values of the flags of `kvrt fork`."""

    at: Annotated[
        int | None,
        Info(_SESSION, "tokens of the copy", "N", low=1, high=_INT_MAX, needed=True),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrimOptions(QuietFlags, FileFlags):
    """Values of the flags of `kvrt trim`."""

    keep: Annotated[
        int | None,
        Info(
            _SESSION,
            "tokens to keep, from the beginning; all if not given",
            "N",
            low=1,
            high=_INT_MAX,
        ),
    ] = None
    output: Annotated[
        str | None,
        Info(
            _SESSION,
            "write it there; else in its own place, where what --keep drops stays as SESSION~",
            "FILE",
            short="o",
        ),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvertOptions(QuietFlags, NamedWeights, NewFileFlags, FileFlags):
    """Values of the flags of `kvrt convert`; a model is for a file of another program."""

    to: Annotated[
        Target | None,
        Info(
            _SESSION,
            "type of the rows; or a file of another program: llama.cpp's tools, a slot of its "
            "server, mlx-lm",
            "TYPE",
            needed=True,
        ),
    ] = None
    hadamard: Annotated[
        bool,
        Info(
            _SESSION,
            "rows of int8, q8_0, int4 and int2 are rotated before they are coded; if not given, as "
            "the session has it",
        ),
    ] = False
    old: Annotated[
        bool, Info(_SESSION, "for a llama.cpp before 0.6 (October 2026), an mlx-lm before 0.32")
    ] = False

    def check(self) -> None:
        """Wants another program where an older one is named."""
        super().check()
        if self.old and self.to in get_args(RowType):
            raise UsageError(f"--old says which llama.cpp or mlx-lm; --to {self.to} is neither")
        if self.model is not None and self.to not in get_args(RowType):
            raise UsageError("-m is for reading a file of another program; give --to f32|bf16|f16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FolderFlags(Options):
    """A folder of sessions."""

    folder: Annotated[
        str | None, Info(_SESSION, "the folder", "FOLDER", place=True, needed=True)
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LsOptions(JsonFlags, FolderFlags):
    """Values of the flags of `kvrt ls`."""

    rebuild: Annotated[bool, Info(_SESSION, "make the index of the folder anew")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class PruneOptions(QuietFlags, JsonFlags, FolderFlags):
    """Values of the flags of `kvrt prune`."""

    budget: Annotated[
        str | None,
        Info(_SESSION, "what the sessions may take, like 10GB or 512MiB", "SIZE", needed=True),
    ] = None
    dry_run: Annotated[
        bool, Info(_SESSION, "say what would be deleted, and delete and write nothing")
    ] = False

    def check(self) -> None:
        """Refuses a size that is none."""
        super().check()
        self.max_bytes()

    def max_bytes(self) -> int:
        """The budget in bytes."""
        return parse_size("--budget", self.budget or "")
