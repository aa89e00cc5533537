"""What a run says beside the text: progress, a summary, JSON, the cells, and how exact it is."""

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from kvrt import Stats, kv_types
from kvrt.cells import Cells
from kvrt.cli.process import output
from kvrt.cli.report import phrases
from kvrt.cli.report.phrases import counted
from kvrt.cli.report.tables import MAP_WIDTH, OWNERS, signs
from kvrt.options.cache import CacheConfig
from kvrt.policies import ScoredPolicy, policy_name
from kvrt.policies.schedule import n_first
from kvrt.policies.self_extend import extend_schedule

if TYPE_CHECKING:
    from kvrt.attention.scored.policy import ScoredPolicy
    from kvrt.options.select import Select

_COLOURS = ("cyan", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")
_MOST_DROPS = 5
_REASONS = {
    "stop": "end of text",
    "stop_string": "stop text found",
    "length": "length reached",
    "context_full": "context full",
    "interrupted": "interrupted",
    "bad_logits": "logits are not finite",
}
# Fields of a run and of its runtime's counters that its JSON has by their own names.
_ANSWER = ("n_prompt", "tokens", "text", "finish_reason", "seed")
_COUNTERS = ("n_ctx", "n_kv", "cells_used", "n_shift", "n_dropped", "n_defrag", "programs")
_COUNTERS += ("n_compiles", "n_from_disk", "compile_s")
_TIMES = ("prefill_s", "decode_s", "prefill_tps", "decode_tps")
# Why a context checkpoint is there no more, by the reason of a `LostCheckpoint`.
_LOST = {
    "evicted": "evicted for newer ones",
    "cut": "behind a cut",
    "changed": "as tokens before it were dropped or moved",
}
# What `Approximation.by` means, for people; a policy by score says its own.
_SAID = {
    "session": "the session's tokens were moved, blended or sampled by sparse reads",
    "reuse_chunks": "chunks were computed under another prefix",
    "chunks": "chunks were computed alone and blended",
    "modules": "modules have not seen each other",
    "self_extend": "tokens share positions",
    "quest": "each sampled token reads some cells",
    "double_sparsity": "each sampled token reads some cells",
}


class Approximation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reason why an answer is not that of the whole text, as JSON has it.

    Attributes:
      by: a policy or a kind of sparse reads as flags name it, or what was reused.
      from_token: the first token, counted from 0 through prompt and answer, that was computed
        without the whole text before it.
      n_dropped: tokens that a policy by position dropped.
      on_states: "keep" where states of recurrent layers have those all the same.
    """

    by: str
    from_token: int
    n_dropped: int = 0
    on_states: Literal["keep"] | None = None

    @property
    def line(self) -> str:
        """The reason for people."""
        said = _SAID.get(self.by, "each kv head keeps some tokens")
        if self.n_dropped:
            said = f"{self.n_dropped:,} older tokens were dropped"
            said += ", recurrent states keep them" if self.on_states else ""
        return f"approximate from token {self.from_token:,} on: {said} ({self.by})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerCounts:
    """Tokens of a prompt and its answer, as far as they decide how exact it is.

    Attributes:
      n_prompt: tokens of the prompt.
      n_computed: tokens that were computed or restored, those of the answer included.
      n_restored: tokens of the prompt that were restored.
      n_compressed: tokens of a prompt that was read whole before a policy by score kept some.
      drop: what a policy by position dropped, None if nothing.
      reused: tokens at the beginning as exact as computed in one go, where others were reused.
    """

    n_prompt: int
    n_computed: int
    n_restored: int = 0
    n_compressed: int = 0
    drop: Approximation | None = None
    reused: Approximation | None = None


def reused_part(n_exact: int | None, by: str) -> Approximation | None:
    """What was reused and is not as computed in one go; `n_exact` is as in `Runtime.n_exact`."""
    return None if n_exact is None else Approximation(by=by, from_token=n_exact)


def approximations(
    counts: AnswerCounts, config: CacheConfig, scored: ScoredPolicy | None
) -> list[Approximation]:
    """All reasons why an answer is not that of the whole text; none where it is.

    Args:
      counts: of the answer.
      config: of its cache.
      scored: the policy by score, None without one.
    """
    n = counts.n_computed
    found = [x for x in (counts.reused, counts.drop) if x is not None and x.from_token < n]
    if scored is not None:
        first = max(scored.n_whole, counts.n_compressed)
        found.append(Approximation(by=policy_name(scored), from_token=first))
    extend, select = config.self_extend, config.select
    if extend is not None and extend.ga_n > 1:
        first = extend.ga_w
        if (schedule := extend_schedule(config)) is not None and not counts.n_restored:
            first = n_first(schedule, counts.n_prompt)
        found.append(Approximation(by="self_extend", from_token=first))
    if select is not None:
        # Prompts read all, and so does a token behind no more cells than it may choose.
        first = max(counts.n_prompt, select.n_cells + 1)
        found.append(Approximation(by=select.name, from_token=first))
    return sorted((x for x in found if x.from_token < n), key=lambda x: x.from_token)


def exactness_lines(found: Sequence[Approximation]) -> list[str]:
    """The lines of a summary that say so; none where the answer is that of the whole text."""
    heads = ["exactness  ", *[" " * 11] * len(found)]
    return [f"{head}{x.line}" for head, x in zip(heads, found, strict=False)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run did.

    Attributes:
      model: name of the model.
      weights: type of its weights, and why; "" is not shown.
      dtype: of its weights.
      n_prompt: tokens of the prompt.
      texts: what the ids of `logprobs` say, by id.
      seed: of the random numbers; None where the most probable token was taken.
      n_restored: how many of them a session held; None without a session.
      n_prefilled: how many of them were evaluated; fewer after a signal.
      n_generated: tokens sampled, an end-of-text token included.
      finish_reason: a key of the reasons: stop, stop_string, length, context_full, interrupted,
        bad_logits.
      stats: the runtime's counters at the end.
      prefill_s: time of the prompt's steps, without compiling.
      decode_s: time of the steps after the first token, without compiling.
      tokens: ids sampled; kept for JSON only.
      text: what they say, without stop text; kept for JSON only.
      logprobs: the best ids and log-probabilities of each token, or None if not asked for.
      approximations: why the answer is not that of the whole text; none where it is.
    """

    model: str
    n_prompt: int
    n_prefilled: int
    n_generated: int
    finish_reason: str
    stats: Stats
    prefill_s: float
    decode_s: float
    tokens: Sequence[int] = ()
    text: str = ""
    logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    texts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    approximations: Sequence[Approximation] = ()
    n_restored: int | None = None
    seed: int | None = None
    weights: str = ""
    dtype: str | None = None

    @property
    def n_wanted(self) -> int:
        """Tokens of the prompt to evaluate."""
        return self.n_prompt - (self.n_restored or 0)

    @property
    def prefill_tps(self) -> float | None:
        """Tokens of the prompt per second."""
        return _rate(self.n_prefilled, self.prefill_s)

    @property
    def decode_tps(self) -> float | None:
        """Steps per second; the first token needs none beyond the prompt's."""
        return _rate(self.n_generated - 1, self.decode_s)


@contextlib.contextmanager
def prefill_bar(n_prompt: int, wanted: bool) -> Iterator[Callable[[int], None]]:
    """A bar with rate and time left on a terminal, else a line every 15 seconds.

    The function that it gives takes the tokens done.
    """
    start, clock = time.perf_counter(), output.Every(output.LINE_S)

    def rate(done: int) -> float:
        return done / (time.perf_counter() - start)

    def line(done: int) -> None:
        if wanted and clock.due():
            note = f"{done:,} of {n_prompt:,} tokens, {rate(done):,.1f} tokens/s"
            output.note(f"prompt     {note}")

    if not (wanted and sys.stderr.isatty()):
        yield line
        return
    with output.bar("prompt", n_prompt, left=True) as show:
        yield lambda done: show(done, f"{rate(done):,.0f} tokens/s")


def summary(outcome: Outcome) -> list[str]:
    """The lines that end a run."""
    stats = outcome.stats
    whole = outcome.n_prefilled == outcome.n_wanted
    prompt = "" if whole else f"{outcome.n_prefilled:,} of "
    prompt += f"{counted(outcome.n_wanted, 'token')} in {outcome.prefill_s:.2f} s"
    reason = _REASONS[outcome.finish_reason]
    seed = "" if outcome.seed is None else f"; seed {outcome.seed}"
    written = f"{counted(outcome.n_generated, 'token')} in {outcome.decode_s:.2f} s"
    return [
        f"prompt     {prompt}{_per_second(outcome.prefill_tps)}",
        f"generated  {written}{_per_second(outcome.decode_tps)}; {reason}{seed}",
        phrases.compiled(stats.n_compiles, stats.compile_s, stats.n_from_disk)
        + (", by layer" if stats.programs.startswith("by_layer") else ", whole"),
        *([f"drafts     {draft_line(stats, outcome.dtype)}"] if stats.n_rounds else []),
        *([f"weights    {outcome.weights}"] if outcome.weights else []),
        f"attention  {stats.attention}",
        f"cache      {_used(stats)}, {stats.cache_bytes / 1e6:.1f} MB of "
        f"{kv_types.described(stats.type_k, stats.type_v)}",
        *([f"           {checkpoint_line(stats)}"] if _had_checkpoints(stats) else []),
        *([f"policy     {kept_line(stats.scored)}"] if stats.scored else []),
        *([f"           {phrases.nan_scores(stats.n_nan_scores)}"] if stats.n_nan_scores else []),
        *([f"reads      {read_line(outcome, stats.select)}"] if stats.select else []),
        f"upkeep     {counted(stats.n_shift, 'context shift')}, "
        f"{counted(stats.n_dropped, 'token')} dropped, {counted(stats.n_defrag, 'defrag')}"
        + (f", {counted(stats.n_extend, 'round')} of SelfExtend" if stats.n_extend else ""),
        *(f"           {line}" for line in drop_lines(outcome.n_prompt, stats)),
        *exactness_lines(outcome.approximations),
    ]


def kept_line(policy: "ScoredPolicy") -> str:
    """The line of a summary that says what a policy by score keeps."""
    from kvrt.policies.scored import DuoAttention  # it needs JAX

    kept = f"{policy.budget:,} tokens a kv head, {policy.budget + policy.interval - 1:,} at most"
    if isinstance(policy, DuoAttention):
        kept += f", and {sum(map(len, policy.streaming))} heads that stream {policy.n_stream:,}"
    if policy.reads is not None:
        reads = policy.reads
        kept += f", and reads {reads.n_read:,} of them, but all every {reads.every:,} tokens"
    return f"{type(policy).__name__} keeps {kept}{', by place' if policy.close_up else ''}"


def read_line(outcome: Outcome, select: "Select") -> str:
    """The line of a summary that says how much of the cache sampled tokens read."""
    n_read, n_cached = cells_read(outcome, select)
    part = f"{n_read / n_cached:.0%} of the cached cells" if n_cached else "no token decoded"
    return (
        f"{select.name}, {select.n_cells:,} cells a token at most, {part}, beyond the first "
        f"{counted(select.n_dense, 'layer')}"
    )


def cells_read(outcome: Outcome, select: "Select") -> tuple[int, int]:
    """Cells that the sampled tokens read of a layer and kv head, and those that were cached."""
    most = outcome.stats.n_ctx
    cached = [min(outcome.n_prompt + i, most) for i in range(outcome.n_generated - 1)]
    return sum(min(n, select.n_cells) for n in cached), sum(cached)


def draft_line(stats: Stats, dtype: str | None) -> str:
    """The line of a summary that says what became of drafts."""
    n = stats.n_rounds
    line = f"{stats.n_drafted:,} in {counted(n, 'round')}, {stats.n_accepted:,} accepted, "
    line += f"{(stats.n_accepted + n) / n:.1f} tokens a round"
    exact = dtype in (None, "f32")
    return line if exact else f"{line}; at {dtype} weights the text may differ from that without"


def checkpoint_line(stats: Stats) -> str:
    """The line of a summary that says which context checkpoints there are, and which went, why."""
    line = f"{counted(stats.n_checkpoints, 'context checkpoint')}"
    line += f", {stats.checkpoint_bytes / 1e6:.1f} MB"
    gone: dict[str, list[int]] = {}
    for x in stats.lost_checkpoints:
        gone.setdefault(_LOST[x.reason], []).append(x.pos)
    lost = "; ".join(f"{phrases.shown_positions(at)} {why}" for why, at in gone.items())
    return f"{line}; lost: {lost}" if lost else line


def _had_checkpoints(stats: Stats) -> bool:
    return stats.n_checkpoints > 0 or len(stats.lost_checkpoints) > 0


def drop_lines(n_prompt: int, stats: Stats) -> list[str]:
    """When each context shift came and what it dropped; at most a few of them."""
    lines, dropped = [], 0
    # A line that says "and 1 more" might as well say what.
    shown = stats.drops if len(stats.drops) <= _MOST_DROPS + 1 else stats.drops[:_MOST_DROPS]
    for drop in shown:
        n_read = drop.n_past + dropped
        # A shift makes room for a token that was sampled but not yet evaluated.
        when = f"{n_read - n_prompt + 1:,} generated"
        if n_read < n_prompt:
            when = f"{n_read:,} of the prompt's tokens"
        lines.append(f"{drop.n_dropped:,} of {drop.n_past:,} dropped after {when}")
        dropped += drop.n_dropped
    more = len(stats.drops) - len(lines)
    return [*lines, f"and {more:,} more"] if more else lines


def outcome_json(
    outcome: Outcome, *, question: str | None = None, more: Mapping[str, Any] | None = None
) -> str:
    """One JSON object, `more` its last fields; a rate of no tokens is null."""
    stats = outcome.stats
    fields: dict[str, Any] = {} if question is None else {"question": question}
    fields |= {"model": outcome.model, "weights": outcome.dtype}
    fields |= {name: getattr(outcome, name) for name in _ANSWER}
    fields |= {name: getattr(stats, name) for name in _COUNTERS}
    fields["attention"] = dataclasses.asdict(stats.attention)
    fields |= {"type_k": stats.type_k, "type_v": stats.type_v}
    fields |= {name: getattr(outcome, name) for name in _TIMES}
    fields["rss_bytes"] = rss_bytes()
    fields |= _where_used(stats)
    fields["approximate"] = bool(outcome.approximations)
    fields["approximations"] = msgspec.to_builtins(outcome.approximations)
    if stats.select:
        n_read, n_cached = cells_read(outcome, stats.select)
        fields |= {"select": stats.select.name, "n_read": n_read, "n_cached": n_cached}
    if outcome.n_restored is not None:
        fields |= {"n_restored": outcome.n_restored, "n_recomputed": outcome.n_prefilled}
    if outcome.logprobs is not None:
        fields["logprobs"] = [
            {"id": token, "text": outcome.texts.get(token, ""), "best": _best(best, outcome.texts)}
            for token, best in zip(outcome.tokens, outcome.logprobs, strict=True)
        ]
    return json.dumps(fields | dict(more or {}), allow_nan=False)


def _where_used(stats: Stats) -> dict[str, Any]:
    """Fields of states in place of cells, of checkpoints and of drafts, where there were any."""
    fields: dict[str, Any] = {} if stats.unit == "cell" else {"cache_unit": stats.unit}
    if _had_checkpoints(stats):
        lost = [{"pos": x.pos, "reason": x.reason} for x in stats.lost_checkpoints]
        fields |= {"n_checkpoints": stats.n_checkpoints, "lost_checkpoints": lost}
        fields["checkpoint_bytes"] = stats.checkpoint_bytes
    if stats.n_rounds:
        fields |= {"n_rounds": stats.n_rounds, "n_drafted": stats.n_drafted}
        fields["n_accepted"] = stats.n_accepted
    return fields


def _best(best: Sequence[tuple[int, float]], texts: Mapping[int, str]) -> list[dict[str, Any]]:
    """The candidates of a token; a probability of 0 has no logarithm in JSON."""
    return [
        {"id": i, "text": texts.get(i, ""), "logprob": x if math.isfinite(x) else None}
        for i, x in best
    ]


def rss_bytes() -> int | None:
    """The most memory that this process has held; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def print_cells(cells: Cells, stats: Stats) -> None:
    """The cell map on standard error with the first cell of each row, in colours on a terminal.

    Rows equal to the one before are left out, with a * in their place.
    """
    from rich.text import Text

    console = output.console(highlight=False, soft_wrap=True)
    digits = len(str(stats.n_ctx))
    room = shutil.get_terminal_size().columns - digits - 1
    width = max(room // 8 * 8, 8) if console.is_terminal else MAP_WIDTH
    before = ""
    for i, row in enumerate(rows := signs(np.asarray(cells.seqs), width)):
        if row != before or i == len(rows) - 1:
            line = Text(f"{i * width:>{digits}} ", style="dim")
            console.print(line.append_text(_coloured(row)))
        elif row != rows[i - 2] or i == 1:
            console.print(Text("*".rjust(digits), style="dim"))
        before = row
    legend = "0-9a-z owner, + a later owner, M shared, . empty, * the same again"
    console.print(Text(f"cells: {_used(stats)}; {legend}"))


def _coloured(row: str):
    from rich.text import Text

    styles = {sign: _COLOURS[i % len(_COLOURS)] for i, sign in enumerate(OWNERS)}
    styles |= {".": "dim", "M": "magenta", "+": "white"}
    return Text.assemble(*((sign, styles[sign]) for sign in row))


def _used(stats: Stats) -> str:
    used = f"{stats.cells_used:,} of {counted(stats.n_ctx, stats.unit)} used"
    return f"{used}, n_kv {stats.n_kv:,}" if stats.unit == "cell" else used


def _rate(n: int, seconds: float) -> float | None:
    return n / seconds if n > 0 and seconds > 0 else None


def _per_second(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} tokens/s"
