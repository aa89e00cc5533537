"""The flags of `kvrt run`, in groups that other commands share."""

import dataclasses
import functools
import os
import secrets
from typing import Annotated, Literal

from msgspec import Meta

from kvrt.cli.flags.groups import (
    CompressFlags,
    MeshFlags,
    PlacementFlags,
    RunPolicyFlags,
    SelectFlags,
    SessionFlags,
    WindowFlags,
)
from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.options.cache import CacheConfig, SelfExtend
from kvrt.options.option import Options, flag, flag_group, flags_of_config
from kvrt.options.sampling import RANDOM, Sampling

UNTIL_FULL = -2  # as a length
_Text = Annotated[str, Meta(min_length=1)]
_Stop = _Text | Annotated[list[_Text], Meta(max_length=64)]
# Those of `kvrt_models.weights.types`, which no help text waits for.
MatrixDtype = Literal["f32", "bf16", "f16", "int8"]
_model = functools.partial(flag, "Model")
_prompt = functools.partial(flag, "Prompt (-p, -f, both, or --tokens; none resumes a session)")
_length = functools.partial(flag, "Length")
_line = functools.partial(_length, decides=("always",))
_sampling = functools.partial(flag, "Sampling")
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
        decides=("always",),
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
        file=kinds.INPUT,
    )
    tokens: str | None = _prompt(
        None,
        "read ids from a file with a JSON list, - for standard input",
        "FILE",
        file=kinds.INPUT,
    )
    chat: bool = _prompt(
        False,
        "take the text as a user's message, by the model's chat template; with a session it is the "
        "next turn of the conversation there",
    )

    system: str | None = _prompt(
        None, "with --chat: the system message that it begins with", "TEXT"
    )

    def check(self) -> None:
        """Wants one prompt; a file and a text after it are one."""
        super().check()
        given = {"-p": self.prompt, "-f": self.file, "--tokens": self.tokens}
        found = [name for name, value in given.items() if value is not None]
        more = found == ["-p", "-f"] or (self.prompt_elsewhere and not found)
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
    def prompt_elsewhere(self) -> bool:
        """Whether a session, or a schema, may hold the prompt."""
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
    ignore_eos: bool = _line(False, "continue after an end-of-text token", line=True)
    stop: tuple[str, ...] = _line(
        (), "end before this text; may be given several times", "TEXT", line=_Stop
    )

    def check(self) -> None:
        """Refuses an empty stop text."""
        super().check()
        if "" in self.stop:
            raise UsageError("flag --stop= is empty; give at least one character")


@flag_group
class DraftFlags(Options):
    """Drafts that are verified several at a time."""

    draft: str | None = _length(
        None,
        "the same text sooner, from drafts verified a step: ngram (from the text so far), "
        "layerskip:E (by the first E layers) or a smaller model's name",
        "WAY",
    )
    n_draft: int = _length(
        8, "with --draft: tokens drafted a step", "K", low=1, most=64, advanced=True
    )

    def check(self) -> None:
        """Refuses a number of drafts where nothing drafts."""
        super().check()
        if "n_draft" in self.given and self.draft is None:
            raise UsageError(f"--n_draft {self.n_draft} drafts nothing alone; add --draft ngram")


def random_seed() -> int:
    """A seed that nobody has chosen."""
    return secrets.randbelow(2**32)


@flag_group
class SamplingFlags(flags_of_config(Sampling)):
    """How tokens are sampled."""

    def settled(self) -> Options:
        """The options with a number for a random seed."""
        found = super().settled()
        return found if self.seed != RANDOM else dataclasses.replace(found, seed=random_seed())


@flag_group
class EvalFlags(
    MeshFlags,
    WindowFlags,
    flags_of_config(SelfExtend),
    RunPolicyFlags,
    flags_of_config(CacheConfig, without="n_seq_max"),
    ModelFlags,
):
    """What every command shares that evaluates tokens."""

    def check(self) -> None:
        """Refuses a policy beside SelfExtend in the cache, and where a full context ends all."""
        super().check()
        if self.policy in (None, "none"):
            return
        if self.extends:
            raise UsageError(
                f"--policy {self.policy} and SelfExtend in the cache both move positions; choose "
                "one, or take --self_extend paper"
            )
        if isinstance(self, LengthFlags) and self.n_predict == UNTIL_FULL:
            raise UsageError(
                f"-n {UNTIL_FULL} ends when the context is full, --policy {self.policy} never lets "
                "it be; choose one"
            )

    @property
    def extends(self) -> bool:
        """Whether SelfExtend moves cells."""
        return self.grp_attn_n > 1 and self.self_extend == "cache"


@flag_group
class TextFlags(PlacementFlags, CompressFlags, EvalFlags):
    """The same, for commands that read a text into a cache of its own."""

    def check(self) -> None:
        """Refuses blocks where positions move."""
        super().check()
        if self.blocks and (self.policy_name != "none" or self.extends):
            mover = "SelfExtend in the cache" if self.extends else f"a {self.policy_name} policy"
            remedy = "-gan" if self.extends else "it: --nocontext_shift"
            raise UsageError(
                f"--blocks has a token's place by its position, and {mover} moves positions; do "
                f"without {remedy}"
            )


@flag_group
class WriteFlags(SelectFlags, SamplingFlags, LengthFlags):
    """What every command shares that writes text."""

    json: bool = _output(
        False, "print one JSON object instead of the text, or one a line for several"
    )
    quiet: bool = _output(False, "no progress, no summary")
    stride: int = _length(
        1,
        "tokens of one compiled program; the text is the same, and shows so many at a time",
        "N",
        low=1,
        advanced=True,
    )

    def check(self) -> None:
        """Refuses a random seed where processes would each take another one."""
        super().check()
        joins = isinstance(self, MeshFlags) and self.coordinator is not None
        if joins and self.seed == RANDOM:
            raise UsageError("--seed -1 is another one in each process of --coordinator; give it")


@flag_group
class RunOptions(DraftFlags, WriteFlags, TextFlags, SessionFlags, PromptFlags):
    """Values of the flags of `kvrt run`, each within its range."""

    logprobs: int = _output(
        0, "with --json: of each token the K best candidates, their text and log-probabilities", "K"
    )
    cells: bool = _output(False, "print a map of the cells on standard error")

    @property
    def prompt_elsewhere(self) -> bool:
        """Whether a session, or a schema, may hold the prompt."""
        return self.session is not None and not self.append

    @property
    def policy_elsewhere(self) -> bool:
        """Whether a session that is there may say the policy."""
        return self.session is not None and os.path.exists(self.session)

    def check(self) -> None:
        """Refuses log-probabilities in text."""
        super().check()
        if self.logprobs and not self.json:
            raise UsageError(f"--logprobs {self.logprobs} has no place in the text; add --json")
