"""The flags of `kvrt run`, in groups that other commands share."""

import dataclasses
import functools
import secrets
from typing import Literal

from kvrt.cli.flags.declare import Options, flag, flag_group
from kvrt.cli.flags.mesh import MeshFlags
from kvrt.cli.flags.run_session import SessionFlags
from kvrt.cli.report.size import parse_size
from kvrt.config import ExtendKind, RopeMode
from kvrt.errors import UsageError
from kvrt.kv_types import KeyDtypes, KVDtypes

RANDOM = -1  # as a seed
# Those of `kvrt_models.weights.types`, which no help text waits for.
MatrixDtype = Literal["f32", "bf16", "f16", "int8"]
_model = functools.partial(flag, "Model")
_prompt = functools.partial(flag, "Prompt (-p, -f, both, or --tokens; none resumes a session)")
_length = functools.partial(flag, "Length")
_context = functools.partial(flag, "Context")
_sampling = functools.partial(flag, "Sampling")
_cache = functools.partial(flag, "Cache")
_output = functools.partial(flag, "Output")


@flag_group
class ModelFlags(Options):
    """Which model."""

    model: str = _model(
        "smollm2-135m",
        "a .gguf file, a folder with Hugging Face safetensors, or a known name, fetched once",
        "NAME",
        short="m",
    )
    dtype: MatrixDtype | None = _model(
        None,
        "dtype of the weights in memory; if not given, a session's, else int8 on CPU and bf16 on "
        "GPU and TPU",
    )


@flag_group
class PromptFlags(Options):
    """What to read."""

    prompt: str | None = _prompt(
        None,
        "the text to continue; with -f it follows the file's text and a blank line",
        "TEXT",
        short="p",
    )
    file: str | None = _prompt(
        None,
        "read the text from a file, - for standard input; a newline at its end is left out",
        "FILE",
        short="f",
    )
    tokens: str | None = _prompt(
        None, "read ids from a file with a JSON list, - for standard input", "FILE"
    )
    chat: bool = _prompt(
        False,
        "take the text as a user's message, by the model's chat template; with --session it "
        "is the next turn of the conversation there",
    )

    system: str | None = _prompt(
        None, "with --chat: the system message that it begins with", "TEXT"
    )

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


@flag_group
class LengthFlags(Options):
    """How much to write."""

    n_predict: int = _length(
        256,
        "tokens to write at most; -1 without end, -2 until the context is full",
        "N",
        short="n",
        low=-2,
    )
    ignore_eos: bool = _length(False, "continue after an end-of-text token")
    stop: tuple[str, ...] = _length((), "end before this text; may be given several times", "TEXT")

    def check(self) -> None:
        """Refuses an empty stop text."""
        super().check()
        if "" in self.stop:
            raise UsageError("flag --stop= is empty; give at least one character")


@flag_group
class SizeFlags(Options):
    """How much it holds."""

    n_ctx: int = _context(
        0,
        "cells of the context; 0 takes a session's, or the length the model was trained for if "
        "that needs at most a quarter of the free memory, else less, but what the prompt needs",
        "N",
        short="c",
    )


@flag_group
class ContextFlags(SizeFlags):
    """How far it reaches."""

    context_shift: bool = _context(True, "drop older tokens when the context is full, and continue")
    keep: int = _context(
        0,
        "tokens of the prompt that a shift never drops, a begin-of-text token not counted; "
        "-1 keeps all",
        "N",
        low=-1,
    )


@flag_group
class ExtendFlags(Options):
    """How far tokens share positions."""

    grp_attn_n: int = _context(
        1,
        "SelfExtend: tokens that share a position, so that a model reads so many times "
        "further; 1 is off",
        "N",
        short="gan",
        low=1,
    )
    grp_attn_w: int = _context(
        512, "SelfExtend: window of tokens with positions of their own", "N", short="gaw", low=1
    )
    self_extend: ExtendKind = _context(
        "cache",
        "by moving cells, without context shift, or as in the paper, which needs --rope read",
    )


def random_seed() -> int:
    """A seed that nobody has chosen."""
    return secrets.randbelow(2**32)


@flag_group
class SamplingFlags(Options):
    """How tokens are sampled."""

    temp: float = _sampling(0.8, "temperature; 0 takes the most probable token", "X")
    top_k: int = _sampling(40, "sample from the K most probable tokens; 0 is off", "K")
    top_p: float = _sampling(
        0.95, "sample from the fewest tokens of this probability; 1 is off", "P", most=1
    )
    min_p: float = _sampling(
        0.05, "leave out tokens below this share of the best; 0 is off", "P", most=1
    )
    repeat_penalty: float = _sampling(
        1.0, "make recent tokens less probable; 1 is off", "X", low=1e-6
    )
    repeat_last_n: int = _sampling(64, "how many tokens are recent", "N", most=1 << 20)
    seed: int = _sampling(
        0,
        "the same seed gives the same text; -1 takes a random one, and says which",
        "N",
        low=RANDOM,
        most=2**32 - 1,
    )

    def settled(self) -> Options:
        """The options with a number for a random seed."""
        found = super().settled()
        return found if self.seed != RANDOM else dataclasses.replace(found, seed=random_seed())


@flag_group
class KVFlags(Options):
    """What decides how many bytes the KV cache takes."""

    cache_type_k: KeyDtypes | None = _cache(
        None,
        "dtype of cached keys, or one for each layer group, by commas; if not given, a session's, "
        "else f16 on CPU and bf16 on GPU and TPU",
        "TYPE",
        several=True,
    )
    cache_type_v: KVDtypes | None = _cache(
        None, "dtype of cached values, likewise", "TYPE", several=True
    )
    hadamard: bool = _cache(
        False, "Hadamard transform before keys and values become int8, q8_0, int4 or int2"
    )
    swa_full: bool = _cache(
        False, "windowed layers get all cells too; otherwise cells outside the window are reused"
    )


@flag_group
class StepFlags(Options):
    """How much a step does."""

    n_ubatch: int = _cache(512, "tokens of the prompt that a prefill step takes", "N", low=1)


@flag_group
class AttentionFlags(Options):
    """When RoPE is applied to keys, and what computes attention."""

    rope: RopeMode = _cache(
        "write", "apply RoPE to keys when they are written, or when read: shifts are then exact"
    )
    attention: Literal["auto", "chunked", "pallas_gpu", "pallas_tpu", "mosaic_gpu"] = _cache(
        "auto",
        "compute attention by XLA (chunked), or by a kernel for GPUs (pallas_gpu; mosaic_gpu from "
        "Ampere and JAX 0.11.1 on) or TPUs (pallas_tpu); auto takes the device's kernel if a "
        "self-test passes, else chunked",
        "WAY",
    )


@flag_group
class CacheFlags(StepFlags, AttentionFlags, KVFlags):
    """How the cache is kept."""

    defrag_thold: float = _cache(
        0.1,
        "defragment the cache when more than this share of its used part is empty; 1 is off",
        "X",
        most=1,
    )


@flag_group
class CheckpointFlags(Options):
    """Where windowed and recurrent layers can be cut back to."""

    n_checkpoints: int = _cache(
        0,
        "context checkpoints of a sequence at most, saved in its session: a prompt that differs "
        "late resumes at the nearest one, where layers are windowed or recurrent; 0 is none",
        "N",
        low=0,
    )
    checkpoint_interval: int | None = _cache(
        None,
        "tokens from one to the next, at least those of a step, and whole blocks with --mode "
        "paged; 0 makes them only where a prompt begins and ends, without the flag each step may",
        "N",
        low=0,
    )
    checkpoint_bytes: str | None = _cache(
        None, "memory of all of them at most, such as 500MB", "SIZE"
    )

    def max_checkpoint_bytes(self) -> int | None:
        """Their budget in bytes; None where it was left out."""
        if self.checkpoint_bytes is None:
            return None
        return parse_size("--checkpoint_bytes", self.checkpoint_bytes)

    def check(self) -> None:
        """Refuses a size that is none."""
        super().check()
        self.max_checkpoint_bytes()


@flag_group
class EvalFlags(MeshFlags, CheckpointFlags, CacheFlags, ExtendFlags, ContextFlags, ModelFlags):
    """What every command shares that evaluates tokens."""


@flag_group
class WriteFlags(SamplingFlags, LengthFlags):
    """What every command shares that writes text."""

    json: bool = _output(
        False, "print one JSON object instead of the text, or one a line for several"
    )
    quiet: bool = _output(False, "no progress, no summary")

    def check(self) -> None:
        """Refuses a random seed where processes would each take another one."""
        super().check()
        joins = isinstance(self, MeshFlags) and self.coordinator is not None
        if joins and self.seed == RANDOM:
            raise UsageError("--seed -1 is another one in each process of --coordinator; give it")


@flag_group
class RunOptions(WriteFlags, EvalFlags, SessionFlags, PromptFlags):
    """Values of the flags of `kvrt run`, each within its range."""

    logprobs: int = _output(
        0, "with --json: of each token the K best candidates, their text and log-probabilities", "K"
    )
    cells: bool = _output(False, "print a map of the cells on standard error")

    @property
    def with_session(self) -> bool:
        """Whether a session may hold the prompt."""
        return self.session is not None and not self.append

    def check(self) -> None:
        """Refuses log-probabilities in text."""
        super().check()
        if self.logprobs and not self.json:
            raise UsageError(f"--logprobs {self.logprobs} has no place in the text; add --json")
