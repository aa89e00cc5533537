"""How many operations a step of one token has; each costs a microsecond on CPU, however small."""

import hlo
import pytest

from kvrt import CacheConfig, Runtime
from tests.toys import ToyLm

pytestmark = pytest.mark.slow

OPTIMISED = True  # see conftest.py: the operations are those of the real programs
N_LAYERS = (2, 4)

# Of one layer with both loops over its cells, of which a short list runs one: those that only name
# or regroup arrays do not run. They were 36 and 4 before long lists had a loop of their own.
MOST_OPERATIONS, MOST_COPIES = 55, 6


@pytest.fixture(scope="module")
def texts():
    """The program of one token in two sizes of a model, as compiled; sampling is beside layers."""
    found = []
    for n_layers in N_LAYERS:
        model = ToyLm(n_layers=n_layers, n_kv_heads=3, head_dim=64)
        runtime = Runtime(model, CacheConfig(n_ctx=1024, n_ubatch=8))
        runtime.append([1])
        (program,) = runtime.programs.compiled().values()
        found.append(program.as_text())
    return found


def test_a_layer_has_few_operations_and_copies(texts):
    few, many = map(hlo.executed, texts)
    n = N_LAYERS[1] - N_LAYERS[0]
    each, copies = (len(many) - len(few)) / n, (many.count("copy") - few.count("copy")) / n
    print(f"{each} operations a layer, {copies} copies")
    # Of a layer's blocks the first ones are read side by side, the others one after another.
    assert few.count("while") == 2 * N_LAYERS[0], "the text of programs is read wrongly"
    assert each <= MOST_OPERATIONS
    assert copies <= MOST_COPIES


def test_cosines_are_made_once_a_step(texts):
    assert [text.count(" cosine(") for text in texts] == [1, 1]
