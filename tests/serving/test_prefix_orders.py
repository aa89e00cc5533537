"""Orders by prefixes: the same outputs as any other order, and fewer tokens computed."""

import random

import numpy as np
import pytest
from plainspace import PlainSpace, Served, alone, ids

from kvrt.options.serving import Rules
from kvrt.serving.request import Request
from tests.serving import engines

pytestmark = pytest.mark.usefixtures("numpy_device")

BY_PREFIX = ["lpm", "dfs", "batchllm"]
ORDERS = ["fcfs", "priority", *BY_PREFIX]


def ask(name, tokens, n_predict=2, **rest) -> Request:
    return Request(id=name, tokens=tuple(tokens), n_predict=n_predict, **rest)


def served(n_seq_max=1, **rules) -> Served:
    space = PlainSpace(n_seq_max, 256, block=1, finds=True)
    return Served(space, Rules(**{"n_batch": 256, "n_alike": 1, **rules}))


def admitted(s: Served) -> list[str]:
    s.run(2000)
    return [name for plan in s.plans for name in ids(plan.admitted)]


def test_longest_cached_prefix_first():
    s = served(order="lpm")
    s.add(ask("first", [1, 2, 3, 4]))
    s.step()
    texts = {"none": [9, 9], "one": [1, 9, 9], "three": [1, 2, 3, 9], "two": [1, 2, 9]}
    for name, tokens in texts.items():
        s.add(ask(name, tokens))
    assert admitted(s) == ["first", "three", "two", "one", "none"]


def test_by_arrival_above_128_that_wait():
    s = served(order="lpm")
    s.add(ask("first", [1, 2, 3, 4], 1))
    s.run(9)
    for i in range(129):
        s.add(ask(f"other{i}", [50, i], 1))
    s.add(ask("hit", [1, 2, 3, 9], 1))
    order = admitted(s)
    assert order[1:5] == ["other0", "other1", "hit", "other2"]


def test_whom_the_cache_never_helps_waits_for_a_bounded_time():
    waited = {}
    for n_wait in (None, 20):
        s = served(order="lpm", n_wait=n_wait)
        s.add(ask("a", [1, 2, 3, 4]))
        s.step()
        s.add(ask("cold", [9, 9]))
        for i in range(60):
            s.add(ask(f"hot{i}", [1, 2, 3, i]))
            if "cold" in ids(s.step().admitted):
                waited[n_wait] = i
                break
    assert waited.keys() == {20} and waited[20] <= 20 + 3


@pytest.mark.parametrize("order", ["dfs", "batchllm"])
def test_a_round_ends_before_the_next_one_begins(order):
    s = served(order=order)
    for name, tokens in {"a": [1, 1, 5], "b": [2, 2, 5], "c": [1, 1, 3]}.items():
        s.add(ask(name, tokens))
    s.step()
    for i in range(5):
        s.add(ask(f"late{i}", [1, 1, 9, i]))
    order_of = admitted(s)
    assert order_of[:3] == {"dfs": ["a", "c", "b"], "batchllm": ["c", "a", "b"]}[order]
    assert all(name.startswith("late") for name in order_of[3:])


@pytest.mark.parametrize("order", BY_PREFIX)
def test_one_that_another_computes_a_prefix_for_is_held_back(order):
    s = served(4, order=order, n_batch=20, n_alike=4)
    for i in range(4):
        s.add(ask(f"{i}", [*range(40), 60 + i], 1))
    s.run(60)
    assert s.n_computed == 40 + 4


def test_by_memory_nobody_is_preempted_and_as_many_run_as_fit():
    """24 places of one token: by text eight are admitted, of which some then have to go."""
    found = {}
    for order in ("fcfs", "batchllm"):
        s = Served(PlainSpace(8, 24, block=1), Rules(n_batch=64, order=order))
        for i in range(12):
            s.add(ask(f"{i}", [i, i, i], 4))
        found[order] = len(s.step().admitted), None
        s.run(200)
        found[order] = found[order][0], sum(x.n_preempted for x in s.ended.values())
    assert found["batchllm"] == (24 // 6, 0)
    assert found["fcfs"][0] == 8 and found["fcfs"][1] > 0


def test_by_memory_samples_that_follow_are_counted():
    s = Served(PlainSpace(8, 20, block=1), Rules(n_batch=64, order="batchllm"))
    for i in range(6):
        s.add(ask(f"{i}", [i, i, i], 5, n=2))
    s.run(200)
    assert not sum(x.n_preempted for x in s.ended.values())


def test_by_memory_samples_that_never_fit_together_follow_each_other():
    s = Served(PlainSpace(1, 22, block=1), Rules(n_batch=5, order="batchllm"))
    s.add(ask("a", range(12), 5, n=4))
    s.run(200)
    assert {x.finish_reason for x in s.ended.values()} == {"length"} and len(s.ended) == 4


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_sampled_does_not_depend_on_the_order(order):
    rng = random.Random(3)
    heads = [tuple(rng.choices(range(90), k=k)) for k in (9, 20)]
    asked = [
        ask(
            f"{i}",
            [*rng.choice(heads), *rng.choices(range(90), k=rng.randint(1, 5))],
            rng.randint(1, 6),
            n=rng.choice([1, 1, 2]),
            priority=rng.randint(0, 2),
            salt=rng.choice([b"", b"x"]),
            cache=rng.random() < 0.8,
        )
        for i in range(30)
    ]
    s = Served(PlainSpace(4, 30, finds=True), Rules(n_batch=16, order=order, n_alike=4))
    for request in asked:
        s.add(request)
    s.run(2000)
    for request in asked:
        for sample in range(request.n):
            assert s.ended[request.id, sample].output == alone(request, sample)


# --- on a model --------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_engine_gives_the_same_in_every_order():
    rng = np.random.default_rng(5)
    heads = [rng.integers(0, 32, n).tolist() for n in (12, 21)]
    asked = [
        engines.ask(
            i, [*heads[i % 2], *rng.integers(0, 32, 1 + i % 4)], 3 + i % 4, n=1 + i % 5 // 4
        )
        for i in range(14)
    ]
    found = []
    for order in ORDERS:
        for by_prefix in (False, True) if order == "fcfs" else (False,):
            rules = Rules(n_batch=16, order=order, by_prefix=by_prefix, n_alike=4)
            engine = engines.make(rules=rules, n_ctx=128, n_ubatch=16)
            found.append(engines.served(engine, asked))
            assert engine.stats().prefix["hit"] > 0
    assert all(tokens == found[0] for tokens in found)


N_DOCS, N_QUESTIONS, N_DOC, N_QUESTION = 15, 8, 64, 3


def questions():
    """15 documents with 8 questions each, shuffled; questions of a document share nothing."""
    rng = np.random.default_rng(6)
    docs = rng.integers(0, 32, (N_DOCS, N_DOC)).tolist()
    asked = [
        engines.ask(f"{d}.{q}", [*docs[d], q, *rng.integers(0, 32, N_QUESTION - 1)], 2)
        for d in range(N_DOCS)
        for q in range(N_QUESTIONS)
    ]
    return [asked[i] for i in rng.permutation(len(asked))]


@pytest.mark.slow
def test_documents_with_questions_in_a_pool_of_three():
    """Tokens computed for prompts over the ideal: each edge of the tree of all prompts once."""
    asked, outputs, ratio = questions(), {}, {}
    ideal = len({r.tokens[:n] for r in asked for n in range(1, len(r.tokens) + 1)})
    for order in ("fcfs", "batchllm", "dfs"):
        rules = Rules(n_batch=64, order=order)
        options = dict(n_ctx=3 * N_DOC, n_ubatch=64, block_size=4)
        engine = engines.make(rules=rules, **options)
        outputs[order] = engines.served(engine, asked)
        stats = engine.stats()
        n_hit = stats.prefix["hit"] + stats.prefix["hit_again"]
        n_asked = stats.prefix["asked"] + stats.prefix["asked_again"]
        ratio[order] = (n_asked - n_hit) / ideal
        print(f"{order} {ratio[order]:.3f}")
        assert not stats.sequences["preempted"] or order == "fcfs"
    assert all(found == outputs["fcfs"] for found in outputs.values())
    assert ratio.pop("fcfs") >= 1.5
    assert all(1 <= x <= 1.02 for x in ratio.values())
