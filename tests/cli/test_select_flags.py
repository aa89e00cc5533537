"""`--select`: decode that reads some cells."""

import json

import pytest

from kvrt.runtime.heavy_channels import write_channels

FLAGS = ("--select", "quest", "--select_cells", 32, "--select_sink", 0, "--select_recent", 1)
FLAGS += ("--select_dense", 0)
LONG = ("-n", 60, "--ignore_eos", "--dtype", "f32", "--temp", 0)


@pytest.mark.slow
def test_the_summary_says_how_much_was_read(go):
    """From 1 to 59 tokens behind the prompt's, of which each reads 32 at most."""
    done = go(*LONG, *FLAGS, "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    cached = range(found["n_prompt"], found["n_prompt"] + 59)
    assert (found["select"], found["n_cached"]) == ("quest", sum(cached))
    assert found["n_read"] == sum(min(n, 32) for n in cached) < found["n_cached"]
    part = f"{found['n_read'] / found['n_cached']:.0%}"
    done = go(*LONG, *FLAGS)
    assert f"reads      quest, 32 cells a token at most, {part} of the cached cells" in done.err
    assert "exactness  approximate from token 33 on: each sampled token reads" in done.err
    assert "reads " not in go("-n", 3, "--dtype", "f32").err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--select_cells", 64), "--select_cells sizes sparse reads; add --select quest"),
        (("--select", "quest", "--select_labels", "f16"), "is for --select double_sparsity"),
        (("--select", "double_sparsity"), "add --select_channels FILE"),
        (("--select", "quest", "--select_cells", 100), "--select quest: select reads n_cells"),
        (("--select", "quest", "--rope", "read"), "use rope='write'"),
        (
            ("--select", "quest", "--select_dense", 0, "--draft", "ngram", "--n_draft", 4),
            "leave one of them out",
        ),
        (("--select", "quest", "--policy", "h2o"), "use one of the two"),
        (("--select", "double_sparsity", "--select_channels", "none.json"), "none.json: "),
    ],
    ids=str,
)
def test_what_cannot_be_read_sparsely_is_one_line(go, flags, message):
    done = go(*flags)
    assert done.code == 2 and done.out == b"" and done.err.count("\n") == 1
    assert message in done.err


def test_channels_of_another_model_are_refused(go, tmp_path):
    path = tmp_path / "channels.json"
    write_channels(str(path), (((0, 1),) * 9,) * 9, "0123")
    done = go("--select", "double_sparsity", "--select_channels", path, "--select_dense", 0)
    assert done.code == 2 and "find them with this model" in done.err


@pytest.mark.slow
def test_a_session_says_that_it_was_sampled_by_sparse_reads(go, kvrt, tmp_path):
    path = tmp_path / "a.kv"
    first = go(*LONG, *FLAGS, "--session", path, "--session_all")
    assert first.code == 0, first.err
    said = "from token 33 on sampled by sparse reads (name=quest n_cells=32 "
    found = json.loads(kvrt("inspect", path, "--json").out)
    assert found["select"].startswith("name=quest n_cells=32 ")
    assert found["sequences"][0]["exact"] == 33 < found["sequences"][0]["tokens"]
    again = go("-n", 2, "--dtype", "f32", "--session", path, "--session_ro", prompt=False)
    assert again.code == 0, again.err
    assert said in again.err and "read here: all cells" in again.err.splitlines()[0]
    same = go(*LONG, *FLAGS, "-n", 2, "--session", path, "--session_ro", prompt=False)
    assert said in same.err and "), as here" in same.err.splitlines()[0]
