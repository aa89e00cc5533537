"""Speculative decoding: text and cache as without drafts, whichever of them are refused."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from kvrt import (
    AttentionSinks,
    CacheConfig,
    ContextShift,
    MaskSpec,
    PromptLookup,
    Runtime,
    Sampling,
    SelfExtend,
    Speculation,
)
from kvrt.cells.cells import owned
from kvrt.errors import BadConfig, BadToken, CacheFull
from kvrt.store.codec import decode
from tests.indexedlm import IndexedLm
from tests.latentlm import LatentLm
from tests.marks import first_fast, slow
from tests.numpy_device.device import installed
from tests.sharedlm import CLA2, SharedLm
from tests.toys import HybridLm, ToyLm

N_VOCAB, N_DRAFT, PROMPT = 32, 5, [3, 1, 4, 1, 5, 9, 2, 6]
FULL = MaskSpec()
WINDOW = MaskSpec(kind="window", size=9)
KINDS = {
    "full": lambda: ToyLm(n_vocab=N_VOCAB),
    "window": lambda: ToyLm(n_vocab=N_VOCAB, masks=[WINDOW, FULL]),
    "heads of 32": lambda: ToyLm(n_vocab=N_VOCAB, head_dim=32),
    "hybrid": HybridLm,
    "recurrent": lambda: HybridLm(attention=False),
    "shared": lambda: SharedLm(kv_of=CLA2),
    "latent": LatentLm,
    "indexed": IndexedLm,
}
PAPER = SelfExtend(ga_n=2, ga_w=4, kind="paper")
# Latents and the delta rule are in program/test_rounds_by_layer.py, other masks in the matrix.
EACH_KIND = [k for k in KINDS if k not in ("heads of 32", "latent")]
EACH = [k if k in ("full", "hybrid") else slow(k) for k in EACH_KIND]


@functools.cache
def model(kind="full"):
    return KINDS[kind]()


class Script:
    """Drafts a known text, with a mistake at an index that goes round; None at the end of it."""

    def __init__(self, text, n_before, *, mistakes=True):
        self.text, self.n_before, self.mistakes = list(text), n_before, mistakes
        self.asked, self.wrong_at = 0, []

    def check(self, n_vocab):
        self.n_vocab = n_vocab

    def draft(self, context, n):
        begin = len(context.tokens) - self.n_before
        drafts, at = self.text[begin : begin + n], self.asked % (N_DRAFT + 1)
        self.asked += 1
        if self.mistakes and at < len(drafts):
            drafts[at] = (drafts[at] + 1) % self.n_vocab
            self.wrong_at.append(at)
        return drafts


def build(kind="full", policy=None, **options):
    config = {"n_ctx": 128, "block_size": 8, "n_ubatch": 16, **options}
    return Runtime(model(kind), CacheConfig(**config), policy=policy)


def run(runtime, n=48, drafter=None, **asked):
    runtime.clear()
    runtime.prefill(PROMPT)
    spec = drafter and Speculation(drafter=drafter, n_draft=N_DRAFT)
    return list(runtime.generate(n, speculation=spec, **asked))


def ids(tokens):
    return [t.id for t in tokens]


def of_owned(runtime):
    """Keys and values of each group's newest cells by position, and states of its newest token."""
    found = []
    for i, group in enumerate(runtime.group_cells):
        mask = getattr(runtime._cache.host.groups[i].group, "mask")  # noqa: B009
        mine = np.flatnonzero(owned(group, 0)).astype(np.int32)
        order = mine[np.argsort(group.pos[mine])]
        keep = mask.size if runtime._cache.host.groups[i].group.rolls else len(order)
        order = order[-keep:]
        rows = runtime._cache.device.take_kv(i, order)
        found.append((group.pos[order], [np.asarray(decode(x, -1)) for x in rows]))
    states = runtime._cache.host.states
    if states is not None:
        pos, index = states.kept[0][-1]
        tables = jax.tree.leaves(runtime.cache.states)
        found.append((np.array([pos]), [np.asarray(x[index]) for x in tables]))
    return found


def same_cache(a, b, tolerance=5e-5):
    assert a.token_history()[1].tolist() == b.token_history()[1].tolist()
    found = list(zip(of_owned(a), of_owned(b), strict=True))
    assert found
    for (pos, rows), (other_pos, other_rows) in found:
        assert pos.tolist() == other_pos.tolist()
        for x, y in zip(rows, other_rows, strict=True):
            np.testing.assert_allclose(x, y, rtol=0, atol=tolerance)


def differs(kind, tolerance=5e-5, **options):
    """Runs both ways, plainly in NumPy where it can be; the runtime with drafts, for more."""
    with installed():
        plain = build(kind, **options)
    drafted = build(kind, **options)
    text = ids(run(plain))
    script = Script(text, len(PROMPT))
    assert ids(run(drafted, drafter=script)) == text
    same_cache(plain, drafted, tolerance)
    assert set(script.wrong_at) == set(range(N_DRAFT))
    stats = drafted.stats()
    assert (stats.n_rounds > 5, 0 < stats.n_accepted < stats.n_drafted) == (True, True)
    return drafted


@pytest.mark.parametrize("kind", EACH)
def test_text_and_cache_are_those_of_plain_decoding(kind):
    drafted = differs(kind)
    assert sum(k.name == "verify_round" for k in drafted.programs.compiled()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"hadamard": True, "type_k": "int8", "type_v": "q8_0"},
        {"attention": "reference", "type_k": "f16", "type_v": "f16"},
    ],
    ids=str,
)
def test_other_frames_and_implementations(options):
    differs("heads of 32", 0.1, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("window", {}),
        ("latent", {"hadamard": True}),
        ("latent", {"rope": "read"}),
    ],
)
def test_logits_of_a_round_over_a_quantized_cache_are_those_of_single_steps(kind, options):
    """As they would not be if tokens saw each other as they were computed: then by 0.1 on average.

    An integer may be rounded otherwise, as sums of a step of several tokens are ordered otherwise.
    """
    plain, drafted = (build(kind, type_k="int8", type_v="int8", **options) for _ in range(2))
    asked = {"n_best": 3, "n": 30}
    tokens = run(plain, **asked)
    right = Script(ids(tokens), len(PROMPT), mistakes=False)
    found = run(drafted, drafter=right, **asked)
    assert ids(found) == ids(tokens)
    assert drafted.stats().n_accepted == drafted.stats().n_drafted > 20
    both = zip(tokens, found, strict=True)
    off = [abs(x - y) for a, b in both for (_, x), (_, y) in zip(a.best, b.best, strict=True)]
    assert np.median(off) < 1e-4


POLICIES = {
    "shift": dict(policy=ContextShift(n_keep=2), n_ctx=32),
    "sinks": dict(policy=AttentionSinks(n_sink=2, n_window=24, n_drop=12), n_ctx=32),
    "self_extend": dict(self_extend=SelfExtend(ga_n=2, ga_w=8)),
    "paper": dict(self_extend=SelfExtend(ga_n=2, ga_w=16, kind="paper"), rope="read"),
    "paper, rotated": dict(self_extend=SelfExtend(ga_n=2, ga_w=16, kind="paper")),
    "checkpoints": dict(n_checkpoints=4),
    "states": dict(n_rs_seq=3),
}


@installed()
@pytest.mark.parametrize("name", first_fast(POLICIES))
def test_policies_cut_rounds_and_change_no_text(name):
    kind = {"checkpoints": "window", "states": "hybrid"}.get(name, "full")
    plain, drafted = build(kind, **POLICIES[name]), build(kind, **POLICIES[name])
    text = ids(run(plain, 60))
    script = Script(text, len(PROMPT))
    if name in ("shift", "sinks"):  # positions drop out, so the drafter counts what it is asked
        script.draft = functools.partial(by_newest, text)
    assert ids(run(drafted, 60, drafter=script)) == text
    same_cache(plain, drafted)
    assert drafted.stats().n_shift == plain.stats().n_shift
    assert drafted.stats().n_accepted > 5
    if name == "states":
        kept = [r._cache.host.states.kept[0] for r in (plain, drafted)]
        assert [pos for pos, _ in kept[0]] == [pos for pos, _ in kept[1]]
        drafted.seq_rm(0, drafted.seq_pos_max() - 2)
        plain.seq_rm(0, plain.seq_pos_max() - 2)
        same_cache(plain, drafted)


def by_newest(text, context, n):
    """What follows the newest four tokens in a known text, the last of it wrong."""
    last = context.tokens[-4:].tolist()
    for i in range(len(text) - 4):
        if text[i : i + 4] == last:
            drafts = text[i + 4 : i + 4 + n]
            return [*drafts[:-1], (drafts[-1] + 1) % N_VOCAB] if drafts else []
    return []


@installed()
def test_a_sequence_in_blocks_keeps_them():
    plain, drafted = build("full"), build("full")
    text = ids(run(plain))
    drafted.append(PROMPT)
    drafted.to_blocks(0)
    spec = Speculation(drafter=Script(text, len(PROMPT)), n_draft=N_DRAFT)
    assert ids(drafted.generate(48, speculation=spec)) == text
    same_cache(plain, drafted)
    assert len(drafted.table(0)[0]) == -(-(len(PROMPT) + 47) // 8)


SAMPLED = Sampling(temp=0.9, top_k=8, top_p=0.95, repeat_penalty=1.3, repeat_last_n=6, seed=7)


@installed()
@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, Sampling(repeat_penalty=1.5, repeat_last_n=12)],
    ids=["random", "penalty"],
)
def test_sampled_text_is_that_of_the_same_seed(sampling):
    """Penalties and random numbers advance token by token, so drafts change nothing."""
    plain, drafted = build(), build()
    asked = {"sampling": sampling, "recent": PROMPT, "n_best": 2}
    tokens = run(plain, **asked)
    found = run(drafted, drafter=Script(ids(tokens), len(PROMPT)), **asked)
    assert ids(found) == ids(tokens)
    for a, b in zip(tokens, found, strict=True):
        np.testing.assert_allclose([x for _, x in a.best], [x for _, x in b.best], atol=1e-4)
    same_cache(plain, drafted)


class Always:
    """Drafts the same tokens whatever the text is."""

    def __init__(self, drafts):
        self.drafts = drafts

    def check(self, n_vocab):
        pass

    def draft(self, context, n):
        return self.drafts[:n]


class Likely(Always):
    """Drafts the most probable token after each, of a table of logits."""

    def draft(self, context, n):
        found = [int(context.tokens[-1])]
        for _ in range(n):
            found.append(int(self.drafts[found[-1]].argmax()))
        return found[1:]


class Fixed(nnx.Module):
    """Logits that depend on the token alone: the exact distribution of a text is known."""

    recurrent = None

    def __init__(self, n_vocab=5):
        toy = ToyLm(n_vocab=n_vocab, n_layers=1, n_kv_heads=1, head_dim=2)
        rng = np.random.default_rng(3)
        self.groups, self.n_vocab = toy.groups, n_vocab
        self.table = nnx.Param(rng.normal(size=(n_vocab, n_vocab)).astype(np.float32))

    def __call__(self, tokens, attend, out_ids):
        x = self.table[...][tokens]
        attend(0, x[:, None, :2].repeat(2, axis=1), x[:, None, :2], x[:, None, 2:4])
        return x[out_ids]


@pytest.mark.slow
def test_pairs_of_tokens_are_distributed_as_the_model_says():
    """Chi-square of pairs behind one that was certain, accepted and refused drafts together."""
    toy, n = Fixed(), 2000
    runtime = Runtime(toy, CacheConfig(n_ctx=n + 8, block_size=64, n_ubatch=16))
    runtime.prefill([0])
    spec = Speculation(drafter=Likely(np.asarray(toy.table[...])), n_draft=3)
    asked = {"sampling": Sampling(temp=1.0, seed=11), "speculation": spec}
    text = [0, *ids(runtime.generate(n, **asked))]
    stats = runtime.stats()
    assert 0.1 < stats.n_accepted / stats.n_drafted < 0.9
    table = np.asarray(toy.table[...], np.float64)
    p = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    seen = np.zeros_like(p)
    np.add.at(seen, (text[:-1], text[1:]), 1)
    expected = p * seen.sum(1, keepdims=True)
    chi = float(((seen - expected) ** 2 / expected).sum())
    # 5 x 4 degrees of freedom: mean 20, standard deviation sqrt(40).
    assert chi < 20 + 4 * math.sqrt(40)


def test_it_stops_where_plain_decoding_stops():
    with installed():
        plain = build()
    drafted = build()
    text = ids(run(plain))
    end = text[20]
    plain_text = ids(run(plain, stop_ids=[end]))
    right = Script(text, len(PROMPT), mistakes=False)
    assert ids(run(drafted, drafter=right, stop_ids=[end])) == plain_text
    same_cache(plain, drafted)


@installed()
@pytest.mark.parametrize("n", [1, slow(2), slow(3), 9])
def test_it_gives_as_many_tokens_as_were_asked(n):
    plain, drafted = build(), build()
    text = ids(run(plain, 20))
    right = Script(text, len(PROMPT), mistakes=False)
    assert ids(run(drafted, n, drafter=right)) == text[:n]
    run(plain, n)
    same_cache(plain, drafted)


@installed()
def test_two_generations_are_one():
    plain, drafted = build(), build()
    text = ids(run(plain))
    spec = Speculation(drafter=Script(text, len(PROMPT)), n_draft=N_DRAFT)
    first = ids(run(drafted, 13, drafter=spec.drafter))
    assert first + ids(drafted.generate(35, speculation=spec)) == text
    same_cache(plain, drafted)


@installed()
def test_a_generation_left_within_a_round_is_taken_up():
    plain, drafted = build(), build()
    text = ids(run(plain))
    right = Speculation(drafter=Script(text, len(PROMPT), mistakes=False), n_draft=N_DRAFT)
    drafted.prefill(PROMPT)
    tokens = drafted.generate(48, speculation=right)
    first = [next(tokens).id for _ in range(4)]
    tokens.close()
    assert first + ids(drafted.generate(44, speculation=right)) == text
    same_cache(plain, drafted)


@installed()
def test_strides_run_where_there_are_no_drafts():
    plain, drafted = build(), build()
    text = ids(run(plain))
    script = Script(text, len(PROMPT))
    script.draft = lambda context, n: [] if len(context.tokens) % 3 else text[:n]
    assert ids(run(drafted, drafter=script, stride=4)) == text
    stats = drafted.stats()
    assert 0 < stats.n_rounds < len(text) // 2 and stats.n_drafted > 0


@installed()
@pytest.mark.slow
def test_prompt_lookup_needs_fewer_steps_on_a_text_that_repeats_itself():
    plain, drafted = build("full"), build("full")
    prompt = PROMPT * 3
    for runtime in (plain, drafted):
        runtime.prefill(prompt)
    text = ids(plain.generate(60))
    spec = Speculation(drafter=PromptLookup(n_min=1), n_draft=N_DRAFT)
    assert ids(drafted.generate(60, speculation=spec)) == text
    same_cache(plain, drafted)


@installed()
@pytest.mark.slow
def test_a_full_cache_is_refused_as_without_drafts():
    drafted = build(n_ctx=16)
    drafted.prefill(PROMPT)
    spec = Speculation(drafter=Always([1, 2, 3]), n_draft=3)
    with pytest.raises(CacheFull, match="1 tokens need 1 cells, 0 of 16 are free"):
        list(drafted.generate(20, speculation=spec))
    assert drafted.seq_pos_max() == 15


@pytest.mark.parametrize(
    ("options", "n_draft", "message"),
    [
        ({}, 16, "n_draft is 16, and a step of 17 tokens exceeds n_ubatch 16"),
        ({"type_k": "kivi4", "block_size": 32}, 3, "keys of kivi4 share scales by tokens"),
        ({"self_extend": PAPER, "type_k": "int8", "rope": "read"}, 4, "longer than ga_w 4"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(options, n_draft, message):
    runtime = build(**options)
    before = runtime.stats()
    with pytest.raises(BadConfig, match=message):
        runtime.generate(3, speculation=Speculation(drafter=PromptLookup(), n_draft=n_draft))
    assert dataclasses.replace(runtime.stats(), drops=()) == dataclasses.replace(before, drops=())


@installed()
def test_drafts_outside_the_vocabulary_are_refused():
    runtime = build()
    runtime.prefill(PROMPT)
    spec = Speculation(drafter=Always([N_VOCAB]), n_draft=3)
    with pytest.raises(BadToken, match="token id 32 is not in"):
        list(runtime.generate(3, speculation=spec))


@pytest.mark.slow
def test_a_round_is_compiled_ahead():
    from kvrt import GenerationSpec

    runtime, spec = build(), Speculation(drafter=Always([1, 2]), n_draft=2)
    asked = {"n_predict": 9, "seq_id": 0, "sampling": Sampling(), "stop_ids": (), "recent": ()}
    runtime.prepare(8, GenerationSpec(**asked, n_best=0, stride=1, speculation=spec))
    runtime.prefill(PROMPT)
    list(runtime.generate(9, speculation=spec))
    assert sum(k.name == "verify_round" for k in runtime.programs.compiled()) == 1
