"""Orders by prefixes: what is computed is what the tree of all prompts says, and for how long."""

import random

import pytest
from plainspace import PlainSpace, Served

from kvrt.options.serving import Rules
from kvrt.serving.request import Request
from kvrt.serving.scheduling import queue

pytestmark = pytest.mark.usefixtures("numpy_device")

BY_PREFIX = ["lpm", "dfs", "batchllm"]
ORDERS = ["fcfs", "priority", *BY_PREFIX]


class LimitedSpace(PlainSpace):
    """Remembers as many tokens as it has room for; the least recently used leaf goes first."""

    def __init__(self, n_known):
        super().__init__(1, 256, block=1, finds=True)
        self.n_known = n_known
        self.used: dict[tuple[bytes, tuple[int, ...]], None] = {}

    def admit(self, state, n_tokens, whole):
        found = super().admit(state, n_tokens, whole)
        self.touch(state, found or 0)
        return found

    def computed(self, state):
        self.touch(state, state.n_computed)

    def touch(self, state, n_tokens):
        # A prefix after those that go on from it, so that the oldest is always a leaf.
        for n in range(n_tokens, 0, -1):
            key = state.request.salt, tuple(state.tokens[:n])
            self.used.pop(key, None)
            self.used[key] = None
        while len(self.used) > self.n_known:
            del self.used[next(iter(self.used))]
        self.known = set(self.used)


def served(asked, order, space=None, **rules):
    """What was computed for some prompts, whose only sampled token is never computed."""
    s = Served(space or PlainSpace(1, 256, block=1, finds=True), Rules(order=order, **rules))
    for i, tokens in enumerate(asked):
        s.add(Request(id=str(i), tokens=tuple(tokens), n_predict=1))
    s.run(5000)
    return s


def n_edges(asked):
    return len({tuple(x[:n]) for x in asked for n in range(1, len(x) + 1)})


@pytest.mark.parametrize(
    ("order", "n_seq_max"), [*((x, 1) for x in ORDERS), *((x, 4) for x in BY_PREFIX)]
)
def test_with_room_for_all_each_edge_of_the_tree_is_computed_once(order, n_seq_max):
    """Those whose prefix is on its way are held back where several run at once."""
    rng = random.Random(n_seq_max)
    for _ in range(10):
        # The last token is nobody else's: of an equal prompt it would be computed once more.
        asked = [[*rng.choices(range(2), k=rng.randint(0, 9)), 100 + i] for i in range(12)]
        space = PlainSpace(n_seq_max, 256, block=1, finds=True)
        assert served(asked, order, space, n_batch=64, n_alike=1).n_computed == n_edges(asked)


def test_the_last_token_of_a_prompt_that_is_known_is_computed_again():
    """Its logits are wanted, and nobody has kept them."""
    asked = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2], [1, 2, 3]]
    for order in ORDERS:
        n = served(asked[:2], order, n_batch=64, n_alike=1).n_computed
        assert n == 4 + 1
        assert n_edges(asked) < served(asked, order, n_batch=64, n_alike=1).n_computed <= 4 + 3


@pytest.mark.parametrize("order", ["lpm", "dfs"])
def test_three_levels_in_a_cache_of_the_longest_path(order):
    """Shuffled, so that by arrival what is shared is gone before it is asked for again."""
    rng = random.Random(2)
    tree = [
        [a] * 8 + [10 + b] * 6 + [20 + c] * 4 for a in range(4) for b in range(4) for c in range(4)
    ]
    asked = [[*path, 100 + i] for i, path in enumerate(tree)]
    rng.shuffle(asked)
    found = {
        x: served(asked, x, LimitedSpace(20), n_batch=64, n_alike=1).n_computed
        for x in ("fcfs", order)
    }
    ratio = found["fcfs"] / found[order]
    assert ratio > 1.5, ratio
    if order == "dfs":
        assert found["dfs"] == n_edges(asked)


def test_groups_need_their_prefixes_for_a_shorter_time():
    """Tokens of documents that are needed, over all steps: from the first question to the last."""
    asked = [[d] * 20 + [10 + d, 100 + i] for i in range(6) for d in range(8)]
    area = {}
    for order in ("fcfs", "batchllm"):
        steps = {}
        for i, plan in enumerate(served(asked, order, n_batch=64, n_alike=1).plans):
            for state, _, _ in plan.prompts:
                steps.setdefault(state.tokens[0], []).append(i)
            for state in plan.decode:
                steps.setdefault(state.tokens[0], []).append(i)
        area[order] = sum(20 * (1 + max(x) - min(x)) for x in steps.values())
    assert area["batchllm"] < 0.3 * area["fcfs"], area


def seconds_of(plan):
    """A step's time by a model of costs: a pass over the weights, and its tokens beyond some."""
    return 1 + 0.1 * max(plan.n_tokens - 4, 0)


@pytest.mark.slow
def test_long_decodes_first_end_sooner_than_last(monkeypatch):
    """Groups of few tokens in and many out beside those of many in and few out, in both orders."""
    asked = [Request(id=f"long{i}", tokens=(1, 1, 1, i), n_predict=60) for i in range(4)]
    asked += [
        Request(id=f"short{i}", tokens=(2 + i // 4,) * 40 + (i,), n_predict=2) for i in range(24)
    ]
    random.Random(3).shuffle(asked)
    by_groups, ended = queue.by_groups, {}
    for turned in (False, True):

        def ordered(states, n_least, turned=turned):
            found = by_groups(states, n_least)
            return found[::-1] if turned else found

        monkeypatch.setattr(queue, "by_groups", ordered)
        s = Served(PlainSpace(6, 4096, block=1, finds=True), Rules(n_batch=32, order="batchllm"))
        for request in asked:
            s.add(request)
        s.run(2000)
        ended[turned] = sum(map(seconds_of, s.plans))
    assert ended[False] < 0.9 * ended[True], ended
