"""The runtime's device side: the cache, and the programs that take it and give it back."""

import dataclasses

import numpy as np
from flax import nnx

from kvrt.arrays import Array
from kvrt.cells import Cells, create
from kvrt.config import CacheConfig
from kvrt.engine import loop
from kvrt.engine.batch import Batch, bucket, pad, padded
from kvrt.engine.programs import Programs
from kvrt.engine.sample import Sampler
from kvrt.engine.step import Cache, on_device
from kvrt.store import store as rows


class Device:
    """Every method replaces `cache`; arrays of the one before are dead."""

    def __init__(self, model: nnx.Module, config: CacheConfig):
        """Allocates the rows; compiles nothing."""
        self.programs = Programs(model, config)
        self.n_rows = config.n_blocks * config.block_size
        self._n_moves_max = -(-config.n_ctx // rows.MOVE_CHUNK) * rows.MOVE_CHUNK
        store = rows.create(self.programs.groups, config)
        self.cache = Cache(store=store, cells=on_device(create(config.n_ctx, config.n_seq_max)))

    def upload(self, cells: Cells) -> None:
        """Replaces the device's cells by the host's."""
        self.cache = dataclasses.replace(self.cache, cells=on_device(cells))

    def shift(self) -> None:
        """Rotates keys whose cells have a delta, and clears it."""
        self.cache = self.programs.shift(self.cache)

    def scrub(self) -> None:
        """Zeroes the rows of empty cells."""
        self.cache = self.programs.scrub(self.cache)

    def copy_rows(self, src: np.ndarray, dst: np.ndarray) -> None:
        """Copies rows src to rows dst in every layer."""
        if len(src) == 0:
            return
        store = self.programs.move(
            self.cache.store,
            pad(src, self._n_moves_max, self.n_rows),
            pad(dst, self._n_moves_max, self.n_rows),
            np.asarray(len(src), np.int32),
        )
        self.cache = dataclasses.replace(self.cache, store=store)

    def prepare(self, n_tokens: int) -> None:
        """Compiles the steps of a prompt of n_tokens, without running them."""
        config = self.programs.config
        none = np.zeros(0, np.int32)
        blocks = np.zeros(config.n_blocks, np.int32), np.asarray(0, np.int32)
        whole, rest = divmod(n_tokens, config.n_ubatch)
        for n in {min(whole, 1) * config.n_ubatch, rest} - {0}:
            size = bucket(n, config.n_ubatch)
            batch = padded(none, none, none, none, blocks, [], size=size, n_rows=self.n_rows)
            self.programs.compile_forward(self.cache, batch)

    def forward(self, batch: Batch) -> Array:
        """Runs a batch; its logits."""
        logits, self.cache = self.programs.forward(self.cache, batch)
        return logits

    def decode(
        self, plan: loop.LoopPlan, sampler: Sampler, n_best: int
    ) -> tuple[loop.Drawn, Sampler]:
        """Runs a plan of decode steps; what it drew."""
        drawn, self.cache, sampler = self.programs.decode(self.cache, plan, sampler, n_best)
        return drawn, sampler
