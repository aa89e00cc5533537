"""States of recurrent layers in llama.cpp's files, number by number, and damaged ones."""

import struct

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt.errors import BadSession, KvrtError, SessionMismatch
from tests.session import llama_bytes as made
from tests.session.llama_bytes import i32, read, u32, written
from tests.toys import HybridLm

pytestmark = pytest.mark.usefixtures("numpy_device")

IDS = [5, 9, 1, 30, 2, 7, 7, 11, 3, 20, 4]
WIDTH = 16


def runtime(*, attention=True, n_seq_max=2, **more):
    config = CacheConfig(n_ctx=64, n_seq_max=n_seq_max, block_size=16, n_ubatch=8, **more)
    return Runtime(HybridLm(attention=attention), config)


def rec(cells, states, n_layers, *, layers=(0,)):
    """The section of states: (pos, owners) of each cell, and its (window, sum) in every layer."""
    out = u32(len(cells)) + b"".join(i32(pos, len(seqs), *seqs) for pos, seqs in cells)
    out += u32(0, n_layers)
    for part in (0, 1):
        for layer in layers:
            rows = [np.asarray(s[layer][part]) for s in states]
            rows = [x.T if part == 0 else x for x in rows]
            out += i32(0) + struct.pack("<Q", rows[0].size * 4)
            out += b"".join(np.ascontiguousarray(x, "<f4").tobytes() for x in rows)
    return out


def state_of(snapshot, s):
    at = snapshot.states.held[s][-1][1]
    return [[np.asarray(t)[at] for t in layer] for layer in snapshot.states.tables]


def test_checkpoints_are_those_of_a_server(load):
    """Number by number, and back: a sequence is cut back to one of them."""
    kept = {"n_checkpoints": 4, "checkpoint_interval": 0}
    at = runtime(attention=False, **kept)
    at.append(IDS[:6])
    at.append(IDS[6:])
    held = at.snapshot()
    content = written(held, (), "mamba", whole=False)
    points = [c for c in held.checkpoints if c.pos in (6, 11)]
    assert [c.pos for c in points] == [6, 11]
    end = u32(0x504B4353, 1, 2)
    for c in points:
        data = u32(0xAF143CD8, 0) + rec([(c.pos - 1, [])], [c.state], 1)
        end += struct.pack("<qiiQ", c.pos, c.pos - 1, c.pos - 1, len(data)) + data + bytes(16)
    assert content.endswith(end)
    found = load(content, (), fingerprint=at.fingerprint, arch="mamba")
    other = runtime(attention=False, **kept)
    other.restore(found)
    assert other.checkpoints() == (6, 11)
    for one in (at, other):
        one.seq_rm(0, 6)
    assert np.array_equal(other.append([4, 8]), at.append([4, 8]))
    for changed, message in (
        (content.replace(u32(0x504B4353, 1, 2), u32(0x504B4353, 2, 2)), "version 2 of the server"),
        (content.replace(u32(0x504B4353, 1, 2), u32(0x504B4353, 1, 1 << 30)), "checkpoints at"),
        (content.replace(u32(0xAF143CD8), u32(0xAF143CD7)), "a checkpoint of 6 tokens"),
        (content[:-20], "needs"),
    ):
        with pytest.raises((BadSession, SessionMismatch), match=message):
            load(changed, (), fingerprint=at.fingerprint, arch="mamba")


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("old", [False, True])
def test_one_sequence_is_what_was_put_together(load, attention, old):
    at = runtime(attention=attention)
    at.append(IDS)
    held = at.snapshot()
    content = written(held, at._cache.device.layout.groups, "jamba", whole=False, old=old)
    end = rec([(len(IDS) - 1, [])], [state_of(held, 0)], 2 if attention else 1)
    assert content.endswith(end)
    if not attention:
        assert content == made.sequence(made.tokens(IDS), end, version=3 if old else 4)
    found = load(content, at._cache.device.layout.groups, fingerprint=at.fingerprint, arch="jamba")
    assert found.seq_ids == (0,) and found.states.held == {0: ((len(IDS) - 1, 0),)}
    for a, b in zip(state_of(found, 0), state_of(held, 0), strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    # What was read goes on as what was written, to the bit.
    other = runtime(attention=attention)
    other.restore(found)
    assert np.array_equal(other.append([4, 8, 15]), at.append([4, 8, 15]))


def test_a_whole_session_names_its_owners(load):
    at = runtime(n_seq_max=3)
    at.append(IDS)
    at.seq_cp(0, 2)
    groups = at._cache.device.layout.groups
    content = written(at.snapshot(), groups, "jamba", whole=True)
    end = rec([(len(IDS) - 1, [0, 2])], [state_of(at.snapshot(), 0)], 2)
    assert content.endswith(end)
    found = load(content, groups, fingerprint=at.fingerprint, arch="jamba", tokens={2: IDS})
    assert found.seq_ids == (0, 2) and found.states.held[0] == found.states.held[2]


def test_what_llama_cpp_cannot_hold_is_not_written():
    at = runtime(attention=False, n_seq_max=3)
    at.append(IDS)
    at.append(IDS[:4], 1)
    with pytest.raises(SessionMismatch, match="write one sequence a file"):
        written(at.snapshot(), (), "mamba", whole=True)
    assert len(written(at.snapshot(), (), "mamba", whole=False, seq_id=1)) > 100
    found = at.snapshot()
    states = type(found.states)(held={0: ((3, 0),)}, tables=found.states.tables)
    with pytest.raises(SessionMismatch, match="there is no state of that token"):
        written(
            type(found)(**{**vars_of(found), "states": states}), (), "mamba", whole=False, seq_id=0
        )
    said = {**found.fingerprint, "recurrent": {"layers": [1], "shapes": [[WIDTH]]}}
    with pytest.raises(SessionMismatch, match="not those of llama"):
        written(
            type(found)(**{**vars_of(found), "fingerprint": said}),
            (),
            "mamba",
            whole=False,
            seq_id=0,
        )


def vars_of(x):
    return {name: getattr(x, name) for name in x.__dataclass_fields__}


SOUND = {"cells": [(1, [])], "n_layers": 1}
STATE = [[np.ones((3, WIDTH), np.float32), np.ones(WIDTH, np.float32)]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cells": [(1, []), (1, [])]}, "2 states, 1 is allowed"),
        ({"cells": []}, "0 states, 1 is allowed"),
        ({"cells": [(1, [0])]}, "has 1 owners"),
        ({"cells": [(-1, [])]}, "at position -1"),
        ({"cells": [(5, [])]}, "is of position 5, and there are 2 tokens"),
        ({"n_layers": 2}, "states of 2 layers in layout 0, the model has 1"),
        (
            {"state": [[np.ones((2, WIDTH), "f4"), np.ones(WIDTH, "f4")]]},
            "have 128 bytes of type 0",
        ),
        ({"state": [[STATE[0][0] * np.nan, STATE[0][1]]]}, "no finite numbers"),
    ],
)
def test_states_that_are_of_no_such_model(load, change, message):
    of = {**SOUND, "state": STATE, **change}
    end = rec(of["cells"], [of["state"]] * max(len(of["cells"]), 1), of["n_layers"])
    with pytest.raises((BadSession, SessionMismatch), match=message):
        load(
            made.sequence(made.tokens([3, 4]), end),
            (),
            fingerprint=runtime(attention=False).fingerprint,
            arch="mamba",
        )


@pytest.mark.slow
def test_any_damage_is_refused_or_another_sound_file(load):
    at = runtime(n_checkpoints=2, checkpoint_interval=0)
    at.append(IDS)
    groups, said = at._cache.device.layout.groups, at.fingerprint
    content = written(at.snapshot(), groups, "jamba", whole=False)
    draw = np.random.default_rng(0)
    for n in range(8, len(content), 97):
        with pytest.raises(KvrtError):
            load(content[:n], groups, fingerprint=said, arch="jamba")
    with pytest.raises(BadSession, match="bytes follow"):
        load(content + b"12345678", groups, fingerprint=said, arch="jamba")
    for _ in range(150):
        changed = bytearray(content)
        changed[draw.integers(len(changed))] = draw.integers(256)
        try:
            found = load(bytes(changed), groups, fingerprint=said, arch="jamba")
        except (BadSession, SessionMismatch):
            continue
        assert found.seq_ids == (0,)


def test_positions_of_states_and_cells_agree(load):
    at = runtime()
    at.append(IDS)
    groups, held = at._cache.device.layout.groups, at.snapshot()
    content = written(held, groups, "jamba", whole=False)
    good = rec([(len(IDS) - 1, [])], [state_of(held, 0)], 2)
    wrong = rec([(len(IDS) - 2, [])], [state_of(held, 0)], 2)
    with pytest.raises(
        BadSession, match="states of the positions 0: 9, the sequences end at 0: 10"
    ):
        load(content.replace(good, wrong), groups, fingerprint=at.fingerprint, arch="jamba")


def test_caches_of_others_are_refused(tmp_path):
    at = runtime(attention=False)
    at.append(IDS)
    path = tmp_path / "x.bin"
    path.write_bytes(written(at.snapshot(), (), "mamba", whole=False))
    other = {**at.fingerprint, "recurrent": {"layers": [1], "shapes": [[4, WIDTH], [WIDTH]]}}
    with pytest.raises(SessionMismatch, match="take the model that made it"):
        read(path, (), "mamba", fingerprint=other)
