"""The short history of a cell with an Engine: two requests, what becomes of them, a second turn."""

import copy
from pathlib import Path
from typing import Any

import numpy as np

from kvrt import Sampling, session
from kvrt.serving.beams.spec import BeamSpec
from kvrt.serving.request import Request
from tests.matrix import drafted, reused
from tests.matrix.axes import Cell
from tests.matrix.build import build, extend_of, policy_of, scored_of, sizes_of
from tests.matrix.plaincache import PlainSeq
from tests.matrix.plainmodel import STATES, drawn, pieces
from tests.matrix.tolerance import Different, Judge
from tests.serving.plainbeams import beam_search


class EngineHistory:
    """An Engine whose steps are noted, so that the oracle computes each in the same chunks."""

    def __init__(self, cell: Cell, made: Any):
        self.cell, self.made, self.judge = cell, made, Judge(cell)
        self.chunks: dict[str, list[tuple[int, int]]] = {}
        self.logits: dict[str, list[np.ndarray]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.n_cached: dict[str, int] = {}
        self.texts: list[tuple[float, list[int]]] = []  # of a beam search, the best first
        append = made.space.append

        def noted(step: Any, *stays: Any) -> None:
            for name, part in drafted.tokens_apart(step, *stays):
                self.chunks.setdefault(name, []).append(part)
            append(step, *stays)

        made.space.append = noted

    def ask(self, name: str, tokens: list[int], n_predict: int, **told: Any) -> None:
        request = Request(id=name, tokens=tuple(tokens), n_predict=n_predict, **told)
        self.tokens[name], self.logits[name] = list(tokens), []
        self.made.add_request(request)

    def fork(self, name: str, new: str) -> None:
        """Forks a request; of the fork we know what we know of its source."""
        self.made.fork(name, new, sampling=Sampling(temp=1.5, seed=5))
        for known in (self.chunks, self.logits, self.tokens):
            known[new] = list(known[name])

    def n_sampled(self, name: str) -> int:
        """Tokens that were sampled of a request; of a search steps that were taken."""
        n_prompt = len(self.tokens[name]) - len(self.logits[name])
        return len({start for start, n in self.chunks.get(name, ()) if start + n >= n_prompt})

    def step(self) -> None:
        for out in self.made.step():
            if out.error:
                raise Different(f"request {out.id}: {out.error}")
            self.n_cached.setdefault(out.id, out.n_cached)
            if out.score is not None:
                self.texts.append((out.score, list(out.tokens)))
                continue
            for i, token in enumerate(out.tokens):
                logits = np.asarray(self.made.logits(out.id, 0, i))
                self.logits[out.id].append(logits)
                self.tokens[out.id].append(token)
                if out.id != "fork" and token != int(logits.argmax()):
                    raise Different(f"request {out.id}: {token} is not the best token")

    def finish(self) -> None:
        while self.made.has_work:
            self.step()

    def compare(self, name: str) -> None:
        """The logits of a request, in the chunks in which they were computed."""
        tokens, found = self.tokens[name], iter(self.logits[name])
        n_prompt = len(tokens) - len(self.logits[name])
        seq, n_done = self.begun(tokens, self.chunks[name][0][0], n_prompt)
        for start, n in self.chunks[name]:
            if start != n_done:
                raise Different(f"request {name}: a chunk at {start}, wanted {n_done}")
            n_done += n
            part = tokens[start : start + n]
            more = seq.one_by_one(part) if scored_of(self.cell) else 0.0
            wanted = self.stepped(seq, part)
            if start + n >= n_prompt:
                where = f"request {name}, position {start + n - 1}"
                self.judge(where, next(found), wanted, wanted + more)

    def begun(self, tokens: list[int], n: int, n_prompt: int) -> tuple[PlainSeq, int]:
        """The oracle of a request that begins with a hit of n tokens, and n."""
        told = self.cell, policy_of(self.cell), extend_of(self.cell)
        if self.cell.state != "chunks":
            seq, n_blended = PlainSeq(*told), 0
        else:
            seq, n_blended = reused.BlendedSeq(*told), min(n, reused.ENDS[-1])
            if n_blended:
                seq.blend(n_blended)
        seq.n_whole = n_prompt
        for part in pieces(tokens[n_blended:n], 8):
            seq.hold(part)
        return seq, n

    def stepped(self, seq: PlainSeq, tokens: list[int]) -> np.ndarray:
        """The logits after a chunk."""
        n_ctx = self.made.options.rules.n_ctx_seq
        if n_ctx is not None:
            seq.make_room(len(tokens), n_ctx, 0)
        return seq.step(tokens)[-1]

    def compare_search(self, name: str, n_predict: int) -> None:
        """The texts of a beam search, each of which the oracle computes by itself."""
        prompt = self.tokens[name]
        n = len(prompt)
        seq, _ = self.begun(prompt, self.chunks[name][0][0], n)
        known: dict[tuple[int, ...], tuple[PlainSeq, np.ndarray]] = {}
        for start, size in self.chunks[name]:
            if start < n:
                known[tuple(prompt)] = seq, self.stepped(seq, prompt[start : start + size])

        def logits(text: tuple[int, ...]) -> np.ndarray:
            if text not in known:
                logits(text[:-1])
                one = copy.deepcopy(known[text[:-1]][0])
                known[text] = one, self.stepped(one, [text[-1]])
            return known[text][1]

        spec = BeamSpec(num_beams=2, n_predict=n_predict)
        wanted = beam_search(
            lambda texts: np.stack([logits(tuple(t)) for t in texts]), prompt, spec
        )
        for (score, text), (found, sampled) in zip(wanted, self.texts, strict=True):
            if text != sampled:
                raise Different(f"request {name}: a beam of {sampled}, wanted {text}")
            self.judge(f"request {name}, score", np.asarray(found), np.asarray(score))
        self.tokens[name] = [*prompt, *self.texts[0][1]]


def engine_history(cell: Cell, made: Any, folder: Path) -> float:
    """Two requests together, a second turn of the first one; tiers and sessions in between."""
    at = EngineHistory(cell, made)
    drops = policy_of(cell) is not None  # within 56 tokens, in the first and in the second turn
    folds = cell.policy == "extend_cache" and cell.state != "plain"
    by_channel = cell.dtype.startswith("kivi")
    told: dict[str, Any] = {"num_beams": 2, "n": 2} if cell.decode == "beams" else {}
    is_drafted = cell.speculation != "none"
    if is_drafted and cell.decode == "shared":  # single tokens beside those of rounds
        told = {"drafts": False}
    n_predict = 20 if drops else 12 if is_drafted else 6
    began = {"private_prefix": made.private_prefix} if cell.state == "chunks" else {}
    at.ask("a", drawn(2, 40), n_predict, **told, **began)
    while not at.n_sampled("a"):
        at.step()
    # Of whole chunks before its last token a layer of chunks alone needs nothing: two are too many.
    n_b = 23 if cell.layers == "chunked" else 30
    n_folds = 34 if cell.attention == "sparse" else 10  # a hit is a block, of 16
    if by_channel:  # a hit is a block of 32 tokens
        n_b = n_folds = 34
    at.ask("b", drawn(1, n_b if drops else n_folds if folds else 7), 12 if is_drafted else 3)
    if cell.decode in ("fork", "shared"):
        while at.n_sampled("a") < (18 if drops else 2):
            at.step()
        at.fork("a", "fork")
    at.finish()
    if cell.decode in ("fork", "shared"):
        at.compare("fork")
    if cell.decode == "shared" and not (drops or cell.policy == "extend_cache"):
        # What they share nobody moves; of a head's slots nobody else reads.
        reads = cell.layers not in STATES and scored_of(cell) is None
        if reads and not at.made.stats().reads["read_once"]:
            raise Different("nothing was read once for both")
    if cell.decode == "beams":
        at.compare_search("a", n_predict)
    if cell.state == "session":
        # As above: of "b" what the second turn never drops.
        n = sizes_of(cell).n_keep + by_channel if drops else None
        tokens = at.tokens["b"][:n] if drops or folds else at.tokens["a"]
        at = _reloaded_engine(cell, at, folder, tokens)
    if cell.state == "tiers":
        _evict(at, folds=folds)
    # 48 tokens: a hit of whole blocks ends at 40, within a chunk of 12, and not at its end.
    # What "a" has dropped or moved nothing can hit: then the second turn is one of "b", and drops
    # or moves itself.
    begins = at.tokens["a"]
    if drops or folds:
        begins = at.tokens["b"] + drawn(6, 43 - n_b if drops else 13)
    if cell.state == "checkpoints":  # which continues otherwise
        begins = [*(at.tokens["b"][:-3] if drops or folds else begins[:36]), *drawn(6, 13)]
    at.ask("second", begins + drawn(4, 2), 10 if drops else 3, **began)
    at.finish()
    for name in ("a", "b", "second"):
        if name in at.chunks and not (name == "a" and cell.decode == "beams"):
            at.compare(name)
    if cell.state != "plain" and not at.n_cached["second"]:
        raise Different("nothing of the first turn was found for the second one")
    if cell.state == "tiers" and not made.stats().tiers["host"].counts["loaded"]:
        raise Different("nothing came back from the host's memory")
    drafted.check(cell, *at.made.stats().drafts.values())
    if made.tiers:
        made.close()
    return at.judge.worst


def _evict(at: EngineHistory, *, folds: bool) -> None:
    """Fills the device with other texts until nothing that it holds now is found there.

    What SelfExtend moved is not kept, so that short texts alone need the place of others.
    """
    n_tokens = 12 if folds else 47
    large = at.cell.dtype == "kivi4" or at.cell.attention == "sparse"
    if folds and large:  # whole blocks, and no round of SelfExtend
        n_tokens = 40
    pools = at.made.space.pools
    held = [(p, key) for p in pools for block in range(p.n_blocks) for key in p.keys(block)]
    for i in range(100):
        _settle(at.made)
        if not any(pool.find(*key) is not None for pool, key in held):
            return
        at.ask(f"filler {i}", drawn(10 + i, n_tokens), 2, salt=b"%d" % i)
        at.finish()
    raise AssertionError("a hundred texts did not evict what the device held")


def _settle(engine: Any) -> None:
    engine.tiers.flush()
    engine.space.begin_step()


def _reloaded_engine(
    cell: Cell, before: EngineHistory, folder: Path, tokens: list[int]
) -> EngineHistory:
    """What is cached of a request that has ended goes to a file, and into another engine."""
    path = folder / "saved.kvrt"
    session.save(path, before.made.save(tokens))
    fresh = build(cell)
    fresh.load(session.read(path))
    after = EngineHistory(cell, fresh)
    after.tokens = dict(before.tokens)
    return after
