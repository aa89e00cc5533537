"""States of the gated delta rule, whose prompts run in chunks: parts, rollback, forks, engines."""

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from tests.toys import DeltaLm

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
TEXT = [(7 * i + i // 5) % 32 for i in range(90)]


def runtime(**change):
    config = {"n_ctx": 256, "block_size": 16, "n_ubatch": 64, "n_seq_max": 2, **change}
    return Runtime(DeltaLm(), CacheConfig(**config))


def read(at, parts, n_rest=0):
    """Logits of the text in parts of these sizes, the last tokens decoded one by one."""
    tokens, logits = list(TEXT), []
    for size in parts:
        part, tokens = tokens[:size], tokens[size:]
        logits.append(np.asarray(at.append(part, out_ids=range(size))))
    logits += [np.asarray(at.decode({0: x})[0])[None] for x in tokens[:n_rest]]
    return np.concatenate(logits)


def assert_near(a, b):
    worst = float(np.abs(np.asarray(a) - np.asarray(b)).max())
    print(f"largest difference {worst:.1e}")
    assert worst < TOLERANCE * max(1.0, float(np.abs(np.asarray(b)).max()))


@pytest.mark.parametrize("n_rs_seq", [0, 6])
def test_parts_of_any_size_are_single_steps(n_rs_seq):
    one = read(runtime(), [1] * 90)
    assert_near(read(runtime(n_rs_seq=n_rs_seq), [64, 9, 17]), one)
    assert_near(read(runtime(n_rs_seq=n_rs_seq), [41, 29], 20), one)


def test_a_rollback_into_a_prompt_continues_as_if_nothing_had_been():
    at, fresh = runtime(n_rs_seq=6), runtime()
    at.append(TEXT[:60])
    assert at.resume_positions().earliest == 54
    at.seq_rm(0, 55)
    assert_near(at.append(TEXT[60:80])[0], fresh.append(TEXT[:55] + TEXT[60:80])[0])


def test_a_probe_changes_nothing_and_sees_the_same():
    at = runtime()
    at.append(TEXT[:50])
    probed = at.probe(TEXT[50:])
    assert_near(at.append(TEXT[50:], out_ids=range(40)), probed)


def test_a_fork_and_its_source_go_on_each_for_itself():
    at, fresh = runtime(), runtime()
    at.append(TEXT[:40])
    at.seq_cp(0, 1)
    at.append(TEXT[::-1], 1)
    assert_near(at.append(TEXT[40:])[0], fresh.append(TEXT)[0])
