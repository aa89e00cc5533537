"""NaN and infinities of a snapshot: found in every array, and never saved by a command."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from snapshots import snapshot

from kvrt import CacheConfig, Runtime
from kvrt.cli.flags.session_files import PrefillOptions
from kvrt.cli.run.generation import Reading
from kvrt.cli.run.kept_session import KeptSession
from kvrt.errors import BadLogits
from kvrt.session.change.damage import find_damage
from tests.toys import ToyLm

pytestmark = pytest.mark.usefixtures("numpy_device")


def with_block(held, group, block, **arrays):
    blocks = list(held.groups[group].blocks)
    blocks[block] = dataclasses.replace(blocks[block], **arrays)
    groups = list(held.groups)
    groups[group] = dataclasses.replace(groups[group], blocks=blocks)
    return dataclasses.replace(held, groups=tuple(groups))


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
def test_layers_sides_and_positions_are_named(dtype):
    held = snapshot(n_cells=(40, 300), dtype=dtype)
    assert find_damage(held) is None
    k = np.array(held.groups[1].blocks[1].k)
    k[1, 7, 0, 2] = k[1, 9, 1, 3] = 0x7FC0 if dtype == "uint16" else np.nan
    held = with_block(held, 1, 1, k=k)
    where = "the keys of layer 1 have 2 values of NaN or infinity, first at position 263"
    assert find_damage(held) == where
    v = np.array(held.groups[1].blocks[0].v)
    v[0, 5, 0, 0] = 0xFF80 if dtype == "uint16" else -np.inf
    found = find_damage(with_block(held, 1, 0, v=v))
    assert found == (
        "the values of layer 0 have 1 value of NaN or infinity, first at position 5, and 1 more "
        "arrays are damaged"
    )


def test_states_and_logits_are_looked_at_too():
    held = snapshot(states=True)
    assert find_damage(held) is None
    tables = [[np.array(x) for x in layer] for layer in held.states.tables]
    tables[1][1][0, 2] = np.inf
    states = dataclasses.replace(held.states, tables=tuple(map(tuple, tables)))
    found = find_damage(dataclasses.replace(held, states=states))
    assert found == "array 1 of the states of layer 7 has 1 value of NaN or infinity"
    pos, x = held.logits[0]
    for values, said in (
        (np.where(np.arange(90) < 3, -np.inf, x), None),
        (np.full(90, -np.inf), "the logits of sequence 0, of position 39, have no finite value"),
        (np.where(np.arange(90) < 3, np.inf, x), "have 3 values of NaN or infinity"),
    ):
        found = find_damage(dataclasses.replace(held, logits={0: (pos, values)}))
        assert found is None if said is None else said in found


@pytest.mark.parametrize("bad", [False, True])
def test_a_prompt_that_was_interrupted_is_saved_if_it_is_sound(tmp_path, bad):
    model = ToyLm(n_layers=1)
    if bad:
        model.embedding[...] = model.embedding[...].at[3].set(jnp.nan)
    runtime = Runtime(model, CacheConfig(n_ctx=16, block_size=16, n_ubatch=8))
    # Its steps but the last one want no logits, so nothing tells but the arrays.
    runtime.append([1, 2, 3], out_ids=[0])
    kept = KeptSession(PrefillOptions(output=str(tmp_path / "a.kv"), quiet=True))
    reading = Reading(ids=[1, 2, 3, 4, 5], spans=[(0, 5)], n_done=3)
    if bad:
        with pytest.raises(BadLogits, match="not saved, since the keys of layer 0 have 32 values"):
            kept.after_prompt(runtime, reading)
    else:
        kept.after_prompt(runtime, reading)
        kept.finish()
    assert (tmp_path / "a.kv").exists() != bad
