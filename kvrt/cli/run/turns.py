"""Turns of a conversation by the model's chat template: the first, and those that follow.

A template renders whole conversations, so the next turn is what it writes of all messages. As far
as a session holds that text its tokens stay as they are; where the template writes an earlier part
otherwise (thoughts that it drops, today's date) the session is cut and computed anew from there:
many templates render an answer whole as long as it is the last one, and without its thoughts once
another message follows.
"""

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from kvrt.errors import UsageError
from kvrt_models import chat
from kvrt_models.tokenizer.encode import Tokenizer

# Stand for an earlier message, its answer and the new message; no template changes them.
_FIRST, _ANSWER, _NEXT = "message-1-5d80", "answer-1-5d80", "message-2-5d80"
_SYSTEM = "system-5d80"
# Two moments without a word of a date in common.
_CLOCKS = ("1987-11-30T23:58:59", "2031-02-04T05:06:07")
_DATE = "[^\\n]{0,40}?"
_SHOWN = 40  # letters of a text that is written otherwise, or left out


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldText:
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
class Rewritten:
    """Where a template writes an earlier part of a conversation otherwise than a session holds it.

    Attributes:
      first: the first token that does not stay.
      n_held: tokens of the session.
      held: how the text begins there, that the session holds.
      now: how the text begins there, that the template writes.
    """

    first: int
    n_held: int
    held: str
    now: str

    def __str__(self) -> str:
        """One line for a reader."""
        held, now = (
            json.dumps(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
            for text in (self.held, self.now)
        )
        return (
            f"the chat template now writes {now} where the session holds {held}; computed anew "
            f"from token {self.first:,} of {self.n_held:,}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """A conversation with its next message, up to where the answer begins.

    Attributes:
      ids: all of its tokens.
      n_kept: how many of them the session holds.
      unanswered: the message before has no answer.
      rewritten: where the template writes an earlier part otherwise.
    """

    ids: list[int]
    n_kept: int
    unanswered: bool = False
    rewritten: Rewritten | None = None


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


def next_turn(so_far: HeldText, text: str, system: str | None, tokenizer: Tokenizer) -> Turn:
    """Token ids of a message behind a conversation, up to where its answer begins.

    The tokens that stay and those that follow are the template's text of all messages. A token that
    ended the answer, whichever it was, is the template's.

    Args:
      so_far: the conversation.
      text: the message.
      system: the system message that the conversation began with; None does not ask.
      tokenizer: of the model.

    Raises:
      UsageError: what is held is no conversation, began with another system message, or the
        template does not render messages one behind the other.
    """
    ids = [*so_far.ids, *([] if so_far.newest is None else [so_far.newest])]
    n_ended = 1 if ids and ids[-1] in tokenizer.eos_ids else 0
    bos = _name(tokenizer, tokenizer.bos_id)
    held = text_of(ids[: len(ids) - n_ended], tokenizer)
    parts = _parts(held, system, tokenizer)
    if parts is None:
        raise UsageError(
            f"{so_far.name}: holds no conversation by this model's chat template; use --append "
            "without --chat to continue its text, --overwrite to replace it, or another name"
        )
    if system is not None and (parts.system or "").strip() != system.strip():
        raise UsageError(
            f"{so_far.name}: its conversation did not begin with this system message; leave out "
            "--system, use --overwrite to begin anew, or another name"
        )
    unanswered = not parts.answer.strip() and not n_ended
    if unanswered and parts.said[-1].strip() == text.strip():
        return Turn(ids=ids, n_kept=len(so_far.ids))  # This very message waits for its answer.
    written = max(parts.written(text, tokenizer, bos), key=lambda whole: n_alike(held, whole))
    kept, n_same = _kept(ids[: len(ids) - n_ended], held, written, tokenizer)
    start = len(text_of(kept, tokenizer))
    whole = kept + tokenizer.encode(written[start:], add_special=False, parse_special=True)
    n_kept = n_alike(so_far.ids, whole)
    rewritten = None
    if n_same < len(held):
        shown = slice(n_same, n_same + _SHOWN + 1)
        rewritten = Rewritten(
            first=n_kept, n_held=len(so_far.ids), held=held[shown], now=written[shown]
        )
    return Turn(ids=whole, n_kept=n_kept, unanswered=unanswered, rewritten=rewritten)


def _kept(ids: list[int], held: str, written: str, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """Tokens of `held` that stay where `written` takes its place, and letters alike in both.

    What follows a control token is tokenized as if it stood alone, so the cut is behind one.
    """
    n_same = n_alike(held, written)
    if n_same == len(held):
        return ids, n_same
    ends = list(itertools.accumulate(len(piece(i, tokenizer)) for i in ids))
    n_bytes = len(held[:n_same].encode())
    cuts = (i + 1 for i, end in enumerate(ends) if end <= n_bytes and not _says(ids[i], tokenizer))
    return ids[: max(cuts, default=0)], n_same


def _says(token: int, tokenizer: Tokenizer) -> bool:
    """True for a token of text, False for a control token."""
    return bool(tokenizer.token_bytes(token))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """A conversation taken apart.

    Attributes:
      head: text before the first message that no system message gives; "" where one does.
      system: the system message, if any.
      opening: what begins a message of the user.
      said: messages and answers, from a message to a message.
      answer: the newest answer as it was sampled, perhaps empty.
      final: what a template writes before an earlier answer that no new one begins with, such as
        the end of its thoughts.
    """

    head: str
    system: str | None
    opening: str
    said: list[str]
    answer: str
    final: str

    def written(self, text: str, tokenizer: Tokenizer, bos: str) -> Iterable[str]:
        """The template's text of all and another message, for each spelling of the answer.

        Some templates refuse an answer with its thoughts: it gets there what is behind them.
        """
        _, final, last = self.answer.rpartition(self.final or _UNKNOWN)
        answers = [self.answer, self.answer.strip(), *([last.strip()] if final else [])]
        refusal: UsageError | bool | None = None
        for answer in dict.fromkeys(answers):
            if answer == answers[-1] and final and refusal is False:
                break
            try:
                whole = render_turns(tokenizer, self.system, [*self.said, answer, text])
            except UsageError as error:
                refusal = error
                continue
            refusal = False
            if self.head:
                yield self.head + whole[whole.find(self.opening) :]
            else:
                yield whole if not tokenizer.add_bos or whole.startswith(bos) else bos + whole
        if isinstance(refusal, UsageError):
            raise refusal


def _parts(held: str, system: str | None, tokenizer: Tokenizer) -> _Parts | None:
    """Messages and answers of a conversation; None where there is none."""
    rendered = render_turns(tokenizer, None, [_FIRST, _ANSWER, _NEXT])
    head, earlier = rendered.partition(_FIRST)[0], _behind(rendered, _FIRST)
    behind = _behind(rendered, _ANSWER)
    message, begins = behind.partition(_NEXT)[0], _behind(behind, _NEXT)
    before = earlier.partition(_ANSWER)[0]
    opening = _common_end(head, message)
    begin = held.rfind(begins) if begins.strip() else -1
    start = held.find(opening) if opening.strip() else len(head) * held.startswith(head)
    if not message.strip() or not before.strip() or not 0 <= start < begin:
        return None
    lead = _lead(system, opening, tokenizer)
    said, at = [], start + len(opening)
    for mark in itertools.cycle([before, message]):
        end = held.find(mark, at, begin)
        said.append(held[at : end if end >= 0 else begin].removeprefix(lead))
        if end < 0:
            break
        at = end + len(mark)
    if len(said) % 2 == 0:
        return None
    led = system if lead and held.find(lead) >= 0 else None
    found = led if led is not None else _system_of(held[:start], opening, tokenizer)
    return _Parts(
        head=held[:start] if found is _UNKNOWN else "",
        system=None if found is _UNKNOWN else found,
        opening=opening,
        said=said,
        answer=held[begin + len(begins) :],
        final=before[n_alike(before, begins) :].strip(),
    )


def _common_end(one: str, other: str) -> str:
    """The text by which two texts end alike, without half a tag at its beginning."""
    n = n_alike(reversed(one), reversed(other))
    return re.sub(r"^[^<>]*>", "", one[len(one) - n :])


def _lead(system: str | None, opening: str, tokenizer: Tokenizer) -> str:
    """The system message where a template writes it into a message of the user, with its space."""
    if system is None or not opening:
        return ""
    head = render_turns(tokenizer, system, [_FIRST]).partition(_FIRST)[0]
    _, begun, lead = head.rpartition(opening)
    return lead if begun and lead.strip() else ""


_UNKNOWN = "unknown-5d80"


def _system_of(head: str, opening: str, tokenizer: Tokenizer) -> str | None:
    """The system message of what stands before the first message; `_UNKNOWN` if there is no saying.

    A date that the template writes may be another one.
    """
    bos = _name(tokenizer, tokenizer.bos_id)
    head = head.removeprefix(bos)
    for system in (None, _SYSTEM):
        try:
            heads = [
                render_turns(tokenizer, system, [_FIRST], now=now).partition(_FIRST)[0]
                for now in _CLOCKS
            ]
        except UsageError:
            continue  # The template has no place for a system message.
        heads = [h.removesuffix(opening).removeprefix(bos) for h in heads]
        if system is not None and not all(system in h for h in heads):
            continue
        pattern = _any_date(*heads).replace(re.escape(_SYSTEM), "(?P<system>.*)")
        if found := re.fullmatch(pattern, head, re.DOTALL):
            return found.groupdict().get("system")
    return _UNKNOWN


def _any_date(one: str, other: str) -> str:
    """An expression for a text that was written at two times, and at others."""
    a, b = (re.split(r"(\W)", text) for text in (one, other))
    matches = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return "".join(
        re.escape("".join(a[i1:i2])) if kind == "equal" else _DATE for kind, i1, i2, _, _ in matches
    )


def _behind(rendered: str, mark: str) -> str:
    _, found, behind = rendered.partition(mark)
    if not found or mark in behind or not behind.strip():
        raise UsageError(
            "the model's chat template does not render messages one behind the other, so a "
            "conversation cannot continue; leave out --chat, or leave out --session and give the "
            "whole text"
        )
    return behind


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


def render_turns(
    tokenizer: Tokenizer, system: str | None, contents: Sequence[str], *, now: str | None = None
) -> str:
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
            now=now,
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


def n_alike(a: Iterable[object], b: Iterable[object]) -> int:
    """Letters or tokens by which two texts begin alike."""
    both = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))


def piece(token: int, tokenizer: Tokenizer) -> bytes:
    """What a token says, a control token its name."""
    return tokenizer.token_bytes(token) or tokenizer.vocab.texts[token].encode()


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
    text = text_of(ids, tokenizer)
    try:
        frame = frame_of(tokenizer)
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


def _answers(text: str, frame: TurnFrame) -> list[tuple[int, int]]:
    """Where the answers lie that another message follows, and the last one."""
    found, at = [], 0
    while (start := text.find(frame.answer, at)) >= 0:
        start += len(frame.answer)
        at = text.find(frame.message, start)
        if at < 0:
            return [*found, (start, len(text))]
        found.append((start, at))
    return found


def _written(answers: list[str], frame: TurnFrame, tokenizer: Tokenizer) -> list[str]:
    """What the template writes of answers that a message follows, without what is around them."""
    marks = [f"message-{i}-5d80" for i in range(len(answers) + 1)]
    said = [*itertools.chain(*zip(marks, map(str.strip, answers), strict=False)), marks[-1]]
    rendered, out = render_turns(tokenizer, None, said), []
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
    n = n_alike(held[start:end], now)
    m = n_alike(reversed(held[start + n : end]), reversed(now[n:]))
    return start + n, end - m


def _tokens(
    text: str, span: tuple[int, int], ids: Sequence[int], tokenizer: Tokenizer
) -> tuple[int, int]:
    """The tokens of a part of the text: from the one that it begins in to before the last's end."""
    start, end = (len(text[:i].encode()) for i in span)
    ends = list(itertools.accumulate(len(piece(i, tokenizer)) for i in ids))
    first = next((i for i, n in enumerate(ends) if n > start), len(ids))
    last = next((i for i, n in enumerate(ends) if n >= end), len(ids) - 1)
    return first, last + 1
