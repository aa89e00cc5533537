"""One step, or a run of them: slots are found, the device runs, the host takes the tokens in."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from kvrt.arrays import Array, Float, Int32, TokenIds
from kvrt.cache import checks, schedules
from kvrt.cache.cell_cache import CellCache
from kvrt.cache.last_logits import ResumePoint
from kvrt.cache.runner import CellSteps, Runner
from kvrt.cellcache import history
from kvrt.cells.edits import Remove
from kvrt.cells.slots import StepTokens, one_sequence, only_tokens
from kvrt.drafts.back_off import BackOff, after_round
from kvrt.drafts.drafter import DraftContext, Drafter, Speculation
from kvrt.drafts.layer_skip import LayerSkip
from kvrt.errors import BadLogits, BadRange, BadToken, CannotRewind
from kvrt.exclusive import HeldInterrupts
from kvrt.options.compose import check_together
from kvrt.program.batch import bucket, some_outputs, to_batch
from kvrt.program.decode_loop import LoopSpec, Sampled, plan_run
from kvrt.program.rounds.round import Drafted, RoundSpec, Verified
from kvrt.program.sample import Sampler

# Called with tokens done and tokens in all after each step of an append. What it raises ends the
# append; the tokens done stay, exact, since windows and states could not always go back, and what a
# policy dropped for them is gone. The command line stops a long prompt so, and saves what is read.
Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """Drafts of a round: whose, tokens that may be and were sampled, how earlier rounds fared."""

    spec: Speculation
    n_left: int
    n_sampled: int
    back_off: BackOff


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ran:
    """Tokens that a sequence sampled in one run, on the host.

    Attributes:
      tokens: all of them; the last one is not in the cache.
      best_ids: the most probable ids where each was sampled.
      best: their log-probabilities.
      sampler: after the last token.
    """

    tokens: Int32[np.ndarray, " n"]
    best_ids: Int32[np.ndarray, "n K"]
    best: Float[np.ndarray, "n K"]
    sampler: Sampler


def read_run(sampled: Sampled, sampler: Sampler) -> Ran:
    """Fetches the tokens of a run of one sequence."""
    n = int(sampled.n_steps)  # sync: how far the run came, and the caller sees each token
    arrays = sampled.tokens, sampled.best_ids, sampled.best
    tokens, best_ids, best = (np.asarray(x)[:n, 0] for x in arrays)
    return Ran(tokens=tokens, best_ids=best_ids, best=best, sampler=sampler)


def read_round(verified: Verified) -> tuple[Ran, int]:
    """Fetches the tokens of a round of one sequence, and how many drafts were verified."""
    (newest,), (more,), (n_drafted,) = verified.read()
    tokens, n = np.array([newest, *more], np.int32), len(more) + 1
    best_ids, best = (np.asarray(x)[:n] for x in (verified.best_ids, verified.best))
    ran = Ran(tokens=tokens, best_ids=best_ids, best=best, sampler=verified.sampler)
    return ran, n_drafted


class Stepper:
    """Runs steps: plans on the host, runs on the device, and notes what was done."""

    def __init__(self, cache: CellCache, n_vocab: int):
        """Takes the cache, and the size of the vocabulary."""
        self.n_vocab, self.device = n_vocab, cache.device
        self.cache = self._cache = cache
        self._host, self._config = cache.host, cache.config
        self._cells = CellSteps(cache)
        self.runner = Runner(cache.device, self._cells)

    def append(
        self,
        tokens: TokenIds,
        seq_id: int,
        out_ids: Sequence[int] | None,
        progress: Progress | None,
    ) -> Float[Array, "R V"]:
        """See `Runtime.append`."""
        cache = self._cache
        ids = checks.token_ids(tokens, self.n_vocab)
        wanted = checks.out_ids(out_ids, len(ids))
        kept, n = cache.checkpoints, len(ids)
        n_part = schedules.n_part(cache, seq_id, n) if cache.policy else n
        schedules.make_room(cache, {seq_id: n_part})
        logits, step, n_done = [], min(n_part, self._config.n_ubatch), 0
        if kept and n > 1:
            cache.add_checkpoint(seq_id)
        try:
            while n_done < n:
                size = min(step, kept.n_until(self._host.pos_max(seq_id) + 1)) if kept else step
                part = ids[n_done : n_done + size]
                if n_part < n and n_done > 0:
                    schedules.make_room(cache, {seq_id: len(part)})
                if cache.extend:
                    schedules.extend(cache, seq_id)
                here = [i - n_done for i in wanted if n_done <= i < n_done + len(part)]
                with HeldInterrupts():
                    logits.append(self._step(self._at_end(part, seq_id), here))
                    n_done += len(part)
                if kept and (kept.is_due(self._host.pos_max(seq_id) + 1) or n_done == n > 1):
                    cache.add_checkpoint(seq_id)
                if progress:
                    progress(n_done, len(ids))
        except BaseException as error:
            _note(error, n_done, len(ids), f"at the end of sequence {seq_id}")
            raise
        if wanted[-1] == len(ids) - 1:
            last, end = logits[-1], self._host.pos_max(seq_id)
            cache.logits.put(seq_id, end, last if len(last) == 1 else last[-1:])
        return logits[0] if len(logits) == 1 else jnp.concatenate(logits)

    def remove(self, edit: Remove) -> None:
        """See `Runtime.seq_rm`."""
        try:
            return self._cache.apply(edit)
        except CannotRewind:
            found = self._cache.resumes_at(edit)
            if found is None:
                raise
        (seq_id,) = edit.seq_ids
        pos, ids, _ = history.entries(self._host.history, seq_id)
        again = ids[(pos >= found.pos) & (pos < edit.p0)]
        self._cache.rewind(seq_id, found, len(again))
        if len(again):
            self.append(again.tolist(), seq_id, None, None)

    def fill(self, tokens: TokenIds, seq_id: int, first: int) -> None:
        """See `Runtime.fill`."""
        host, cache = self._host, self._cache
        ids = checks.token_ids(tokens, self.n_vocab)
        self._cache.check_seq_id(seq_id)
        checks.last_pos(first + len(ids))
        there = f"positions [{first}, {first + len(ids)}) of sequence {seq_id}"
        check_together({"filled positions": there}, cache.traits)
        held = history.positions(host.history, seq_id)
        inside = held[(held >= first) & (held < first + len(ids))]
        if first < 0 or len(inside):
            raise BadRange(
                f"{there} are not empty: {len(inside)} are held; remove or move them first"
            )
        schedules.check_end(cache, seq_id, first + len(ids))
        if cache.in_blocks(seq_id):
            cache.copy_on_write(np.full(len(ids), seq_id, np.int32), {seq_id: first})
        else:
            schedules.check_free(cache, len(ids), host.n_free)
        n_done, n_ubatch = 0, self._config.n_ubatch
        try:
            for start in range(0, len(ids), n_ubatch):
                part = ids[start : start + n_ubatch]
                step = one_sequence(part, seq_id, first + start, bucket(len(part), n_ubatch))
                with HeldInterrupts():
                    logits = self._step(step, [len(part) - 1])
                    host.history = history.filled(host.history, seq_id, first + start, len(part))
                    n_done = start + len(part)
                if (last := first + n_done - 1) == host.pos_max(seq_id):
                    cache.logits.put(seq_id, last, logits)
        except BaseException as error:
            _note(error, n_done, len(ids), f"from position {first} of sequence {seq_id} on")
            raise

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Float[Array, " V"]]:
        """See `Runtime.decode`."""
        cache, host = self._cache, self._host
        ids = checks.token_ids(list(tokens.values()), self.n_vocab)
        seqs, n = list(tokens), len(tokens)
        for s in seqs:
            cache.check_seq_id(s)
        checks.step_size(n, self._config.n_ubatch)
        schedules.make_room(cache, dict.fromkeys(seqs, 1))
        for s in seqs if cache.extend else ():
            schedules.extend(cache, s)
        pos = np.array([host.pos_max(s) + 1 for s in seqs], np.int32)
        seq_ids, size = np.array(seqs, np.int32), bucket(n, self._config.n_ubatch)
        step = StepTokens(tokens=ids, pos=pos, seq_ids=seq_ids, size=size)
        logits = self._step(step, range(n))
        for i, s in enumerate(seqs):
            cache.logits.put(s, int(pos[i]), logits[i : i + 1])
        return {s: logits[i] for i, s in enumerate(seqs)}

    def probe(self, tokens: TokenIds, seq_id: int) -> Float[Array, "T V"]:
        """See `Runtime.probe`."""
        self._cache.check_seq_id(seq_id)
        ids = checks.token_ids(tokens, self.n_vocab)
        checks.step_size(len(ids), self._config.n_ubatch)
        return self._probed(ids, seq_id, self._host.pos_max(seq_id) + 1)

    def last_logits(self, seq_id: int) -> Float[Array, "1 V"]:
        """See `Runtime.last_logits`."""
        self._cache.check_seq_id(seq_id)
        logits, pos = self._cache.logits, self._host.pos_max(seq_id)
        held = logits.get(seq_id, pos)
        if held is None:
            held = self._again(seq_id, pos)
            logits.put(seq_id, pos, held)
        return held

    def resume_point(self, seq_id: int) -> ResumePoint | None:
        """Where the last generation of a sequence stopped, if nothing has changed it since.

        What a run of many steps has taken in beyond the last token that it gave is removed.

        Raises:
          CannotRewind: a layer cannot take it back.
        """
        self._cache.check_seq_id(seq_id)
        found = self._cache.logits.resume_point(seq_id)
        if found is not None and found.pos <= self._host.pos_max(seq_id):
            try:
                self._cache.apply(Remove(seq_id=seq_id, p0=found.pos))
            except CannotRewind as error:
                raise CannotRewind(
                    f"the last generation of sequence {seq_id} was left within a run of several "
                    "tokens, which cannot be cut back to the last one taken; take all of them, or "
                    f"use stride=1 ({error})"
                ) from error
            self._cache.logits.set_resume_point(seq_id, found)
        return found

    def sampled(self, seq_id: int, resume_point: ResumePoint, n: int) -> None:
        """The end of a sequence is that of a run whose n newest tokens are to be given."""
        resume_point.pos = self._host.pos_max(seq_id) + 1 - n
        self._cache.logits.set_resume_point(seq_id, resume_point)

    def _again(self, seq_id: int, pos: int) -> Array:
        """Logits of the newest token, from a probe of it where the cache lacks it."""
        entries = history.entries(self._host.history, seq_id)
        ids = entries[1][entries[0] == pos]
        if len(ids) != 1:
            raise BadToken(
                f"sequence {seq_id} has no logits to sample from: {len(ids)} of its tokens stand "
                f"at its end, position {pos}; append one more token"
            )
        try:
            with self._cache.without(seq_id, pos):
                return self._probed(ids, seq_id, pos)
        except CannotRewind as error:
            raise CannotRewind(
                f"sequence {seq_id} has no logits to sample from, and its newest token cannot be "
                f"evaluated again; append one more token ({error})"
            ) from error

    def bad_logits(self, seq_id: int) -> BadLogits:
        """Counts logits that no token can be sampled from, of the newest token of a sequence."""
        self._cache.counts.n_bad_logits += 1
        self._cache.logits.forget([seq_id])
        return BadLogits(
            f"sequence {seq_id}: the logits of its token at position {self._host.pos_max(seq_id)} "
            "have NaN, +inf or no finite value, so there is no next token; the weights, or the "
            "cached keys and values before it, are damaged: check the model, and read the text anew"
        )

    def run_loop(
        self, token: int, seq_id: int, loop: LoopSpec, n_steps: int, sampler: Sampler
    ) -> Ran:
        """Feeds a token and samples up to n_steps, in one compiled run of loop.stride steps.

        The run is cut where the cache is full or the context has to shift.
        """
        n = self._n_ahead(seq_id, n_steps)
        step = self._at_end([token] * n, seq_id, loop.stride)
        where = self._cells.place(dataclasses.replace(step, cached_early=n > 1))
        first = int(step.pos[0])
        run = plan_run((token, first), seq_id, where, loop.stop_ids, n)
        with HeldInterrupts():
            ran = read_run(*self.device.decode(run, sampler, loop.n_best))
            self._keep(step, ran.tokens)
        if self._config.select:
            self._cache.note_reads(seq_id, first)
        return ran

    def run_round(
        self, token: int, seq_id: int, loop: LoopSpec, asked: Drafting, sampler: Sampler
    ) -> tuple[Ran, BackOff] | None:
        """Feeds a token and its drafts in one step; None, and nothing is done, without drafts.

        Drafts are cut where the cache is full or the context has to shift.
        """
        spec, counts, ids = asked.spec, self.cache.counts, [token]
        if asked.n_sampled < asked.back_off.n_resume:
            return None
        n = self._n_ahead(seq_id, min(asked.n_left, spec.n_draft + 1))
        if isinstance(spec.drafter, LayerSkip):
            # The device drafts, after slots are found: any tokens hold the drafts' places.
            ids = [token] * n
        elif n > 1:
            ids += self._drafts(spec.drafter, token, seq_id, asked, n - 1)
        if len(ids) == 1:
            return None
        how = RoundSpec(n_best=loop.n_best, exit_layer=spec.exit_layer)
        step = self._at_end(ids, seq_id, spec.n_draft + 1)
        step = dataclasses.replace(step, cached_early=spec.exit_layer is not None)
        drafted = Drafted(0, 0, sampler.recent.shape[1], ids[1:], loop.stop_ids)
        with HeldInterrupts():
            verified = self.runner.round(step, [drafted], (1, spec.n_draft), how, sampler)
            ran, n_drafted = read_round(verified)
            # Drafts that stay are the tokens that were sampled.
            self._keep(step, ran.tokens)
        n_sampled = len(ran.tokens)
        counts.n_rounds += 1
        counts.n_drafted += n_drafted
        counts.n_accepted += n_sampled - 1
        n_all = asked.n_sampled + n_sampled
        return ran, after_round(asked.back_off, n_all, n_drafted, n_sampled - 1)

    def _step(self, step: StepTokens, wanted: Sequence[int]) -> Array:
        """Runs a step of tokens that stay; the logits of those `wanted`."""
        skips = not wanted and self.device.skips_unwanted
        out_ids = some_outputs(wanted, step.size)[: 0 if skips else None]
        logits, _ = self.runner.run(step, out_ids, self.device.forward)
        if self._config.select and len(step.tokens) == 1:
            self._cache.note_reads(int(step.seq_ids[0]), int(step.pos[0]))
        return logits if len(logits) == len(wanted) else logits[: len(wanted)]

    def _at_end(
        self, tokens: Sequence[int] | np.ndarray, seq_id: int, size: int | None = None
    ) -> StepTokens:
        """Tokens at the end of a sequence; of a bucket's size, if none is given."""
        size = size or bucket(len(tokens), self._config.n_ubatch)
        return one_sequence(tokens, seq_id, self._host.pos_max(seq_id) + 1, size)

    def _keep(self, step: StepTokens, sampled: Int32[np.ndarray, " n"]) -> None:
        """Appends the first tokens of a step: the newest one, and those sampled but the last."""
        n, n_all = len(sampled), len(step.tokens)
        stays, fed = np.arange(n_all) < n, np.append(step.tokens[:1], sampled[:-1])
        self._cells.append(only_tokens(step, stays, tokens=fed), None if n == n_all else stays)

    def _probed(self, ids: np.ndarray, seq_id: int, first: int) -> Array:
        """The logits of tokens at `first` and behind, which leave no trace in states either."""
        self._cache.flush()
        n, size = len(ids), bucket(len(ids), self._config.n_ubatch)
        step = one_sequence(ids, seq_id, first, size)
        where = self._host.probe(step)
        batch = to_batch(step, where, some_outputs(range(n), size))
        if where[1] is None:
            return self.device.forward(batch)[0][:n]
        index = int(where[1].dst[0])
        held = self.device.take_state(index)
        try:
            return self.device.forward(batch)[0][:n]
        finally:
            self.device.put_state(index, held)

    def _drafts(
        self, drafter: Drafter, token: int, seq_id: int, asked: Drafting, n: int
    ) -> list[int]:
        """At most n tokens that a drafter says may follow, all of the vocabulary."""
        held = history.tokens(self._host.history, seq_id)
        context = DraftContext(
            tokens=np.append(held, np.int32(token)), seq_id=seq_id, n_sampled=asked.n_sampled
        )
        drafts = list(drafter.draft(context, n))[:n]
        return checks.token_ids(drafts, self.n_vocab).tolist() if drafts else []

    def _n_ahead(self, seq_id: int, n: int) -> int:
        """Tokens of n that a sequence can take in before something moves, after room for one."""
        host = self._host
        n = min(n, schedules.n_ahead(self._cache, seq_id))
        if host.rolls:
            n = min(n, self._config.n_ubatch)
        checks.last_pos(host.pos_max(seq_id) + 1 + n)
        return n


def _note(error: BaseException, n_done: int, n: int, where: str) -> None:
    """Adds to an error between steps what the steps before it have left."""
    if n_done:
        error.add_note(
            f"{n_done} of {n} tokens were evaluated and stay, {where}; what follows them may be "
            "appended, seq_rm takes them out where can_remove allows it"
        )
