"""`kvrt batch --budget`: as many tokens as fit, which is said; the same results as with -c."""

import json
import re

import pytest
from test_mistakes import fails

LINES = [
    {"id": "a", "prompt": "the sand of the sea", "n_predict": 8, "temp": 0},
    {"id": "b", "prompt": "the sand of the land", "n_predict": 40, "temp": 0},
]
POLICY = ("--policy", "attention_sinks", "--n_sink", 2)


@pytest.fixture
def batch(kvrt, tiny, tmp_path):
    """`kvrt batch` on the tiny model, without -c."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(x) + "\n" for x in LINES))

    def run(*args, out="out.jsonl"):
        fixed = ["batch", "-m", tiny, "-i", tmp_path / "in.jsonl", "-o", tmp_path / out]
        sizes = ["--n_batch", 8, "--n_seq_max", 4, "--block_size", 8, "--cache_type_k", "f32"]
        return kvrt(*fixed, *sizes, "--cache_type_v", "f32", *args)

    return run


@pytest.mark.slow
def test_a_budget_takes_the_place_of_a_length(batch, tmp_path):
    done = batch("--budget", "300kB", "--n_ctx_seq", 48, *POLICY)
    assert done.code == 0, done.err
    found = re.search(
        r"budget     300kB: ([\d,]+) tokens in [\d,]+ blocks of 8, (\d) requests of 48 at once, "
        r"([\d,]+) bytes\n",
        done.err,
    )
    n_ctx, n_requests, n_bytes = (int(x.replace(",", "")) for x in found.groups())
    assert n_ctx >= 48 and 1 < n_requests <= 4 and n_bytes <= 300_000
    assert batch("-c", n_ctx, "--n_ctx_seq", 48, *POLICY, out="c.jsonl").code == 0
    both = [sorted((tmp_path / name).read_text().splitlines()) for name in ("out.jsonl", "c.jsonl")]
    tokens = [[json.loads(line)["tokens"] for line in lines] for lines in both]
    assert tokens[0] == tokens[1] and len(tokens[0]) == 2
    # The same command is done; another budget decides nothing of a result.
    again = batch("--budget", "400kB", "--n_ctx_seq", 48, *POLICY)
    assert again.code == 0 and "nothing is left to do" in again.err


def test_what_is_refused(batch):
    fails(batch("--budget", "1MB"), 2, "how much of it one request may take", "add --n_ctx_seq N")
    fails(batch("--budget", "1MB", "--n_ctx_seq", 48, "-c", 99), 2, "leave one out")
    fails(batch("--budget", "much", "--n_ctx_seq", 48), 2, "--budget much: a size is wanted")


@pytest.mark.slow
def test_too_little_says_the_least_that_would_do(batch):
    done = batch("--budget", "9kB", "--n_ctx_seq", 48, *POLICY)
    fails(done, 2, "9000 bytes have no room for one request of 48 tokens, which needs ")
    least = re.search(r"which needs (\d+); give so many", done.err)[1]
    assert batch("--budget", least, "--n_ctx_seq", 48, *POLICY).code == 0
