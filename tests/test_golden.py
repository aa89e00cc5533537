"""Real models at f32 against what the real llama.cpp computes; see tests/golden/README.md."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parent / "golden"


@dataclasses.dataclass(frozen=True)
class Known:
    """A known model, its folder of cases and the largest difference of a logit."""

    name: str
    folder: str
    tolerance: float


# llama.cpp looks GELU up in a table of f16, which shows in Gemma's logits.
MODELS = [Known("smollm2-135m", "smollm2", 1e-3), Known("gemma3-270m", "gemma3", 5e-2)]


# Each size up to n_ubatch is a program, or two: what all cases share takes longest to compile.
COMMON = {"n_ctx": 1024, "n_ubatch": 32, "programs": "by_layer"}
FULL = {**COMMON, "n_seq_max": 2, "swa_full": True}
# Windows of 512 tokens in 576 cells: a text of 900 uses most of them again.
SMALL = {**COMMON, "block_size": 64, "rope": "read"}
SMOLLM2, GEMMA3 = MODELS
# A model a key frame; the other one of SmolLM2 has programs of its own, which take a minute.
SETTINGS = {
    "smollm2-write": (SMOLLM2, "write"),
    "smollm2-read": (SMOLLM2, "read"),
    "gemma3-write": (GEMMA3, "write"),
    "gemma3-small": (GEMMA3, "small"),
}


def setting_of(name, *case, marks=()):
    marks = [pytest.mark.full] if name == "smollm2-read" else marks
    return pytest.param(SETTINGS[name], *case, id="-".join([name, *case]), marks=marks)


# A long text where windows slide: that of SmolLM2 is the whole programs'. What Gemma's other frame
# gives is in the other cases.
FEW = ("smollm2-write-plain-short", "gemma3-small-plain-long")
PLAIN = [
    setting_of(name, case, marks=[] if f"{name}-{case}" in FEW else [pytest.mark.full])
    for name in SETTINGS
    for case in ("plain-short", "plain-long")
]


@functools.cache
def model_of(name):
    return load(name).decoder


@pytest.fixture(scope="module", params=[setting_of(name) for name in SETTINGS])
def setting(request):
    return request.param


@pytest.fixture(scope="module")
def known(setting):
    return setting[0]


@pytest.fixture(scope="module")
def runtime(setting):
    known, kind = setting
    if kind != "small":
        config = CacheConfig(rope=kind, **FULL)
        return Runtime(model_of(known.name), config)
    at = Runtime(model_of(known.name), CacheConfig(**SMALL))
    assert {len(c.pos) for c in at.group_cells} == {576, 1024}
    return at


@pytest.fixture
def case(request, known, runtime):
    runtime.clear()
    with np.load(GOLDEN / known.folder / f"{request.param}.npz") as data:
        return dict(data)


def difference(logits, golden, name, row=0):
    """The largest difference over the 64 best and the 256 fixed ids."""
    logits = np.asarray(logits)
    best = np.abs(logits[golden[f"{name}.top_ids"][row]] - golden[f"{name}.top"][row])
    probe = np.abs(logits[golden[f"{name}.probe_ids"]] - golden[f"{name}.probe"][row])
    lse = np.abs(np.logaddexp.reduce(logits.astype(np.float64)) - golden[f"{name}.lse"][row])
    return float(max(best.max(), probe.max(), lse))


@pytest.fixture
def is_greedy(budget):
    """Whether tokens are those of llama.cpp, as many as there is time for."""

    def check(runtime, golden):
        n = budget(24, len(golden["greedy"]))
        return greedy(runtime, n) == golden["greedy"][:n].tolist()

    return check


def greedy(runtime, n):
    return [token.id for token in runtime.generate(n)]


@pytest.mark.parametrize(("setting", "case"), PLAIN, indirect=True)
def test_plain(known, runtime, case, is_greedy):
    logits = runtime.append(case["tokens"].tolist(), out_ids=case["keep"].tolist())
    worst = max(difference(x, case, "logits", i) for i, x in enumerate(logits))
    print(f"largest difference {worst:.1e}")
    assert worst < known.tolerance
    # And once more behind a rewind: rows of windows that slid are those that they were.
    n_again = 20
    runtime.seq_rm(0, len(case["tokens"]) - n_again)
    again = runtime.append(case["tokens"][-n_again:].tolist())
    assert float(np.abs(np.asarray(again)[-1] - np.asarray(logits)[-1]).max()) < 1e-3
    assert is_greedy(runtime, case)


@pytest.mark.parametrize(
    ("of", "case"),
    # Windows in whole programs are the matrix's in CI, and Gemma's by layer are in all other tests.
    [(SMOLLM2, "plain-long"), pytest.param(GEMMA3, "plain-short", marks=pytest.mark.full)],
    ids=lambda x: getattr(x, "folder", x),
)
def test_whole_programs_give_the_text_of_programs_by_layer(of, case, is_greedy):
    """All other tests here run by layer.

    Steps of the long text have as many tokens as there are by default, of the short one few.
    """
    with np.load(GOLDEN / of.folder / f"{case}.npz") as data:
        golden = dict(data)
    tokens, rows = golden["tokens"].tolist(), golden["keep"].tolist()
    config = CacheConfig(n_ctx=1024, programs="whole")
    assert config.n_ubatch == 512
    at = Runtime(model_of(of.name), config)
    logits = at.append(tokens, out_ids=rows)
    worst = max(difference(x, golden, "logits", i) for i, x in enumerate(logits))
    print(f"largest difference {worst:.1e}")
    assert worst < of.tolerance and rows[-1] == len(tokens) - 1
    assert is_greedy(at, golden)
    assert {"forward", "decode_steps"} <= {key.name for key in at.programs.compiled()}


@pytest.mark.parametrize("case", ["context-shift"], indirect=True)
def test_context_shift(known, runtime, case, is_greedy):
    tokens = case["tokens"].tolist()
    runtime.append(tokens[:160])
    runtime.seq_rm(0, 4, 82)
    runtime.seq_add(0, 82, 160, -78)
    worst = [difference(runtime.prefill(tokens[160:161]), case, "logits1")]
    worst += [difference(runtime.prefill(tokens[161:201]), case, "logits2")]
    runtime.seq_rm(0, 4, 34)
    runtime.seq_add(0, 34, 123, -30)
    assert runtime.seq_pos_max() == 92
    worst += [difference(runtime.prefill(tokens[201:]), case, "logits3")]
    print(f"largest difference {max(worst):.1e}")
    assert max(worst) < known.tolerance
    assert is_greedy(runtime, case)


# Two sequences have windows of their own sizes, and so programs of their own.
FORKS = [
    setting_of(name, "fork", marks=[pytest.mark.full] * (name == "gemma3-small"))
    for name in SETTINGS
]


@pytest.mark.parametrize(("setting", "case"), FORKS, indirect=True)
def test_fork(known, runtime, case):
    if runtime.config.n_seq_max == 1:
        runtime = Runtime(model_of(known.name), CacheConfig(**{**SMALL, "n_seq_max": 2}))
    tokens = case["tokens"].tolist()
    runtime.append(tokens[:64])
    runtime.seq_cp(0, 1)
    worst = [difference(runtime.prefill(tokens[64:80]), case, "logits1")]
    worst += [difference(runtime.prefill(tokens[100:120], 1), case, "logits2")]
    runtime.seq_rm(0, 70)
    worst += [difference(runtime.prefill(tokens[200:204]), case, "logits3")]
    print(f"largest difference {max(worst):.1e}")
    assert max(worst) < known.tolerance


@pytest.mark.parametrize("case", ["gap"], indirect=True)
def test_gap(known, runtime, case):
    tokens = case["tokens"].tolist()
    runtime.append(tokens[:48])
    runtime.seq_add(0, 24, 48, 100)
    logits = runtime.prefill(tokens[48:])
    assert runtime.seq_pos_max() == 148
    worst = difference(logits, case, "logits")
    print(f"largest difference {worst:.1e}")
    assert worst < known.tolerance


@pytest.mark.full
def test_small_windows_equal_full_ones():
    """More tokens than windows hold, and a rewind: rows were used again, and nobody can tell."""
    known = GEMMA3
    with np.load(GOLDEN / known.folder / "plain-long.npz") as data:
        tokens = data["tokens"].tolist()
    # Those of the golden cases, and their programs.
    small = CacheConfig(**SMALL)
    full = CacheConfig(rope="write", **FULL)
    found = []
    for config in (small, full):
        at = Runtime(model_of(known.name), config)
        # Whole steps of one output, or of all; the last of 640 tokens take cells of the first.
        at.append(tokens[:576])
        logits = [at.append(tokens[400:464], out_ids=range(64))]
        assert at.resume_positions().earliest == (0 if config.swa_full else 583)
        at.seq_rm(0, 596)
        logits.append(at.append(tokens[10:74], out_ids=range(64)))
        found.append((np.concatenate(logits), greedy(at, 16)))
    worst = float(np.abs(found[0][0] - found[1][0]).max())
    print(f"largest difference {worst:.1e}")
    assert worst < 1e-3
    assert found[0][1] == found[1][1]
