"""What a cache is said to take, against the arrays of an engine that was then made."""

import dataclasses

import pytest
from test_estimate import CONFIGS, MODELS, n_bytes

from kvrt.program import estimate
from kvrt.serving.cache.prefixes import N_KEPT
from kvrt.serving.config import EngineConfig
from kvrt.serving.engine import Engine

KEPT = {"n_checkpoints": 3, "checkpoint_bytes": 1 << 20}
SIZES = CONFIGS | {"checkpoints": dataclasses.replace(next(iter(CONFIGS.values())), **KEPT)}


@pytest.mark.parametrize("config", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("mode", ["cell", "paged"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_engine_takes_what_was_said(model, mode, config):
    model, n_batch = model(), max(config.n_ubatch, config.n_seq_max)
    config = dataclasses.replace(config, n_rs_seq=0, n_ubatch=n_batch)
    if mode == "paged":
        said = estimate.of_blocks(model.groups, model.recurrent, config)
    else:
        said = estimate.of_cells(model.groups, model.recurrent, config, n_kept=N_KEPT)
    engine = Engine(model, config, EngineConfig(mode=mode))
    cache, space = engine.device.cache, engine.space
    # Of checkpoints only pools have room from the start.
    checkpoints = said.checkpoint_bytes if mode == "paged" else 0
    assert said.cache_bytes + checkpoints == n_bytes(cache.stores) + n_bytes(cache.states)
    paged = mode == "paged"
    host = [x.cells for x in (space._arrays._cells.values() if paged else space._host.groups)]
    assert said.index_bytes == n_bytes(cache.cells) + n_bytes(host)
