"""2:4 GEMMs on Hopper: which there are, how the kernel may cut one up, and how it does
where nothing was tuned.

One predicate, `why_invalid`, serves gate, heuristic and tuner.
"""

from dataclasses import dataclass

from jax.experimental import pallas as pl

from pallas_kernels.gemm_tasks import tiling_of

TILE_K = 64
"""Columns of A in one step: what a word of metadata per thread covers. A itself comes
two steps at a time, so that its rows are read in whole lines of 128 bytes."""

SHARED_MEMORY_BYTES = 227 << 10
"""What a block may use on Hopper."""

LINE_BYTES = 128
"""Of a row of C in shared memory."""

ROWS = 64
"""Of A, which one instruction multiplies."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The static facts of one GEMM."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    b_k_major: bool = True
    """Whether B is stored (n, k), else (k, n)."""
    transpose_out: bool = True
    """Whether C is stored (n, m), else (m, n)."""
    float32_out: bool = False
    """Whether C is float32, else of 16 bits."""
    experts: int = 1
    """Grouped over so many, see `grouped_matmul_sm90`."""
    group_tile: int = 0
    """Tokens that follow each other and have one expert; 0 where nothing is grouped."""
    packed_out: bool = False
    """Whether what is written is 2:4, see `matmul_to_packed_sm90`, else C itself."""

    @property
    def sums_over_tokens(self) -> bool:
        """Whether k counts tokens: in weight gradients, both operands a row of each."""
        return self.float32_out and not self.b_k_major

    @property
    def products(self) -> int:
        """How many C: one for each expert in weight gradients."""
        return self.experts if self.sums_over_tokens else 1

    @property
    def out_bytes(self) -> int:
        """Of a number of C."""
        return 4 if self.float32_out else 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """How the work is cut up; what the tuner searches."""

    warpgroups: int = 2
    """That multiply."""
    row_blocks: int = 2
    """Of 64 rows of A, for each warpgroup."""
    tile_n: int = 192
    """Columns of B per tile."""
    stages: int = 4
    """Steps along k whose part of B is in shared memory at a time."""
    pairs: int = 2
    """Pairs of steps whose part of A is."""
    cluster: int = 2
    """Blocks along m that load B together."""
    columns_first: bool = False
    """Whether neighbouring tiles follow along n, else along m."""
    width: int = 8
    """Tiles of the other axis that are visited together, so that both operands stay in
    the L2 cache."""
    out_columns: int = 64
    """Columns of C written at a time."""
    out_slots: int = 2
    """Writes of C under way at a time."""

    @property
    def tile_m(self) -> int:
        """Rows of A per block."""
        return ROWS * self.row_blocks * self.warpgroups

    @property
    def bytes_per_step(self) -> int:
        """Written to shared memory, and read from it by the tensor cores."""
        words = 512 * self.tile_m // ROWS
        written = self.tile_m * TILE_K + words + 2 * self.tile_n * TILE_K
        # Every 64 rows of A are multiplied by all of B.
        read = self.tile_m * TILE_K + 2 * self.tile_n * TILE_K * (self.tile_m // ROWS)
        return written + read

    def shared_memory_bytes(self, out_bytes: int) -> int:
        """Operands of all stages, pieces of C with numbers of `out_bytes`, barriers."""
        words = 128 * self.row_blocks * self.warpgroups
        pair = 2 * (self.tile_m * TILE_K + 4 * words) + 16
        stage = 2 * self.tile_n * TILE_K + 16
        piece = out_bytes * self.out_columns * ROWS
        pieces = self.warpgroups * self.out_slots * piece
        return self.pairs * pair + self.stages * stage + pieces


def why_unsupported(shape: Shape) -> str | None:
    """Why no config runs a GEMM, or None. The gate of every caller."""
    if shape.dtype not in ("bfloat16", "float16"):
        return f"multiplies bfloat16 and float16, not {shape.dtype}"
    if shape.k % TILE_K or not shape.k:
        return f"k={shape.k} is not a multiple of {TILE_K}"
    if not shape.b_k_major and shape.n % 64:
        return f"n={shape.n} is not a multiple of 64, required of B stored (k, n)"
    name, size = ("m", shape.m) if shape.transpose_out else ("n", shape.n)
    if size % 64 or not size:
        return f"{name}={size}, the rows of C in memory, is not a multiple of 64"
    return None


def why_invalid(config: Config, shape: Shape) -> str | None:
    """Why `config` cannot run `shape`, or None: for the gate, the heuristic and the
    tuner alike."""
    if reason := why_unsupported(shape):
        return reason
    if config.tile_n not in range(64, 257, 16):
        return f"tile_n={config.tile_n} is not a multiple of 16 from 64 to 256"
    if config.tile_n % 64 and not shape.b_k_major:
        return f"tile_n={config.tile_n} is not a multiple of 64, required of B (k, n)"
    if config.warpgroups not in (1, 2):
        # Three start with 128 registers per thread, and 256 columns need more.
        return f"warpgroups={config.warpgroups} is not 1 or 2"
    if config.row_blocks not in (1, 2):
        return f"row_blocks={config.row_blocks} is not 1 or 2"
    if config.row_blocks * config.tile_n > 384:
        return (
            f"row_blocks={config.row_blocks} x tile_n={config.tile_n} is above 384: "
            f"more sums than a thread has registers"
        )
    if config.cluster not in (1, 2):
        # Larger ones leave blocks idle: 30 clusters of four fit 132 multiprocessors.
        return f"cluster={config.cluster} is not 1 or 2"
    if config.out_columns % 8 or config.tile_n % max(config.out_columns, 1):
        return (
            f"out_columns={config.out_columns} is not a multiple of 8 that divides "
            f"tile_n={config.tile_n}"
        )
    width = config.out_columns * shape.out_bytes
    if not shape.transpose_out and width % LINE_BYTES:
        return (
            f"out_columns={config.out_columns} of {shape.out_bytes} bytes are not "
            f"{LINE_BYTES}, required of C stored (m, n)"
        )
    if min(config.stages, config.pairs, config.out_slots, config.width) < 1:
        return "stages, pairs, out_slots and width must be positive"
    if reason := _why_not_grouped(config, shape) or _why_no_packed_out(config, shape):
        return reason
    needed = config.shared_memory_bytes(shape.out_bytes)
    if needed > SHARED_MEMORY_BYTES:
        return f"needs {needed} bytes of shared memory of {SHARED_MEMORY_BYTES}"
    return None


def _why_not_grouped(config: Config, shape: Shape) -> str | None:
    """A block, and what its cluster shares of B, is of one expert."""
    if not shape.group_tile:
        return None
    if shape.sums_over_tokens:
        if shape.group_tile % (2 * TILE_K):
            return f"group_tile={shape.group_tile} is not a multiple of {2 * TILE_K}"
        return None
    name, size = "tile_n", config.tile_n
    if not shape.transpose_out:
        name, size = "cluster x tile_m", config.cluster * config.tile_m
    if shape.group_tile % size:
        return f"{name}={size} does not divide group_tile={shape.group_tile}"
    return None


def _why_no_packed_out(config: Config, shape: Shape) -> str | None:
    """A piece of C is a tile of 64 tokens by 64 features, and while it is packed the
    next one is in another slot."""
    if not shape.packed_out:
        return None
    if not shape.transpose_out or shape.float32_out:
        return "packs C^T (n, m) of 16 bits, no other result"
    if config.out_columns != ROWS or config.out_slots < 2:
        return (
            f"out_columns={config.out_columns} and out_slots={config.out_slots} are "
            f"not {ROWS} and 2 or more, required of a packed result"
        )
    return None


def default_config(shape: Shape, multiprocessors: int) -> Config:
    """The heuristic for shapes that were not tuned: what moves the fewest bytes through
    shared memory, over all rounds that the multiprocessors need."""

    def cost(config: Config) -> float:
        tiling = tiling_of(shape, config)
        tiles = shape.products * tiling.rows * tiling.columns
        rounds = pl.cdiv(tiles, multiprocessors // config.cluster)
        # Without a cluster the L2 cache is read more often: 3 % was measured.
        alone = 1.03 if config.cluster == 1 else 1
        return rounds * config.bytes_per_step * alone

    tilings = _tilings(shape)
    fitting = [tiling for tiling in tilings if not _why_not_grouped(tiling, shape)]
    return min(fitting or tilings, key=cost)


def _tilings(shape: Shape) -> list[Config]:
    """What `default_config` chooses from; the first of equals."""
    fine = shape.b_k_major and shape.transpose_out
    fine = fine and not (shape.float32_out or shape.packed_out)
    step = 16 if fine else 64
    piece = LINE_BYTES // shape.out_bytes
    sizes = [(2, n) for n in range(192, 63, -step)]
    sizes += [(1, n) for n in range(256, 63, -step)]
    return [
        Config(
            row_blocks=row_blocks,
            tile_n=tile_n,
            cluster=cluster,
            out_columns=piece if tile_n % piece == 0 else tile_n // 2,
        )
        for row_blocks, tile_n in sizes
        for cluster in (2, 1)
    ]
