"""What blended chunks lose beside a prefill of the whole prompt, and what simpler ways lose.

    python -m scripts.experiments.reuse.blend
    python -m scripts.experiments.reuse.blend --prompts passages
    python -m scripts.experiments.reuse.blend --prompts mine.jsonl --row_mask
    python -m scripts.experiments.reuse.blend --model gemma3-270m --ratios 0.15,1 --rules values

A prompt is three chunks of --n_chunk tokens, each computed alone behind BOS, and a question: pieces
of a play that follow each other and the --n_question tokens that follow them ("play"), pieces of
three plays and a question about them ("passages"), or lines of a file of one's own, such as
{"chunks": ["...", "...", "..."], "question": "..."}. One JSON line a way: the divergence (KL, in
nats) from a prefill of the whole over the question's tokens, of each prompt and their mean. The
ways are each of --rules at each of --ratios, "random" tokens as the rules' control, "reused"
(chunks moved to where they stand, nothing computed again) and "unmoved" (keys left as they are
rotated, a control). With --row_mask also the first rule in a dense computation (of models whose
layers all see all tokens), once with masks by position and once, as a control, by row.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime
from kvrt.arrays import Array
from kvrt.errors import UsageError
from kvrt.reuse.blend import BlendSpec, Named
from kvrt.runtime.chunks.chunk import CachedChunk
from kvrt_models.load import load
from scripts._lib import commands, measure
from scripts.experiments import texts
from scripts.experiments.divergence import mean_kl
from scripts.experiments.reuse.dense_blend import DenseBlend, Mask

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_RATIOS = flags.DEFINE_list("ratios", ["0", "0.05", "0.15", "0.3", "1"], "Of the chunks' tokens.")
_RULES = flags.DEFINE_list("rules", ["values", "keys", "first", "random"], "How they are chosen.")
_N_CHUNK = flags.DEFINE_integer("n_chunk", 300, "Tokens of a chunk.", lower_bound=2)
_N_QUESTION = flags.DEFINE_integer("n_question", 50, "Tokens behind them.", lower_bound=2)
_N_PROMPTS = flags.DEFINE_integer("n_prompts", 3, "Prompts.", lower_bound=1)
_LEAD = flags.DEFINE_bool("lead", True, "Whether chunks stand behind BOS when they are computed.")
_PROMPTS = flags.DEFINE_string("prompts", "play", "play, passages, or a file of JSON lines.")
_ROW_MASK = flags.DEFINE_bool("row_mask", False, "Whether the control of masks by row is run.")
_CHECK_LAYER = flags.DEFINE_integer("check_layer", 1, "Whose entries are compared.", lower_bound=0)

Prompt = tuple[list[list[int]], list[int]]
Way = Callable[[Runtime, list[CachedChunk], list[int]], Array]
ASK = (
    "\n\nAnswer from the passages above, in five words at most, and write nothing else. "
    "Question: {}\nAnswer:"
)
# Of each prompt of passages.
QUESTIONS = (
    "which of these people has killed a king?",
    "who is to be banished from the city, and why?",
    "where does the second passage take place?",
)


def run() -> None:
    """All ways over all prompts."""
    model = load(_MODEL.value, dtype="f32")
    read = prompts(model.tokenizer)
    n = 1 + max(sum(map(len, chunks)) + len(question) for chunks, question in read)
    config = CacheConfig(
        n_ctx=-(-n // 256) * 256, n_seq_max=2, swa_full=True, type_k="f32", type_v="f32"
    )
    runtime = Runtime(model.decoder, config)
    bos = model.tokenizer.bos_id
    lead = [bos] if _LEAD.value and bos is not None else []
    found: dict[str, list[float]] = {}
    for chunks, question in read:
        runtime.clear()
        computed = [runtime.chunk(x, lead) for x in chunks]
        whole = [*lead, *(t for x in chunks for t in x), *question]
        exact = question_logits(runtime, whole, len(question))
        for name, way in ways():
            runtime.clear()
            first = np.asarray(way(runtime, computed, question))
            rest = question_logits(runtime, question[1:], len(question) - 1)
            logits = np.concatenate([first, rest])
            found.setdefault(name, []).append(mean_kl(exact, logits))
        if _ROW_MASK.value:
            for name, logits in by_mask(runtime, model.decoder, computed, question):
                found.setdefault(name, []).append(mean_kl(exact, logits))
    for name, kls in found.items():
        measure.emit("blended chunks", way=name, kl=float(np.mean(kls)), kls=kls)


def prompts(tokenizer: Any) -> list[Prompt]:
    """Chunks and what stands behind them, of the kind that is asked for."""
    if _PROMPTS.value == "play":
        return plays(tokenizer)
    told = passages() if _PROMPTS.value == "passages" else read_prompts(_PROMPTS.value)
    n, out = _N_CHUNK.value, []
    for chunks, question in told[: _N_PROMPTS.value]:
        ids = [tokenizer.encode(x, add_special=False) for x in (*chunks, question)]
        out.append(([x[:n] for x in ids[:-1]], ids[-1]))
    return out


def passages() -> list[tuple[list[str], str]]:
    """A piece of each of three plays, from where a paragraph begins, and a question."""
    read, out = [texts.play(name) for name in texts.PLAYS], []
    for i, asked in enumerate(QUESTIONS):
        pieces = []
        for j in range(3):
            text = read[(i + j) % 3]
            at = text.index("\n\n", 12000 * (i + 1))
            pieces.append(text[at : at + 8 * _N_CHUNK.value])
        out.append((pieces, ASK.format(asked)))
    return out


def read_prompts(path: str) -> list[tuple[list[str], str]]:
    """Prompts of a file, one a line.

    Raises:
      UsageError: there is no such file, or a line is none.
    """
    try:
        lines = [json.loads(x) for x in Path(path).read_text("utf-8").splitlines()]
        return [(list(x["chunks"]), str(x["question"])) for x in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--prompts {path}: {error}; give play, passages, or a file of lines such as "
            '{"chunks": ["a text", "another"], "question": "why"}'
        ) from error


def plays(tokenizer: Any) -> list[Prompt]:
    """Three pieces of a play that follow each other, and what follows them; other plays in turn."""
    n, names, out = _N_CHUNK.value, list(texts.PLAYS), []
    read = {name: tokenizer.encode(texts.play(name)) for name in names[: _N_PROMPTS.value]}
    for i in range(_N_PROMPTS.value):
        tokens = read[names[i % len(names)]][3000 * (1 + i // len(names)) :]
        question = tokens[3 * n : 3 * n + _N_QUESTION.value]
        out.append(([tokens[at : at + n] for at in range(0, 3 * n, n)], question))
    return out


def ways() -> list[tuple[str, Way]]:
    """What is compared, by name."""
    rng, out = np.random.default_rng(0), [("reused", reused), ("unmoved", unmoved)]

    def random(apart: np.ndarray, sizes: Sequence[int], n: int) -> np.ndarray:
        return rng.choice(sum(sizes), n, replace=False).astype(np.int32)

    for rule in _RULES.value:
        for ratio in _RATIOS.value:
            spec = BlendSpec(
                ratio=float(ratio),
                check_layer=_CHECK_LAYER.value,
                rule=random if rule == "random" else _named(rule),
            )

            def way(runtime: Runtime, chunks: list[CachedChunk], ids: list[int], spec=spec) -> Any:
                return runtime.blend(chunks, ids[:1], spec).logits

            out.append((f"{rule} {ratio}", way))
    return out


def _named(rule: str) -> Named:
    for known in get_args(Named):
        if rule == known:
            return known
    raise UsageError(f"--rules {rule}: {', '.join(get_args(Named))} or random")


def reused(
    runtime: Runtime, chunks: list[CachedChunk], question: list[int], moved: bool = True
) -> Array:
    """Chunks at their places as they are, and the question's first token."""
    end = 0
    for i, chunk in enumerate(chunks):
        n_lead = chunk.n_lead if i else 0
        runtime.restore(chunk.snapshot, {chunk.seq_id: 1})
        runtime.seq_rm(1, 0, n_lead)
        if moved:
            runtime.seq_add(1, n_lead, None, end - n_lead)
        runtime.seq_cp(1, 0)
        runtime.seq_rm(1)
        end += len(chunk.tokens) - n_lead
    return runtime.append(question[:1])


def unmoved(runtime: Runtime, chunks: list[CachedChunk], question: list[int]) -> Array:
    """The same at the positions that each chunk has had alone."""
    return reused(runtime, chunks, question, moved=False)


def by_mask(
    runtime: Runtime, model: Any, chunks: list[CachedChunk], question: list[int]
) -> Iterator[tuple[str, np.ndarray]]:
    """The first rule at 15 % in a dense computation, by each kind of mask."""
    spec = BlendSpec(rule=_named(_RULES.value[0]), check_layer=_CHECK_LAYER.value)
    runtime.clear()
    computed = runtime.blend(chunks, question[:1], spec).computed
    dense = DenseBlend(
        model=model,
        chunks=[x.tokens.tolist() for x in chunks],
        n_lead=chunks[0].n_lead,
        question=question,
        check_layer=spec.check_layer,
    )
    for mask in get_args(Mask):
        yield f"dense {_RULES.value[0]} {spec.ratio}, mask by {mask}", dense.logits(computed, mask)


def question_logits(runtime: Runtime, tokens: list[int], n: int) -> np.ndarray:
    """Logits of the last n of some tokens that are appended."""
    return np.asarray(runtime.append(tokens, out_ids=range(len(tokens) - n, len(tokens))))


if __name__ == "__main__":
    commands.run(run)
