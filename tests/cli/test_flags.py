"""The flags of `kvrt run`: spellings, ranges, contradictions, and names of other programs."""

import pytest
from flag_samples import NEEDS, expected, sample

from kvrt.cli.commands import COMMANDS, RUN
from kvrt.cli.flags import other_names
from kvrt.cli.flags.parse import parse_flags
from kvrt.cli.main import main
from kvrt.errors import UsageError

TABLE = RUN.flags()
VALUED = [flag for flag in TABLE if flag.type is not bool]
SWITCHES = [flag for flag in TABLE if flag.type is bool]


def options(*words: str):
    """Options of these words, with a prompt if they bring none, and JSON for --logprobs."""
    named = {word.lstrip("-").partition("=")[0] for word in words}
    prompt = [] if named & {"p", "prompt", "f", "file", "tokens"} else ["-p", "x"]
    found = parse_flags([*words, *prompt, "--json"])
    assert found is not None
    return found


def of(name: str, *words: str):
    """Options of another command."""
    return parse_flags(words, next(c for c in COMMANDS if c.name == name))


@pytest.mark.parametrize("flag", VALUED, ids=lambda f: f.name)
def test_every_spelling_of_a_value(flag):
    names = {f"--{flag.name}", f"-{flag.name}", f"--{flag.name.replace('_', '-')}"}
    names |= {f"-{flag.short}"} if flag.short else set()
    value = sample(flag)
    needed = NEEDS.get(flag.name, {}).items()
    more = [f"--{name}={other}" for name, other in needed if name != flag.name]
    for name in names:
        assert getattr(options(name, value, *more), flag.name) == expected(flag), name
        assert getattr(options(f"{name}={value}", *more), flag.name) == expected(flag), name


@pytest.mark.parametrize("flag", SWITCHES, ids=lambda f: f.name)
def test_every_spelling_of_a_switch(flag):
    dashed = flag.name.replace("_", "-")
    on = [f"--{flag.name}", f"-{flag.name}", f"--{dashed}", f"--{flag.name}=true"]
    off = [f"--no{flag.name}", f"--no-{dashed}", f"--no_{flag.name}", f"--{flag.name}=false"]
    with_it = ["-p", "x", *(["--session", "a.kv"] if flag.group == "Session" else [])]
    with_it += ["--policy", "none"] if flag.name == "blocks" else []
    with_it += [f"--{name}={other}" for name, other in NEEDS.get(flag.name, {}).items()]
    for word in on:
        assert getattr(parse_flags([*with_it, word]), flag.name) is True, word
    for word in off:
        assert getattr(parse_flags([*with_it, word]), flag.name) is False, word


def test_short_names_are_those_of_llama_cpp():
    short = {flag.short: flag.name for flag in TABLE if flag.short}
    one = {"m": "model", "p": "prompt", "f": "file", "n": "n_predict", "c": "n_ctx"}
    assert short == one | {"gan": "grp_attn_n", "gaw": "grp_attn_w"}


def test_every_flag_of_the_issue_is_there():
    wanted = """model prompt file n_predict n_ctx keep context_shift temp top_k top_p min_p
        repeat_penalty repeat_last_n seed logprobs chat ignore_eos stop dtype cache_type_k
        cache_type_v n_ubatch json quiet tokens cells defrag_thold""".split()
    assert set(wanted) <= {flag.name for flag in TABLE}


@pytest.mark.parametrize("value", ["-1", "-2", "0"])
def test_a_negative_value_is_no_flag(value):
    assert options("-n", value).n_predict == int(value)


@pytest.mark.parametrize("text", ["--help", "-n", "--", "-", "a=b", "", "--json=1", "--flagfile=x"])
def test_a_prompt_may_look_like_a_flag(text):
    assert options("-p", text).prompt == text
    assert options(f"--prompt={text}").prompt == text


def test_names_of_llama_cpp_for_sessions():
    found = parse_flags(["-f", "a", "-p", "b", "--prompt-cache", "x.kv", "--prompt-cache-all"])
    assert (found.session, found.session_all, found.session_ro) == ("x.kv", True, False)
    assert parse_flags(["-p", "b", "--prompt-cache=x.kv", "--prompt-cache-ro"]).session_ro
    assert {"file", "prompt", "session"} <= found.given and "rope" not in found.given


def test_a_file_and_a_text_after_it_are_one_prompt_everywhere():
    for found in (
        parse_flags(["-f", "a", "-p", "b"]),
        of("prefill", "-f", "a", "-p", "b", "-o", "x"),
    ):
        assert (found.file, found.prompt) == ("a", "b")


def test_types_of_rows_are_one_or_one_a_group():
    assert options("--cache_type_k", "q8_0").cache_type_k == "q8_0"
    assert options("--cache_type_v", "f16,int4").cache_type_v == ("f16", "int4")
    assert options("--hadamard").hadamard and not options("--nohadamard").hadamard


def test_stop_may_come_several_times_and_other_flags_take_the_last():
    assert options("--stop", "a", "--stop=b", "-n", "1", "-n", "2").stop == ("a", "b")
    assert options("-n", "1", "-n", "2").n_predict == 2


OUTSIDE = {
    "n_predict": ["-3", "1.5", "x", "", "2147483648"],
    "n_ctx": ["-1", "1e3"],
    "keep": ["-2"],
    "temp": ["-0.1", "nan", "inf", "hot"],
    "top_k": ["-1"],
    "top_p": ["-0.1", "1.1", "nan"],
    "min_p": ["2"],
    "repeat_penalty": ["0", "-1"],
    "repeat_last_n": ["-1"],
    "seed": ["-2", "4294967296"],
    "logprobs": ["-1"],
    "dtype": ["f64", "F32"],
    "cache_type_k": ["q4_0", "f16,", "f16,q4_0"],
    "cache_type_v": [""],
    "rope": ["never"],
    "attention": ["reference"],
    "n_ubatch": ["0"],
    "n_checkpoints": ["-1"],
    "checkpoint_interval": ["-1"],
    "policy": ["h3o"],
    "n_drop": ["0"],
    "policy_interval": ["0"],
    "refresh_every": ["0"],
    "n_read": ["-1"],
    "seq": ["-1", "4096"],
    "stride": ["0"],
    "block_size": ["0"],
    "n_rs_seq": ["-1"],
    "defrag_thold": ["-0.1", "1.01", "nan"],
    "json": ["maybe"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n in OUTSIDE for v in OUTSIDE[n]])
def test_values_outside_their_range(name, value, capsys):
    assert main(["run", "-p", "x", f"--{name}={value}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and f"--{name}" in err and "is wanted" in err
    assert "see kvrt run --help" in err


MISTAKES = {
    "no prompt": ([], "the prompt is wanted once"),
    "two prompts": (["-p", "x", "--tokens", "y"], "found -p and --tokens"),
    "three prompts": (["-p", "x", "-f", "y", "--tokens", "z"], "found -p and -f and --tokens"),
    "chat with ids": (["--tokens", "z", "--chat"], "--chat needs text"),
    "empty stop": (["-p", "x", "--stop", ""], "--stop= is empty"),
    "logprobs as text": (["-p", "x", "--logprobs", "2"], "add --json"),
    "no value": (["-p"], "Missing value for flag -p"),
    "a bare word": (["-p", "x", "words"], "unexpected argument 'words'"),
    "system without chat": (["-p", "x", "--system", "y"], "add --chat"),
    "append nothing": (["--session", "a", "--append"], "found none"),
    "append alone": (["-p", "x", "--append"], "--append needs --session"),
    "append and not": (["-p", "x", "--session", "a", "--append", "--overwrite"], "choose one"),
    "never and replaced": (["-p", "x", "--session", "a", "--session_ro", "--overwrite"], "choose"),
    "session words alone": (["-p", "x", "--session_ro"], "--session_ro needs --session"),
    "a sequence alone": (["-p", "x", "--seq", "1"], "--seq 1 needs --session FILE"),
    "never and always": (
        ["-p", "x", "--session", "a", "--session_ro", "--session_all"],
        "choose one",
    ),
    "two policies": (["-p", "x", "--policy", "attention_sinks", "--nocontext_shift"], "drops none"),
    "a policy beside SelfExtend": (
        ["-p", "x", "--policy", "context_shift", "-gan", "2"],
        "both move positions; choose one",
    ),
    "a policy until the context is full": (
        ["-p", "x", "--policy", "attention_sinks", "-n", "-2"],
        "never lets it be; choose one",
    ),
    "blocks that move": (["-p", "x", "--blocks"], "do without it: --nocontext_shift"),
    "blocks beside SelfExtend": (["-p", "x", "--blocks", "-gan", "2", "--policy", "none"], "-gan"),
    "a bare dash": (["-p", "x", "-"], "unexpected argument '-'"),
    "a flag for a value": (["-p", "-n", "5"], "argument '5' (-p has taken -n for its value)"),
    "a glued value": (["-p", "x", "-n5"], "unknown flag -n5 (did you mean -n 5?)"),
    "a flag of others": (["-p", "x", "-o", "y"], "unknown flag -o (one of kvrt prefill, fork"),
    "a former name of others": (["-p", "x", "--probe"], "--check_logits (one of kvrt verify)"),
    "another's short name": (["-p", "x", "-b", "8"], "in kvrt it is --n_ubatch"),
    "unknown": (["-p", "x", "--zzz=3"], "unknown flag --zzz;"),
    "nearly": (["-p", "x", "--n-predikt", "3"], "did you mean --n_predict?"),
    "nearly, one dash": (["-p", "x", "-ignore-eso"], "did you mean --ignore_eos?"),
    "no flag to negate": (["-p", "x", "--nozzz"], "unknown flag --nozzz"),
    "a value to no switch": (["-p", "x", "--nojson=1"], "--nojson=1 does not take an argument"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes(words, message, capsys):
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert err.startswith("kvrt: ") and err.count("\n") == 1 and err.endswith("\n")


COMMANDS_OF_OTHERS = {
    "serve": "'serve': kvrt is no server; kvrt batch",
    "chat": "'chat': kvrt run --chat is meant",
    "RUN": "'RUN' (did you mean run?)",
    "--verison": "'--verison' (did you mean --version?)",
    "-m": "the command comes first, before -m",
}


@pytest.mark.parametrize("word", COMMANDS_OF_OTHERS)
def test_commands_that_are_meant(word, capsys):
    assert main([word, "-p", "x"]) == 2
    assert COMMANDS_OF_OTHERS[word] in capsys.readouterr().err


@pytest.mark.parametrize("words", [["walk"], ["--verbose"], [""]])
def test_no_such_command(words, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "the commands are: run" in err


def test_mistakes_have_their_own_type():
    with pytest.raises(UsageError, match="unknown flag"):
        parse_flags(["--wat"])


FOREIGN = {
    "-t 4": "kvrt has none; XLA takes all cores",
    "--threads 4": "taskset",
    "-ngl 99": "JAX_PLATFORMS",
    "--n-gpu-layers 99": "JAX_PLATFORMS",
    "--ctx-size 4096": "in kvrt it is --n_ctx",
    "-ctk q8_0": "in kvrt it is --cache_type_k",
    "-ctv=q8_0": "in kvrt it is --cache_type_v",
    "--temperature 0.5": "in kvrt it is --temp",
    "--max-tokens 5": "in kvrt it is --n_predict",
    "-np 4": "in kvrt it is --n_seq_max (one of kvrt batch, fit)",
    "--cache-type-k q4_0": "is wanted; for q4_0 take int4",
    "--cache_type_v Q8_0": "is wanted; for Q8_0 take q8_0",
    "--dtype float16": "is wanted; for float16 take f16",
}


@pytest.mark.parametrize("words", FOREIGN)
def test_flags_and_values_of_other_programs_name_their_counterpart(words, capsys):
    assert main(["run", "-p", "x", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and FOREIGN[words] in err


def test_counterparts_are_flags_of_kvrt_and_take_nothing_over():
    own = {c.name: {n for f in c.flags() for n in (f.name, f.short)} for c in COMMANDS}
    for name in other_names._FLAGS:
        found = other_names.counterpart(name)
        assert found is not None and (found.remark or found.flag)
        assert not found.flag or any(found.flag in names for names in own.values()), name
        # A flag that all commands know would never be looked up.
        assert any(name not in names for names in own.values()), name


def test_the_names_of_llama_cpp_are_taken_as_they_are():
    assert options("--n-predict", "5").n_predict == options("-n_predict", "5").n_predict == 5
    assert options("--model", "x.gguf").model == "x.gguf"


def test_a_random_seed_is_a_number_that_can_be_given_again():
    seeds = {options("--seed", "-1").seed for _ in range(4)}
    assert len(seeds) > 1 and all(0 <= seed < 2**32 for seed in seeds)
    again = options("--seed", str(max(seeds)))
    assert again.seed == max(seeds) and options().seed == 0
    # Each request of a batch has one of its own.
    assert of("batch", "-i", "a", "-o", "b", "--seed", "-1").seed == -1
    with pytest.raises(UsageError, match="another one in each process"):
        options("--seed", "-1", "--mesh=context=2", "--coordinator=h:1", "--n_processes=2")


OLD = {
    "batch -i a -o b --by_prefix": "in kvrt it is --group_by_prefix",
    "batch -i a -o b --n_seq 7": "in kvrt it is --n_seq_max",
    "convert a.kv --to mlx -o b --old": "in kvrt it is --legacy_format",
    "fit --n-seq=7": "in kvrt it is --n_seq_max",
    "verify a.kv -m x --probe": "in kvrt it is --check_logits",
}


@pytest.mark.parametrize("call", OLD)
def test_old_names_of_flags_are_refused_with_the_new_one(call, capsys):
    assert main(call.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and OLD[call] in err


def test_places_of_words_without_a_dash():
    found = of("ask", "a.kv", "-n", "3", "why?")
    assert (found.session, found.question, found.n_predict) == ("a.kv", "why?", 3)
    assert of("ask", "a.kv", "--", "--why?").question == "--why?"
    assert of("ask", "a.kv", "-F", "-").questions == "-"


OTHERS = {
    "ratio of no chunks": (["ask", "a.kv", "x", "--ratio", "0.2"], "add --chunk FILE"),
    "chunks and no question": (["ask", "--chunk", "a.kv"], "a question is wanted"),
    "a session beside chunks": (["ask", "a.kv", "x", "--chunk", "b.kv"], "leave out a.kv"),
    "a ratio above 1": (["ask", "--chunk", "a.kv", "x", "--ratio", "1.5"], "from 0 to 1"),
    "no session": (["ask"], "SESSION is wanted: kvrt ask SESSION"),
    "no question": (["ask", "a.kv"], "a question is wanted"),
    "two questions": (["ask", "a.kv", "x", "-F", "y"], "one of both"),
    "a word too many": (
        ["inspect", "a.kv", "b.kv"],
        "unexpected argument 'b.kv'; the call is kvrt inspect SESSION [flags];",
    ),
    "a budget without its flag": (
        ["prune", "x", "5GB"],
        "'5GB'; the call is kvrt prune FOLDER --budget SIZE [flags];",
    ),
    "files without flags": (["batch", "a", "b"], "the call is kvrt batch -i REQUESTS -o RESULTS"),
    "a model without its flag": (["fit", "smollm2-135m"], "the call is kvrt fit [-m NAME]"),
    "a prompt for a book": (["ask", "-f", "x"], "unknown flag -f (one of kvrt run, prefill"),
    "no output": (["prefill", "-p", "x"], "-o, --output FILE is wanted"),
    "nowhere to cut": (["fork", "a.kv", "-o", "b.kv"], "--at N is wanted"),
    "a cut at nothing": (["fork", "a.kv", "-o", "b.kv", "--at", "0"], "of at least 1|from 1 to"),
    "a probe of no model": (["verify", "a.kv", "--check_logits"], "add -m NAME"),
    "text of no tokens": (["inspect", "a.kv", "-m", "x"], "add --tokens"),
    "an odd type": (["convert", "a.kv", "-o", "b", "--to", "f64"], "f32 or bf16 or f16"),
    "no size": (["prune", "x", "--budget", "much"], "a size is wanted, like 10GB"),
}


@pytest.mark.parametrize(("words", "message"), OTHERS.values(), ids=OTHERS)
def test_mistakes_of_other_commands(words, message, capsys):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert any(part in err for part in message.split("|"))
    assert f"see kvrt {words[0]} --help" in err


SIZES = {"10GB": 10**10, "512MiB": 2**29, "7": 7, "1.5k": 1500, "2 tib": 2**41}


def test_sizes():
    for text, wanted in SIZES.items():
        assert of("prune", "x", "--budget", text).size("budget") == wanted
