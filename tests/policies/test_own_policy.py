"""A policy of one's own: scores that are no numbers, scores of a wrong shape, and what it is."""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import (
    CacheConfig,
    Engine,
    EngineConfig,
    GroupSpec,
    LayerSkip,
    Request,
    RopeSpec,
    Runtime,
    Speculation,
    session,
)
from kvrt.attention.scored.evict import evict
from kvrt.attention.scored.head_slots import HeadSlots, SlotMarks
from kvrt.attention.scored.layers import ScoredGroup, by_kind
from kvrt.attention.scored.policy import Reads
from kvrt.attention.scored.reads import choose_slots
from kvrt.attention.scored.spec import SlotSpec, empty_slots
from kvrt.cli.batch import progress
from kvrt.cli.report import phrases
from kvrt.errors import BadConfig, SessionMismatch
from kvrt.files.class_source import class_identity
from kvrt.options.serving import TierConfig
from kvrt.policies import ContextShift
from kvrt.policies.scored import H2O, ScoredPolicy
from kvrt.session import fingerprint
from kvrt.session.fingerprint import named_policy
from tests.toys import KindedLm, ToyLm

N_KV, N_SINK, N_RECENT = 2, 2, 8
SIZES = {"budget": 20, "interval": 8, "n_sink": N_SINK, "n_recent": N_RECENT}
GROUP = GroupSpec(layers=(0,), n_kv_heads=N_KV, head_dim=8, rope=RopeSpec(n_rot=8))
N_SLOTS = SIZES["budget"] + SIZES["interval"]


evicted = jax.jit(evict, static_argnums=0)


class Sums(ScoredPolicy):
    """What the tests put into the sums."""

    def score(self, seen):
        return seen.sums


def spec_of(policy):
    kept = {"group": GROUP, "budget": policy.budget, "type_k": "f32", "type_v": "f32"}
    return SlotSpec(policy=policy, n_ctx=0, **kept)


def filled(spec, sums):
    """Slots of which all are taken, with these sums."""
    slots: HeadSlots = empty_slots(spec)
    n = spec.policy.budget + spec.policy.interval
    pos = np.where(np.arange(spec.n_slots) < n, np.arange(spec.n_slots), 0).astype(np.int32)
    marks = SlotMarks(
        pos=np.tile(pos, (N_KV, 1)),
        sums=np.pad(np.float32(sums), ((0, 0), (0, spec.n_slots - n))),
        filled=np.int32(n),
        queries=slots.marks.queries,
        chosen=slots.marks.chosen,
    )
    return dataclasses.replace(slots, marks=marks)


def scores(which):
    """One a kv head and token, of which some are NaN."""
    found = np.tile(np.arange(N_SLOTS, dtype=np.float32), (N_KV, 1))
    found[which] = np.nan
    return found


EVERY_THIRD = np.s_[:, ::3]
PATTERNS = {
    "third": (EVERY_THIRD, {}),
    "all": (np.s_[:], {}),
    "newest": (np.s_[:, -8:], {}),
    "one head": (np.s_[0], {}),
    "shared": (EVERY_THIRD, {"head_share": 0.3}),
    "shared, one head": (np.s_[0], {"head_share": 0.3}),
}


@pytest.mark.parametrize(("which", "more"), PATTERNS.values(), ids=PATTERNS)
def test_nan_goes_first_and_protected_tokens_stay(which, more):
    spec, given = spec_of(Sums(**SIZES, **more)), scores(which)
    slots, n_nan = evicted(spec, filled(spec, given))
    pos, taken = np.asarray(slots.marks.pos), np.asarray(slots.marks.taken)
    kept = [p[t].tolist() for p, t in zip(pos, taken, strict=True)]
    protected = {*range(N_SINK), *range(N_SLOTS - N_RECENT, N_SLOTS)}
    assert all(protected <= set(head) for head in kept)
    assert sum(map(len, kept)) == N_KV * SIZES["budget"]
    assert int(n_nan) == np.isnan(given).sum()
    dropped = [(h, p) for h, head in enumerate(kept) for p in set(range(N_SLOTS)) - set(head)]
    n_free_nan = [np.isnan(given[h, sorted(set(range(N_SLOTS)) - protected)]).sum() for h in (0, 1)]
    # As many as may go: those that a head must keep stay, NaN or not.
    assert sum(np.isnan(given[h, p]) for h, p in dropped) == sum(
        min(n, sum(x == h for x, _ in dropped)) for h, n in enumerate(n_free_nan)
    )


def test_the_least_of_numbers_ranks_above_nan():
    spec, given = spec_of(Sums(**SIZES)), np.full((N_KV, N_SLOTS), -np.inf, np.float32)
    given[:, 2:4] = np.nan
    slots, _ = evict(spec, filled(spec, given))
    assert (
        np.asarray(slots.marks.pos)[:, :20].tolist() == [[0, 1, *range(4, 14), *range(20, 28)]] * 2
    )


def test_nan_is_chosen_last_by_queries_that_read_some():
    spec = spec_of(Sums(**SIZES))
    reads = Reads(n_read=8, n_recent=4, every=4)
    marks = filled(spec, scores(EVERY_THIRD)).marks
    marks = dataclasses.replace(marks, chosen=jnp.zeros((N_KV, 4), jnp.int32))
    found = jax.jit(choose_slots, static_argnums=0)(reads, marks, np.int32(N_SLOTS - 1))
    chosen = np.asarray(found.chosen) - 1
    assert not np.isnan(scores(EVERY_THIRD)[0, chosen[0]]).any()


class OneForAll(ScoredPolicy):
    def score(self, seen):
        return seen.sums[0]


class Scalar(ScoredPolicy):
    def score(self, seen):
        return 1.0


class Complex(ScoredPolicy):
    def score(self, seen):
        return seen.sums.astype(jnp.complex64)


class OneQueryHead(Sums):
    def observe(self, seen):
        return seen.probabilities[:, :1]


WRONG = {
    OneForAll: r"OneForAll.score gives float32\[28\], real numbers of shape \[2, 28\]",
    Scalar: r"Scalar.score gives float\[\], .* one for each of seen.sums",
    Complex: r"Complex.score gives complex64\[2, 28\]",
    OneQueryHead: r"OneQueryHead.observe gives .* one for each of seen.probabilities",
}


@pytest.mark.parametrize(("kind", "says"), WRONG.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_scores_of_a_wrong_shape_are_refused_before_a_step(kind, says):
    with pytest.raises(BadConfig, match=says) as found:
        by_kind([GROUP], None, CacheConfig(n_ctx=64), kind(**SIZES), {})
    assert "\n" not in str(found.value)


# --- counts ----------------------------------------------------------------------------------

CONFIG = CacheConfig(n_ctx=64, n_ubatch=16)


class EveryThird(ScoredPolicy):
    def score(self, seen):
        return jnp.where(seen.pos % 3 == 0, jnp.nan, 1.0)


def n_nan(n_tokens):
    """NaN scores of one kv head, by the lists: evictions at 28, 36, 44 tokens and so on."""
    held, n = [], 0
    for pos in range(n_tokens):
        held.append(pos)
        if len(held) == N_SLOTS:
            n += sum(p % 3 == 0 for p in held)
            first, newest = held[:N_SINK], held[-N_RECENT:]
            rest = sorted(held[N_SINK:-N_RECENT], key=lambda p: (p % 3 == 0, p))
            held = first + sorted(rest[: SIZES["budget"] - N_SINK - N_RECENT]) + newest
    return n


class Zeros:
    """Drafts that are refused, but by chance."""

    def check(self, n_vocab):
        pass

    def draft(self, context, n):
        return [0] * n


@pytest.mark.slow
@pytest.mark.parametrize("model", [ToyLm, KindedLm])
@pytest.mark.parametrize("drafter", [Zeros(), LayerSkip(exit_layer=1)], ids=["zeros", "layers"])
def test_evictions_behind_refused_drafts_are_not_counted(model, drafter):
    runtime = Runtime(model(n_layers=2), CONFIG, policy=EveryThird(**SIZES))
    runtime.append([(7 * i) % 32 for i in range(42)])
    list(runtime.generate(20, speculation=Speculation(drafter=drafter, n_draft=3)))
    stats = runtime.stats()
    assert stats.n_drafted > stats.n_accepted
    assert stats.n_nan_scores == 2 * N_KV * n_nan(runtime.seq_pos_max() + 1)


@pytest.mark.slow
def test_stats_count_scores_that_were_nan():
    runtime = Runtime(ToyLm(n_layers=1), CONFIG, policy=EveryThird(**SIZES))
    tokens = [(7 * i) % 32 for i in range(50)]
    runtime.append(tokens[:45])
    assert runtime.stats().n_nan_scores == N_KV * n_nan(45) > 0
    list(runtime.generate(20, stride=4))
    n = N_KV * n_nan(64)
    assert runtime.stats().n_nan_scores == n
    options = EngineConfig(mode="paged")
    with Engine(ToyLm(n_layers=1), CONFIG, options, policy=EveryThird(**SIZES)) as engine:
        engine.add_request(Request(id="a", tokens=tuple(tokens[:45]), n_predict=20))
        while engine.has_work:
            engine.step()
        stats = engine.stats()
    assert stats.n_nan_scores == n
    assert ("scores that were NaN", str(n)) in list(progress.rows(stats))
    assert phrases.nan_scores(n).startswith(f"{n} scores were NaN")


# --- identity --------------------------------------------------------------------------------

SOURCE = '''
from kvrt.policies.scored import H2O

class Mine(H2O):
    """Sums, or what stands against them."""
    version = {version!r}

    def score(self, seen):
        return {sign}seen.sums
'''


def written(folder, monkeypatch, module, **change):
    """A policy of one's own in a module of its own."""
    monkeypatch.syspath_prepend(folder)
    (folder / f"{module}.py").write_text(SOURCE.format(**{"version": "", "sign": ""} | change))
    sys.modules.pop(module, None)
    importlib.invalidate_caches()
    return importlib.import_module(module).Mine(**SIZES)


def described(policy):
    scored = [ScoredGroup(group=GROUP, slots=(spec_of(policy),))]
    found = fingerprint.describe((GROUP,), None, CONFIG, 64, "w", {})
    return fingerprint.with_scored(found, scored, CONFIG)


def test_a_class_of_ones_own_is_told_by_module_version_and_source(tmp_path, monkeypatch):
    here = described(written(tmp_path, monkeypatch, "first_kept"))
    others = {
        "module": written(tmp_path, monkeypatch, "other_kept"),
        "version": written(tmp_path, monkeypatch, "versioned_kept", version="2"),
    }
    (tmp_path / "first_kept.py").unlink()
    others["source"] = written(tmp_path, monkeypatch, "first_kept", sign="-")
    for name, policy in others.items():
        with pytest.raises(SessionMismatch, match="use the class that kept its tokens") as caught:
            fingerprint.check_match(here, described(policy), convert=True)
        assert "\n" not in str(caught.value)
        assert fingerprint.digest(described(policy)) != fingerprint.digest(here), name


def test_the_source_is_the_one_that_was_imported(tmp_path, monkeypatch):
    policy = written(tmp_path, monkeypatch, "edited_kept")
    before = class_identity(type(policy))
    (tmp_path / "edited_kept.py").write_text(SOURCE.format(version="", sign="-"))
    assert class_identity(type(policy)) == before and before["source"]


def test_methods_count_where_two_classes_have_one_name():
    def made(score):
        return type("Mine", (H2O,), {"score": score})

    one, two = (class_identity(made(f)) for f in (Sums.score, OneForAll.score))
    assert one["source"] != two["source"] and one["name"] == two["name"]


def test_kvrt_policies_are_told_by_name_and_fields_as_before():
    said = described(H2O(**SIZES))["scored"][0]["policy"]
    assert said["name"] == "H2O" and "class" not in said
    own = type("H2O", (H2O,), {})
    assert described(own(**SIZES)) != described(H2O(**SIZES))


def test_a_session_of_before_that_names_no_class_is_refused():
    here = described(Sums(**SIZES))
    before = {k: x for k, x in here["scored"][0]["policy"].items() if k != "class"}
    older = here | {"scored": [here["scored"][0] | {"policy": before}]}
    with pytest.raises(SessionMismatch, match="older sessions do not say which they had"):
        fingerprint.check_match(older, here, convert=False)


def test_a_policy_by_position_of_ones_own_is_named_as_such():
    assert "class" not in named_policy(ContextShift(n_keep=1), {})
    own = type("ContextShift", (ContextShift,), {})(n_keep=1)
    assert named_policy(own, {})["class"]["module"] == __name__


def test_a_field_without_a_json_form_is_refused_in_one_line():
    with pytest.raises(BadConfig, match="use numbers, texts, None, or tuples of them"):
        fingerprint.plain({"x": object()})
    assert fingerprint.plain(np.float32(0.5)) == 0.5


@pytest.mark.slow
def test_a_session_of_another_class_of_the_same_name_is_refused(tmp_path, monkeypatch):
    model = ToyLm(n_layers=1)
    runtime = Runtime(model, CONFIG, policy=written(tmp_path, monkeypatch, "saved_kept"))
    runtime.append(list(range(30)))
    session.save(tmp_path / "a.kv", runtime.snapshot())
    found = session.read(tmp_path / "a.kv")
    same = written(tmp_path, monkeypatch, "saved_kept")
    Runtime(model, CONFIG, policy=same).restore(found)
    other = written(tmp_path, monkeypatch, "elsewhere_kept", sign="-")
    with pytest.raises(SessionMismatch, match=r"class\.module is saved_kept in the session"):
        Runtime(model, CONFIG, policy=other).restore(found)


def test_a_disk_tier_serves_one_policy_alone(tmp_path):
    model, config = ToyLm(n_layers=1), CacheConfig(n_ctx=64, n_seq_max=1, block_size=16)

    def opened(policy, identity=None):
        tiers = TierConfig(host_bytes=1 << 20, disk=tmp_path, disk_bytes=1 << 20)
        options = EngineConfig(tiers=tiers, identity=identity or {})
        Engine(model, config, options, policy=policy).close()

    opened(H2O(**SIZES))
    for other in (H2O(**SIZES, normalised=True), Sums(**SIZES)):
        with pytest.raises(BadConfig, match="another policy by score; give another name"):
            opened(other)
    with pytest.raises(BadConfig, match="another model"):
        opened(H2O(**SIZES), {"arch": "other"})
    opened(H2O(**SIZES))
