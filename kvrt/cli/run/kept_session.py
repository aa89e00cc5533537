"""The session of a run: what is restored from it, what that saves, and what is written to it."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvrt import Runtime
from kvrt.cli.process import output
from kvrt.cli.report import phrases
from kvrt.cli.run import conversation, prompt, restore
from kvrt.cli.run.generation import Reading, all_of
from kvrt.cli.run.prompt import Prompt
from kvrt.cli.run.restore import Way
from kvrt.cli.run.save import EVERY_S, Saver, check_sound, held_tokens
from kvrt.cli.session.open_session import (
    check_fits,
    choose_sequence,
    holds_session,
    is_library,
    open_existing,
    real_path,
)
from kvrt.errors import BadSession, KvrtError, SessionMismatch, UsageError
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy, ScoredPolicy
from kvrt.reuse.diff import common_prefix
from kvrt.session import OpenedSession, SamplingState, fingerprint
from kvrt.session.change import replace
from kvrt.session.change.replace import Change
from kvrt.session.library.library import Library
from kvrt.sizes import extent
from kvrt_models import load
from kvrt_models.identity import identity
from kvrt_models.load import Opened
from kvrt_models.tokenizer.encode import Tokenizer

# Sessions of a folder that are opened to learn the type of their weights.
_MOST_LOOKED_AT = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SessionUse:
    """How a run uses its session.

    Attributes:
      writes: it is saved.
      answers: with what is sampled.
      overwrite: another text may take its place.
      append: a prompt follows all that it holds.
      converse: so does a message by the chat template.
      chunks: cached keys and values that were computed under another text may be used.
      quiet: nothing is said but what went wrong.
      seq: the sequence that is meant; the others stay. None is the only one.
    """

    writes: bool = True
    answers: bool = False
    overwrite: bool = False
    append: bool = False
    converse: bool = False
    chunks: bool = False
    quiet: bool = False
    seq: int | None = None


class KeptSession:
    """The session of a run: a file, or the best of a folder.

    Attributes:
      path: where it is; a folder before `begin`, then where it will be in it.
      opened: of the file that is there already; of a folder None before `begin`.
    """

    def __init__(self, name: str, use: SessionUse, *, every_s: float = EVERY_S):
        """Reads what is there but the cached keys and values.

        Args:
          name: a file that need not be there, or a folder; a link stands for what it points to.
          use: what is done with it.
          every_s: seconds between saves while a prompt is read, and where `use.answers` while
            tokens are sampled.

        Raises:
          BadSession: it is damaged, or no session.
          SaveError: it could not be written later.
          UsageError: it holds several sequences, and none of them is named.
        """
        self.path = real_path(name)
        tell = None if use.quiet else output.note
        self._library = Library(self.path, tell=tell) if is_library(self.path) else None
        self._use = use
        self._saver = Saver(
            self.path,
            library=self._library,
            overwrite=use.overwrite,
            quiet=use.quiet,
            every_s=every_s,
            seq_id=use.seq,
        )
        self._n_held = 0
        self._damage = ""
        self._rewrites = False  # the chat template writes an earlier part otherwise
        self._way = Way.COMPARED
        self.opened = None
        if self._library is not None and use.writes:
            self._library.check_writable()
        if self._library is not None and use.seq is not None:
            raise UsageError(
                f"{self.path}: is a folder of sessions, of a sequence each; name one for --seq"
            )
        if self._library is None and self.path.exists():
            self._open()

    def _open(self) -> None:
        """Opens the file that is there; a damaged one that may be replaced counts as none."""
        try:
            opened = open_existing(self.path)
        except BadSession as error:
            self._replace_damaged(error)
            return
        self.opened = choose_sequence(opened, self._use.seq, is_new_one=self._use.writes)
        self._saver.expect(self.path, held_tokens(self.opened))

    def _replace_damaged(self, error: BadSession) -> None:
        """Does without a damaged session where --overwrite was given; else raises the error.

        One of its sequences cannot be written beside others that cannot be read.
        """
        if not self._use.overwrite or self._use.seq is not None or not holds_session(self.path):
            raise error
        self._damage = str(error).partition("; ")[0].removeprefix(f"{self.path}: ")
        self.opened = None
        self._saver.expect_damage()

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
        if self._use.chunks and (rolls or extends or model.spec.recurrent is not None or is_scored):
            raise UsageError(
                "--reuse_chunks fills gaps in the middle, which recurrent layers, layers that keep "
                "tokens by score, SelfExtend in the cache and windows without --swa_full cannot; "
                "leave it out"
            )
        self._check_loss(ids)

    def _check_loss(self, ids: Sequence[int]) -> None:
        """Refuses a prompt in whose place much of the held text would go."""
        if self.opened is None or not self._use.writes or self._use.overwrite or self._rewrites:
            return
        held = held_tokens(self.opened)
        n_exact = self.opened.manifest.exact.get(self.opened.seq_id, len(held.ids))
        begins = common_prefix(held.ids, np.asarray(ids, np.int32)) == len(ids) <= n_exact
        if begins and not self._use.answers:
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
                found = open_existing(entry.path)
            except (UsageError, BadSession):
                continue
            if decoder is None:
                spec = load.describe_model(name, progress=not self._use.quiet).spec
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
        if self.opened is None or not len(self.opened.held[1]) or self._use.overwrite:
            return False
        return given.is_none or self._use.append or (self._use.converse and given.chat)

    def tokens(self, given: Prompt, tokenizer: Tokenizer) -> list[int]:
        """All tokens of a prompt, before it those that it follows.

        Those that are held are taken as they are; so is one that was sampled and not evaluated,
        but for a token that ended the text, which continues now.

        Raises:
          UsageError: there is no session to resume, or nothing to append.
        """
        if self._library is not None and self._use.append:
            raise UsageError(f"{self.path}: is a folder of sessions; name the one to append to")
        if not self.follows(given) or self.opened is None:
            if given.is_none:
                raise self._nothing()
            return prompt.prompt_ids(given, tokenizer, chat=given.chat)
        held, draw = self.opened.held[1].tolist(), self.opened.draw
        newest = None if draw is None else draw.token
        self._way = Way.RESUMED
        if given.is_none:
            return [*held, *([] if newest is None else [newest])]
        self._way = Way.APPENDED
        if given.chat and given.text is not None:
            so_far = conversation.Conversation(ids=held, newest=newest, name=str(self.path))
            turn = conversation.next_turn(so_far, given.text, given.system, tokenizer)
            if turn.unanswered:
                output.warn(f"{self.path}: the message before has no answer, and gets none now")
            if turn.n_kept < len(held) or turn.ids == held:
                self._way = Way.COMPARED
            if turn.rewritten is not None:
                self._say(f"{self.path}: {turn.rewritten}; the former is kept with ~")
                self._rewrites = True
                self._saver.allow_loss()
            return turn.ids
        more = prompt.behind(given, tokenizer)
        return held + ([] if newest is None or newest in tokenizer.eos_ids else [newest]) + more

    def policy(self, ids: Sequence[int]) -> Mapping[str, Any] | None:
        """The policy by position that the session was left with; None is none that is known.

        It keeps no more of a prompt than both begin with. A run without a policy saves it again.
        """
        if self.opened is None or self._use.overwrite:
            return None
        said = self.opened.manifest.policies.get(self.opened.seq_id)
        if said is not None and isinstance(said.get("n_keep"), int):
            n = common_prefix(self.opened.held[1], np.asarray(ids, np.int32))
            said = {**said, "n_keep": min(said["n_keep"], n)}
        self._saver.policy = said
        return said

    def begin(self, runtime: Runtime, ids: list[int]) -> Reading:
        """Restores what fits of the `tokens`, says so, and gives what is left to read.

        Raises:
          SessionMismatch: the session is of another model or cache.
          BadSession: it is damaged.
        """
        if self._library is not None:
            self._choose(self._library, runtime, ids)
        if self.opened is None:
            return self._begin_anew(ids)
        try:
            found = restore.restore_usable(
                runtime, self.opened, ids, self._way, chunks=self._use.chunks
            )
        except BadSession as error:
            self._replace_damaged(error)
            return self._begin_anew(ids)
        self._n_held = len(self.opened.held[1])
        begins = bool(self.opened.seq_ids) and self.opened.seq_id not in self.opened.seq_ids
        new = f"{self.path}: sequence {self._use.seq} begins, {len(ids):,} computed"
        said, select = self.opened, runtime.config.select
        how = phrases.sampled_by(said.manifest, said.seq_id, select)
        self._say(new if begins else found.line + how)
        return found.reading

    def _begin_anew(self, ids: list[int]) -> Reading:
        why = f"damaged and replaced: {self._damage}" if self._damage else "no such session yet"
        self._say(f"{self.path}: nothing restored, {len(ids):,} computed: {why}")
        return dataclasses.replace(all_of(ids), n_restored=0)

    def during_prompt(self, runtime: Runtime, reading: Reading) -> None:
        """Starts to save what was read of a prompt, if the last save is long enough ago.

        What the session held is kept as `F~` where the part has less. A prompt that is appended is
        saved whole or not at all: the same command would append it to a part of itself.
        """
        appended = self._way is Way.APPENDED
        if appended or reading.whole or not (self._use.writes and self._saver.due):
            return
        check_sound(self.path, runtime, reading)
        self._saver.start(runtime, reading.read, is_part=True)

    def after_prompt(self, runtime: Runtime, reading: Reading) -> None:
        """Starts to save the prompt, if there is more of it than the session holds."""
        if reading.after is not None:
            return
        n_more = len(runtime.token_history()[1]) - self._n_held
        if reading.whole and not self._is_new(reading.ids, runtime):
            if self._library is not None and self._use.writes and self.opened is not None:
                try:
                    self._library.touch(self.opened.path)
                except KvrtError as error:
                    output.warn(f"{self.opened.path}: its use is not noted: {error}")
        elif self._way is Way.APPENDED and not reading.whole:
            # Half of it would be held twice when the same command is given again.
            self._say(f"{self.path}: stays as it was, for not all of the prompt was read")
        elif reading.whole or n_more > 0:
            if self._use.writes:
                check_sound(self.path, runtime, reading)
            self.save(runtime, reading.read)

    def save(self, runtime: Runtime, ids: Sequence[int], draw: SamplingState | None = None) -> None:
        """Starts to save all that a runtime holds, after the save that is running.

        Args:
          runtime: what is saved.
          ids: all tokens that were read and sampled.
          draw: where sampling was left.
        """
        if self._use.writes:
            self._saver.start(runtime, ids, draw)

    @property
    def alone(self) -> bool:
        """Whether this process saves without others, which would have to take part."""
        return self._saver.alone

    @property
    def due(self) -> bool:
        """Whether what was sampled has to be saved again."""
        return self._use.writes and self._use.answers and self._saver.due

    def finish(self) -> None:
        """Waits for the save that is running.

        Raises:
          SaveError: it failed.
        """
        self._saver.finish()

    def _choose(self, library: Library, runtime: Runtime, ids: list[int]) -> None:
        """The best session of the folder, and the name of the one to write."""
        digest = fingerprint.digest(runtime.fingerprint)
        match = library.best(digest, ids)
        self.opened = None if match is None else open_existing(match.entry.path)
        if self.opened is not None:
            n = max((g.n_used for g in self.opened.manifest.groups), default=0)
            n_ctx = runtime.config.n_ctx
            if n > n_ctx:
                self._say(f"{self.opened.path}: has {n:,} cells, -c gives {n_ctx:,}: left out")
                self.opened = None
        name = hashlib.sha256(digest.encode() + np.asarray(ids, "<i4").tobytes()).hexdigest()
        self.path = library.folder / f"{name[:32]}.kv"
        self._saver.expect(self.path, None)

    def _is_new(self, ids: list[int], runtime: Runtime) -> bool:
        """Whether the session does not begin with all of a prompt already, as exact as now."""
        if self.opened is None:
            return True
        n_exact = self.opened.manifest.exact.get(self.opened.seq_id)
        if runtime.n_exact() is None and n_exact is not None and n_exact < len(ids):
            return True
        return common_prefix(self.opened.held[1], np.asarray(ids, np.int32)) < len(ids)

    def _nothing(self) -> UsageError:
        what = "which of its sessions" if self._library else "what"
        return UsageError(
            f"--session {self.path}: there is nothing to say {what} to resume; give a prompt "
            "with -p, -f or --tokens"
        )

    def _say(self, line: str) -> None:
        if not self._use.quiet:
            output.note(line)
