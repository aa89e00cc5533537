"""What `kills` ends: commands that go on where they were ended, and what each has to leave."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from kvrt import session
from kvrt.cellcache.history import tokens
from kvrt.errors import KvrtError
from scripts.soak import slowed
from tests.peer import tiny_gguf

ROOT = Path(__file__).parents[2]
N_PROMPT, N_ANSWER = 200, 160
_PROMPT = [i * 7 % 250 for i in range(N_PROMPT)]
_SAVE_S = 15.0  # in which a save ends
_LIMIT_S = 300.0


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended.

    Attributes:
      number: the signal it was sent, at `when`.
      stage: "starting" before its first step, "working", or "done" when it was too late.
      log: time, what was done, and how much of it by then.
      code: its exit code.
      out: what it wrote.
      err: what it said.
      pid: of it.
    """

    number: int
    when: float
    log: list[tuple[float, str, int]]
    code: int
    out: bytes
    err: bytes
    pid: int

    @property
    def is_graceful(self) -> bool:
        """Whether the command could save what it had."""
        return self.number != signal.SIGKILL

    @property
    def stage(self) -> str:
        """When the signal came."""
        # Python hears nothing any more while it ends.
        over = b"\ngenerated " in self.err or b" read in " in self.err
        if self.code == 0 or (self.is_graceful and self.code == -self.number and over):
            return "done"
        return "working" if self.log else "starting"

    def last(self, what: str) -> int:
        """How much was done."""
        return max((n for _, done, n in self.log if done == what), default=0)


class Bench:
    """A model, a cache folder, and what undisturbed commands give.

    Attributes:
      folder: for everything.
      model: a file.
      prompt: a file of tokens.
      text: tokens of the prompt and of what follows it.
    """

    def __init__(self, folder: Path) -> None:
        """Makes the files, and compiles."""
        self.folder, self.model = folder, folder / "tiny.gguf"
        tiny_gguf.write_gguf(self.model, tiny_gguf.TinyModel(n_layers=1))
        self.prompt = folder / "prompt.json"
        self.prompt.write_text(json.dumps(_PROMPT))
        (folder / "cache").mkdir(mode=0o700)
        self._n_logs = 0
        self._times: dict[str, tuple[float, float]] = {}
        words = ["run", *self.flags, *SAMPLED, "--tokens", self.prompt, "-n", N_ANSWER, "--json"]
        self.whole("compiled", words)
        self.text = [*_PROMPT, *json.loads(self.whole("text", words).out)["tokens"]]

    @property
    def flags(self) -> list:
        """Of every command that reads a prompt."""
        return ["-m", self.model, "-c", 512, "--dtype", "f32", "--n_ubatch", 4]

    def whole(self, name: str, words: list) -> End:
        """A command that nothing disturbs; its times are those of `name`."""
        process, log = self._start(words)
        end = _ended(process, log, 0)
        assert end.code == 0, end.err.decode()
        start, first, last = (_time(log, i) for i in (0, 1, -1))
        self._times[name] = first - start, last - first
        return end

    def killed(self, course: "Course", number: int, rng: random.Random) -> End:
        """The next process of a course, ended at a random moment."""
        early, share = rng.random() < 1 / 3, rng.random()
        process, log = self._start(course.words())
        start_s, work_s = self._times[course.times]
        while process.poll() is None and len(_lines(log)) < (1 if early else 2):
            time.sleep(0.002)
        time.sleep(share * (start_s if early else work_s))
        if process.poll() is None:
            process.send_signal(number)
        return _ended(process, log, number)

    def _start(self, words: list) -> tuple[subprocess.Popen, Path]:
        self._n_logs += 1
        log = self.folder / f"{self._n_logs}.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.soak.slowed", str(log), *map(str, words)],
            cwd=ROOT,
            env=env | {"KVRT_CACHE": str(self.folder / "cache")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return process, log


SAMPLED = "--temp", "0", "--ignore_eos"


class Course:
    """A command that is started again and again."""

    def __init__(self, bench: Bench, name: str) -> None:
        """Runs it undisturbed once, where that has to be known."""
        self.bench, self.name = bench, name
        self.times = "text"
        self._n_paths = 0

    def words(self) -> list:
        """Of the next process."""
        raise NotImplementedError

    def check(self, end: End) -> list[str]:
        """What is lost, in a line each."""
        raise NotImplementedError

    def lost_s(self, end: End) -> float:
        """How long before SIGKILL that was done which is not saved."""
        return 0.0

    def free(self, suffix: str) -> Path:
        """A new name."""
        self._n_paths += 1
        return self.bench.folder / f"{self.name}-{self._n_paths}{suffix}"


class SessionCourse(Course):
    """`kvrt prefill`, and `kvrt run` with a session: of the prompt alone, or of the answer too."""

    def __init__(self, bench: Bench, name: str) -> None:
        """No session yet."""
        super().__init__(bench, name)
        self._answers = "all" in name
        if name == "prefill":
            self.times, self._path = name, self.free(".kv")
            self._saved = self._drawn = 0
            bench.whole(name, self.words())
        self._saved = self._drawn = 0
        self._path = self.free(".kv")

    def words(self) -> list:
        """The prompt once more, or nothing where an answer goes on."""
        flags, prompt = self.bench.flags, ["--tokens", self.bench.prompt]
        if self.name == "prefill":
            return ["prefill", *flags, *prompt, "-o", self._path]
        more = ["--session", self._path, "-n", N_ANSWER - self._drawn]
        if self._answers:
            more.append("--session_all")
            prompt = prompt if self._saved < N_PROMPT else []
        return ["run", *flags, *SAMPLED, *prompt, *more]

    def check(self, end: End) -> list[str]:
        """Compares the session with the text, with what was there and with what was done."""
        before, before_drawn = self._saved, self._drawn
        try:
            found = self._look()
        except KvrtError as error:
            self._begin()
            return [str(error)]
        n_read, n_drawn = end.last("read"), end.last("sampled")
        if self._saved < before or self._drawn < before_drawn:
            found.append(f"{before}, {before_drawn} tokens were there, {self._saved} are")
        if end.is_graceful and self._saved < n_read:
            found.append(f"{n_read} tokens were read, {self._saved} are saved")
        if end.is_graceful and self._answers and self._drawn < n_drawn:
            found.append(f"{n_drawn} tokens were sampled, {self._drawn} are saved")
        if self.lost_s(end) > slowed.EVERY_S + _SAVE_S:
            found.append(f"SIGKILL has cost {self.lost_s(end):.1f} s")
        if end.is_graceful and list(self._path.parent.glob(f".*.{end.pid}.tmp")):
            found.append("a temporary file is left")
        if end.stage == "done" or self._is_done or found:
            self._begin()
        return found

    def lost_s(self, end: End) -> float:
        """Since the first token that is not saved was read, or sampled to be saved."""
        if end.is_graceful:
            return 0.0
        limits = {"read": self._last[0]} | ({"sampled": self._last[1]} if self._answers else {})
        return end.when - min(
            (at for at, what, n in end.log if n > limits.get(what, n)), default=end.when
        )

    @property
    def _is_done(self) -> bool:
        return self._drawn > N_ANSWER - 20 if self._answers else self._saved >= N_PROMPT

    def _begin(self) -> None:
        self._saved, self._drawn, self._path = 0, 0, self.free(".kv")

    def _look(self) -> list[str]:
        """Reads the session as it is now; what is wrong with it."""
        self._last = self._saved, self._drawn = 0, 0
        if not self._path.exists():
            return []
        found = session.read(self._path)
        held, draw = tokens(found.history, 0).tolist(), found.draws.get(0)
        self._last = self._saved, self._drawn = len(held), draw.n_drawn if draw else 0
        text = held + ([draw.token] if draw else [])
        if text != self.bench.text[: len(text)]:
            return ["the session has other tokens"]
        if draw and draw.n_drawn != len(text) - N_PROMPT:
            return [f"{draw.n_drawn} tokens were sampled, by a session of {len(text)}"]
        return []


class FolderCourse(SessionCourse):
    """`kvrt run` with a folder of sessions, a new one each time."""

    def words(self) -> list:
        """Makes the folder."""
        self._folder = self._path.with_suffix("")
        self._folder.mkdir()
        self._saved = self._drawn = 0
        more = ["--session", self._folder, "--session_all", "-n", N_ANSWER]
        return ["run", *self.bench.flags, *SAMPLED, "--tokens", self.bench.prompt, *more]

    def check(self, end: End) -> list[str]:
        """As of a file, which is the only one in the folder."""
        found = sorted(self._folder.glob("*.kv"))
        self._path = found[0] if found else self._folder / "none.kv"
        lost = super().check(end)
        self._begin()
        return lost + ([f"{len(found)} sessions"] if len(found) > 1 else [])


class AskCourse(Course):
    """`kvrt ask`: the session stays, and what was written is the beginning of the answers."""

    def __init__(self, bench: Bench, name: str) -> None:
        """Makes a session, and answers all questions."""
        super().__init__(bench, name)
        self.times, self._path = name, self.free(".kv")
        words = ["prefill", *bench.flags, "--tokens", bench.prompt, "-o", self._path]
        bench.whole("prefill", words)
        self._kept = self._path.read_bytes()
        self._questions = bench.folder / "questions.txt"
        self._questions.write_text("the sand\nthe sea\n")
        bench.whole("compiled", self.words())
        self._whole = bench.whole(name, self.words()).out

    def words(self) -> list:
        """Two questions."""
        flags = ["-m", self.bench.model, *SAMPLED, "--n_ubatch", 4, "-n", 100]
        return ["ask", *flags, self._path, "-F", self._questions]

    def check(self, end: End) -> list[str]:
        """Compares the session and what was written."""
        found = [] if self._path.read_bytes() == self._kept else ["the session has changed"]
        # Half a character may be at the end.
        text = end.out.rstrip(b"\n").removesuffix("\ufffd".encode())
        if not self._whole.startswith(text):
            found.append("other answers")
        return found


class BatchCourse(Course):
    """`kvrt batch`: no result is lost, none computed twice, and the same command goes on."""

    def __init__(self, bench: Bench, name: str) -> None:
        """Serves all requests once."""
        super().__init__(bench, name)
        self.times, self._requests = name, bench.folder / "requests.jsonl"
        lines = [
            {"id": f"r{i}", "tokens": [i + 1, *range(50, 70)], "n_predict": 30, "seed": i}
            for i in range(12)
        ]
        self._requests.write_text("".join(json.dumps(x) + "\n" for x in lines))
        for _ in range(2):  # the first one compiles
            self._path, self._there = self.free(".jsonl"), {}
            bench.whole(name, self.words())
        self._whole = _results(self._path)
        self._path = self.free(".jsonl")

    def words(self) -> list:
        """Every request, and metrics at the end."""
        size = ["-c", 400, "--n_batch", 16, "--n_seq_max", 3, "--ignore_eos", "--temp", 1]
        files = ["-i", self._requests, "-o", self._path, "--metrics", self._metrics]
        self._metrics.unlink(missing_ok=True)
        return ["batch", "-m", self.bench.model, "--dtype", "f32", *size, *files]

    @property
    def _metrics(self) -> Path:
        return self._path.with_suffix(".prom")

    def check(self, end: End) -> list[str]:
        """Compares results with those that were there, and with those of the undisturbed run."""
        now, found = _results(self._path), []
        if not now.items() >= self._there.items() or not self._whole.items() >= now.items():
            found.append("other results")
        if len(now) - len(self._there) < end.last("done"):
            found.append(f"{end.last('done')} requests ended, {len(now) - len(self._there)} there")
        if end.is_graceful and end.stage == "working":
            if b"requests   " not in end.err or not self._metrics.exists():
                found.append("no summary or no metrics")
            if self._path.read_bytes()[-1:] not in (b"\n", b""):
                found.append("half a line")
        self._there = now
        if end.stage == "done" or found:
            self._path, self._there = self.free(".jsonl"), {}
        return found


COURSES: dict[str, type[Course]] = {
    "run": SessionCourse,
    "run_all": SessionCourse,
    "prefill": SessionCourse,
    "folder_all": FolderCourse,
    "ask": AskCourse,
    "batch": BatchCourse,
}


def problems(end: End) -> list[str]:
    """What is wrong with how a process ended, whatever it was."""
    found = []
    expected = 128 + end.number if end.is_graceful else -end.number
    if end.code != expected and end.stage != "done":
        found.append(f"exit code {end.code}")
    if any(x in end.err for x in (b"Traceback", b"Exception ignored", b"Fatal")):
        found.append("a traceback")
    return found


def _ended(process: subprocess.Popen, log: Path, number: int) -> End:
    when = time.time()
    out, err = process.communicate(timeout=_LIMIT_S)
    lines = [line.split() for line in _lines(log)[1:]]
    steps = [(float(at), what, int(n)) for at, what, n in lines]
    return End(number, when, steps, process.returncode, out, err, process.pid)


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def _time(log: Path, i: int) -> float:
    return float(_lines(log)[i].split()[0])


def _results(path: Path) -> dict[str, list[int]]:
    """Tokens by request, of whole lines."""
    text = path.read_text() if path.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    found = [json.loads(line) for line in lines]
    assert len({x["id"] for x in found}) == len(found), "a request twice"
    return {x["id"]: x["tokens"] for x in found}
