"""When a text is not drafted for: after rounds of which little stayed, for longer and longer."""

import dataclasses

# Tokens without drafts at most; a text that begins to repeat itself is drafted for by then.
_MOST = 64
# A round of which less than one draft in so many stays costs more than it saves: on two cores of a
# CPU one of 9 tokens takes as long as 3.5 of one token.
_PART = 3


@dataclasses.dataclass(frozen=True)
class BackOff:
    """How drafts of one text fared.

    Attributes:
      n_poor: rounds in a row of which little stayed.
      n_resume: tokens of the text from which on it is drafted for.
    """

    n_poor: int = 0
    n_resume: int = 0


def after_round(before: BackOff, n_tokens: int, n_drafted: int, n_accepted: int) -> BackOff:
    """How drafts of a text fared after one more round.

    A round of which a third stays or more is followed by another. After the first poorer one a
    token is decoded without drafts, after the next one in a row 3, then 7, up to 63: so a text
    that is never drafted rightly has log2(64) + n / 64 poor rounds in n tokens.

    Args:
      before: the rounds so far.
      n_tokens: of the text, those of the round included.
      n_drafted: drafts of the round.
      n_accepted: those that stayed.
    """
    if n_accepted * _PART >= n_drafted:
        return BackOff()
    n_poor = before.n_poor + 1
    return BackOff(n_poor, n_tokens + min(1 << min(n_poor, 16), _MOST) - 1)
