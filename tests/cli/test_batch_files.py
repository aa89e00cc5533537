"""Requests and results of `kvrt batch` as files: what is read, refused, kept and resumed."""

import json
import os

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from kvrt import Sampling
from kvrt.cli.batch import requests as batch_in
from kvrt.cli.batch.requests import _KEYS, Parser, Requests, Wrong
from kvrt.cli.batch.results import Result, Results
from kvrt.cli.flags.serving import BatchOptions
from kvrt.errors import KvrtError, UsageError
from kvrt.serving.request import Request

FLAGS = BatchOptions()
GOOD = '{"id": "good", "prompt": "Once"}'


@pytest.fixture
def read(tmp_path):
    """Requests of these lines."""

    def made(*lines: str | bytes) -> Requests:
        path = tmp_path / "in.jsonl"
        data = [line if isinstance(line, bytes) else line.encode() for line in lines]
        path.write_bytes(b"".join(line + b"\n" for line in data))
        opened.append(Requests(str(path), FLAGS))
        return opened[-1]

    opened: list[Requests] = []
    yield made
    for requests in opened:
        requests.close()


def test_a_line_says_what_it_wants_and_flags_say_the_rest(read):
    found = read(
        GOOD,
        '{"id": "b", "tokens": [1, 2], "n_predict": 7, "temp": 0, "top_k": 5, "top_p": 1, '
        '"min_p": 0.5, "seed": 4294967295, "n": 3, "priority": -2, "stop": ["a", "b"], '
        '"repeat_penalty": 1.5, "repeat_last_n": 8, "ignore_eos": true}',
        '{"id": "c", "prompt": "Tell", "chat": true, "stop": "x"}',
    )
    assert found.bad == []
    assert [(e.line, e.id, e.n, e.priority) for e in found.entries] == [
        (1, "good", 1, 0),
        (2, "b", 3, -2),
        (3, "c", 1, 0),
    ]
    first, second, third = map(found.read, found.entries)
    assert (first.prompt, first.tokens, first.options) == ("Once", (), FLAGS)
    assert (second.prompt, second.tokens, second.options.n_predict) == (None, (1, 2), 7)
    said = dict(
        temp=0, top_k=5, top_p=1, min_p=0.5, seed=2**32 - 1, repeat_penalty=1.5, repeat_last_n=8
    )
    assert second.options.part(Sampling).items() >= said.items()
    assert (second.options.stop, second.options.ignore_eos) == (("a", "b"), True)
    assert (third.options.chat, third.options.stop) == (True, ("x",))


def test_texts_of_any_language_and_lines_of_any_end(read):
    text = "Füße, 猫\u2028 and \\ud83d\\ude00"
    found = read("\ufeff" + GOOD, "", "  \r", f'{{"id": "ü", "prompt": "{text}"}}\r')
    assert [(e.line, e.id) for e in found.entries] == [(1, "good"), (4, "ü")]
    assert found.read(found.entries[1]).prompt == "Füße, 猫\u2028 and 😀"


BAD = {
    "no JSON": ('{"id": "a"', "no JSON (Expecting"),
    "a list": ("[1]", "[1] is no JSON object"),
    "a text": ('"' + "x" * 99 + '"', '"xxx'),
    "no UTF-8": (b'{"id": "\xff"}', "byte 8 is no UTF-8"),
    "deep": ("[" * 100_000, "no JSON"),
    "no id": ('{"prompt": "x"}', "id is missing; a text of 1 to 256 characters or a whole"),
    "id a fraction": ('{"id": 7.0, "prompt": "x"}', "id is 7.0; a text"),
    "id a truth": ('{"id": true, "prompt": "x"}', "id is true; a text"),
    "id great": ('{"id": 9223372036854775808, "prompt": "x"}', "id is 9223372036854775808; a"),
    "id empty": ('{"id": "", "prompt": "x"}', 'id is ""; a text'),
    "id long": (json.dumps({"id": "i" * 257, "prompt": "x"}), "a text of 1 to 256"),
    "id half": ('{"id": "\\ud800", "prompt": "x"}', "no JSON (half"),
    "a key": (
        '{"id": "a", "prompt": "x", "temperature": 1}',
        'unknown key "temperature" (in kvrt it is temp); the keys are id, prompt',
    ),
    "another key": ('{"id": "a", "prompt": "x", "zzz": 1}', 'unknown key "zzz"; the keys'),
    "twice": ('{"id": "a", "prompt": "x", "prompt": "y"}', 'key "prompt" is given twice'),
    "NaN": ('{"id": "a", "prompt": "x", "temp": NaN}', "NaN is no number of JSON"),
    "infinite": ('{"id": "a", "prompt": "x", "temp": -Infinity}', "-Infinity is no number"),
    "huge": ('{"id": "a", "prompt": "x", "temp": 1e999}', "temp is Infinity; a number of at"),
    "digits": ('{"id": "a", "prompt": "x", "seed": ' + "9" * 5000 + "}", "no JSON (Exceeds"),
    "bool": ('{"id": "a", "prompt": "x", "n_predict": true}', "n_predict is true; a whole"),
    "temp bool": ('{"id": "a", "prompt": "x", "temp": true}', "temp is true; a number"),
    "temp text": ('{"id": "a", "prompt": "x", "temp": "1"}', 'temp is "1"; a number'),
    "temp below": ('{"id": "a", "prompt": "x", "temp": -1}', "temp is -1; a number of at least 0"),
    "top_p": ('{"id": "a", "prompt": "x", "top_p": 1.5}', "top_p is 1.5; a number from 0 to 1"),
    "top_k": ('{"id": "a", "prompt": "x", "top_k": 1.0}', "top_k is 1.0; a whole number"),
    "seed": ('{"id": "a", "prompt": "x", "seed": 4294967296}', "from -1 to 4294967295"),
    "null": ('{"id": "a", "prompt": "x", "seed": null}', "seed is null"),
    "n_predict": ('{"id": "a", "prompt": "x", "n_predict": 0}', "n_predict is 0; a whole"),
    "n": ('{"id": "a", "prompt": "x", "n": 4097}', "n is 4097; a whole number from 1 to 4096"),
    "priority": ('{"id": "a", "prompt": "x", "priority": 2000000}', "priority is 2000000"),
    "num_beams": ('{"id": "a", "prompt": "x", "num_beams": 0}', "num_beams is 0; a whole number"),
    "quota": ('{"id": "a", "prompt": "x", "quota": 0}', "quota is 0; a whole number from 1"),
    "reserve": ('{"id": "a", "prompt": "x", "reserve": -1}', "reserve is -1; a whole number"),
    "length_penalty": (
        '{"id": "a", "prompt": "x", "length_penalty": "1"}',
        'length_penalty is "1"; a number is wanted',
    ),
    "early_stopping": (
        '{"id": "a", "prompt": "x", "early_stopping": "maybe"}',
        'early_stopping is "maybe"; true or false or never is wanted',
    ),
    "beams and stop": (
        '{"id": "a", "prompt": "x", "num_beams": 2, "stop": "y"}',
        "stop ends a text as it is read, num_beams compares whole ones; give one",
    ),
    "neither": ('{"id": "a"}', "either prompt or tokens is wanted"),
    "both": ('{"id": "a", "prompt": "x", "tokens": [1]}', "either prompt or tokens"),
    "no prompt": ('{"id": "a", "prompt": ""}', 'prompt is ""; a text of at least 1'),
    "half": ('{"id": "a", "prompt": "\\udfff"}', "no JSON (half"),
    "no list": ('{"id": "a", "tokens": 5}', "tokens is 5; a list"),
    "no ids": ('{"id": "a", "tokens": []}', "tokens is []; a list of at least 1 entry"),
    "id below": ('{"id": "a", "tokens": [1, -1]}', "tokens[1] is -1; a whole number from 0"),
    "id bool": ('{"id": "a", "tokens": [false]}', "tokens[0] is false"),
    "id fraction": ('{"id": "a", "tokens": [1.0]}', "tokens[0] is 1.0"),
    "stop": ('{"id": "a", "prompt": "x", "stop": [""]}', 'stop[0] is ""; a text of at least 1'),
    "stops": ('{"id": "a", "prompt": "x", "stop": 3}', "stop is 3; a text of at least 1"),
    "chat": ('{"id": "a", "prompt": "x", "chat": 1}', "chat is 1; true or false is wanted"),
    "chat ids": ('{"id": "a", "tokens": [1], "chat": true}', "chat needs prompt, tokens gives"),
}


@pytest.mark.parametrize(("line", "found"), BAD.values(), ids=BAD)
def test_a_bad_line_fails_alone(read, line, found):
    requests = read(GOOD, line, '{"id": "last", "prompt": "x"}')
    assert [e.id for e in requests.entries] == ["good", "last"]
    (bad,) = requests.bad
    assert bad.error.startswith("line 2: ") and found in bad.error
    assert "\n" not in bad.error and len(bad.error) < 350
    named = isinstance(line, str) and line.startswith('{"id": "a"')
    readable = not any(word in bad.error for word in ("JSON", "twice"))
    assert bad.id == ("a" if named and readable else None)


KEYS = [*_KEYS, "more"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("a"),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(), x, max_size=2),
    max_leaves=4,
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    data=st.binary(max_size=60)
    | VALUES.map(lambda x: json.dumps(x).encode())
    | st.dictionaries(st.sampled_from(KEYS), VALUES).map(lambda x: json.dumps(x).encode())
    | st.fixed_dictionaries(
        {"id": st.just("a"), "prompt": st.just("b")},
        optional={key: VALUES for key in _KEYS if key not in ("id", "prompt")},
    ).map(lambda x: json.dumps(x).encode())
)
def test_any_line_is_a_request_or_says_why_not(data):
    parser = Parser(FLAGS)
    try:
        asked = parser.parse(data)
    except Wrong as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 300
        return
    assert isinstance(asked.prompt, str) or asked.tokens
    assert all(type(t) is int for t in asked.tokens)
    if asked.options.seed >= 0:
        assert Sampling(**asked.options.part(Sampling)).temp == asked.options.temp
    assert Request(
        id=asked.id,
        tokens=asked.tokens or (1,),
        n_predict=asked.options.n_predict,
        n=asked.n,
        priority=asked.priority,
    )


def test_an_id_is_one_request(read):
    requests = read(GOOD, '{"id": "b", "prompt": "x"}', GOOD)
    assert [e.id for e in requests.entries] == ["good", "b"]
    (bad,) = requests.bad
    assert (bad.line, bad.id) == (3, "good")
    assert bad.error == "line 3: its id is that of line 1; give it one of its own"


def test_a_line_too_long_is_told_and_passed_over(read, monkeypatch):
    monkeypatch.setattr(batch_in, "MAX_LINE_BYTES", 100)
    long = '{"id": "a", "prompt": "' + "x" * 500 + '"}'
    exact = '{"id": "b", "prompt": "' + "x" * (99 - 25) + '"}'
    requests = read(GOOD, long, exact, exact.replace("b", "c") + " ", long.replace("a", "d", 1))
    assert [(e.line, e.id) for e in requests.entries] == [(1, "good"), (3, "b")]
    assert [b.line for b in requests.bad] == [2, 4, 5]
    assert all("longer than" in b.error for b in requests.bad)
    assert requests.read(requests.entries[1]).prompt == "x" * 74


@pytest.mark.parametrize("lines", [(), ("", " "), ("{}",), ('{"id": "a"}', "x")])
def test_a_file_without_a_request(read, lines):
    with pytest.raises(UsageError, match=r"holds no request: .*give a JSON object a line"):
        read(*lines)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match=r"-i .*none: no such file or directory; give a file"):
        Requests(str(tmp_path / "none"), FLAGS)
    with pytest.raises(UsageError, match="is a directory"):
        Requests(str(tmp_path), FLAGS)


def test_too_many_lines(read, monkeypatch):
    monkeypatch.setattr(batch_in, "MAX_LINES", 2)
    assert len(read(GOOD, "{}").entries) == 1
    with pytest.raises(UsageError, match="more than 2 lines; divide it"):
        read(GOOD, "{}", "{}")


def test_a_pipe_is_read_once(tmp_path):
    read_end, write_end = os.pipe()
    os.write(write_end, f"{GOOD}\n".encode())
    os.close(write_end)
    requests = Requests(f"/dev/fd/{read_end}", FLAGS)
    os.close(read_end)
    assert requests.read(requests.entries[0]).prompt == "Once"
    requests.close()


def test_a_file_that_changes_meanwhile(read, tmp_path):
    requests = read(GOOD, '{"id": "b", "prompt": "x"}')
    path = tmp_path / "in.jsonl"
    path.write_text(path.read_text().replace('"b"', '"c"'))
    assert requests.read(requests.entries[0]).id == "good"
    with pytest.raises(UsageError, match="line 2 was changed while"):
        requests.read(requests.entries[1])


# Results.

N = {"a": 1, "b": 2, "c": 1}


def result(name, sample=None, **more):
    fields = {"tokens": [1], "text": "x", "finish_reason": "stop", "n_cached": 0} | more
    return Result(id=name, sample=sample, **fields)


@pytest.fixture
def out(tmp_path):
    """The file, and results opened on it with these bytes in it."""
    path = tmp_path / "out.jsonl"

    def opened(data: bytes | None = None) -> Results:
        if data is not None:
            path.write_bytes(data)
        made.append(Results(str(path), N))
        return made[-1]

    made: list[Results] = []
    opened.path = path
    yield opened
    for results in made:
        results.close()


def lines(*records) -> bytes:
    return b"".join(json.dumps(msgspec.to_builtins(r)).encode() + b"\n" for r in records)


A, B = lines(result("a")), lines(result("b", 0), result("b", 1))
C = lines(result("c", finish_reason="error", error="too long"))
BAD_LINE = lines(result(None, finish_reason="error", line=4, error="line 4: no JSON"))


def test_results_are_lines_that_are_there_at_once(out):
    results = out()
    results.write([result("a", text="ü\ud83d")])
    assert out.path.read_bytes() == (
        b'{"id": "a", "tokens": [1], "text": "\\u00fc\\ud83d", "finish_reason": "stop", '
        b'"n_cached": 0}\n'
    )
    results.write([result("b", 0), result("b", 1)])
    results.write([result("c", error="too long")])
    found = [json.loads(line) for line in out.path.read_text().splitlines()]
    assert [(r["id"], r.get("sample")) for r in found] == [
        ("a", None),
        ("b", 0),
        ("b", 1),
        ("c", None),
    ]
    assert (results.done, results.n_failed) == ({"a", "b", "c"}, 1)
    assert out.path.stat().st_mode & 0o777 == 0o600
    results.close()


def test_fields_of_a_result_stand_in_one_order():
    assert Result.__struct_fields__ == (
        *("id", "sample", "tokens", "text", "finish_reason", "n_cached", "line", "error"),
        *("seed", "n_dropped", "score", "n_chunks", "ratio", "check_layer", "n_reused"),
        *("approximate", "approximations", "digest"),
    )


def test_what_is_there_is_not_done_again(out):
    data = A + BAD_LINE + C
    results = out(data)
    assert (results.done, results.reported, results.n_failed) == ({"a", "c"}, {4}, 2)
    assert results.n_cut == 0
    results.write([result("b", 0), result("b", 1)])
    results.close()
    assert out.path.read_bytes() == data + B


@pytest.mark.parametrize("n", range(len(A) + len(B) + 1))
def test_wherever_it_was_torn_it_goes_on(out, n):
    results = out((A + B)[:n])
    whole = 0 if n < len(A) else len(A) if n < len(A) + len(B) else n
    assert out.path.stat().st_size == whole and results.n_cut == n - whole
    assert results.done == ({"a"} if n >= len(A) else set()) | (
        {"b"} if whole == n > len(A) else set()
    )
    for name in ("a", "b"):
        if name not in results.done:
            results.write([result(name)] if name == "a" else [result("b", 0), result("b", 1)])
    results.close()
    assert out.path.read_bytes() == A + B


FOREIGN = {
    "a text": (b"Once upon a time\n", "line 1 is not of these requests: it is no JSON"),
    "a text without end": (b"Once upon", "it is no result"),
    "a request": (GOOD.encode() + b"\n", "it is no result"),
    "a request without end": (GOOD.encode(), "it is no result"),
    "another's": (A + lines(result("z")), 'line 2 .* request "z", which -i has not'),
    "no name": (lines(result(7)), "it is of request 7"),
    "twice": (A + A, 'request "a" is there already'),
    "a part": (lines(result("b", 0)) + A, 'request "b" before it is not whole'),
    "a list": (b"[1]\n", "it is no result"),
    "no error": (lines(result(None, line=3)), "request null"),
    "deep": (b"[" * 100_000 + b"\n", "it is no JSON"),
}


@pytest.mark.parametrize(("data", "found"), FOREIGN.values(), ids=FOREIGN)
def test_a_file_of_something_else_stays_as_it_is(out, data, found):
    with pytest.raises(UsageError, match=found):
        out(data)
    assert out.path.read_bytes() == data


def test_a_line_of_any_length_is_not_taken_for_torn(out, monkeypatch):
    monkeypatch.setattr("kvrt.cli.batch.results._MAX_BYTES", 100)
    data = lines(result("a", text="x" * 200))
    with pytest.raises(UsageError, match="it is no result"):
        out(data)
    assert out.path.read_bytes() == data


def test_two_processes_do_not_write_one_file(out):
    results = out()
    with pytest.raises(UsageError, match="another kvrt batch is writing it"):
        out()
    results.close()
    out().close()


def test_files_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match=r"-o .*: is a directory; give another name, or -"):
        Results(str(tmp_path), N)
    with pytest.raises(UsageError, match="no such file or directory"):
        Results(str(tmp_path / "none" / "out"), N)


def test_a_device_is_no_file_to_go_on_with():
    results = Results("/dev/null", N)
    results.write([result("a")])
    assert results.done == {"a"}
    results.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_device_is_one_line():
    results = Results("/dev/full", N)
    with pytest.raises(KvrtError, match=r"-o /dev/full: no space left .*run again"):
        results.write([result("a")])
    assert results.done == set()
    results.close()


def test_standard_output(capfdbinary):
    results = Results("-", N)
    results.write([result("a")])
    assert capfdbinary.readouterr().out == A
    results.close()
