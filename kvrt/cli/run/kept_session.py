"""The session of a run: what is restored from it, what that saves, and what is written to it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvrt import Runtime
from kvrt.cli.flags.evaluate import RunOptions
from kvrt.cli.flags.session_files import PrefillOptions
from kvrt.cli.process import output
from kvrt.cli.report import phrases
from kvrt.cli.report.summary import reused_part
from kvrt.cli.run import prompt, turns
from kvrt.cli.run.generation import Reading
from kvrt.cli.run.prompt import Prompt
from kvrt.cli.session.open_session import check_fits
from kvrt.errors import BadLogits, BadSession, SessionMismatch, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy, ScoredPolicy
from kvrt.program.sample import can_sample
from kvrt.reuse.diff import common_prefix
from kvrt.runtime.session_file import EVERY_S, SessionFile, Way, held_tokens
from kvrt.session import OpenedSession, io
from kvrt.session.change import replace
from kvrt.session.change.damage import find_damage
from kvrt.session.change.replace import Change
from kvrt.sizes import extent
from kvrt_models import load
from kvrt_models.identity import identity
from kvrt_models.load import Opened
from kvrt_models.tokenizer.encode import Tokenizer

# Sessions of a folder that are opened to learn the type of their weights.
_MOST_LOOKED_AT = 32


class KeptSession(SessionFile):
    """The session of a run: a file, or the best of a folder, as the flags mean it."""

    _seq_name = "--seq"

    def __init__(self, options: RunOptions | PrefillOptions, *, every_s: float = EVERY_S):
        """Reads what is there but the cached keys and values; raises as `SessionFile`.

        Args:
          options: name a file that need not be there, or a folder, and say what becomes of it.
          every_s: seconds between saves while a prompt is read, and where the answer is saved while
            tokens are sampled.
        """
        self._options, self._way, self._n_held = options, Way.COMPARED, 0
        run = options if isinstance(options, RunOptions) else None
        name = options.session if isinstance(options, RunOptions) else options.output
        assert name is not None
        self._answers = run is not None and run.session_all and run.n_predict != 0
        self._chunks = run is not None and run.reuse_chunks
        super().__init__(
            name,
            seq_id=options.seq,
            writes=run is None or not run.session_ro,
            overwrite=options.overwrite,
            every_s=every_s,
        )

    def _note(self, line: str) -> None:
        if not self._options.quiet:
            output.note(line)

    def _warn(self, line: str) -> None:
        output.warn(line)

    def check(
        self, model: Opened, config: CacheConfig, policy: AnyPolicy | None, ids: Sequence[int]
    ) -> None:
        """Refuses what can be refused before the weights are there.

        Args:
          model: whose session it has to be.
          config: of the cache.
          policy: what stays of a text.
          ids: tokens of the prompt.

        Raises:
          SessionMismatch: the session is of another model or cache.
          UsageError: chunks are wanted of layers that cannot give them, or much of what the
            session holds would be lost.
        """
        if self.opened is not None:
            try:
                check_fits(self.opened, model, config, policy)
            except SessionMismatch as error:
                raise SessionMismatch(f"{error}, or another name for the session") from error
        rolls = any(extent(g, config).rolls for g in model.spec.groups)
        extends = config.self_extend is not None and config.self_extend.kind == "cache"
        is_scored = isinstance(policy, ScoredPolicy)
        if self._chunks and (rolls or extends or model.spec.recurrent is not None or is_scored):
            raise UsageError(
                "--reuse_chunks fills gaps in the middle, which recurrent layers, layers that keep "
                "tokens by score, SelfExtend in the cache and windows without --swa_full cannot; "
                "leave it out"
            )
        self._check_loss(ids)

    def _check_loss(self, ids: Sequence[int]) -> None:
        """Refuses a prompt in whose place much of the held text would go."""
        if self.opened is None or not self._writes or self._may_lose:
            return
        held = held_tokens(self.opened)
        n_exact = self.opened.manifest.exact.get(self.opened.seq_id, len(held.ids))
        begins = common_prefix(held.ids, np.asarray(ids, np.int32)) == len(ids) <= n_exact
        if begins and not self._answers:
            return  # Nothing will be saved.
        n_lost = held.n_lost(ids)
        if replace.judge(held.n, n_lost) is Change.LOSES:
            raise UsageError(
                f"{self.path}: holds {held.n:,} tokens, and {n_lost:,} of them are not in this "
                "prompt and would be lost; use --append to continue behind them, --overwrite to "
                f"replace them (kept as {self.path.name}~), or another name"
            )

    def like(self, name: str) -> OpenedSession | None:
        """The session whose types a run takes: the file, or of a folder the newest.

        Args:
          name: of the model, whose sessions alone count in a folder.

        Raises:
          BadModelFile: the model is damaged.
        """
        if self._library is None:
            return self.opened
        decoder = None
        for entry in self._library.entries()[:_MOST_LOOKED_AT]:
            try:
                found = io.open_existing(entry.path)
            except (UsageError, BadSession):
                continue
            if decoder is None:
                spec = load.describe_model(name, progress=not self._options.quiet).spec
                decoder = identity(spec, "", "f32")["decoder"]
            if (found.manifest.fingerprint.get("model") or {}).get("decoder") == decoder:
                return found
        return None

    def n_to_do(self, ids: list[int]) -> int:
        """Tokens that will be evaluated, as far as is known without a runtime."""
        if self.opened is None:
            return len(ids)
        if self._way is Way.RESUMED:
            return 1
        same = common_prefix(self.opened.held[1], np.asarray(ids, np.int32))
        return len(ids) - min(same, len(ids) - 1)

    def follows(self, given: Prompt) -> bool:
        """Whether a prompt follows all that the session holds."""
        if self.opened is None or not len(self.opened.held[1]) or self._options.overwrite:
            return False
        converses = isinstance(self._options, RunOptions) and given.chat
        return given.is_none or self._options.append or converses

    def tokens(self, given: Prompt, tokenizer: Tokenizer) -> list[int]:
        """All tokens of a prompt, before it those that it follows.

        Those that are held are taken as they are; so is one that was sampled and not evaluated,
        but for a token that ended the text, which continues now.

        Raises:
          UsageError: there is no session to resume, or nothing to append.
        """
        if self._library is not None and self._options.append:
            raise UsageError(f"{self.path}: is a folder of sessions; name the one to append to")
        if not self.follows(given) or self.opened is None:
            if given.is_none:
                what = "which of its sessions" if self._library else "what"
                raise UsageError(
                    f"--session {self.path}: there is nothing to say {what} to resume; give a "
                    "prompt with -p, -f or --tokens"
                )
            return prompt.prompt_ids(given, tokenizer, chat=given.chat)
        held, draw = self.opened.held[1].tolist(), self.opened.draw
        newest = None if draw is None else draw.token
        self._way = Way.RESUMED
        if given.is_none:
            return [*held, *([] if newest is None else [newest])]
        self._way = Way.APPENDED
        if given.chat and given.text is not None:
            so_far = turns.HeldText(ids=held, newest=newest, name=str(self.path))
            turn = turns.next_turn(so_far, given.text, given.system, tokenizer)
            if turn.unanswered:
                output.warn(f"{self.path}: the message before has no answer, and gets none now")
            if turn.n_kept < len(held) or turn.ids == held:
                self._way = Way.COMPARED
            if turn.rewritten is not None:
                self._note(f"{self.path}: {turn.rewritten}; the former is kept with ~")
                self._may_lose = True
            return turn.ids
        more = prompt.behind(given, tokenizer)
        return held + ([] if newest is None or newest in tokenizer.eos_ids else [newest]) + more

    def begin(self, runtime: Runtime, ids: list[int]) -> Reading:
        """Restores what fits of the `tokens`, says so, and gives what is left to read.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        found = self.restore(runtime, ids, way=self._way, chunks=self._chunks)
        opened, n = self.opened, f"{len(ids):,} computed"
        if opened is None:
            why = f"damaged and replaced: {self._damage}" if self._damage else "no such session yet"
            self._note(f"{self.path}: nothing restored, {n}: {why}")
        elif opened.seq_ids and opened.seq_id not in opened.seq_ids:
            self._note(f"{self.path}: sequence {self._options.seq} begins, {n}")
        else:
            how = phrases.sampled_by(opened.manifest, opened.seq_id, runtime.config.select)
            self._note(phrases.restored(opened.path, found) + how)
        self._n_held = 0 if opened is None else len(opened.held[1])
        return Reading(
            ids=ids,
            n_restored=found.n_restored,
            spans=found.spans,
            after=found.after,
            reused=reused_part(found.n_exact, "session" if found.plan is None else "reuse_chunks"),
        )

    def during_prompt(self, runtime: Runtime, reading: Reading) -> None:
        """Starts to save what was read of a prompt, if the last save is long enough ago.

        What the session held is kept as `F~` where the part has less. A prompt that is appended is
        saved whole or not at all: the same command would append it to a part of itself.
        """
        if self._way is Way.APPENDED or reading.whole or not self.due:
            return
        check_sound(self.path, runtime, reading)
        self.save(runtime, reading.read, is_part=True)

    def after_prompt(self, runtime: Runtime, reading: Reading) -> None:
        """Starts to save the prompt, if there is more of it than the session holds."""
        if reading.after is not None:
            return
        n_more = len(runtime.token_history()[1]) - self._n_held
        if reading.whole and not self.lacks(runtime, reading.ids):
            self.note_use()
        elif self._way is Way.APPENDED and not reading.whole:
            # Half of it would be held twice when the same command is given again.
            self._note(f"{self.path}: stays as it was, for not all of the prompt was read")
        elif reading.whole or n_more > 0:
            if self._writes:
                check_sound(self.path, runtime, reading)
            self.save(runtime, reading.read)


def check_sound(path: Path, runtime: Runtime, reading: Reading) -> None:
    """Refuses to save keys and values that are not finite.

    Every later token sees them, so the last one's logits tell; without them the arrays do.
    """
    if reading.whole and can_sample(runtime.last_logits(0)[0]):
        return
    found = find_damage(runtime.snapshot())
    if reading.whole or found:
        why = found or "the logits of the last token have NaN, +inf or no finite value"
        raise BadLogits(f"{path}: not saved, since {why}; the weights are damaged: check the model")
