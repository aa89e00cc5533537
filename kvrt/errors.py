"""Every exception that kvrt raises on purpose.

A message is one line and says what was wanted, what was found, the limit and the remedy. A call
that raises one of these has changed nothing.
"""

# What there is to do about a session that is damaged, for the end of a message.
DAMAGED = (
    "the session is damaged: kvrt repair keeps what is sound, kvrt run --overwrite replaces it"
)


def reason(error: OSError) -> str:
    """Why the system refused, in its own words, for the middle of a line."""
    return (error.strerror or str(error)).lower()


class KvrtError(Exception):
    """Base of all errors below; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(KvrtError, ValueError):
    """A flag or argument that cannot be used; the command line exits with 2."""

    exit_code = 2


class BadConfig(UsageError):
    """A configuration that contradicts itself or exceeds a limit."""


class NoKernel(UsageError, NotImplementedError):
    """An implementation of attention that does not exist, or cannot serve what is asked of it."""


class BadSequence(UsageError):
    """A sequence number outside [0, n_seq_max)."""


class BadRange(UsageError):
    """A range of positions that is reversed, negative or beyond 2^31 - 1."""


class BadToken(UsageError):
    """A token id outside the vocabulary, or a batch that no step can run."""


class BadRequest(UsageError):
    """A request to an engine that cannot be served; other requests go on."""


class Busy(KvrtError):
    """A call on a `Runtime` or an `Engine` before another one had returned; it may be repeated."""


class CacheFull(KvrtError):
    """No free cells for what was asked."""


class SharedCells(KvrtError):
    """A move would have moved cells for a sequence that was not named."""


class BadLogits(KvrtError):
    """Logits with NaN, +inf or no finite value, from which no token can be sampled."""


class CannotRewind(KvrtError):
    """A change after which a layer would lack what its next token has to see."""


class BadModelFile(KvrtError):
    """A model file that is damaged, truncated or not what its name says."""


class UnsupportedModel(KvrtError):
    """A well-formed model that kvrt cannot run."""


class FetchError(KvrtError):
    """A model that could not be fetched or does not match its digest."""


class BadSession(KvrtError):
    """A session file, or an index of them, that is damaged or not what its name says."""


class SessionMismatch(KvrtError):
    """A sound session of another model or cache; the command line exits with 2."""

    exit_code = 2


class SaveError(KvrtError):
    """A session that could not be written; what was there before is still there."""
