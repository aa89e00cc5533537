"""The commands: what each is for, its flags, and the module that does it."""

import dataclasses

from kvrt.cli.flags import evaluate as o
from kvrt.cli.flags import serving as e
from kvrt.cli.flags import session_files as s
from kvrt.options.option import Flag, Options, flags_of


@dataclasses.dataclass(frozen=True)
class Command:
    """A command.

    Attributes:
      name: the word after `kvrt`.
      places: the words that follow it.
      brief: a few words for the list of commands.
      about: what its help begins with.
      options: its flags.
      does: the module and function that take the options.
      examples: whole calls, which its help ends with.
    """

    name: str
    places: str
    brief: str
    about: str
    options: type[Options]
    does: str
    examples: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        """How it is called."""
        return " ".join(x for x in (self.name, self.places, "[flags]") if x)

    def flags(self) -> tuple[Flag, ...]:
        """Its flags and places, in the order of the help."""
        return flags_of(self.options)

    def given_by_name(self) -> dict[str, Flag]:
        """Its flags by their names, without its places."""
        return {flag.name: flag for flag in self.flags() if not flag.place}


RUN = Command(
    "run",
    "",
    "continue a prompt with a model",
    "Continues a prompt. Standard output is the text and nothing else.",
    o.RunOptions,
    "kvrt.cli.run.run_command:execute",
    (
        'kvrt run -p "Once upon a time" -n 100',
        'kvrt run -m model.gguf --chat -p "Who was Ada Lovelace?"',
        "kvrt run -f book.txt --temp 0 -c 8192",
        'kvrt run -f book.txt --session book.kv -p "Who speaks?"',
        'kvrt run -p "Once" --seed -1 --json --logprobs 5',
    ),
)
COMMANDS = (
    RUN,
    Command(
        "prefill",
        "-f FILE -o SESSION",
        "read a text into a session",
        "Reads a text and keeps it as a session; nothing is generated.",
        s.PrefillOptions,
        "kvrt.cli.run.run_command:execute_prefill",
        ("kvrt prefill -f book.txt -o book.kv", "kvrt prefill -f page.txt --as_chunk -o page.kv"),
    ),
    Command(
        "ask",
        "SESSION [QUESTION]",
        "questions to a session, which stays as it is",
        "Answers questions after the text of a session, each as if it were the first. The file is "
        "never written. With --chunk the text is made of texts that were read alone, in any order: "
        "most of it is not computed again, and the answer is approximate.",
        s.AskOptions,
        "kvrt.cli.ask.ask:execute",
        (
            'kvrt ask book.kv "Who is speaking?"',
            "kvrt ask book.kv -F questions.txt --json",
            'kvrt ask --chunk a.txt --chunk b.txt "Who is speaking?"',
        ),
    ),
    Command(
        "inspect",
        "SESSION",
        "what a session holds",
        "Says what a session holds, from its manifest and its cells; keys and values are not read.",
        s.InspectOptions,
        "kvrt.cli.session.inspect:execute",
    ),
    Command(
        "verify",
        "SESSION",
        "whether a session is sound, and fits a model",
        "Checks every digest of a session. Ends with 0 if it is sound, 1 if it is damaged, 2 if it "
        "does not fit the model.",
        s.VerifyOptions,
        "kvrt.cli.session.verify:execute",
    ),
    Command(
        "explain",
        "SESSION -f FILE",
        "what of a session a new prompt would reuse",
        "Says what a new prompt would reuse of a session, where the two differ first, and why "
        "the rest would be recomputed. Of a folder of sessions it takes the one that shares most.",
        s.ExplainOptions,
        "kvrt.cli.session.explain:execute",
    ),
    Command(
        "fork",
        "SESSION --at N -o FILE",
        "a copy of a session, cut at a token",
        "Copies the first N tokens of a session to another one. No model is needed.",
        s.ForkOptions,
        "kvrt.cli.session.copies:execute_fork",
        ("kvrt fork book.kv --at 1200 -o chapter1.kv",),
    ),
    Command(
        "trim",
        "SESSION",
        "drop what a session no longer needs",
        "Writes a session anew without what later saves have replaced in it.",
        s.TrimOptions,
        "kvrt.cli.session.copies:execute_trim",
    ),
    Command(
        "repair",
        "SESSION",
        "what is sound of a damaged session",
        "Keeps of a damaged session what its digests prove: of each sequence the tokens before the "
        "first damaged block, or up to a context checkpoint before it. Says what is lost. Ends "
        "with 0 if something is left, or nothing was damaged, else with 1.",
        s.RepairOptions,
        "kvrt.cli.session.copies:execute_repair",
        ("kvrt repair book.kv", "kvrt repair book.kv -o sound.kv"),
    ),
    Command(
        "convert",
        "SESSION --to TYPE -o FILE",
        "a copy of a session with another KV dtype",
        "Copies a session with its keys and values in another dtype, or in the format of another "
        "program; with -m also from a file of llama.cpp or mlx-lm, which does not name its model.",
        s.ConvertOptions,
        "kvrt.cli.session.copies:execute_convert",
        (
            "kvrt convert book.kv --to q8_0 -o small.kv",
            "kvrt convert book.kv --to llama.cpp -o book.bin",
            "kvrt convert book.bin -m model.gguf --to f16 -o b.kv",
        ),
    ),
    Command(
        "ls",
        "FOLDER",
        "the sessions of a folder",
        "Lists the sessions of a folder, the one used last first.",
        s.LsOptions,
        "kvrt.cli.session.folder:execute_ls",
    ),
    Command(
        "prune",
        "FOLDER --budget SIZE",
        "delete the sessions used least recently",
        "Deletes the sessions of a folder that were used least recently, until the others fit, and "
        "says of each why it goes or stays. A session was used when kvrt read or wrote it; one "
        "that the index does not know yet was used when its file was read or changed last.",
        s.PruneOptions,
        "kvrt.cli.session.folder:execute_prune",
        ("kvrt prune sessions --budget 2GB --dry_run",),
    ),
    Command(
        "batch",
        "-i REQUESTS -o RESULTS",
        "many requests at once, resumable",
        "Serves the requests of a file together. A line is a JSON object with id and prompt, or "
        "tokens, and any of n_predict, temp, top_k, top_p, min_p, repeat_penalty, repeat_last_n, "
        "seed, n (samples), num_beams, priority (lower first), stop, chat, ignore_eos, salt, cache "
        "(may use what others computed), quota and reserve (cached tokens), chunks (files of texts "
        "before it), and those of its policy. Results are written as requests end: id, tokens, "
        "text, finish_reason, n_cached, digest; sample where n is above 1, and error for a request "
        "that could not be served. The same command resumes after an interruption; a request that "
        "was changed is computed anew, results of another model or other flags are refused "
        "(--restart). Ends with 1 if a request failed.",
        e.BatchOptions,
        "kvrt.cli.batch.batch_command:execute",
        ("kvrt batch -i requests.jsonl -o results.jsonl -c 16384",),
    ),
    Command(
        "fit",
        "[-m NAME]",
        "the memory a model and its cache take",
        "Says what weights, KV cache and states take in memory, and the longest context that fits. "
        "No weight is read; -m may also be a config.json alone. Ends with 1 if it does not fit.",
        e.FitOptions,
        "kvrt.cli.fit:execute",
        ("kvrt fit -m model.gguf -c 32768 --cache_type_k q8_0",),
    ),
    Command(
        "doctor",
        "[-m NAME]",
        "what kvrt finds here, and what computes attention",
        "Says what kvrt runs on here: versions, devices, free memory, where compiled programs are "
        "kept, and what --attention auto takes and why. A kernel that was not tested on this "
        "device yet is tested now. No weight is read.",
        e.DoctorOptions,
        "kvrt.cli.doctor:execute",
        ("kvrt doctor", "kvrt doctor -m model.gguf --rope read"),
    ),
)
