"""A hundred mistakes of a new user, at every command: one line, its exit code, no file changed."""

import shlex

import pytest
from test_exit_codes import files
from test_mistakes import fails

# In place of MODEL a model, of SESSION a session of it, of BOOK a text, of REQUESTS a file of
# requests, of FOLDER a folder with a session.
MISTAKES = """
rum -p x
-p x
Run -p x
--model MODEL run
chat
serve
run
run Once
run -p
run -p x -p
run -p x extra
run -p x -n
run -p x -n ten
run -p x -n 1.5
run -p x -n -3
run -p x -n 99999999999
run -p x --n-predict= 5
run -p x -c -1
run -p x -c 1e9
run -p x --temp hot
run -p x --temp -1
run -p x --temp nan
run -p x --top_p 1.5
run -p x --top_k -2
run -p x --min_p 2
run -p x --seed -2
run -p x --seed 99999999999
run -p x --repeat_penalty 0
run -p x --stop=
run -p x --json=maybe
run -p x --no-json=1
run -p x --dtype f64
run -p x --dtype q4_0
run -p x --cache_type_k int3
run -p x --cache_type_v kivi4
run -p x --attention flash
run -p x --flash-attn
run -p x --rope both
run -p x --policy lru
run -p x --policy_budget 5
run -p x --n_drop 5
run -p x --policy attention_sinks --n_discard 5
fit --policy context_shift --n_sink 2
run -p x --policy h2o --policy_budget -5
run -p x --policy h2o --policy_budget 200%
run -p x --policy duo_attention
run -p x --policy h2o --nocontext_shift
run -p x --n_read 4
run -p x --draft
run -p x --n_draft 4
run -p x --mesh 4
run -p x --mesh heads=2
run -p x --coordinator here:1
run -p x --logprobs 5
run -p x --system hello
run -p x --chat --tokens BOOK
run -p x --tokens BOOK
run -f BOOK --tokens BOOK
run -f FOLDER
run --tokens BOOK
run -p x --session_all
run -p x --session
run -p x --session_ro
run -p x --session SESSION --overwrite --append
run -p x -gan 0
run -p x -gan 3 -gaw 512
run -p x -gan 2 --policy attention_sinks
run -p x --self_extend paper -gan 2 --select quest
run -p x --select quest --select_cells 0
run -p x --select topk
run -p x --select_cells 10
run -p x --checkpoint_bytes lots
run -p x --compress
run -p x --blocks
run -p x --window_sinks -1
run -p x -m BOOK/
run -p x -m .
run -p x -m smollm2-135
run -p x -m https://example.org/model.gguf
run -p x --verbose
run -p x --threads 4
run -p x --ngl 99
run -m
prefill -f BOOK
prefill -o new.kv
prefill -f BOOK -o
prefill -p x -o new.kv --as_chunk --chat
prefill -p x -n 5 -o new.kv
ask
ask SESSION
ask "Who is it?"
ask SESSION "Who?" -F BOOK
ask SESSION "" --temp x
ask SESSION "Who?" --session SESSION
inspect
inspect BOOK
inspect SESSION SESSION
inspect SESSION --html FOLDER/none/page.html
verify
verify FOLDER/none.kv
explain SESSION
explain SESSION -p x -f BOOK --tokens BOOK
fork SESSION
fork SESSION --at 3
fork SESSION --at -1 -o new.kv
fork SESSION --at 9999 -o new.kv
fork SESSION --at 3 -o SESSION
trim
trim SESSION --keep 9999
trim SESSION --keep x
repair
repair FOLDER/none.kv
repair SESSION -o SESSION
repair BOOK
convert SESSION -o new.kv
convert SESSION --to q4 -o new.kv
convert SESSION --to f16
convert SESSION --to f16 -o SESSION
ls
ls SESSION
ls FOLDER FOLDER
prune FOLDER
prune FOLDER --budget much
prune FOLDER --budget -1
prune SESSION --budget 1GB
batch -i REQUESTS
batch -o out.jsonl
batch -i REQUESTS -o REQUESTS
batch -i REQUESTS -o SESSION
batch -i REQUESTS -o FOLDER
batch -i REQUESTS -o out.jsonl --metrics out.jsonl
batch -i REQUESTS -o out.jsonl --metrics REQUESTS
batch -i REQUESTS -o out.jsonl --mode pages
batch -i REQUESTS -o out.jsonl --n_seq_max 0
batch -i REQUESTS -o out.jsonl --budget nothing
batch -i REQUESTS -o out.jsonl --policy none --n_sink -4
fit --budget x
fit --unified
fit -c -5
doctor extra
doctor -m nosuch
help nosuch
"""
# A file or folder that holds something else is damage.
DAMAGE = ("run -p x -m .", "inspect BOOK", "repair BOOK")
CASES = [line for line in MISTAKES.splitlines() if line]


def test_there_are_a_hundred_at_every_command():
    from kvrt.cli.commands import COMMANDS

    assert len(CASES) >= 100 and len(set(CASES)) == len(CASES)
    assert {line.split()[0] for line in CASES} >= {c.name for c in COMMANDS}


@pytest.mark.parametrize("line", CASES)
def test_a_mistake_is_one_line_and_changes_nothing(
    kvrt, tiny, prefilled, book, tmp_path, monkeypatch, line
):
    code = 1 if line in DAMAGE else 2
    folder, requests = tmp_path / "folder", tmp_path / "requests.jsonl"
    folder.mkdir()
    (folder / "a.kv").write_bytes(prefilled.read_bytes())
    requests.write_text('{"id": 1, "prompt": "x"}\n')
    monkeypatch.chdir(tmp_path)
    names = {"MODEL": tiny, "SESSION": prefilled, "BOOK": book, "REQUESTS": requests}
    names["FOLDER"] = folder
    for name, path in names.items():
        line = line.replace(name, str(path))
    words = shlex.split(line)
    takes_model = words[0] in ("run", "prefill", "ask", "explain", "batch") and "-m" not in words
    words[1:1] = ["-m", str(tiny)] if takes_model else []
    before = {path: path.is_file() and path.read_bytes() for path in files(tmp_path)}
    fails(kvrt(*words), code)
    assert {path: path.is_file() and path.read_bytes() for path in files(tmp_path)} == before
