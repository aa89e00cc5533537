"""Results of `kvrt batch` after a power loss: those written are there, others follow."""

import json

import msgspec
import pytest
from powerloss import recording
from powerloss_states import states, write_tree

from kvrt.cli.batch.results import Result, Results, failed
from kvrt.errors import UsageError

N = {"a": 1, "b": 3, "c": 1}
RECORDS = {
    "a": [Result(id="a", tokens=[1, 2], text="x" * 40, finish_reason="stop", n_cached=0)],
    "b": [
        Result(id="b", tokens=[3] * 9, text=f"{i}", finish_reason="length", n_cached=1, sample=i)
        for i in range(3)
    ],
    "c": [failed("c", "too long")],
}


def write_all(path, mark=lambda text: None):
    results = Results(str(path), N)
    mark("opened")
    for name, records in RECORDS.items():
        if name not in results.done:
            results.write(records)
            mark(name)
    results.close()


def everything(path):
    return sorted(path.read_text().splitlines())


WANTED = sorted(json.dumps(msgspec.to_builtins(r)) for records in RECORDS.values() for r in records)


def bad_states(tmp_path, monkeypatch, left_out=(), before=b""):
    """States from which it cannot be resumed, or where acknowledged results are missing."""
    (tmp_path / "done").mkdir()
    if before:
        (tmp_path / "done" / "out").write_bytes(before)
    with recording(tmp_path / "done", monkeypatch, left_out) as recorder:
        write_all(tmp_path / "done" / "out", recorder.mark)
    (tmp_path / "states").mkdir()
    bad, n_done = [], set()
    for i, state in enumerate(states(recorder, matters=lambda path: True, most=200)):
        root = tmp_path / "states" / str(i)
        write_tree(root, state.tree)
        try:
            results = Results(str(root / "out"), N)
            results.close()
            n_done.add(len(results.done))
            write_all(root / "out")
            what = "" if everything(root / "out") == WANTED else "other results"
            what = what or ("" if {*state.marks} - {"opened"} <= results.done else "results lost")
        except UsageError as error:
            what = str(error)
        if what:
            bad.append((state.n_done, state.fates, what))
    assert n_done >= {1, 2, 3}
    return bad


A = json.dumps(msgspec.to_builtins(RECORDS["a"][0])).encode() + b"\n"


TORN = A + b'{"id": "c", "tokens": [' + b"7, " * 300  # longer than what follows it


@pytest.mark.parametrize("before", [b"", A, A + bytes(900), TORN])
def test_what_was_acknowledged_is_there_and_the_rest_is_done_again(tmp_path, monkeypatch, before):
    assert not bad_states(tmp_path, monkeypatch, before=before)


@pytest.mark.parametrize("left_out", [("file", 0), ("file", 1), ("file", 2), ("folder", 0)])
def test_an_fsync_that_is_left_out_is_found(tmp_path, monkeypatch, left_out):
    assert bad_states(tmp_path, monkeypatch, [left_out])


def test_the_fsync_after_a_cut_is_needed(tmp_path, monkeypatch):
    assert bad_states(tmp_path, monkeypatch, [("file", 0)], before=TORN)


NOT_OURS = {
    "zeros and something": bytes(4096) + b"a disk image",
    "zeros and a line": bytes(4096) + b'{"text": "x"}\n',
    "a result, zeros, something": A + bytes(100) + b"\x01\x02",
    "a result, zeros, a letter": A + b"Dear\0\0Sir\n",
    "more than one write": A + bytes(100) + b'{"id": "b"}\n' * 4,
}


@pytest.mark.parametrize("data", NOT_OURS.values(), ids=NOT_OURS)
def test_zeros_of_others_stay_as_they_are(tmp_path, data):
    (tmp_path / "out").write_bytes(data)
    with pytest.raises(UsageError, match="it is no result"):
        Results(str(tmp_path / "out"), N)
    assert (tmp_path / "out").read_bytes() == data
