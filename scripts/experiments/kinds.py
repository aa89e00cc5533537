"""The flags of scripts that set kinds of weights or caches beside f32, over plays."""

import dataclasses
import sys
from collections.abc import Callable, Sequence

from absl import app, flags

from kvrt.errors import KvrtError
from scripts._lib import texts

# Tokens of each play that are not scored; so many are read at once at most.
N_UNSCORED = 512

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_KINDS = flags.DEFINE_list("kinds", None, "Which to measure, beside f32; all if left out.")
_CHUNK = flags.DEFINE_integer(
    "chunk",
    None,
    f"Tokens that come in at once, a divisor of {N_UNSCORED}; the script's own if left out.",
    lower_bound=1,
    upper_bound=N_UNSCORED,
)
_N_TEXTS = flags.DEFINE_integer("n_texts", 3, "Plays.", lower_bound=1, upper_bound=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What is to be measured.

    Attributes:
      model: known name, file or folder.
      kinds: of weights or of caches; f32 comes first in any case.
      chunk: tokens that come in at once.
      n_texts: how many plays.
    """

    model: str = "smollm2-135m"
    kinds: Sequence[str]
    chunk: int
    n_texts: int = 3

    @property
    def plays(self) -> list[str]:
        """Their names."""
        return list(texts.PLAYS)[: self.n_texts]

    @property
    def with_f32(self) -> list[str]:
        """Each kind once, f32 before the others."""
        return list(dict.fromkeys(["f32", *self.kinds]))


def asked(argv: Sequence[str], default: Asked) -> Asked:
    """What the flags say; where they say nothing, kinds and chunk are those of `default`.

    Raises:
      UsageError: there are other arguments, or the chunk does not divide what is not scored.
    """
    chunk = default.chunk if _CHUNK.value is None else _CHUNK.value
    if N_UNSCORED % chunk:
        raise app.UsageError(f"--chunk {chunk} does not divide {N_UNSCORED}")
    return Asked(
        model=_MODEL.value,
        kinds=default.kinds if _KINDS.value is None else _KINDS.value,
        chunk=chunk,
        n_texts=_N_TEXTS.value,
    )


def ended(name: str, run: Callable[[Asked], None], what: Asked) -> int:
    """Runs it; a script's exit code."""
    try:
        run(what)
    except KvrtError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    return 0
