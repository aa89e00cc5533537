"""Files that flags name: another kind is never replaced, and no file is written by two flags."""

import os

import pytest

from kvrt.cli.commands import COMMANDS
from kvrt.cli.session import inspect
from kvrt.errors import UsageError
from kvrt.files import kinds
from kvrt.files.named import check_named

PATHS = {"FILE", "SESSION", "FOLDER", "DIR"}
FLAGS = [(c, f) for c in COMMANDS for f in c.flags() if f.file is not None]
WRITTEN = [(c, f) for c, f in FLAGS if f.file and f.file.is_written]
PAIRS = [(c, a, b) for c, a in WRITTEN for d, b in FLAGS if d is c and a is not b]
NAMES = [f"{c.name} {f.name}" for c, f in WRITTEN]
FOREIGN = b"Dear diary,\n"
OURS = {
    "a session": b"kvrt-kv\n",
    "a file of results": b'{"id": ',
    "a file of kvrt's metrics": b"# HELP kvrt_steps_total",
    "a page of kvrt inspect": inspect._HEAD.encode(),
    "a folder of sessions": b"",
    "a folder of blocks": b"",
}


def check(command, **values):
    check_named(command.options(**values).files())


def value(flag, path):
    return (str(path),) if flag.type == tuple[str, ...] else str(path)


def test_each_flag_that_names_a_file_says_of_which_kind():
    unsaid = [f.name for c in COMMANDS for f in c.flags() if f.value in PATHS and f.file is None]
    assert not unsaid
    assert {f"{c.name} {f.name}" for c, f in WRITTEN} == {
        *("run session", "prefill output", "ask chunk_dir", "inspect html", "fork output"),
        *(
            "trim output",
            "repair output",
            "convert output",
            "batch output",
            "batch metrics",
            "batch session_dir",
        ),
        *("batch disk_cache", "batch chunk_dir"),
    }


@pytest.mark.parametrize(("command", "flag"), WRITTEN, ids=NAMES)
def test_a_file_of_another_kind_is_refused(command, flag, tmp_path):
    path = tmp_path / "kept"
    path.write_bytes(FOREIGN)
    with pytest.raises(UsageError, match=r"kept: .*; give another name") as error:
        check(command, **{flag.name: str(path)})
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert path.read_bytes() == FOREIGN


@pytest.mark.parametrize(("command", "flag"), WRITTEN, ids=NAMES)
def test_a_file_of_its_kind_and_a_new_one_are_taken(command, flag, tmp_path):
    path = tmp_path / "there"
    check(command, **{flag.name: str(path)})
    assert not path.exists()
    if flag.file is kinds.NEW:
        path.write_bytes(b"")
        with pytest.raises(UsageError, match="is there already"):
            check(command, **{flag.name: str(path)})
    elif flag.file.form == "folder":
        path.mkdir()
        check(command, **{flag.name: str(path)})
    else:
        for data in (b"", OURS[flag.file.name]):
            path.write_bytes(data)
            check(command, **{flag.name: str(path)})
            assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("command", "a", "b"), PAIRS, ids=[f"{c.name} {a.name} {b.name}" for c, a, b in PAIRS]
)
def test_two_flags_never_name_one_file(command, a, b, tmp_path):
    path, other = tmp_path / "new", tmp_path / "New"

    def refused(first, second):
        with pytest.raises(UsageError, match=r"one file|is there already|is not a|, not a folder"):
            check(command, **{a.name: value(a, first), b.name: value(b, second)})

    if a.file is b.file and a.file.form == "folder":
        check(command, **{a.name: value(a, path), b.name: value(b, path)})
        return
    refused(path, path)
    refused(path, other)
    (tmp_path / "link").symlink_to(path)
    refused(path, tmp_path / "link")
    path.write_bytes(OURS.get(a.file.name, b""))
    os.link(path, tmp_path / "hard")
    refused(path, tmp_path / "hard")
    refused(path, tmp_path / "link")


def test_names_that_differ_by_case_are_two_where_both_exist(tmp_path):
    command = next(c for c in COMMANDS if c.name == "batch")
    for name, text in (("o", '{"id": '), ("O", "# HELP kvrt_")):
        (tmp_path / name).write_text(text)
    if os.path.samefile(tmp_path / "o", tmp_path / "O"):
        pytest.skip("this folder ignores case")
    check(command, output=str(tmp_path / "o"), metrics=str(tmp_path / "O"))


@pytest.mark.parametrize(
    ("make", "why"),
    [(os.mkfifo, "a pipe, not a regular file"), (os.mkdir, "a folder, not a regular file")],
    ids=["pipe", "folder"],
)
def test_what_is_replaced_by_rename_is_a_regular_file(make, why, tmp_path):
    command = next(c for c in COMMANDS if c.name == "batch")
    make(tmp_path / "m")
    with pytest.raises(UsageError, match=why):
        check(command, metrics=str(tmp_path / "m"))


def test_a_session_that_is_never_written_may_be_any_file(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(FOREIGN)
    run = next(c for c in COMMANDS if c.name == "run")
    check(run, session=str(path), session_ro=True, file=str(path))


def test_metrics_destroy_neither_results_nor_requests(kvrt, tmp_path):
    names = requests, results, _session = [tmp_path / x for x in ("r.jsonl", "o.jsonl", "s.kv")]
    texts = '{"id": 1, "prompt": "x"}\n', '{"id": 1', "kvrt-kv\n"
    for path, text in zip(names, texts, strict=True):
        path.write_text(text)
    before = [path.read_bytes() for path in names]
    for path in names:
        done = kvrt("batch", "-i", requests, "-o", results, "--metrics", path)
        assert (done.code, done.out, done.err.count("\n")) == (2, b"", 1)
        assert f"--metrics {path}: is not a file of kvrt's metrics" in done.err
    done = kvrt("batch", "-i", "-", "-o", tmp_path / "stdin", stdin=b'{"id": 1, "prompt": "x"}\n')
    assert done.code == 2 and "name one file" in done.err
    assert [path.read_bytes() for path in names] == before
    assert inspect._HEAD.encode().startswith(kinds.PAGE.begins)
