"""One call at a time on a Runtime and an Engine: what is guarded, what is free, what is seen."""

import inspect
import itertools
import os
import select
import signal
import threading
import time
import warnings
from types import FunctionType

import pytest

from kvrt import Busy, CacheConfig, Engine, Request, Runtime, session
from kvrt_models.load import load
from tests.toys import ToyLm, allclose

pytestmark = pytest.mark.usefixtures("numpy_device")

TOY = ToyLm(n_layers=1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# What any thread may use at any time. A new public member is guarded unless its name comes here.
FREE = {
    Runtime: {
        *("cells", "group_cells", "programs", "fingerprint", "n_free"),
        *("stats", "seq_pos_min", "token_history", "n_exact"),
    },
    Engine: {
        *("programs", "fingerprint", "running", "has_work"),
        *("stats", "metrics", "usage", "tiers"),
    },
}
# What a progress callback of a Runtime may use besides.
READS = {
    *("cache", "flush", "snapshot", "seq_pos_max", "resume_positions", "checkpoints"),
    *("can_remove", "table"),
}


def runtime():
    config = CacheConfig(n_ctx=32, n_seq_max=3, block_size=8, n_ubatch=8)
    found = Runtime(TOY, config)
    found.append(PROMPT)
    return found


def engine():
    found = Engine(TOY, CacheConfig(n_ctx=64, n_seq_max=4, block_size=8, n_ubatch=8))
    found.add_request(Request(id="a", tokens=tuple(PROMPT), n_predict=4))
    return found


def members(cls):
    """Public methods and properties by name."""
    kinds = (FunctionType, property)
    found = {n: m for x in reversed(cls.__mro__) for n, m in vars(x).items()}
    return {n: m for n, m in found.items() if isinstance(m, kinds) and n[0] != "_"}


def use(of, name):
    """Uses a member, whatever it is given: the guard comes before a look at the arguments."""
    member = members(type(of))[name]
    if isinstance(member, property):
        return member.__get__(of)
    wanted = [p for p in inspect.signature(member).parameters.values() if p.default is p.empty]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # old names
        return member(of, *[0 for p in wanted[1:] if p.kind is p.POSITIONAL_OR_KEYWORD])


def in_thread(call):
    """The result of a call in a thread of its own, or what it raised."""
    found = []

    def run():
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def all_of(cls):
    return [pytest.param(cls, name, id=f"{cls.__name__}.{name}") for name in members(cls)]


@pytest.fixture(scope="module")
def made():
    return {Runtime: runtime(), Engine: engine()}


@pytest.mark.parametrize(("cls", "name"), all_of(Runtime) + all_of(Engine))
def test_every_public_member_is_guarded_or_said_to_be_free(made, cls, name):
    at = made[cls]
    at._exclusive.enter("another_call")
    try:
        found = in_thread(lambda: use(at, name))
        if name in FREE[cls]:
            assert not isinstance(found, Busy)
            return
        assert isinstance(found, Busy)
        what = cls.__name__
        assert str(found).startswith(
            f"{what}.{name} was called while another thread is in {what}.another_call, and a {what}"
        )
        with pytest.raises(Busy, match=r"within .*another_call of the same thread, by a callback"):
            use(at, name)
    finally:
        at._exclusive.leave()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize("call", ["append", "new", "load"])
def test_a_forked_process_is_refused_at_the_call(made, call, tmp_path):
    calls = {
        "append": lambda: made[Runtime].append([1]),
        "new": lambda: Runtime(TOY, CacheConfig(n_ctx=32)),
        "load": lambda: load(tmp_path),
    }
    ours, theirs = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python and JAX warn of forks beside threads
        child = os.fork()
    if not child:
        try:
            calls[call]()
        except BaseException as error:
            os.write(theirs, f"{type(error).__name__} {error}".encode())
        os._exit(0)
    os.close(theirs)
    try:
        said = os.read(ours, 1000).decode() if select.select([ours], [], [], 60)[0] else "hangs"
    finally:
        os.close(ours)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert said.startswith("UsageError ") and "JAX, whose threads no fork copies" in said
    assert {"append": "Runtime.append", "new": "Runtime", "load": "load"}[call] in said
    made[Runtime].seq_pos_max()  # this process goes on


def test_what_is_free_is_said():
    for cls, names in FREE.items():
        for name in names | (READS if cls is Runtime else set()):
            assert f"`{name}`" in (cls.__doc__ or ""), name


def test_a_callback_may_look_and_not_change():
    at, seen = runtime(), []

    def progress(done, total):
        for name in READS:
            use(at, name)
        assert at.seq_pos_max() == len(PROMPT) + done - 1
        for name in members(Runtime).keys() - READS - FREE[Runtime]:
            with pytest.raises(Busy, match=r"was called within Runtime\.append of the same thread"):
                use(at, name)
        assert isinstance(in_thread(at.seq_pos_max), Busy)
        seen.append(at.snapshot())

    tokens = [(5 * i) % 64 for i in range(20)]
    found = at.append(tokens, progress=progress)
    assert len(seen) == 3 and [len(s.history.pieces[0][0][0]) > 0 for s in seen] == [True] * 3
    alone = runtime()
    allclose(found, alone.append(tokens), 0)
    # What was taken in the middle is what was there then.
    alone.restore(seen[0])
    assert alone.token_history()[1].tolist() == PROMPT + tokens[:8]
    # A callback that raises ends the call as well.
    with pytest.raises(ZeroDivisionError):
        alone.append([1], progress=lambda *_: 1 // 0)
    alone.append([1])


@pytest.mark.slow
def test_another_call_fits_between_two_tokens_and_a_busy_item_comes_later():
    at, alone = runtime(), runtime()
    expected = [t.id for t in alone.generate(8)]
    tokens, found = at.generate(8), []
    for i in range(8):
        if i == 3:
            assert in_thread(lambda: at.append([7], 1)).shape == (1, 64)
            at._exclusive.enter("another_call")
            assert isinstance(in_thread(lambda: next(tokens)), Busy)
            assert isinstance(in_thread(tokens.close), Busy)
            at._exclusive.leave()
        found.append(next(tokens).id)
    assert found == expected and next(tokens, None) is None
    early = at.generate(5)
    next(early)
    early.close()
    assert next(early, None) is None


@pytest.mark.slow
def test_a_stream_and_a_step_take_turns():
    alone, at = engine(), engine()
    expected = [x.tokens for x in alone.stream("a")]
    stream = at.stream("a")
    first = next(stream)
    at._exclusive.enter("another_call")
    assert isinstance(in_thread(lambda: next(stream)), Busy)
    assert isinstance(in_thread(lambda: at.cancel("a")), Busy)
    assert at.stats().n_steps == 1 and at.has_work
    at._exclusive.leave()
    assert [first.tokens, *(x.tokens for x in stream)] == expected


def answers(at, seq):
    """A prompt of a thread's own, and what follows it."""
    at.append([seq + 1, 2 * seq + 3, 7], seq)
    return [t.id for t in at.generate(5, seq)]


def again(call, refused):
    """The result of a call that is repeated while the object is busy."""
    while True:
        try:
            return call()
        except Busy as error:
            refused.append(error)
            time.sleep(0)


@pytest.mark.slow
def test_threads_get_the_right_answer_or_are_told_to_wait():
    """Three threads, one sequence each; everything between two calls is up to chance."""
    at, alone = runtime(), runtime()
    expected = {}
    for seq in range(3):
        alone.clear()
        expected[seq] = answers(alone, seq)
    at.clear()
    found, refused, errors = [], [], []
    barrier, ended = threading.Barrier(3), threading.Event()

    def serve(seq):
        try:
            barrier.wait()
            for _ in range(15):
                again(lambda: at.append([seq + 1, 2 * seq + 3, 7], seq), refused)
                tokens, out = again(lambda: at.generate(5, seq), refused), []
                while (token := again(lambda it=tokens: next(it, None), refused)) is not None:
                    out.append(token.id)
                again(lambda: at.seq_rm(seq), refused)
                found.append((seq, out))
        except Exception as error:
            errors.append(error)

    def watch():
        try:
            while not ended.is_set():
                assert at.stats().cells_used <= 3 * 8
                at.token_history(1), at.n_free
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(s,)) for s in range(3)]
    watcher = threading.Thread(target=watch)
    for thread in (watcher, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    watcher.join()
    assert errors == [] and len(found) == 45
    assert all(out == expected[seq] for seq, out in found)
    assert refused and {str(e).split(" ")[0] for e in refused} <= {
        f"Runtime.{name}" for name in ("append", "generate", "seq_rm")
    }
    assert at.stats().cells_used == 0


@pytest.mark.slow
def test_a_session_is_saved_while_decoding_goes_on(tmp_path):
    at, alone = runtime(), runtime()
    expected = [t.id for t in alone.generate(20)]
    found = [t.id for t in itertools.islice(at.generate(20), 6)]
    jobs = []
    for i in range(4):
        jobs.append(session.start_save(tmp_path / f"{i}.kv", at.snapshot()))
        found += [t.id for t in at.generate(3)]
    for i, job in enumerate(jobs):
        job.result()
        alone.clear()
        alone.restore(session.read(tmp_path / f"{i}.kv"))
        n = len(alone.token_history()[1]) - len(PROMPT)
        assert alone.token_history()[1].tolist() == PROMPT + expected[:n]
    assert found == expected[: len(found)]
