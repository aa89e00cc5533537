"""The flags of the commands that work on sessions."""

import dataclasses
import functools
from typing import Any, Literal, get_args

from kvrt.cli.flags.evaluate import (
    EvalFlags,
    MatrixDtype,
    ModelFlags,
    PromptFlags,
    TextFlags,
    WriteFlags,
)
from kvrt.cli.flags.groups import ReplaceFlags, SequenceFlags
from kvrt.config import MAX_SEQUENCES
from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.kv_types import KVDtype
from kvrt.options.option import Options, flag, flag_group, flags_of

Target = Literal[
    "f32",
    "bf16",
    "f16",
    "fp8",
    "int8",
    "q8_0",
    "int4",
    "int2",
    "llama.cpp",
    "llama.cpp-slot",
    "mlx",
]

_model = functools.partial(flag, "Model")
_session = functools.partial(flag, "Session")
_cache = functools.partial(flag, "Cache")
_chunks = functools.partial(flag, "Cache", advanced=True)
_output = functools.partial(flag, "Output")


def _schema(help: str) -> Any:
    return _session(None, f"{help}; see kvrt help schema", "FILE", advanced=True, file=kinds.INPUT)


@flag_group
class FileFlags(Options):
    """A session that is there."""

    session: str | None = _session(
        None, "the session file", "SESSION", place=True, needed=True, file=kinds.INPUT
    )


@flag_group
class NewFileFlags(Options):
    """A session that is made."""

    output: str | None = _session(
        None, "the session file to write", "FILE", short="o", needed=True, file=kinds.NEW
    )


@flag_group
class QuietFlags(Options):
    """Less on standard error."""

    quiet: bool = _output(False, "no progress, no summary")


@flag_group
class JsonFlags(Options):
    """For other programs."""

    json: bool = _output(False, "print JSON")


@flag_group
class PrefillOptions(QuietFlags, TextFlags, PromptFlags, ReplaceFlags, NewFileFlags):
    """Values of the flags of `kvrt prefill`."""

    output: str | None = _session(
        None, "the session file to write", "FILE", short="o", needed=True, file=kinds.SESSION
    )
    schema: str | None = _schema("compute the modules of a schema, each once and alone")

    as_chunk: bool = _session(
        False,
        "begin the text with the model's BOS where its tokenizer does not, for ask --chunk",
    )

    @property
    def prompt_elsewhere(self) -> bool:
        """Whether a schema holds the text."""
        return self.schema is not None

    @property
    def policy_elsewhere(self) -> bool:
        """Whether the session that is there may say the policy."""
        return True

    def check(self) -> None:
        """Refuses a conversation as a chunk, and one that is appended."""
        super().check()
        if self.as_chunk and (self.chat or self.append):
            other = "--chat" if self.chat else "--append"
            raise UsageError(f"--as_chunk reads a text alone; leave out {other}")
        if self.as_chunk and self.schema is not None:
            raise UsageError("--as_chunk reads one text, --schema has several; give one of both")


@flag_group
class QuestionFlags(Options):
    """What to ask."""

    question: str | None = _session(
        None, "what to ask; a blank line is put before it", "QUESTION", place=True
    )
    questions: str | None = _session(
        None,
        "read questions from a file, one a line, - for standard input; each is printed with "
        "its answer, not with --quiet",
        "FILE",
        short="F",
        file=kinds.INPUT,
    )


@flag_group
class BlendFlags(Options):
    """How chunks are blended, and where texts are kept."""

    chunk_dir: str | None = _cache(
        None, "a folder that keeps chunks of texts, and finds them", "DIR", file=kinds.SESSIONS
    )
    ratio: float = _chunks(
        0.15, "of the tokens of chunks, how many are computed again", "R", most=1
    )
    check_layer: int = _chunks(
        1, "the layer, from 0, that says which; all are computed up to it", "N"
    )
    strict: bool = _chunks(
        False, "refuse a damaged chunk; without it that is computed again from its tokens"
    )


@flag_group
class ChunkFlags(BlendFlags):
    """Chunks in place of a session."""

    chunk: tuple[str, ...] = _session(
        (),
        "in place of SESSION: a text file, or what kvrt prefill --as_chunk made of one; give it "
        "once for each, in the order of the text",
        "FILE",
        file=kinds.INPUT,
    )
    auto_ratio: bool = _chunks(
        False,
        "a greater ratio than --ratio, where computing so many takes no longer than loading the "
        "chunks did; it depends on this machine and moment",
    )


@flag_group
class AskedFile(Options):
    """The session of a question; with chunks its place is the question's."""

    session: str | None = _session(
        None, "the session file", "SESSION", place=True, file=kinds.INPUT
    )


@flag_group
class AskOptions(WriteFlags, EvalFlags, ChunkFlags, QuestionFlags, SequenceFlags, AskedFile):
    """Values of the flags of `kvrt ask`."""

    schema: str | None = _schema(
        "QUESTION is a <prompt> of the modules that the session has of this schema"
    )

    @property
    def policy_elsewhere(self) -> bool:
        """Whether the session may say the policy."""
        return self.session is not None

    def check(self) -> None:
        """Wants a session or chunks, and a question or a file of them."""
        super().check()
        if not self.chunk:
            alone = sorted({f.name for f in flags_of(ChunkFlags)} & self.given)
            if alone:
                raise UsageError(f"--{alone[0]} is for chunks; add --chunk FILE")
            if self.session is None:
                raise UsageError("SESSION is wanted: kvrt ask SESSION [QUESTION] [flags]")
        elif self.question is not None:
            raise UsageError(
                f"chunks take the place of a session; leave out {self.session}, or --chunk"
            )
        elif self.schema is not None:
            raise UsageError("--schema asks a session of modules; leave it out, or --chunk")
        elif self.seq is not None:
            raise UsageError("--seq is for a session; a chunk holds one sequence")
        question = self.session if self.chunk else self.question
        if (question is None) == (self.questions is None):
            raise UsageError("a question is wanted, or a file of them with -F; one of both")

    def settled(self) -> "AskOptions":
        """The question in its place, behind chunks as behind a session."""
        found = super().settled()
        assert isinstance(found, AskOptions)
        if not found.chunk:
            return found
        return dataclasses.replace(found, question=found.session, session=None)


@flag_group
class NamedModel(Options):
    """A model where one is needed for a part only."""

    model: str | None = _model(
        None,
        "a .gguf file, a folder with Hugging Face safetensors, or a known name",
        "NAME",
        short="m",
    )


@flag_group
class InspectOptions(JsonFlags, NamedModel, FileFlags):
    """Values of the flags of `kvrt inspect`."""

    cells: bool = _output(False, "a map of the cells of each group")
    tokens: bool = _output(False, "ids of the tokens of each sequence; their text too with -m")
    html: str | None = _output(
        None, "write a page with the map of the cells", "FILE", file=kinds.PAGE
    )

    def check(self) -> None:
        """Wants a model for texts only."""
        super().check()
        if self.model is not None and not self.tokens:
            raise UsageError("-m gives the text of tokens; add --tokens")


@flag_group
class NamedWeights(NamedModel):
    """A model whose weights count, where one is needed for a part only."""

    dtype: MatrixDtype | None = _model(
        None,
        "dtype of the weights in memory; if not given, the session's, else int8 on CPU and bf16 "
        "on GPU and TPU",
    )

    def check(self) -> None:
        """Wants a model for its weights."""
        super().check()
        if self.dtype is not None and self.model is None:
            raise UsageError("--dtype needs a model; add -m NAME")


@flag_group
class VerifyOptions(QuietFlags, NamedWeights, FileFlags):
    """Values of the flags of `kvrt verify`."""

    check_logits: bool = _output(
        False, "evaluate the last token again and compare its logits; needs -m"
    )

    def check(self) -> None:
        """Wants a model for its logits."""
        super().check()
        if self.check_logits and self.model is None:
            raise UsageError("--check_logits needs a model; add -m NAME")


@flag_group
class ExplainOptions(JsonFlags, ModelFlags, PromptFlags, SequenceFlags, FileFlags):
    """Values of the flags of `kvrt explain`."""


@flag_group
class ForkOptions(QuietFlags, NewFileFlags, FileFlags):
    """Values of the flags of `kvrt fork`."""

    at: int | None = _session(None, "tokens of the copy", "N", low=1, needed=True)


@flag_group
class TrimOptions(QuietFlags, FileFlags):
    """Values of the flags of `kvrt trim`."""

    keep: int | None = _session(
        None, "tokens to keep, from the beginning; all if not given", "N", low=1
    )
    output: str | None = _session(
        None,
        "write it there; else in its own place, where what --keep drops stays as SESSION~",
        "FILE",
        short="o",
        file=kinds.NEW,
    )


@flag_group
class RepairOptions(QuietFlags, FileFlags):
    """Values of the flags of `kvrt repair`."""

    output: str | None = _session(
        None,
        "write what is sound there; else in its own place, and the damaged session stays as "
        "SESSION~",
        "FILE",
        short="o",
        file=kinds.NEW,
    )


@flag_group
class ConvertOptions(QuietFlags, NamedWeights, NewFileFlags, FileFlags):
    """Values of the flags of `kvrt convert`; a model is for a file of another program."""

    to: Target | None = _session(
        None,
        "KV dtype; or a file of another program: llama.cpp's tools, a slot of its server, mlx-lm",
        "TYPE",
        needed=True,
    )
    hadamard: bool = _session(
        False,
        "Hadamard transform before fp8, int8, q8_0, int4, int2; not given, as the session has it",
    )
    legacy_format: bool = _session(
        False, "for a llama.cpp before 0.6 (October 2026), an mlx-lm before 0.32"
    )
    seq: int | None = _session(
        None,
        "the sequence that a slot file or a prompt cache of mlx-lm gets, of a session that holds "
        "several",
        "N",
        most=MAX_SEQUENCES - 1,
    )
    tokens: str | None = _session(
        None,
        "with -m: file with a JSON list of the ids that the cache was computed from, or an object "
        "of such lists by sequence, where the other program's file lacks them, as mlx-lm's do",
        "FILE",
        file=kinds.INPUT,
    )
    notes: str | None = _session(
        None,
        "with --to mlx: file with a JSON object of texts for the cache's metadata, like "
        '{"model": "...", "tokenizer_config": "{}"}, which mlx_lm.generate looks for',
        "FILE",
        file=kinds.INPUT,
    )

    def check(self) -> None:
        """Refuses flags that belong to another program's file where none is read or written."""
        super().check()
        one_sequence = ("llama.cpp-slot", "mlx")
        if self.legacy_format and self.to in get_args(KVDtype):
            raise UsageError(
                f"--legacy_format says which llama.cpp or mlx-lm; --to {self.to} is neither"
            )
        if self.seq is not None and self.to not in one_sequence:
            raise UsageError(
                f"--seq {self.seq}: --to {self.to} takes all sequences; leave it out, or give "
                f"--to {' or '.join(one_sequence)}"
            )
        if self.tokens is not None and self.model is None:
            raise UsageError("--tokens is for reading a file of another program; add -m NAME")
        if self.notes is not None and self.to != "mlx":
            raise UsageError(f"--notes is for mlx-lm, --to {self.to} has no place for it")


@flag_group
class FolderFlags(Options):
    """A folder of sessions."""

    folder: str | None = _session(
        None, "the folder", "FOLDER", place=True, needed=True, file=kinds.INPUT
    )


@flag_group
class LsOptions(JsonFlags, FolderFlags):
    """Values of the flags of `kvrt ls`."""

    rebuild: bool = _session(False, "make the index of the folder anew")


@flag_group
class PruneOptions(QuietFlags, JsonFlags, FolderFlags):
    """Values of the flags of `kvrt prune`."""

    budget: str | None = _session(
        None, "what the sessions may take, like 10GB or 512MiB", "SIZE", needed=True, size=True
    )
    dry_run: bool = _session(False, "say what would be deleted, and delete and write nothing")
