"""Prompts of one step read the blocks that they share once."""

import pytest
from engines import B, ask, make, served

pytestmark = pytest.mark.slow

OPTIMISED = False  # toys: what is compiled runs a few times
N_SHARED = 4 * B


def test_prompts_of_one_step_list_a_common_prefix_once(monkeypatch):
    engine = make()
    shared = list(range(N_SHARED))
    served(engine, [ask("first", [*shared, 1], n_predict=1)])
    listed, place = [], engine.space.place

    def spy(step):
        places, states = place(step)
        listed.append(([c.n_before for c in step.prompts], [int(x.n_blocks) for x in places]))
        return places, states

    monkeypatch.setattr(engine.space, "place", spy)
    found = served(engine, [ask(i, [*shared, 20 + i, 3], n_predict=1) for i in range(3)])
    assert len(found) == 3
    # Three prefix hits of four blocks each, in one step.
    assert listed == [([N_SHARED] * 3, [N_SHARED // B])]
