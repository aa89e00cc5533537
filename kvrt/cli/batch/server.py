"""The engine's side of `kvrt batch`: feeds requests, gathers tokens, gives whole results back."""

import contextlib
import dataclasses
import functools
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Literal

import jax

from kvrt import Sampling
from kvrt.cli.ask.answers import question_ids
from kvrt.cli.batch.chunks import Begun, RequestChunks
from kvrt.cli.batch.progress import BatchCounts
from kvrt.cli.batch.requests import Asked, RequestEntry, Requests
from kvrt.cli.batch.results import Result, Results, failed
from kvrt.cli.flags.evaluate import random_seed
from kvrt.cli.flags.groups import BY_POSITION
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.report.phrases import counted
from kvrt.cli.report.summary import (
    AnswerCounts,
    Approximation,
    approximations,
)
from kvrt.cli.run import prompt
from kvrt.cli.setup.config import dropping, n_kept
from kvrt.errors import BadRequest, KvrtError
from kvrt.options.cache import CacheConfig
from kvrt.options.sampling import RANDOM
from kvrt.policies import Policy, ScoredPolicy
from kvrt.runtime.compress import REPEAT, compressed_prefix
from kvrt.serving.engine import Engine
from kvrt.serving.outputs import Output
from kvrt.serving.request import Request
from kvrt.serving.sessions.private_prefix import PrivatePrefix
from kvrt.session.snapshot import Snapshot
from kvrt_models.tokenizer.encode import Tokenizer
from kvrt_models.tokenizer.stream import TextStream

# Requests that an engine knows of at once: enough to choose from, and few enough to hold.
_WINDOW = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerLimits:
    """Up to where answers are those of the whole text, within what the model was trained for.

    Attributes:
      n_ctx_train: tokens that the model was trained for, or can tell apart by SelfExtend.
      config: of the engine's cache.
      scored: the policy by score of all requests.
    """

    n_ctx_train: int
    config: CacheConfig
    scored: ScoredPolicy | None = None


class Compression:
    """Prompts that are read whole and compressed once, when their requests are admitted.

    Attributes:
      compile_s: seconds in which programs were compiled for it.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        """For an engine with a policy by score, whose weights may come later."""
        policy = engine.programs.spec.layout.policy
        assert policy is not None, "flags refuse others"
        self._engine, self._n_least = engine, policy.budget + policy.interval
        self._ask = tokenizer.encode(REPEAT, add_special=False) if policy.reads_whole else []
        self._unit = engine.space.hit_size
        self._n = self._n_evaluated = 0
        self.compile_s = 0.0

    def of(self, request: Request) -> Request:
        """A request whose prompt is compressed, but for its last token; in blocks, whole blocks."""
        n = (len(request.tokens) - 1) // self._unit * self._unit
        if request.private_prefix is not None or n < self._n_least:
            return request
        tokens = request.tokens[:n]
        prefix = PrivatePrefix(tokens=tokens, read=functools.partial(self._read, tokens))
        return dataclasses.replace(request, private_prefix=prefix)

    def said(self) -> list[str]:
        """The line of the summary."""
        return [
            f"compressed {counted(self._n, 'prompt')} read whole, {self._n_evaluated:,} tokens "
            f"evaluated for it; programs compiled in {self.compile_s:.2f} s, not counted above"
        ]

    def _read(self, tokens: Sequence[int]) -> Snapshot:
        snapshot, took = compressed_prefix(self._engine, tokens, ask=self._ask)
        self._n += 1
        self._n_evaluated += took.n_evaluated
        self.compile_s += took.compile_s
        return snapshot


class Server:
    """Requests on their way through an engine, and their results.

    Attributes:
      counts: what was done.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        requests: Requests,
        results: Results,
        *,
        limits: AnswerLimits,
        prefixes: RequestChunks | Compression | None = None,
    ) -> None:
        """Nothing is asked yet.

        Args:
          engine: what serves.
          tokenizer: of its model.
          requests: where prompts are read.
          results: where lines are written.
          limits: up to where answers are those of the whole text.
          prefixes: blends chunks, where a line names some, or compresses prompts; chunks and
            policies by score do not go together.
        """
        self.counts = BatchCounts()
        self._engine, self._tokenizer = engine, tokenizer
        self._requests, self._results = requests, results
        self._limits, self._prefixes = limits, prefixes
        self._live: dict[str, _Live] = {}

    @property
    def n_live(self) -> int:
        """Requests that the engine knows of."""
        return len(self._live)

    def feed(self, todo: deque[RequestEntry], n_most: int = _WINDOW) -> None:
        """Gives requests to the engine until it has enough to choose from.

        Raises:
          UsageError: the file was changed meanwhile.
        """
        while todo and len(self._live) < n_most:
            entry = todo.popleft()
            asked = self._requests.read(entry)
            try:
                prefixes, begun = self._prefixes, None
                if isinstance(prefixes, RequestChunks) and asked.chunks:
                    begun = prefixes.begin(asked.chunks)
                request = request_of(asked, self._tokenizer, begun)
                if isinstance(prefixes, Compression):
                    request = prefixes.of(request)
                self._engine.add_request(request)
            except KvrtError as error:
                self._write([failed(entry.id, str(error))])
                continue
            stop, policy = asked.options.stop, asked.options.policy
            samples = [_Sample(TextStream(self._tokenizer, stop)) for _ in range(request.n)]
            self._live[request.id] = _Live(request, asked, samples, begun)
            # With a policy positions are those inside the context.
            n_whole = len(request.tokens) + request.n_predict
            self.counts.n_long += policy == "none" and n_whole > self._limits.n_ctx_train

    def step(self) -> None:
        """One step of the engine; writes what has ended."""
        assert self._engine.has_work or not self._live, "the engine has lost a request"
        for output in self._engine.step():
            # What was cancelled for a stop text, or with another sample, is in an output once more.
            if output.id in self._live:
                self._take(output, self._live[output.id])

    def _take(self, output: Output, live: "_Live") -> None:
        self.counts.n_sampled += len(output.tokens)
        results = live.take(output, self._limits)
        if results:
            del self._live[output.id]
        # What ended by a stop text, or with another sample, need not be computed any more.
        for sample, why in live.needless(None if results else output.sample):
            with contextlib.suppress(BadRequest):
                self._engine.cancel(output.id, sample, reason=why)
        if results:
            self.counts.approximate.update({x.by for r in results for x in r.approximations})
            self._write(results)

    def _write(self, results: Sequence[Result]) -> None:
        self._results.write(results)
        self.counts.n_done += 1
        self.counts.n_failed += results[0].error is not None


def request_of(asked: Asked, tokenizer: Tokenizer, begun: Begun | None = None) -> Request:
    """What an engine is asked for, as a line and the flags say it, behind its chunks."""
    ids: Sequence[int] = asked.tokens
    if begun is not None:
        behind = asked.tokens or question_ids([asked.prompt or ""], tokenizer)[0]
        ids = (*begun.prefix.tokens, *behind)
    elif asked.prompt is not None:
        given = prompt.Prompt(text=asked.prompt)
        ids = prompt.prompt_ids(given, tokenizer, chat=asked.options.chat)
    options = asked.options
    if options.seed == RANDOM:
        if jax.process_count() > 1:
            raise BadRequest("seed -1 is another one in each process of --coordinator; give it")
        options = dataclasses.replace(options, seed=random_seed())
    return Request(
        id=str(asked.id),
        tokens=tuple(ids),
        n_predict=options.n_predict,
        sampling=Sampling(**options.part(Sampling)),
        stop_ids=() if options.ignore_eos else tuple(sorted(tokenizer.eos_ids)),
        n=asked.n,
        priority=asked.priority,
        salt=(options.salt or "").encode(),
        cache=asked.cache,
        policy=_policy(options, ids, tokenizer),
        private_prefix=begun and begun.prefix,
        **asked.beams,
        **asked.room,
    )


def _policy(
    options: BatchOptions, ids: Sequence[int], tokenizer: Tokenizer
) -> Policy | Literal["default", "none"]:
    """What a request keeps, by the name that its line gives."""
    if options.policy == "none" or options.policy not in BY_POSITION or not ids:
        return "none"
    n_keep = n_kept(options.keep, ids, tokenizer)
    return dropping(options, options.n_ctx_request, n_keep=n_keep)


class _Live:
    """A request that is being served."""

    def __init__(
        self, request: Request, asked: Asked, samples: "list[_Sample]", begun: Begun | None
    ):
        """Nothing is sampled yet."""
        self.request, self._begun = request, begun
        self._id, self._policy, self._samples = asked.id, asked.options.policy, samples
        is_random = asked.options.seed == RANDOM and request.sampling.temp > 0
        self._seed = request.sampling.seed if is_random else None

    def needless(self, of: int | None) -> Iterator[tuple[int, Literal["cancelled", "stop"]]]:
        """Samples that the engine still serves, and why it is to end them.

        Sample `of` alone if a stop text has ended it; all of them for None, where one has failed.
        """
        for i, s in enumerate(self._samples):
            if not s.ended and (of is None or (i == of and s.reason is not None)):
                yield i, "cancelled" if s.reason is None else "stop"

    def take(self, output: Output, limits: AnswerLimits) -> list[Result]:
        """Takes what is new; the lines of the results once it has ended as a whole."""
        self._samples[output.sample].take(output)
        if output.error is not None:
            # A part of the samples is no answer.
            return [failed(self._id, output.error)]
        if not all(s.reason for s in self._samples):
            return []
        return [self._result(i, s, limits) for i, s in enumerate(self._samples)]

    def _result(self, i: int, sample: "_Sample", limits: AnswerLimits) -> Result:
        found = self._approximations(sample, limits)
        return Result(
            id=self._id,
            sample=i if len(self._samples) > 1 else None,
            tokens=sample.tokens,
            text=sample.text(),
            finish_reason=sample.reason or "",
            n_cached=sample.n_cached,
            seed=self._seed,
            n_dropped=sample.n_dropped,
            score=sample.score,
            **(self._begun.fields if self._begun else {}),
            approximate=bool(found),
            approximations=found,
        )

    def _approximations(self, sample: "_Sample", limits: AnswerLimits) -> list[Approximation]:
        """Why an answer is not that of the whole text; nothing where it is."""
        n_prompt, drop = len(self.request.tokens), None
        if sample.n_before_drop is not None:
            drop = Approximation(
                by=self._policy,
                from_token=sample.n_before_drop,
                n_dropped=sample.n_dropped,
                on_states="keep" if limits.config.on_states == "keep" else None,
            )
        prefix = self.request.private_prefix if self._begun is None else None
        counts = AnswerCounts(
            n_prompt=n_prompt,
            n_compressed=0 if prefix is None else len(prefix.tokens),
            n_computed=n_prompt + max(len(sample.tokens) - 1, 0),
            drop=drop,
            reused=self._begun.reused if self._begun else None,
        )
        return approximations(counts, limits.config, limits.scored)


class _Sample:
    """One sample of a request: its tokens, and why it ended.

    It may have a reason before the engine has ended it, by a stop text.
    """

    def __init__(self, stream: TextStream):
        """Nothing is sampled yet."""
        self.tokens: list[int] = []
        self.n_cached = self.n_dropped = 0
        self.n_before_drop: int | None = None
        self.reason: str | None = None
        self.score: float | None = None
        self.ended = False
        self._stream = stream
        self._text: list[str] = []

    def take(self, output: Output) -> None:
        """Takes tokens, up to the one that completes a stop text."""
        self.n_cached, self.ended = output.n_cached, output.finish_reason is not None
        if self.reason is not None:
            return
        self.n_dropped, self.score = output.n_dropped, output.score
        self.n_before_drop = output.n_before_drop
        for token in output.tokens:
            self.tokens.append(token)
            self._text.append(self._stream.push(token))
            if self._stream.stopped:
                self.reason = "stop_string"
                return
        self.reason = output.finish_reason

    def text(self) -> str:
        """What it says, once it has ended."""
        return "".join(self._text) + self._stream.flush()
