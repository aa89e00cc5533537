"""Speculative decoding beside plain decoding: whether the text is the same, and how fast it comes.

    python -m scripts.bench.drafts.speculation --what speed --dtype f32
    python -m scripts.bench.drafts.speculation --what exact --n_prompts 20 --n_predict 128

"speed": a prompt that asks for its own text again, and one sampled so hot that next to nothing
repeats itself; plain steps, --stride steps a program and drafts by prompt lookup, in interleaved
runs, with tokens a round. "exact": greedy text of many beginnings with and without drafts; where
two differ, the gap between the two best logits there. "kl": how far logits of a round's tokens are
from those of single steps, over the same texts: 0 but for rounding at f32. Models are fetched.
"""

import time
from typing import Any

import numpy as np
from absl import flags

from kvrt import CacheConfig, PromptLookup, Runtime, Sampling, Speculation
from kvrt_models.load import load
from scripts._lib import commands, measure
from scripts.experiments import divergence

_WHAT = flags.DEFINE_list("what", ["speed", "exact"], "Of speed, exact, kl.")
_MODEL = flags.DEFINE_string("model", "smollm2-135m", "A model's name, or its file.")
_DTYPE = flags.DEFINE_enum("dtype", "f32", ["f32", "bf16", "f16", "int8"], "Of the weights.")
_N_DRAFT = flags.DEFINE_integer("n_draft", 8, "Drafts a round.", lower_bound=1)
_N_PREDICT = flags.DEFINE_integer("n_predict", 128, "Tokens of a text.", lower_bound=2)
_N_PROMPTS = flags.DEFINE_integer("n_prompts", 20, "exact, kl: texts.", lower_bound=1)
_STRIDE = flags.DEFINE_integer("stride", 8, "speed: steps a program.", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "speed: runs of each side.", lower_bound=1)

NEWS = (
    "The committee met on Tuesday to discuss the budget. Mr. Hale asked whether the bridge over "
    "the river could be repaired before winter, and Mrs. Ortiz said that the stones had been "
    "ordered in May. After a long silence the mayor read the letter from the county aloud, and it "
    "was agreed to write again. "
)
REPEATS = "Copy this text word by word, again and again.\n\n" + NEWS * 3
BEGINNINGS = (
    *("Once upon a time", "The capital of France", "def main():", "Dear Sir,", "In 1969"),
    *("Water boils at", "1, 2, 3,", "The quick brown fox", "To make bread", "My favourite book"),
    *("The cell is", "It was a dark night", "import numpy as np", "Roses are red", "Our company"),
    *("The war began", "A good friend", "Chapter 1", "She opened the door", NEWS * 2),
)


def main() -> None:
    dtype: Any = _DTYPE.value  # flags know no literal types
    model = load(_MODEL.value, dtype=dtype)
    runtime = Runtime(model.decoder, CacheConfig(n_ctx=2048, type_k="f32", type_v="f32"))
    for what, run in (("exact", _exact), ("kl", _kl)):
        for words in BEGINNINGS[: _N_PROMPTS.value] if what in _WHAT.value else ():
            found = run(runtime, model.tokenizer.encode(words))
            head = {"model": _MODEL.value, "dtype": dtype, "prompt": words[:30]}
            measure.emit(f"speculation {what}", **head, **found)
    if "speed" in _WHAT.value:
        for name, words, temp in (("repeats", REPEATS, 0.0), ("no match", BEGINNINGS[0], 2.0)):
            line = _speed(runtime, model.tokenizer.encode(words), temp)
            measure.emit("speculation speed", text=name, dtype=_DTYPE.value, **line)


def _spec() -> Speculation:
    return Speculation(drafter=PromptLookup(), n_draft=_N_DRAFT.value)


def _timed(runtime: Runtime, ids: list[int], **asked: Any) -> tuple[list[int], float]:
    """The text behind a prompt, and its seconds without the prompt's."""
    runtime.clear()
    np.asarray(runtime.prefill(ids))
    start = time.perf_counter()
    found = [token.id for token in runtime.generate(_N_PREDICT.value, **asked)]
    return found, time.perf_counter() - start


def _speed(runtime: Runtime, ids: list[int], temp: float) -> dict[str, Any]:
    sampling = Sampling(temp=temp, seed=1)
    sides = {"plain": {}, "stride": {"stride": _STRIDE.value}, "drafts": {"speculation": _spec()}}
    seconds, before = {name: [] for name in sides}, runtime.stats()
    texts = {name: _timed(runtime, ids, sampling=sampling, **x)[0] for name, x in sides.items()}
    after = runtime.stats()
    for _ in range(_ROUNDS.value):
        for name, asked in sides.items():
            seconds[name].append(_timed(runtime, ids, sampling=sampling, **asked)[1])
    n_rounds = after.n_rounds - before.n_rounds
    n_accepted = after.n_accepted - before.n_accepted
    plain = float(np.median(seconds["plain"]))
    return {
        "same_text": texts["plain"] == texts["drafts"],
        "n_rounds": n_rounds,
        "n_drafted": after.n_drafted - before.n_drafted,
        "n_accepted": n_accepted,
        "tokens_a_round": round((n_accepted + n_rounds) / n_rounds, 2) if n_rounds else None,
        "tokens_s": {
            n: round(_N_PREDICT.value / float(np.median(x)), 1) for n, x in seconds.items()
        },
        "times_plain": {n: round(plain / float(np.median(x)), 3) for n, x in seconds.items()},
    }


def _exact(runtime: Runtime, ids: list[int]) -> dict[str, Any]:
    runtime.clear()
    runtime.prefill(ids)
    plain = list(runtime.generate(_N_PREDICT.value, n_best=2))
    before = runtime.stats()
    drafted, _ = _timed(runtime, ids, speculation=_spec())
    stats = runtime.stats()
    at = next((i for i, t in enumerate(plain) if t.id != drafted[i]), None)
    gap = None if at is None else plain[at].best[0][1] - plain[at].best[1][1]
    n = {x: getattr(stats, x) - getattr(before, x) for x in ("n_rounds", "n_drafted", "n_accepted")}
    return {"same": at is None, "differs_at": at, "gap": gap, **n}


def _kl(runtime: Runtime, ids: list[int]) -> dict[str, Any]:
    """Of single steps from steps of as many tokens as a round has, both of the plain text."""
    text, _ = _timed(runtime, ids)
    single, rounds = (_log_probs(runtime, ids, text, n) for n in (1, 1 + _N_DRAFT.value))
    kl = divergence.kl(single, rounds)
    other = int((single.argmax(axis=1) != rounds.argmax(axis=1)).sum())
    return {"kl": float(kl.mean()), "greatest_kl": float(kl.max()), "n_other_best": other}


def _log_probs(runtime: Runtime, ids: list[int], text: list[int], n: int) -> np.ndarray:
    """Rows of what follows each token of a text behind a prompt, n tokens a step."""
    runtime.clear()
    runtime.prefill(ids)
    parts = [text[i : i + n] for i in range(0, len(text), n)]
    logits = [np.asarray(runtime.append(x, out_ids=range(len(x)))) for x in parts]
    return divergence.log_probs(np.concatenate(logits))


if __name__ == "__main__":
    commands.run(main)
