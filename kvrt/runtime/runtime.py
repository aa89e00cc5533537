"""The one object that changes; it decides and computes nothing itself: its parts do."""

from collections.abc import Mapping, Sequence

import numpy as np
from jax.sharding import Mesh

from kvrt.arrays import Array, Float, Int32, TokenIds
from kvrt.attention.contract import Decoder
from kvrt.cache import capture, checks
from kvrt.cache.cell_cache import open_cell_cache
from kvrt.cache.kept_positions import KeptPositions, kept_positions
from kvrt.cache.stats import Stats
from kvrt.cellcache import history
from kvrt.cellcache.checkpoint.resume import ResumePositions
from kvrt.cells import Cells, seq_pos_min
from kvrt.drafts.drafter import Speculation
from kvrt.exclusive import Exclusive, Guarded, one_call_at_a_time
from kvrt.options.cache import CacheConfig
from kvrt.options.sampling import Sampling
from kvrt.policies import AnyPolicy
from kvrt.program.disk_hits import CompileProgress
from kvrt.program.mesh import MeshSpec, placement
from kvrt.program.programs import Programs
from kvrt.program.step import Cache
from kvrt.reuse.blend import BlendSpec
from kvrt.runtime import blend, generate
from kvrt.runtime.blend import Blended
from kvrt.runtime.chunks.chunk import CachedChunk, StoredChunk
from kvrt.runtime.edits import SequenceEdits
from kvrt.runtime.generate import GREEDY, After, GenerationSpec, Token
from kvrt.runtime.stepper import Progress, Stepper
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import SamplingState, Snapshot

Ints = Int32[np.ndarray, " n"]


@one_call_at_a_time(
    free=(
        *("cells", "group_cells", "programs", "fingerprint", "n_free", "stats"),
        *("seq_pos_min", "token_history", "n_exact"),
    ),
    reads=("cache", "flush", "snapshot", "seq_pos_max", "resume_positions", "checkpoints"),
)
class Runtime(SequenceEdits):
    """A model on a cell cache.

    A refused call leaves everything as it was; one that is stopped between two steps, by `progress`
    for one, leaves the steps that ran, and the exception has a note that says how many tokens stay.
    Positions follow the sequence: appended tokens stand after the greatest position that it has.

    A `with` block frees keys and values at its end, as `close` does.

    It takes one call at a time, and one item of `generate` is a call: another one meanwhile, of any
    thread, raises `Busy` and changes nothing. `stats`, `cells`, `group_cells`, `programs`,
    `fingerprint`, `n_free`, `seq_pos_min`, `token_history` and `n_exact` never
    do. A `progress` callback may also use `cache`, `flush`, `snapshot`, `seq_pos_max`,
    `resume_positions`, `checkpoints`, `can_remove` and `table`.
    Another thread may save what `snapshot` returned.
    """

    def __init__(
        self,
        model: Decoder,
        config: CacheConfig | None = None,
        *,
        policy: AnyPolicy | None = None,
        identity: Mapping[str, str] | None = None,
        mesh: MeshSpec | Mesh | None = None,
    ):
        """Allocates the cache; nothing is compiled before it is needed.

        Args:
          model: a flax.nnx module, as `kvrt.Decoder` says.
          config: sizes and types of the cache; None is `CacheConfig()`.
          policy: makes room when a sequence has outgrown it, or keeps tokens by score; None raises
            `CacheFull` instead.
          identity: what a session must share beside weights and sizes, e.g. the architecture and
            the tokenizer's digest.
          mesh: devices that divide cache and weights; None is one. Axes are those of `MeshSpec`.

        Raises:
          BadConfig: the model is no decoder, n_keep leaves nothing to drop, groups lack layers, or
            there are too few devices or too little memory.
        """
        self._exclusive = Exclusive("Runtime")
        config = checks.settled(model, CacheConfig() if config is None else config, policy)
        place, divided = placement(mesh, config)
        self._cache = open_cell_cache(model, divided, place, policy)
        self.config, self.identity = self._cache.device.settled(config), dict(identity or {})
        self.n_vocab, self._model_name = int(model.n_vocab), type(model).__name__
        self._stepper = Stepper(self._cache, self.n_vocab)

    @property
    def cells(self) -> Cells:
        """Positions and owners on the host, of layers that keep every position if there are any."""
        return self._cache.host.cells

    @property
    def group_cells(self) -> tuple[Cells, ...]:
        """Positions and owners in each group of layers, in the order of the model's `groups`."""
        return tuple(g.cells for g in self._cache.host.contents.groups)

    @property
    def cache(self) -> Cache:
        """Keys, values and cells on the device, nothing pending; dead after the next step."""
        self._cache.flush()
        return self._cache.device.cache

    @property
    def programs(self) -> Programs:
        """What was compiled so far."""
        return self._cache.device.programs

    @property
    def n_free(self) -> int:
        """Tokens of sequences in cells that fit; 2^31 - 1 where all layers use cells again."""
        return self._cache.host.n_free

    def seq_pos_min(self, seq_id: int = 0) -> int:
        """Least position of a sequence, -1 if it is empty."""
        return int(seq_pos_min(self.cells, self._cache.check_seq_id(seq_id)))

    def seq_pos_max(self, seq_id: int = 0) -> int:
        """Greatest position of a sequence, -1 if it is empty."""
        return self._cache.host.pos_max(self._cache.check_seq_id(seq_id))

    def token_history(self, seq_id: int = 0) -> tuple[Ints, Ints]:
        """Positions and ids of a sequence's tokens, by position; evicted ones of windows too."""
        self._cache.check_seq_id(seq_id)
        found = history.entries(self._cache.host.history, seq_id)
        return found[0], found[1]

    def n_exact(self, seq_id: int = 0) -> int | None:
        """Tokens whose keys and values are as if computed in one go, up to a hole; None is all."""
        self._cache.check_seq_id(seq_id)
        return self._cache.host.history.exact.get(seq_id)

    def resume_positions(self, seq_id: int = 0) -> ResumePositions:
        """The set of positions that a sequence can be cut back to, those of checkpoints included.

        Windowed layers use cells again that no later token sees, recurrent ones keep few states:
        see `CacheConfig.swa_full`, `n_rs_seq` and `n_checkpoints`.
        """
        return self._cache.host.resume_positions(self._cache.check_seq_id(seq_id))

    def checkpoints(self, seq_id: int = 0) -> tuple[int, ...]:
        """Positions of a sequence's context checkpoints, ascending; it can be cut back to each."""
        return self._cache.host.checkpoints.positions(self._cache.check_seq_id(seq_id))

    def kept_positions(self, seq_id: int = 0) -> KeptPositions:
        """By layer and kv head the positions that a policy by score has kept, ascending.

        Layers that it does not choose for are left out. Waits for the device.
        """
        return kept_positions(self._cache, seq_id)

    def stats(self) -> Stats:
        """Counters so far."""
        return self._cache.counts.snapshot(self._cache.host, self._cache.device)

    # --- tokens in, logits out -----------------------------------------------------------------

    def append(
        self,
        tokens: TokenIds,
        seq_id: int = 0,
        *,
        out_ids: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> Float[Array, "R V"]:
        """Evaluates tokens after the greatest position of a sequence, at most n_ubatch in a step.

        Args:
          tokens: ids, at least one.
          seq_id: sequence they belong to.
          out_ids: indices into `tokens` whose logits are wanted; None is the last.
          progress: called with tokens done and tokens in all after each step; may raise.

        Returns:
          Logits of out_ids, float32, on the device.

        Raises:
          BadToken: no tokens, an id outside the vocabulary, or an index outside `tokens`.
          BadSequence: seq_id outside [0, n_seq_max).
          CacheFull: they do not fit, nor would they after context shifts.
        """
        progress = progress and self._exclusive.callback(progress)
        return self._stepper.append(tokens, seq_id, out_ids, progress)

    def fill(self, tokens: TokenIds, seq_id: int, pos: int) -> None:
        """Evaluates tokens at positions [pos, pos + n) of a sequence, where it holds nothing.

        They see what stands before them; what stands behind them was computed without them.

        Raises:
          BadToken: as in `append`.
          BadRange: some of the positions are held.
          CannotRewind: windowed layers that reuse cells, recurrent ones and SelfExtend in the
            cache take tokens in at the end alone.
          CacheFull: they do not fit, or stand behind the end where a policy would drop others.
        """
        self._stepper.fill(tokens, seq_id, pos)

    def prepare(
        self,
        n_tokens: int,
        asked: GenerationSpec | None = None,
        progress: CompileProgress | None = None,
    ) -> None:
        """Compiles what a prompt of n_tokens and a generation need; weights may be read meanwhile.

        `progress` is called with programs that are there, of how many, and how many from a disk.
        """
        generate.prepare(self._cache.device, n_tokens, asked, progress)

    def bind(self, model: Decoder) -> None:
        """Takes the weights of a model that was given as shapes; see `kvrt_models.load`."""
        self.programs.bind(model)

    def prefill(
        self, tokens: TokenIds, seq_id: int = 0, *, progress: Progress | None = None
    ) -> Float[Array, " V"]:
        """`append` of a prompt; the logits of its last token."""
        progress = progress and self._exclusive.callback(progress)
        return self._stepper.append(tokens, seq_id, None, progress)[0]

    def decode(self, tokens: Mapping[int, int]) -> dict[int, Float[Array, " V"]]:
        """One token for each of several sequences in one step; logits by sequence.

        A policy makes room in each of them, and errors are raised, as for `append`.
        """
        return self._stepper.decode(tokens)

    def probe(self, tokens: TokenIds, seq_id: int = 0) -> Float[Array, "T V"]:
        """Logits of tokens after the end of a sequence, which stays as it is.

        Nothing is dropped for them: they stand behind the end, even where a policy would make room.
        """
        return self._stepper.probe(tokens, seq_id)

    def generate(
        self,
        n_predict: int | None = None,
        seq_id: int = 0,
        *,
        sampling: Sampling = GREEDY,
        stop_ids: Sequence[int] = (),
        recent: Sequence[int] = (),
        n_best: int = 0,
        stride: int = 1,
        after: After | None = None,
        speculation: Speculation | None = None,
    ) -> Guarded[Token]:
        """Tokens that continue a sequence; see `GenerationSpec` for the arguments."""
        asked = GenerationSpec(
            n_predict=n_predict,
            seq_id=seq_id,
            sampling=sampling,
            stop_ids=tuple(stop_ids),
            recent=tuple(recent),
            n_best=n_best,
            stride=stride,
            after=after,
            speculation=speculation,
        )
        return Guarded(self._exclusive, "generate", generate.generate_tokens(self._stepper, asked))

    def last_logits(self, seq_id: int) -> Float[Array, "1 V"]:
        """Logits of the newest token that a sequence holds; it stays as it is.

        They are kept from that token's step, unless the sequence was changed since or `generate`
        fed the token; then it is evaluated once more over what stands before it.

        Raises:
          BadToken: the sequence is empty, or several tokens stand at its end.
          CannotRewind: a windowed or recurrent layer no longer has what it saw; append a token.
        """
        return self._stepper.last_logits(seq_id)

    # --- chunks that were computed alone ---------------------------------------------------------

    def chunk(
        self, tokens: TokenIds, lead: TokenIds = (), begun: Snapshot | None = None
    ) -> CachedChunk:
        """Computes a text alone, in a sequence that is empty before and after, for `blend`.

        Args:
          tokens: of the text.
          lead: what it stands behind, such as BOS, so that its first token does not become a sink;
            no part of a blend but before the first chunk.
          begun: whose first sequence may begin so, such as `Engine.save` gives; what it has is
            taken, and the rest computed.

        Raises:
          BadToken, CacheFull: as in `append`.
          BadSequence: no sequence is empty.
          BadConfig, CannotRewind: as in `blend`.
          SessionMismatch: `begun` is of another model or cache.
        """
        return blend.compute(self._stepper, (tokens, lead), self.fingerprint, begun)

    def blend(
        self,
        chunks: Sequence[CachedChunk | StoredChunk],
        suffix: TokenIds,
        spec: BlendSpec | None = None,
        seq_id: int = 0,
    ) -> Blended:
        """Chunks one behind the other in an empty sequence and a suffix, most of it from the cache.

        Layers up to a check layer run over all tokens, those behind it over the chunks' tokens that
        the spec chooses and over the suffix. The rest is approximate, and `n_exact` ends before it.

        Args:
          chunks: of this model, from `chunk`, in any order; they stay as they are. Stored ones are
            read on a worker, while what stands before them is computed.
          suffix: tokens behind them, such as a question.
          spec: how many of the chunks' tokens are computed again, and which.
          seq_id: the sequence; another one has to be empty as well, for chunks on their way.

        Raises:
          UsageError: no chunks; a part of one is damaged.
          BadToken: as in `append`.
          BadConfig: the model cannot be run in parts, no layer lies behind the check layer, or
            entries cannot be replaced one by one (SelfExtend in the cache, keys by channel).
          BadRange, BadSequence: the sequence is not empty, or no other one is.
          CannotRewind: windowed layers that reuse cells, and recurrent ones.
          SessionMismatch: a chunk is of another model or cache.
          BadSession: a stored chunk is damaged.
          CacheFull: they do not fit together.

        Source: arXiv:2405.16444 (CacheBlend).
        """
        asked = spec or BlendSpec()
        return blend.blend(self._cache, chunks, suffix, asked, (seq_id, self.fingerprint))

    @property
    def fingerprint(self) -> Fingerprint:
        """What a session must share with this runtime to be restored into it.

        Raises:
          BadConfig: the model has only shapes so far.
        """
        return capture.fingerprint(self.programs, self.n_vocab, self.identity)

    def snapshot(
        self, draws: Mapping[int, SamplingState] | None = None, *, divided: bool = False
    ) -> Snapshot:
        """The cache as it is, for `kvrt.session.save`; later steps do not change it.

        Args:
          draws: by sequence, where sampling can be resumed elsewhere.
          divided: keys and values stay on the devices of a mesh, for a folder that each process
            writes its own part of; without a mesh there is nothing to divide.
        """
        self._cache.flush()
        divided = divided and self._cache.device.is_divided
        return capture.capture(self._cache, self.fingerprint, draws or {}, divided=divided)

    def restore(
        self,
        snapshot: Snapshot,
        sequences: Mapping[int, int] | None = None,
        *,
        convert: bool = False,
    ) -> None:
        """Replaces the cache by a snapshot, or adds some sequences of it to the others.

        A policy drops what is too much with the next token, not here.

        Args:
          snapshot: from `kvrt.session.read`, or from a runtime.
          sequences: which to take, and their seq_ids here, whose tokens are replaced. None takes
            all of them in place of everything.
          convert: keys and values are converted to this cache's KV dtype.

        Raises:
          SessionMismatch: it is of another model or cache.
          BadSequence: a sequence is not in it, or does not exist here.
          CacheFull: there are too few cells.
          UsageError: a value has no finite counterpart in this cache's KV dtype.
        """
        snapshot = capture.fitted(snapshot, self.fingerprint, self.config, convert=convert)
        capture.restore(self._cache, snapshot, sequences)

    def defrag(self, *, by_sequence: bool = False) -> int:
        """Packs used cells at the front, `by_sequence` by owner and position; how many moved."""
        return self._cache.defrag(by_sequence=by_sequence)

    def flush(self) -> None:
        """Makes the device ready for a step: packs a fragmented cache, rotates pending keys."""
        self._cache.flush()
