"""Prompts of modules against float64 that masks what a module has not seen."""

import dataclasses

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime
from kvrt.errors import (
    BadConfig,
    BadRange,
    BadSequence,
    CannotRewind,
    KvrtError,
    SessionMismatch,
    UsageError,
)
from kvrt.reuse.schema import lay_out, read_schema
from kvrt.runtime.prompt_cache import PromptCache
from tests.oracle import rotated
from tests.toys import ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")

LETTER = """
<schema name="letter">
  3 17 22 9 40
  <union>
    <module name="polite">5 6 7 8 30 31 32 33 34</module>
    <module name="short">11 12 13</module>
  </union>
  <module name="to">
    14 15 <parameter name="who" length="4"/> 16 18 <parameter name="by" length="2"/>
  </module>
  <module name="last">50 51 52 53</module>
</schema>
"""
UNKNOWN, LEAD = 0, (1,)
CONFIG = CacheConfig(n_ctx=128, n_seq_max=4, n_ubatch=16, block_size=32)
SUFFIX = [20, 21, 22]
ARGUMENTS = {("to", "who"): [60, 61, 62], ("to", "by"): [63]}


def encode(text):
    return [int(word) for word in text.split()]


def layout_of(schema=LETTER, lead=LEAD):
    return lay_out(read_schema(schema), encode, UNKNOWN, lead)


def layer_groups(model):
    return [g for g in model.groups for _ in g.layers]


def masked_logits(model, ids, pos, sees):
    """ToyLm in float64 over tokens at any positions, where `sees[i, j]`: i attends to j."""
    embedding, out = (np.asarray(x[...], np.float64) for x in (model.embedding, model.out))
    x, h, kv = embedding[ids], model.n_heads, model.n_kv_heads
    for weights, group in zip(model.qkv, layer_groups(model), strict=True):
        rows = (0.2 * x @ np.asarray(weights[...], np.float64)).reshape(len(x), h + 2 * kv, -1)
        q, k, v = rotated(rows[:, :h], pos), rotated(rows[:, h : h + kv], pos), rows[:, h + kv :]
        k, v = np.repeat(k, h // kv, axis=1), np.repeat(v, h // kv, axis=1)
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
        near = pos[:, None] - pos[None] < (group.mask.size or len(pos) + pos.max())
        s = np.where((sees & near)[None], s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", p, v).reshape(len(x), -1)
    return x @ out * 0.2


def oracle(model, layout, names, suffix, arguments, *, blind=True, packed=False):
    """Logits of the suffix, where modules see the lead, themselves and their own placeholders.

    Packed, positions have no gaps where a prompt leaves modules and places of arguments out.
    """
    rows = [(p, t, "lead", True) for p, t in enumerate(layout.lead)]  # position, id, of, served
    for m in layout.modules:
        if m.name and m.name not in names:
            continue
        inside = {at + i for at, n in m.reserved.values() for i in range(n)}
        for i, t in enumerate(m.ids.tolist()):
            rows.append((m.start + i, t, m.name or m.start, m.start + i not in inside))
        for name, (at, _) in m.reserved.items():
            given = arguments.get((m.name, name), ())
            rows += [(at + i, t, "own", True) for i, t in enumerate(given)]
    rows += [(layout.end + i, t, "own", True) for i, t in enumerate(suffix)]
    pos, ids = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    sees = np.zeros((len(rows), len(rows)), bool)
    for i, (at, _, of, _) in enumerate(rows):
        for j, (before, _, other, served) in enumerate(rows):
            known = served if of == "own" or not blind else other in (of, "lead")
            sees[i, j] = before <= at and (known or i == j)
    if packed:
        pos = np.unique(pos, return_inverse=True)[1]
    return masked_logits(model, ids, pos, sees)[-1]


def close(got, expected, atol=1e-5):
    """Equal up to float32, relative to the greatest logit."""
    return np.abs(np.asarray(got) - expected).max() / np.abs(expected).max() < atol


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (["polite", "to", "last"], ARGUMENTS),
        (["last", "short"], {}),
        (["to"], {("to", "by"): [63, 62]}),
        ([], {}),
    ],
)
@pytest.mark.parametrize("rope", ["write", "read"])
def test_a_prompt_is_what_the_masked_computation_gives(names, arguments, rope):
    model, layout = ToyLm(), layout_of()
    runtime = Runtime(model, dataclasses.replace(CONFIG, rope=rope))
    modules = PromptCache.encode(runtime, layout)
    n_free = runtime.n_free
    served = modules.serve(0, names, SUFFIX, arguments)
    assert close(served.logits[0], oracle(model, layout, names, SUFFIX, arguments))
    # Nothing was copied: cells were taken for what was computed alone.
    assert n_free - runtime.n_free == served.n_computed
    assert served.n_computed == len(SUFFIX) + sum(map(len, arguments.values()))
    assert served.n_shared + served.n_computed == len(runtime.token_history(0)[1])
    # As exact as the lead alone: what lies behind it was computed without what stands before.
    assert runtime.n_exact(0) is not None and runtime.n_exact(0) <= 6


def test_modules_that_see_each_other_are_told_apart():
    model, layout = ToyLm(), layout_of()
    modules = PromptCache.encode(Runtime(model, CONFIG), layout)
    names = ["polite", "to", "last"]
    served = modules.serve(0, names, SUFFIX, ARGUMENTS)
    seeing = oracle(model, layout, names, SUFFIX, ARGUMENTS, blind=False)
    assert not close(served.logits[0], seeing, atol=1e-2)


def test_modules_stand_where_the_schema_has_them():
    """The control: without the gaps of what a prompt leaves out it is another prompt."""
    model, layout = ToyLm(), layout_of()
    modules = PromptCache.encode(Runtime(model, CONFIG), layout)
    served = modules.serve(0, ["last"], SUFFIX)
    assert close(served.logits[0], oracle(model, layout, ["last"], SUFFIX, {}))
    packed = oracle(model, layout, ["last"], SUFFIX, {}, packed=True)
    assert not close(served.logits[0], packed, atol=1e-2)


def test_one_module_is_a_cached_prefix():
    model = ToyLm()
    layout = layout_of("<schema><module name='a'>3 4 5 6 7 8 9</module></schema>", lead=())
    served = PromptCache.encode(Runtime(model, CONFIG), layout).serve(0, ["a"], SUFFIX)
    plain = Runtime(model, CONFIG)
    plain.fill([3, 4, 5, 6, 7, 8, 9], 0, 0)
    plain.fill(SUFFIX, 0, 7)
    assert (np.asarray(served.logits) == np.asarray(plain.last_logits(0))).all()


def test_prompts_share_modules_and_go_on_alone():
    model, layout = ToyLm(), layout_of()
    runtime = Runtime(model, dataclasses.replace(CONFIG, n_seq_max=5))
    modules = PromptCache.encode(runtime, layout)
    first = modules.serve(0, ["polite", "to"], SUFFIX, ARGUMENTS)
    second = modules.serve(3, ["to", "short"], [23], {("to", "who"): [44]})
    runtime.append([9, 9, 9], 0)
    runtime.seq_rm(0)
    again = modules.serve(0, ["polite", "to"], SUFFIX, ARGUMENTS)
    assert (np.asarray(first.logits) == np.asarray(again.logits)).all()
    expected = oracle(model, layout, ["to", "short"], [23], {("to", "who"): [44]})
    assert close(second.logits[0], expected)
    held = runtime.token_history(3)
    assert held[0][-1] == layout.end and held[1][-1] == 23


def test_a_session_of_modules_serves_as_they_did():
    model, layout = ToyLm(), layout_of()
    runtime = Runtime(model, CONFIG)
    modules = PromptCache.encode(runtime, layout)
    snapshot = runtime.snapshot()
    served = modules.serve(0, ["short", "last"], SUFFIX)
    fresh = Runtime(model, CONFIG)
    fresh.restore(snapshot)
    again = PromptCache(fresh, layout).serve(0, ["short", "last"], SUFFIX)
    assert (np.asarray(served.logits) == np.asarray(again.logits)).all()
    assert fresh.n_exact(0) == runtime.n_exact(0)
    changed = layout_of(LETTER.replace("50 51", "50 49"))
    with pytest.raises(SessionMismatch, match="'last' is not at position"):
        PromptCache(fresh, changed)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda p: p.serve(0, ["other"], SUFFIX), UsageError, "no module 'other'"),
        (lambda p: p.serve(0, ["to"], []), UsageError, "at least one token"),
        (
            lambda p: p.serve(0, ["to"], SUFFIX, {("to", "by"): [1, 2, 3]}),
            UsageError,
            "3 tokens, and 2 are reserved",
        ),
        (
            lambda p: p.serve(0, ["last"], SUFFIX, {("to", "by"): [1]}),
            UsageError,
            "no parameter 'by' in module 'to'; the prompt's modules have none",
        ),
        (lambda p: p.serve(1, ["last"], SUFFIX), BadRange, "sequence 1 holds tokens"),
        (lambda p: p.serve(0, ["last"], [99]), KvrtError, "99"),
        (lambda p: p.serve(0, ["last"], [5] * 120), KvrtError, "cells"),
    ],
)
def test_what_is_refused_leaves_the_sequence_empty(call, error, said):
    runtime = Runtime(ToyLm(), CONFIG)
    modules = PromptCache.encode(runtime, layout_of())
    n_free = runtime.n_free
    with pytest.raises(error, match=said):
        call(modules)
    assert runtime.seq_pos_max(0) == -1 and runtime.n_free == n_free


@pytest.mark.parametrize(
    ("masks", "change", "error", "said"),
    [
        (None, {"n_seq_max": 2}, BadSequence, "n_seq_max is 2"),
        (None, {"type_k": "kivi4", "type_v": "int4"}, BadConfig, "one scale for several tokens"),
        ([MaskSpec(kind="window", size=8)] * 2, {}, CannotRewind, "swa_full"),
    ],
)
def test_a_runtime_that_cannot_hold_modules_is_refused(masks, change, error, said):
    runtime = Runtime(ToyLm(masks=masks, head_dim=32), dataclasses.replace(CONFIG, **change))
    with pytest.raises(error, match=said):
        PromptCache.encode(runtime, layout_of())
    assert runtime.seq_pos_max(0) == -1


@pytest.mark.slow
def test_windows_with_all_cells_serve_modules():
    masks = [MaskSpec(), MaskSpec(kind="window", size=8)]
    model, layout = ToyLm(masks=masks), layout_of()
    runtime = Runtime(model, dataclasses.replace(CONFIG, swa_full=True))
    served = PromptCache.encode(runtime, layout).serve(0, ["to", "last"], SUFFIX, ARGUMENTS)
    assert close(served.logits[0], oracle(model, layout, ["to", "last"], SUFFIX, ARGUMENTS))
