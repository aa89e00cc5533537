"""GenerationSpec as an iterator: sample, feed back, shift the context when it is full, stop."""

import dataclasses
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import numpy as np

from kvrt.arrays import Array
from kvrt.cache import checks
from kvrt.cache.last_logits import ResumePoint
from kvrt.drafts.back_off import BackOff
from kvrt.drafts.drafter import Speculation
from kvrt.errors import BadConfig, BadToken
from kvrt.options.sampling import Sampling
from kvrt.program import sample
from kvrt.program.decode_loop import LoopSpec
from kvrt.program.device import Device
from kvrt.program.disk_hits import CompileProgress
from kvrt.program.programs import Program
from kvrt.program.rounds import layer_skip
from kvrt.program.rounds.round import RoundSpec
from kvrt.runtime.stepper import Drafting, Ran, Stepper, read_run
from kvrt.whole_numbers import take_whole_numbers

GREEDY = Sampling()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Token:
    """A sampled token; `best` are the most probable ids and their log-probabilities, if asked."""

    id: int
    best: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class After:
    """Where an earlier generation stopped.

    Attributes:
      token: the last one that it yielded, which is not in the cache.
      n_sampled: how many it had yielded, or earlier ones before it.
    """

    token: int
    n_sampled: int

    def __post_init__(self) -> None:
        """Refuses anything but whole numbers."""
        take_whole_numbers(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationSpec:
    """What to generate.

    Attributes:
      n_predict: tokens at most; None goes on until a stop or a full cache.
      seq_id: sequence to continue, which holds at least one token.
      sampling: how tokens are sampled.
      stop_ids: tokens that end it; the one sampled is still yielded.
      recent: tokens before the first sampled one, `after` included, for the repeat penalty.
      n_best: log-probabilities a token.
      stride: tokens a compiled run; the host sees them only at its end. The text is the same.
      after: where sampling stopped: its newest token is fed first, and random numbers follow on.
      speculation: drafts that are verified several at a time, where there are any, in the place of
        a run; the text is the same. None is none.
    """

    n_predict: int | None = None
    seq_id: int = 0
    sampling: Sampling = GREEDY
    stop_ids: tuple[int, ...] = ()
    recent: tuple[int, ...] = ()
    n_best: int = 0
    stride: int = 1
    after: After | None = None
    speculation: Speculation | None = None

    @property
    def _loop(self) -> LoopSpec:
        """What its compiled runs depend on."""
        return LoopSpec(stride=self.stride, n_best=self.n_best, stop_ids=self.stop_ids)

    def __post_init__(self) -> None:
        """Refuses counts below their least value."""
        take_whole_numbers(self)
        if (self.n_predict or 0) < 0 or self.n_best < 0 or self.stride < 1:
            raise BadConfig(
                f"n_predict {self.n_predict}, n_best {self.n_best}, stride {self.stride}; "
                "the first two must not be negative and stride at least 1"
            )


def generate_tokens(stepper: Stepper, asked: GenerationSpec) -> Generator[Token, None, None]:
    """Yields tokens; those yielded are in the cache, but for the last.

    Where the sequence is as its last generation left it, this one goes on: it feeds the last token
    that was yielded, and random numbers and recent tokens (if none are given) follow on, so that
    two runs of n tokens are one of 2 n. Otherwise it samples from the logits of the newest token
    held, which are computed again if need be. `after` says both by hand.

    Raises:
      BadToken: the sequence is empty.
      CannotRewind: the newest token's logits are not kept and cannot be computed again, or what
        the last generation has in the cache beyond its last token cannot be removed.
      CacheFull: no cell is free and there is no context shift.
      BadConfig: the drafter, or its number of drafts, does not fit the model or the cache.
      BadLogits: logits hold NaN, +inf or no finite value. What was yielded before is right, and
        all of it is in the cache, its last token with damaged keys and values.
    """
    n_vocab, after = stepper.n_vocab, asked.after
    if asked.n_best > n_vocab:
        raise BadConfig(f"n_best is {asked.n_best}; the vocabulary has {n_vocab}")
    if any(not 0 <= t < n_vocab for t in asked.stop_ids):
        raise BadToken(f"stop ids {asked.stop_ids}; the vocabulary has {n_vocab}")
    if after and not 0 <= after.token < n_vocab:
        raise BadToken(f"token {after.token} to go on after; the vocabulary has {n_vocab}")
    if asked.speculation is not None:
        _check(stepper.device, asked.speculation)
    resume_point = None if after else stepper.resume_point(asked.seq_id)
    if resume_point and resume_point.token is not None:
        after = After(token=resume_point.token, n_sampled=resume_point.n_sampled)
        recent = asked.recent or tuple(resume_point.recent)
        asked = dataclasses.replace(asked, after=after, recent=recent)
    n_sampled = after.n_sampled if after else 0
    sampler = sample.create(asked.sampling, [list(asked.recent)], n_sampled=n_sampled)
    logits = None if after else stepper.last_logits(asked.seq_id)
    return _run(stepper, asked, logits, sampler)


def prepare(
    device: Device, n_tokens: int, asked: GenerationSpec | None, progress: CompileProgress | None
) -> None:
    """Compiles the steps of a prompt of n_tokens and of what is generated; runs none of them.

    Raises:
      BadConfig: drafts do not fit the model or the cache.
    """
    if asked and asked.speculation is not None:
        _check(device, asked.speculation)
    sampler = sample.create(asked.sampling, [[]]) if asked else None
    n_first = 0 if asked and asked.after else 1

    def now(begin: Callable[[Program], Any]) -> None:
        device.begin_prompt(begin, n_tokens)
        if asked and sampler and n_first and asked.n_predict != 0:
            begin(device.sample_program(sampler, asked.n_best))

    def later(begin: Callable[[Program], Any]) -> None:
        if asked and sampler and (asked.n_predict is None or asked.n_predict > n_first):
            device.begin_decode(begin, asked._loop, sampler)
            if spec := asked.speculation:
                how = RoundSpec(n_best=asked.n_best, exit_layer=spec.exit_layer)
                step = device.empty_round(spec.n_draft + 1, asked.stop_ids, sampler)
                device.begin_round(begin, step, how)

    device.programs.compile_all(now, later, progress)


def _check(device: Device, spec: Speculation) -> None:
    """Refuses drafts that do not fit the model or the cache; raises BadConfig."""
    checks.drafts(spec, device.spec.config, device.layout.groups, device.n_vocab)
    if spec.exit_layer is not None:
        layer_skip.check_exit(device.programs, spec.exit_layer)


def _run(
    stepper: Stepper, asked: GenerationSpec, logits: Array | None, sampler: sample.Sampler
) -> Generator[Token, None, None]:
    left, after = asked.n_predict, asked.after
    if left == 0:
        return
    new, back_off = list[Token](), BackOff()
    newest = after.token if after else -1
    recent = deque(asked.recent, asked.sampling.repeat_last_n)
    resume_point = ResumePoint(after.n_sampled if after else 0, recent)
    if logits is not None:
        ran = read_run(*stepper.device.sample(logits, sampler, asked.n_best))
        new, sampler = _tokens(ran), ran.sampler
    while True:
        if new:
            stepper.sampled(asked.seq_id, resume_point, len(new))
        for token in new:
            if token.id == sample.NO_TOKEN:
                raise stepper.bad_logits(asked.seq_id)
            resume_point.add(token.id)
            yield token
            newest = token.id
            left = None if left is None else left - 1
            if left == 0 or token.id in asked.stop_ids:
                return
        at = newest, left, resume_point.n_sampled, back_off
        if found := _round(stepper, asked, at, sampler):
            ran, back_off = found
        else:
            n = asked.stride if left is None else min(asked.stride, left)
            ran = stepper.run_loop(newest, asked.seq_id, asked._loop, n, sampler)
        new, sampler = _tokens(ran), ran.sampler


def _round(
    stepper: Stepper,
    asked: GenerationSpec,
    at: tuple[int, int | None, int, BackOff],
    sampler: sample.Sampler,
) -> tuple[Ran, BackOff] | None:
    """What a round of drafts gives; None without drafts."""
    (newest, left, n_sampled, back_off), spec = at, asked.speculation
    if spec is None:
        return None
    n = spec.n_draft + 1 if left is None else left
    drafting = Drafting(spec=spec, n_left=n, n_sampled=n_sampled, back_off=back_off)
    return stepper.run_round(newest, asked.seq_id, asked._loop, drafting, sampler)


def _pairs(ids, values) -> tuple[tuple[int, float], ...]:
    return tuple(
        (int(i), float(x)) for i, x in zip(np.asarray(ids), np.asarray(values), strict=True)
    )


def _tokens(ran: Ran) -> list[Token]:
    rows = zip(ran.tokens.tolist(), ran.best_ids, ran.best, strict=True)
    return [Token(id=token, best=_pairs(ids, best)) for token, ids, best in rows]
