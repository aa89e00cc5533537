"""Reads a prompt and writes what follows it; counts what both do."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from kvrt import Runtime, Stats, Token
from kvrt.cli.flags.evaluate import WriteFlags
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt, Interrupted
from kvrt.cli.report import summary
from kvrt.cli.report.summary import AnswerCounts, Approximation, approximations
from kvrt.cli.setup import config
from kvrt.drafts.drafter import Drafter
from kvrt.drafts.layer_skip import LayerSkip
from kvrt.errors import BadLogits, CacheFull
from kvrt.runtime.generate import After
from kvrt.runtime.session_file import evaluate_spans
from kvrt.session import SamplingState
from kvrt_models import load
from kvrt_models.tokenizer.stream import TextStream


@dataclasses.dataclass
class Reading:
    """A prompt that is being read into a runtime.

    Attributes:
      ids: all of it.
      n_restored: how many tokens a session held; None without a session.
      spans: what is left to evaluate, ascending; all but the last are holes that are filled.
      n_done: tokens evaluated.
      seconds: that it took, without compiling.
      after: where sampling was left: the last of `ids`, which is not evaluated yet.
      reused: what of the restored tokens is not as computed in one go; None if all are.
      n_compressed: tokens that were read whole before a policy by score kept some of them.
      since: the runtime's counters before it; None counts from its beginning.
    """

    ids: list[int]
    n_restored: int | None = None
    after: After | None = None
    spans: Sequence[tuple[int, int]] = ()
    n_done: int = 0
    seconds: float = 0.0
    reused: Approximation | None = None
    n_compressed: int = 0
    since: Stats | None = None

    @property
    def n_to_do(self) -> int:
        """Tokens to evaluate."""
        return sum(end - start for start, end in self.spans)

    @property
    def whole(self) -> bool:
        """Whether everything is evaluated."""
        return self.n_done == self.n_to_do

    @property
    def read(self) -> list[int]:
        """The tokens before the first that is not evaluated yet; after a signal not all."""
        left = self.n_done
        for start, end in self.spans:
            if left < end - start:
                return self.ids[: start + left]
            left -= end - start
        return self.ids

    def run(
        self,
        runtime: Runtime,
        interrupt: Interrupt,
        each: Callable[[], None] | None = None,
        *,
        quiet: bool,
    ) -> None:
        """Evaluates what is left; a signal ends it between two steps.

        Args:
          runtime: evaluates.
          interrupt: of the command.
          each: called after each step.
          quiet: no progress.
        """
        compiled, start = runtime.stats().compile_s, time.perf_counter()
        n_in_holes = sum(end - start for start, end in self.spans[:-1])
        try:
            with summary.prefill_bar(self.n_to_do, not quiet) as show:

                def after_step(n_done: int) -> None:
                    show(n_done)
                    if each and n_done > n_in_holes:
                        each()

                self._steps(runtime, interrupt, after_step)
        except Interrupted:
            pass
        finally:
            compiled = runtime.stats().compile_s - compiled
            self.seconds = time.perf_counter() - start - compiled

    def _steps(self, runtime: Runtime, interrupt: Interrupt, show: Callable[[int], None]) -> None:
        def step(n_done: int) -> None:
            self.n_done = n_done
            show(n_done)
            interrupt.check()

        interrupt.check()
        evaluate_spans(runtime, self.ids, self.spans, step)


def all_of(ids: list[int]) -> Reading:
    """A prompt of which nothing is held."""
    return Reading(ids=ids, spans=[(0, len(ids))])


class Generation:
    """One prompt and its continuation; counts what it does.

    Attributes:
      options: what to write.
      reading: the prompt.
      last: what was written last.
      failed: what ended it in the middle.
    """

    def __init__(
        self,
        options: WriteFlags,
        model: load.Opened,
        runtime: Runtime,
        reading: Reading,
        weights: str = "",
        drafter: Drafter | LayerSkip | None = None,
    ) -> None:
        """Nothing is sampled yet.

        Args:
          options: what to write.
          model: its tokenizer.
          runtime: where the prompt is.
          reading: the prompt.
          weights: what the summary says of the model's.
          drafter: drafts, where --draft asks for it.
        """
        self.options, self._model, self._runtime = options, model, runtime
        self._weights, self._drafter = weights, drafter
        self.reading = reading
        self._n_best = config.n_best(options)
        self._n_generated = 0
        self._decode_s = 0.0
        self._sampled: list[int] = []
        self._tokens: list[Token] = []
        self._text: list[str] = []
        self.last = ""
        self.failed: BadLogits | None = None

    def run(self, interrupt: Interrupt, each: Callable[[], None] | None = None) -> str:
        """Writes what follows the prompt; returns why it ended.

        Args:
          interrupt: ends it between two tokens.
          each: called after each token.
        """
        if not self.reading.whole:
            return "interrupted"
        stream = TextStream(self._model.tokenizer, self.options.stop)
        reason = self._decode(stream, interrupt, each)
        self._emit(stream.flush())
        return reason

    def outcome(self, reason: str) -> summary.Outcome:
        """The run in numbers."""
        stats = self._runtime.stats()
        if self.reading.since is not None:
            stats = stats.since(self.reading.since)
        return summary.Outcome(
            model=self._model.name,
            weights=self._weights,
            dtype=self._model.dtype,
            n_prompt=len(self.reading.ids),
            n_restored=self.reading.n_restored,
            n_prefilled=self.reading.n_done,
            n_generated=self._n_generated,
            finish_reason=reason,
            stats=stats,
            approximations=self._approximations(stats),
            prefill_s=self.reading.seconds,
            decode_s=self._decode_s,
            tokens=[t.id for t in self._tokens],
            text="".join(self._text),
            texts=self._texts(),
            seed=self.options.seed if self.options.temp else None,
            logprobs=[t.best for t in self._tokens] if self._n_best else None,
        )

    def _approximations(self, stats: Stats) -> list[Approximation]:
        """Why the answer is not that of the whole text, if it is not."""
        reading, drop = self.reading, None
        if stats.drops:
            first = stats.drops[0]
            drop = Approximation(
                by=first.policy,
                from_token=first.n_past,
                n_dropped=stats.n_dropped,
                on_states="keep" if self._runtime.config.on_states == "keep" else None,
            )
        counts = AnswerCounts(
            n_prompt=len(reading.ids),
            n_computed=len(reading.read) + max(self._n_generated - 1, 0),
            n_restored=reading.n_restored or 0,
            n_compressed=reading.n_compressed,
            drop=drop,
            reused=reading.reused,
        )
        return approximations(counts, self._runtime.config, stats.scored)

    @property
    def ids(self) -> list[int]:
        """All tokens that were read and sampled."""
        return self.reading.ids + self._sampled

    @property
    def draw(self) -> SamplingState | None:
        """Where sampling was left: the newest token is not in the cache."""
        if not self._sampled:
            return None
        said = dataclasses.asdict(config.sampling(self.options))
        before = self.reading.after.n_sampled if self.reading.after else 0
        return SamplingState(
            token=self._sampled[-1], n_drawn=before + self._n_generated, sampling=said
        )

    def _texts(self) -> dict[int, str]:
        """What each candidate says; half a character is shown as U+FFFD."""
        tokenizer = self._model.tokenizer
        found = {i for token in self._tokens for i, _ in token.best}
        found |= {token.id for token in self._tokens} if self._n_best else set()
        # A model may have logits for more ids than its tokenizer has tokens.
        return {i: tokenizer.piece(i) for i in found if i < tokenizer.n_vocab}

    def _decode(
        self, stream: TextStream, interrupt: Interrupt, each: Callable[[], None] | None
    ) -> str:
        ends = config.stop_ids(self.options, self._model.tokenizer)
        tokens = self._runtime.generate(
            self.options.n_predict if self.options.n_predict >= 0 else None,
            sampling=config.sampling(self.options),
            stop_ids=ends,
            recent=self.reading.ids,
            n_best=self._n_best,
            stride=self.options.stride,
            after=self.reading.after,
            speculation=config.speculation(self.options, self._drafter),
        )
        while not interrupt.asked:
            compiled, start = self._runtime.programs.compile_s, time.perf_counter()
            try:
                token = next(tokens, None)
            except CacheFull:
                return "context_full"
            except BadLogits as error:
                self.failed = error
                return "bad_logits"
            if token is None:
                return "length"
            if self._n_generated:
                compiled = self._runtime.programs.compile_s - compiled
                self._decode_s += time.perf_counter() - start - compiled
            self._take(token, stream)
            if each:
                each()
            if stream.stopped:
                return "stop_string"
            if token.id in ends:
                return "stop"
        return "interrupted"

    def _take(self, token: Token, stream: TextStream) -> None:
        self._n_generated += 1
        self._sampled.append(token.id)
        if self.options.json:
            self._tokens.append(token)
        self._emit(stream.push(token.id))

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self.options.json:
            self._text.append(text)
        else:
            output.write_generated(text)
            self.last = text
