"""What a chat template writes otherwise of earlier answers: thoughts and tool lines that it drops.

Many templates render an answer whole as long as it is the last one, and without its thoughts once
another message follows. So a turn that follows shares tokens with the session only as far as the
first answer that is changed.
"""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from kvrt.cli.run import conversation
from kvrt.errors import UsageError
from kvrt_models.tokenizer.encode import Tokenizer

_SHOWN = 40  # letters of what is left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What the template does not write again of the answers that a session holds.

    Attributes:
      first: the first token that it writes otherwise.
      n_tokens: tokens that it leaves out.
      n_answers: answers that it changes.
      n_held: tokens of the session.
      text: how the first of it begins.
    """

    first: int
    n_tokens: int
    n_answers: int
    n_held: int
    text: str

    @property
    def n_recomputed(self) -> int:
        """Tokens that whoever renders the conversation anew computes again."""
        return self.n_held - self.first - self.n_tokens

    def fields(self) -> dict[str, Any]:
        """For a program."""
        return {**dataclasses.asdict(self), "n_recomputed": self.n_recomputed}

    def __str__(self) -> str:
        """For a reader."""
        of = "an earlier answer" if self.n_answers == 1 else f"{self.n_answers} earlier answers"
        return (
            f"the chat template leaves {self.n_tokens:,} tokens of {of} out, the first at token "
            f"{self.first:,} ({json.dumps(self.text)}); the next message computes "
            f"{self.n_recomputed:,} tokens again"
        )


def left_out(ids: Sequence[int], tokenizer: Tokenizer) -> LeftOut | None:
    """What the template leaves out of the answers of a conversation, now that they are earlier.

    None where it writes all of them as they are, or where there is no such conversation.
    """
    text = conversation.text_of(ids, tokenizer)
    try:
        frame = conversation.frame_of(tokenizer)
        answers = _answers(text, frame)
        written = _written([text[a:b] for a, b in answers], frame, tokenizer)
    except UsageError:
        return None  # it renders no conversation; who continues this one is told so
    spans = []
    for (a, b), now in zip(answers, written, strict=True):
        start, end = _changed(text[a:b], now)
        if text[a + start : a + end].strip():
            spans.append((a + start, a + end))
    if not spans:
        return None
    tokens = [_tokens(text, span, ids, tokenizer) for span in spans]
    shown = text[slice(*spans[0])].strip()
    return LeftOut(
        first=tokens[0][0],
        n_tokens=sum(end - start for start, end in tokens),
        n_answers=len(spans),
        n_held=len(ids),
        text=shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "...",
    )


def _answers(text: str, frame: conversation.TurnFrame) -> list[tuple[int, int]]:
    """Where the answers lie that another message follows, and the last one."""
    found, at = [], 0
    while (start := text.find(frame.answer, at)) >= 0:
        start += len(frame.answer)
        at = text.find(frame.message, start)
        if at < 0:
            return [*found, (start, len(text))]
        found.append((start, at))
    return found


def _written(answers: list[str], frame: conversation.TurnFrame, tokenizer: Tokenizer) -> list[str]:
    """What the template writes of answers that a message follows, without what is around them."""
    marks = [f"message-{i}-5d80" for i in range(len(answers) + 1)]
    said = [*itertools.chain(*zip(marks, map(str.strip, answers), strict=False)), marks[-1]]
    rendered, out = conversation.render_turns(tokenizer, None, said), []
    for mark, after in itertools.pairwise(marks):
        _, _, behind = rendered.partition(mark)
        now, found, _ = behind.partition(after)
        _, begun, now = now.partition(frame.answer)
        now, ended, _ = now.rpartition(frame.message)
        if not (found and begun and ended):
            raise UsageError("the chat template does not render messages one behind the other")
        out.append(now)
    return out


def _changed(held: str, now: str) -> tuple[int, int]:
    """The part of a held answer that is no longer written; spaces around it do not count."""
    start = len(held) - len(held.lstrip())
    end = len(held.rstrip())
    now = now.strip()
    n = conversation.n_alike(held[start:end], now)
    m = conversation.n_alike(reversed(held[start + n : end]), reversed(now[n:]))
    return start + n, end - m


def _tokens(
    text: str, span: tuple[int, int], ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[int, int]:
    """The tokens of a part of the text: from the one that it begins in to before the last's end."""
    start, end = (len(text[:i].encode()) for i in span)
    ends = list(itertools.accumulate(len(conversation.piece(i, tokenizer)) for i in ids))
    first = next((i for i, n in enumerate(ends) if n > start), len(ids))
    last = next((i for i, n in enumerate(ends) if n >= end), len(ids) - 1)
    return first, last + 1
