"""Requests: what was asked, how far each sample of it has come, and what a step reports.

A `Request` never changes; a `SeqState` is the one thing about a sample that does. A sample that is
preempted keeps its tokens, the prompt and those that were sampled; none is sampled again.
"""

import array
import dataclasses
import functools
import sys
from typing import Literal

from kvrt.config import MAX_SEQUENCES
from kvrt.drafts.back_off import BackOff
from kvrt.errors import BadRequest
from kvrt.options.sampling import Sampling
from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Hit
from kvrt.policies import DropSchedule, Policy, Schedule, SeqCounts
from kvrt.policies.schedule import n_first
from kvrt.serving.beams.spec import BeamSpec, EarlyStopping
from kvrt.serving.sessions.private_prefix import PrivatePrefix
from kvrt.whole_numbers import take_whole_numbers

FinishReason = Literal["stop", "length", "cancelled", "error"]
Status = Literal["waiting", "running", "preempted", "finished"]

MAX_ID, MAX_PRIORITY = 256, 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt and how to continue it.

    Attributes:
      id: name of the request; no other that is still being served has it.
      tokens: the prompt; a list or an array becomes a tuple.
      n_predict: tokens to sample at most, for each sample.
      sampling: how they are sampled; sample i uses the seed plus i, modulo 2^32.
      stop_ids: tokens that end a sample; the one that does is still reported.
      n: samples; the prompt is computed once for all of them. Of beams the best so many texts.
      priority: lower goes first, where the scheduler orders by priority.
      salt: prompts with different salts never share a prefix.
      cache: whether it may use prefixes that others have computed; others may always use its own.
      borders: numbers of the prompt's tokens after which a context checkpoint is worth keeping,
        such as the ends of messages.
      policy: what it keeps when it outgrows its context, which is the engine's n_ctx_seq; by
        "default" the engine's policy, with "none" it is refused if it could outgrow that.
      quota: tokens that each sample may have in the cache at once; None is n_ctx_seq. It is the
        context that its policy works in; without one it is refused if it could outgrow it.
      reserve: tokens whose room is each sample's own from its admission on, or all that it may
        have if that is less: until it has more it is not preempted.
      num_beams: texts of a beam search, which are reported when it has ended; 1 is none.
      length_penalty, early_stopping: of a beam search, see `kvrt.BeamSpec`.
      private_prefix: keys and values of its first tokens, for this request alone, whose salt is
        then its own. None computes them, or finds what others computed.
      drafts: whether it is drafted for, where the engine has drafts.
    """

    id: str
    tokens: tuple[int, ...]
    n_predict: int
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    priority: int = 0
    salt: bytes = b""
    cache: bool = True
    policy: Policy | Literal["default", "none"] = "default"
    borders: tuple[int, ...] = ()
    quota: int | None = None
    reserve: int = 0
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = False
    private_prefix: PrivatePrefix | None = None
    drafts: bool = True

    def __post_init__(self) -> None:
        """Refuses what no engine could serve.

        Raises:
          BadRequest: an empty prompt, counts out of range, no whole number, or no policy.
        """
        if not isinstance(self.id, str) or not 0 < len(self.id) <= MAX_ID:
            raise BadRequest(f"a request's id must be a text of 1 to {MAX_ID} characters")
        take_whole_numbers(self, refuse=False)
        if not self.tokens:
            raise BadRequest(f"{self.name}: the prompt is empty; at least one token is needed")
        for ids, what in ((self.tokens, "token"), (self.stop_ids, "stop id")):
            if not set(map(type, ids)) <= {int}:
                bad = next(t for t in ids if type(t) is not int)
                raise BadRequest(f"{self.name}: {what} {bad!r} is no whole number")
        self._check_numbers()
        if self.quota is not None and self.reserve > self.quota:
            raise BadRequest(
                f"{self.name}: reserve is {self.reserve}, above its quota of {self.quota} tokens; "
                "lower it or raise the quota"
            )
        if wrong := self.beams.wrong(self.n, self.sampling) or self._wrong_prefix():
            raise BadRequest(f"{self.name}: {wrong}")
        if self.policy not in ("default", "none") and not isinstance(self.policy, Policy):
            raise BadRequest(
                f"{self.name}: policy is {self.policy!r}; a kvrt.policies.Policy, 'default' or "
                "'none' is wanted"
            )

    def _wrong_prefix(self) -> str:
        if self.private_prefix is None:
            return ""
        if not self.cache:
            return "it may use nothing that was computed before, and has a private prefix; give one"
        return self.private_prefix.wrong(self.tokens)

    def _check_numbers(self) -> None:
        asked = [
            ("n_predict", self.n_predict, 1, 2**31 - 1),
            ("n", self.n, 1, MAX_SEQUENCES),
            ("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY),
            ("num_beams", self.num_beams, 1, MAX_SEQUENCES),
            ("reserve", self.reserve, 0, 2**31 - 1),
            *(("border", x, 1, len(self.tokens)) for x in self.borders),
            *(("quota", x, 1, 2**31 - 1) for x in (self.quota,) if x is not None),
        ]
        for name, value, low, high in asked:
            if type(value) is not int or not low <= value <= high:
                raise BadRequest(
                    f"{self.name}: {name} is {value!r}; it must be a whole number in "
                    f"[{low}, {high}]"
                )

    @property
    def name(self) -> str:
        """The request in an error message, on one line whatever its id holds."""
        return f"request {self.id!r}"

    @property
    def beams(self) -> BeamSpec:
        """Its beam search, of one beam where it has none."""
        return BeamSpec(
            num_beams=self.num_beams,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            n_predict=self.n_predict,
            stop_ids=frozenset(self.stop_ids),
        )

    @property
    def n_whole(self) -> int:
        """Tokens that are computed in all; the last one sampled never is."""
        return len(self.tokens) + self.n_predict - 1

    @functools.cached_property
    def text(self) -> bytes:
        """The prompt as bytes, 4 a token, that sort as the tokens do and compare fast."""
        ids = array.array("I", self.tokens)
        if sys.byteorder == "little":
            ids.byteswap()
        return ids.tobytes()


@dataclasses.dataclass(slots=True, eq=False)
class SeqState:
    """One sample of a request, from its arrival to its end, and all that belongs to it.

    Two states are equal if they are one. The scheduler, the queue, the cache and the samplers each
    keep here what they know of it, so that nothing is left anywhere else once it has ended.

    Attributes:
      request: what was asked.
      sample: which of its samples, from 0.
      tokens: the prompt, then the sampled tokens.
      n_computed: tokens that are in the cache.
      n_past_read: of them those by steps ahead, of which nobody has read what they sampled.
      n_cached: tokens of the prompt that were cached when it was first admitted.
      n_most: tokens at which it ends.
      schedule: of its policy or of SelfExtend in the cache, if that will change positions.
      context: the schedule if it drops tokens; else None.
      n_gone: positions that it took, of tokens that were dropped and of those that share one: the
        next token, i, is at position i - n_gone.
      n_before_drop: tokens that were computed before the first was dropped; None if none was.
      n_until: tokens at which its schedule has edits due, or a part of its prompt ends; None
        without one.
      status: where it is.
      finish_reason: why it ended.
      error: what went wrong, one line.

      arrival: requests that came before its own; the scheduler's, as all up to n_stuck.
      arrival_step: steps that were planned by then.
      queue_key: its place in the queue, None while it does not wait there.
      followers: samples that wait until this one has computed the prompt for all; None if it does
        not lead.
      awaits: another one that computes a prefix which this one can use, and tokens of it.
      n_preempted: how often it was preempted.
      n_stuck: how often there was no room for it although nobody else ran.

      seq_id: sequence number in the cache, None while it does not run; the cache's, as all below.
      capacity: tokens that it may hold without asking for room.
      chain: prefix hashes of its tokens.
      hit: what of them is held already, between `find_hit` and `admit`.
      n_shared: tokens that some layers had of it when it was last looked up.
      n_session: tokens of its hit that a session of a folder gave, or its private prefix; None
        while that was not asked.
      n_ahead: samples that will be forked from it, whose numbers and room are theirs from its
        admission on.

      sampler: its sampling parameters as one column of a step's sampler.
      score: of a text that a beam search has found; None of others.
      back_off: how its drafts fared.
      reads_sparsely: what it samples reads some cells: found by nobody, and never computed again.
    """

    request: Request
    sample: int
    tokens: list[int]
    n_computed: int = 0
    n_past_read: int = 0
    n_cached: int | None = None
    n_most: int = dataclasses.field(init=False)
    schedule: Schedule | None = None
    context: DropSchedule | None = dataclasses.field(default=None, init=False)
    n_gone: int = 0
    n_before_drop: int | None = None
    n_until: int | None = None
    status: Status = "waiting"
    finish_reason: FinishReason | None = None
    error: str | None = None

    arrival: int = -1
    arrival_step: int = 0
    queue_key: tuple[int, ...] | None = None
    followers: "list[SeqState] | None" = dataclasses.field(default=None, repr=False)
    awaits: "tuple[SeqState, int] | None" = dataclasses.field(default=None, repr=False)
    n_preempted: int = 0
    n_stuck: int = 0

    seq_id: int | None = None
    capacity: int = 0
    chain: Chain | None = dataclasses.field(default=None, repr=False)
    hit: Hit | None = dataclasses.field(default=None, repr=False)
    n_shared: int | None = None
    n_session: int | None = None
    n_ahead: int = 0

    sampler: tuple | None = dataclasses.field(default=None, repr=False)
    score: float | None = None
    back_off: BackOff | None = None
    reads_sparsely: bool = False

    def __post_init__(self) -> None:
        """What every step would have to add up."""
        self.n_most = len(self.request.tokens) + self.request.n_predict
        self.n_until = self._n_until_first()
        self.context = self.schedule if isinstance(self.schedule, DropSchedule) else None

    @property
    def n_prompt(self) -> int:
        """Tokens that were given."""
        return len(self.request.tokens)

    @property
    def n_sampled(self) -> int:
        """Tokens that were sampled."""
        return len(self.tokens) - len(self.request.tokens)

    @property
    def n_whole(self) -> int:
        """Tokens that it may have in the cache at once."""
        n = self.request.n_whole
        return n if self.context is None else min(n, self.context.n_most)

    @property
    def n_reserved(self) -> int:
        """Tokens whose room is its own from its admission on, so that it is not preempted."""
        is_whole = self.request.num_beams > 1 or self.reads_sparsely
        return self.n_whole if is_whole else min(self.request.reserve, self.n_whole)

    @property
    def may_go(self) -> bool:
        """Whether it may be preempted: nothing was dropped, and it has more than it reserved."""
        return not self.n_dropped and self.n_computed >= self.n_reserved

    def asks_sessions(self, hit: Hit) -> bool:
        """Whether sessions were not asked for more than a hit, or a private prefix has gone."""
        return self.n_session is None or self.lacks_prefix(hit)

    def lacks_prefix(self, hit: Hit) -> bool:
        """Whether a hit is short of the private prefix that it brings along."""
        if self.request.private_prefix is None:
            return False
        return self.n_session is None or hit.n_tokens < self.n_session

    @property
    def n_past(self) -> int:
        """The position of the next token that is computed."""
        return self.n_computed - self.n_gone

    @property
    def counts(self) -> SeqCounts:
        """What its schedule decides by."""
        assert self.seq_id is not None, "a sample that runs has a sequence number"
        return SeqCounts(self.seq_id, self.n_prompt, self.n_computed, self.n_gone)

    @property
    def n_dropped(self) -> int:
        """Tokens that its policy dropped."""
        return 0 if self.context is None else self.n_gone

    @property
    def folds(self) -> bool:
        """Whether tokens come to share positions, by SelfExtend in the cache."""
        return self.schedule is not None and self.context is None

    @property
    def n_unmoved(self) -> int:
        """Tokens, from the first on, that neither its policy nor SelfExtend will drop or move.

        So others can compute them for it, as far as they are alike; of sparse reads the prompt.
        With a policy it ends within the first part of a long prompt, where something may drop.
        """
        if self.context is not None:
            return min(self.context.n_keep, self.context.n_part(self.n_prompt))
        if self.schedule is not None:
            return n_first(self.schedule, self.n_prompt)
        return self.n_prompt if self.reads_sparsely else len(self.tokens)

    @property
    def n_never_moved(self) -> int | None:
        """Tokens in the cache, from the first on, that stay where they are; None is all."""
        return None if self.schedule is None else self.schedule.n_keep

    @property
    def as_computed(self) -> list[int]:
        """Tokens in the cache that stand where they were computed, none before them dropped."""
        if self.n_dropped and self.context is not None:
            return self.tokens[: self.context.n_keep]
        return self.tokens[: min(self.n_computed - self.n_past_read, self.n_unmoved)]

    @property
    def output(self) -> list[int]:
        """The sampled tokens."""
        return self.tokens[len(self.request.tokens) :]

    @property
    def sampling(self) -> Sampling:
        """How it is sampled: as a request of one sample with its own seed would be."""
        asked = self.request.sampling
        return dataclasses.replace(asked, seed=(asked.seed + self.sample) % (1 << 32))

    def n_next(self, start: int) -> int:
        """Its tokens from `start` on, as far as its policy lets them in without a drop."""
        return min(len(self.tokens), self.n_until or len(self.tokens)) - start

    def start(self, seq_id: int, capacity: int) -> None:
        """It runs under a number; with a context only up to where something has to go."""
        n_until = None if self.context is None else self.n_until
        self.seq_id, self.capacity = seq_id, capacity if n_until is None else n_until

    def forked(self, request: Request, sample: int) -> "SeqState":
        """A sample of a request that begins with all tokens of this one.

        It is as one that was there from the beginning and sampled the same tokens: they count for
        n_predict, for its repeat penalty and for its random numbers.
        """
        return SeqState(
            request=request,
            sample=sample,
            tokens=list(self.tokens),
            schedule=self.schedule,
            reads_sparsely=self.reads_sparsely,
        )

    def restart(self) -> None:
        """Nothing of it is in the cache; its policy has dropped nothing."""
        assert not self.n_dropped, "what was dropped cannot be computed again"
        self.n_computed, self.n_gone, self.n_until = 0, 0, self._n_until_first()

    def append(self, token: int) -> FinishReason | None:
        """Appends a sampled token; why the sample ends with it, or None if it does not."""
        self.tokens.append(token)
        if token in self.request.stop_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.n_most else None

    def _n_until_first(self) -> int | None:
        return None if self.schedule is None else n_first(self.schedule, self.n_prompt)

    def close(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends it; only its tokens, and why it ended, are kept."""
        self.status, self.finish_reason, self.error = "finished", reason, error
        self.seq_id = self.queue_key = self.followers = self.awaits = None
        self.chain = self.hit = self.n_shared = self.sampler = None


def samples_of(
    request: Request, schedule: Schedule | None = None, *, reads_sparsely: bool = False
) -> tuple[SeqState, ...]:
    """The states of all samples of a request that was checked; of a beam search its first beam."""
    same = {"schedule": schedule, "reads_sparsely": reads_sparsely}
    n, n_ahead = (request.n, 0) if request.num_beams == 1 else (1, request.num_beams - 1)
    made = ({"sample": i, "tokens": list(request.tokens)} for i in range(n))
    return tuple(SeqState(request=request, n_ahead=n_ahead, **x, **same) for x in made)
