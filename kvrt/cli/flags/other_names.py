"""Flags, values and commands of other programs, and what may be meant by a flag that is none."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from absl import flags

from kvrt.cli.commands import COMMANDS, Command


@dataclasses.dataclass(frozen=True)
class Counterpart:
    """What kvrt has for a flag of another program.

    Attributes:
      flag: kvrt's flag, "" where there is none.
      remark: how it is used, or why there is none.
    """

    flag: str
    remark: str = ""


# By the names that take their place; names as they are after the dashes, with underscores.
_NAMED: Mapping[str, tuple[str, ...]] = {
    "n_ctx": ("ctx_size", "context_size", "num_ctx", "max_model_len", "max_seq_len", "max_kv_size"),
    "n_predict": ("predict", "max_tokens", "max_new_tokens", "num_predict"),
    "n_ubatch": ("b", "ub", "batch_size", "ubatch_size", "prefill_step_size"),
    "temp": ("temperature", "t_sampling"),
    "seed": ("s",),
    "repeat_penalty": ("repetition_penalty",),
    "stop": ("r", "reverse_prompt"),
    "keep": ("n_keep",),
    "cache_type_k": ("ctk",),
    "cache_type_v": ("ctv",),
    "defrag_thold": ("dt",),
    "n_checkpoints": ("ctx_checkpoints", "ctxcp", "swa_checkpoints"),
    "checkpoint_interval": ("checkpoint_min_step", "cms"),
    "n_seq_max": ("np", "max_num_seqs", "n_seq"),
    "n_batch": ("max_num_batched_tokens", "chunked_prefill_size"),
    "prefix_cache": ("enable_prefix_caching",),
    "n_chunk": ("long_prefill_token_threshold",),
    "order": ("scheduling_policy",),
    "salt": ("cache_salt",),
    "stride": ("num_scheduler_steps",),
    "host_cache": ("swap_space", "cpu_offload_gb"),
    "json": ("j", "format"),
    "quiet": ("q", "no_display_prompt", "log_disable"),
    "model": ("model_path", "model_name"),
    "prompt": ("text",),
    "file": ("prompt_file",),
    "output": ("out",),
    "input": ("input_file",),
    # Former names of ours.
    "group_by_prefix": ("by_prefix",),
    "legacy_format": ("old",),
    "check_logits": ("probe",),
}
_REMARKS = {"n_ubatch": "tokens of a prompt in a step"}
_SEVERAL: Mapping[tuple[str, ...], Counterpart] = {
    ("kv_cache_dtype", "kv_bits", "type_k", "type_v"): Counterpart(
        "cache_type_k", "and --cache_type_v"
    ),
    ("tensor_parallel_size", "tp", "ts", "tensor_split", "sm", "split_mode"): Counterpart(
        "mesh", "as in --mesh tensor=2"
    ),
    ("cnv", "conversation", "i", "interactive", "if", "interactive_first"): Counterpart(
        "chat", "and --session FILE keeps the conversation for the next run"
    ),
    ("fa", "flash_attn"): Counterpart(
        "attention", "and no choice of it stores the scores of a whole context"
    ),
    ("t", "threads", "tb", "threads_batch"): Counterpart(
        "", "XLA takes all cores that the process may use; taskset gives it fewer"
    ),
    ("ngl", "n_gpu_layers", "gpu_layers", "dev", "device", "mg", "main_gpu"): Counterpart(
        "", "all layers are on the device that JAX finds; the variable JAX_PLATFORMS names another"
    ),
    ("mlock", "mmap", "no_mmap"): Counterpart("", "weights are always read into memory"),
    ("hf", "hfr", "hf_repo", "hf_file", "mu", "model_url"): Counterpart(
        "", "fetch the file, and give its path with -m"
    ),
    ("gpu_memory_utilization", "mem_fraction_static"): Counterpart(
        "", "-c says how much is cached, and kvrt fit what that takes"
    ),
    ("rope_scaling", "rope_scale", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"): (
        Counterpart("", "RoPE is as the model's file has it; -gan reads further")
    ),
    ("grammar", "grammar_file", "json_schema", "lora", "md", "model_draft"): Counterpart(
        "", "kvrt does not do that"
    ),
    ("presence_penalty", "frequency_penalty", "logit_bias", "mirostat", "typical"): (
        Counterpart("", "see kvrt help sampling for what there is")
    ),
    ("num_beams", "length_penalty", "early_stopping"): Counterpart(
        "", "a beam search is a key of a line of kvrt batch, or kvrt.Request(num_beams=...)"
    ),
    ("e", "escape"): Counterpart("", "-p is taken as it is; give a text with newlines by -f"),
    ("v", "verbose", "log_file"): Counterpart("", "a summary is on standard error already"),
    ("host", "port"): Counterpart("", "kvrt is no server; kvrt batch serves many requests"),
}
_FLAGS: Mapping[str, Counterpart] = MappingProxyType(
    {
        name: Counterpart(flag, _REMARKS.get(flag, ""))
        for flag, names in _NAMED.items()
        for name in names
    }
    | {name: found for names, found in _SEVERAL.items() for name in names}
)
# Types of weights and of cached keys and values, by what takes their place: the first that a flag
# has is named.
_TYPES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("f32",): ("fp32", "float32", "float", "auto"),
    ("f16",): ("fp16", "float16", "half"),
    ("bf16",): ("bfloat16",),
    ("q8_0", "int8"): ("q8", "q5_0", "q5_1", "8"),
    ("fp8", "int8"): ("fp8_e4m3", "fp8_e5m2"),
    ("int8",): ("fp8",),
    ("int4",): ("q4_0", "q4_1", "iq4_nl", "q4", "4", "q4_k"),
    ("int2",): ("q2_k", "2"),
}
_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {word: found for found, theirs in _TYPES.items() for word in theirs}
)


# Commands of other programs.
_MEANT: Mapping[str, tuple[str, ...]] = {
    "kvrt run is meant": ("generate", "complete", "completion", "cli"),
    "kvrt run --chat is meant": ("chat",),
    "kvrt is no server; kvrt batch serves many requests": ("serve", "server"),
    "kvrt ls FOLDER is meant": ("list", "dir"),
    "kvrt prune FOLDER is meant": ("rm", "delete", "clean"),
    "kvrt inspect SESSION is meant": ("show", "info"),
    "kvrt verify SESSION is meant": ("check",),
    "-m NAME fetches a known model when it is used": ("pull", "download", "get"),
    "kvrt --version is meant": ("version",),
}
_COMMANDS: Mapping[str, str] = MappingProxyType(
    {word: meant for meant, words in _MEANT.items() for word in words}
)


def command(word: str) -> str:
    """What kvrt has for a command of another program, or nothing."""
    return _COMMANDS.get(word.lower(), "")


def counterpart(name: str) -> Counterpart | None:
    """What kvrt has for a flag, by its name without dashes before it, or None if it is unknown."""
    return _FLAGS.get(name)


def nearest_value(value: str, known: Iterable[str]) -> str | None:
    """The value among those known that another program's word comes nearest to, or None."""
    known = tuple(known)
    wanted = (value.lower(), *_VALUES.get(value.lower(), ()))
    return next((x for x in wanted if x in known), None)


def unknown_flag(error: flags.UnrecognizedFlagError, command: Command) -> str:
    """That there is no such flag, and which one may be meant."""
    word = error.flagvalue.partition("=")[0]
    name = word.lstrip("-").replace("-", "_")
    own = {n for flag in command.given_by_name().values() for n in flag.names}
    found = counterpart(name)
    if found is not None and found.flag in own:
        near = _counterpart(name, own)
    elif name[:1] in own and name[1:].isdigit():
        near = f" (did you mean -{name[0]} {name[1:]}?)"
    else:
        near = _elsewhere(name) or _counterpart(name, own) or _nearly(name, command)
    return f"unknown flag {word}{near}"


def _counterpart(name: str, own: set[str]) -> str:
    """What stands for a flag of another program, here or in other commands."""
    found = counterpart(name)
    if found is None:
        return ""
    if not found.flag:
        return f": kvrt has none; {found.remark}"
    where = "" if found.flag in own else _elsewhere(found.flag)
    remark = f", {found.remark}" if found.remark else ""
    return f": in kvrt it is --{found.flag}{where}{remark}"


def _nearly(name: str, command: Command) -> str:
    """The flag whose name is nearly this one; absl names aliases and too many of them."""
    found = difflib.get_close_matches(name, list(command.given_by_name()), n=1)
    return f" (did you mean --{found[0]}?)" if found else ""


def _elsewhere(name: str) -> str:
    """Which commands have a flag that this one lacks."""
    found = [
        command.name
        for command in COMMANDS
        if any(name in flag.names for flag in command.given_by_name().values())
    ]
    return f" (one of kvrt {', '.join(found)})" if found else ""
