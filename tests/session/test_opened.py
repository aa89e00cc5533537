"""A session that was opened is parsed and checked once, whatever is read of it later."""

import numpy as np
import pytest
from snapshots import assert_equal, snapshot

from kvrt import errors, session
from kvrt.session import codec, expected
from kvrt.session import manifest as manifests

pytestmark = pytest.mark.usefixtures("plain")


@pytest.fixture
def n_checks(monkeypatch):
    """How often a manifest was parsed and checked, and cells were."""
    counts = {"from_json": 0, "check_manifest": 0, "cells": 0}

    def count(module, name):
        real = getattr(module, name)

        def counted(*args):
            counts[name] += 1
            return real(*args)

        monkeypatch.setattr(module, name, counted)

    count(manifests, "from_json")
    count(expected, "check_manifest")
    count(codec, "cells")
    return counts


@pytest.mark.parametrize("container", ["file", "folder"])
def test_it_is_checked_once(tmp_path, n_checks, container):
    taken = snapshot(n_cells=(300, 40), states=True)
    session.save(tmp_path / "x", taken, container)
    n_checks.update(dict.fromkeys(n_checks, 0))
    opened = session.open_session(tmp_path / "x")
    assert opened.manifest.n_tokens == {0: 300} and len(opened.groups) == 2
    assert opened.seq_id == 0 and opened.draw == taken.draws[0]
    np.testing.assert_array_equal(opened.held[0], np.arange(300))
    assert_equal(session.read(opened), taken)
    assert n_checks == {"from_json": 1, "check_manifest": 1, "cells": 1}


@pytest.mark.parametrize("container", ["file", "folder"])
def test_one_that_was_saved_again_is_read_as_it_is_now(tmp_path, container):
    session.save(tmp_path / "x", snapshot(n_cells=(300,)), container)
    opened = session.open_session(tmp_path / "x")
    session.save(tmp_path / "x", snapshot(n_cells=(290,), seed=1), container)
    assert_equal(session.read(opened), snapshot(n_cells=(290,), seed=1))


@pytest.mark.slow
def test_damage_that_came_later_is_seen(tmp_path):
    path = tmp_path / "x.kv"
    session.save(path, snapshot(n_cells=(300,)))
    opened = session.open_session(path)
    data = bytearray(path.read_bytes())
    data[opened.manifest.groups[0].blocks[0].offset + 500] ^= 1
    path.write_bytes(data)
    with pytest.raises(errors.BadSession, match="block 0 of group 0"):
        session.read(opened)
