"""Turns of a conversation by the model's chat template: the first, and those that follow.

What a session holds is never tokenized again. A template renders whole conversations, so a turn
that follows is what it writes behind an answer: the end of that answer's turn, the new message, and
what begins the next answer.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from kvrt.errors import UsageError
from kvrt_models import chat
from kvrt_models.tokenizer.encode import Tokenizer

# Stand for an earlier message, its answer and the new message; no template changes them.
_FIRST, _ANSWER, _NEXT = "message-1-5d80", "answer-1-5d80", "message-2-5d80"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation so far.

    Attributes:
      ids: tokens that a session holds.
      newest: a sampled token behind them that is not evaluated yet.
      name: of the session, for messages.
    """

    ids: Sequence[int]
    newest: int | None
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What follows a conversation: its tokens, and whether the message before has no answer."""

    ids: list[int]
    unanswered: bool = False


def first_turn(text: str, system: str | None, tokenizer: Tokenizer) -> list[int]:
    """Token ids of a conversation's first message, up to where its answer begins.

    Raises:
      UsageError: there is no template, or it refuses the message, or has no place for `system`.
    """
    rendered = render_turns(tokenizer, system, [text])
    if system is not None and system.strip() not in rendered:
        raise UsageError(
            "the model's chat template has no place for a system message; leave out --system and "
            "say it with the message"
        )
    # Some templates write the token that begins a text, and it must not come twice.
    bos = _name(tokenizer, tokenizer.bos_id)
    written = bool(bos) and rendered.startswith(bos)
    return tokenizer.encode(rendered, add_special=not written, parse_special=True)


def next_turn(so_far: Conversation, text: str, system: str | None, tokenizer: Tokenizer) -> Turn:
    """Token ids of a message behind a conversation, up to where its answer begins.

    An answer that was cut short is ended first; the token that ended it, if it was sampled, is
    taken once, whichever of the model's end tokens it was.

    Args:
      so_far: the conversation.
      text: the message.
      system: the system message that the conversation began with; None does not ask.
      tokenizer: of the model.

    Raises:
      UsageError: what is held is no conversation, began with another system message, or the
        template does not render messages one behind the other.
    """
    held = text_of(so_far.ids, tokenizer)
    opening = _behind(_behind_answer(_NEXT, tokenizer), _NEXT)
    if opening.strip() not in held:
        raise UsageError(
            f"{so_far.name}: holds no conversation by this model's chat template; use --append "
            "without --chat to continue its text, --overwrite to replace it, or another name"
        )
    _check_system(so_far, held, system, tokenizer)
    turn = tokenizer.encode(_behind_answer(text, tokenizer), add_special=False, parse_special=True)
    ids, ends = list(so_far.ids), tokenizer.eos_ids
    if so_far.newest is not None:
        ended = so_far.newest in ends
        return Turn(ids=turn if ended else [so_far.newest, *turn])
    if ids[-len(turn) :] == turn or ids == first_turn(text, system, tokenizer):
        return Turn(ids=[])  # This very message waits for its answer.
    n = next((n for n in range(len(turn), 0, -1) if ids[-n:] == turn[:n]), 0)
    n = n if turn[0] in ends else 0
    return Turn(ids=turn[n:], unanswered=held.rstrip().endswith(opening.strip()))


def _behind_answer(text: str, tokenizer: Tokenizer) -> str:
    """What the template writes behind an answer, with another message."""
    rendered = render_turns(tokenizer, None, [_FIRST, _ANSWER, text])
    return _behind(rendered, _ANSWER)


def _behind(rendered: str, mark: str) -> str:
    _, found, behind = rendered.partition(mark)
    if not found or mark in behind or not behind.strip():
        raise UsageError(
            "the model's chat template does not render messages one behind the other, so a "
            "conversation cannot continue; leave out --chat, or leave out --session and give the "
            "whole text"
        )
    return behind


def _check_system(
    so_far: Conversation, held: str, system: str | None, tokenizer: Tokenizer
) -> None:
    """Refuses another system message than the one that the conversation began with."""
    if system is None:
        return
    bos = _name(tokenizer, tokenizer.bos_id)
    begins = render_turns(tokenizer, system, [_FIRST]).partition(_FIRST)[0]
    if not held.removeprefix(bos).lstrip().startswith(begins.removeprefix(bos).strip()):
        raise UsageError(
            f"{so_far.name}: its conversation did not begin with this system message; leave out "
            "--system, use --overwrite to begin anew, or another name"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnFrame:
    """What the template writes around earlier turns.

    Attributes:
      answer: behind a message and before its answer, whether that is being written or was.
      message: behind an answer and before the next message.
    """

    answer: str
    message: str


def frame_of(tokenizer: Tokenizer) -> TurnFrame:
    """What the template writes between turns, without spaces at the ends.

    Raises:
      UsageError: there is no template, or it does not render messages one behind the other.
    """
    rendered = render_turns(tokenizer, None, [_FIRST, _ANSWER, _NEXT])
    earlier, behind = _behind(rendered, _FIRST), _behind(rendered, _ANSWER)
    # What begins an answer may begin its thoughts as well.
    before, begins = earlier.partition(_ANSWER)[0], _behind(behind, _NEXT)
    answer = before[: n_alike(before, begins)].strip()
    message = behind.partition(_NEXT)[0].strip()
    if not answer or not message:
        raise UsageError("the model's chat template writes nothing between turns; leave out --chat")
    return TurnFrame(answer=answer, message=message)


def render_turns(tokenizer: Tokenizer, system: str | None, contents: Sequence[str]) -> str:
    """The conversation, and what begins the next answer; messages and answers take turns."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for i, content in enumerate(contents):
        messages.append({"role": "assistant" if i % 2 else "user", "content": content})
    try:
        return chat.render_template(
            tokenizer.chat_template,
            messages,
            bos=_name(tokenizer, tokenizer.bos_id),
            eos=_name(tokenizer, tokenizer.eos_id),
        )
    except UsageError as error:
        if system is None:
            raise
        raise UsageError(f"{error}, or --system") from error


def _name(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.vocab.texts[token]


def text_of(ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """What tokens say, control tokens by their names, as a template writes them."""
    return b"".join(piece(i, tokenizer) for i in ids).decode(errors="replace")


def n_alike(a: Iterable[str], b: Iterable[str]) -> int:
    """Letters by which two texts begin alike."""
    both = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


def piece(token: int, tokenizer: Tokenizer) -> bytes:
    """What a token says, a control token its name."""
    return tokenizer.token_bytes(token) or tokenizer.vocab.texts[token].encode()
