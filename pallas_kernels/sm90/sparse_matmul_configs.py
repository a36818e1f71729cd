"""The 2:4 GEMMs on Hopper: which there are, how the kernel may cut one up, and how it
does where nothing was tuned.

    C = A B,    A (m, k) 2:4 along k,    B (k, n),    C (m, n)

One predicate, `why_invalid`, serves gate, heuristic and tuner.
"""

from dataclasses import dataclass
from typing import Literal

from jax.experimental import pallas as pl

from pallas_kernels.sm90.gemm.tile_scheduler import tiling_of

TILE_K = 64
"""The number of columns of A that a step multiplies, those that a word of metadata per
thread covers. A itself comes two steps at a time, so that its rows are read in whole
lines of 128 bytes."""

SHARED_MEMORY_BYTES = 227 << 10
"""The bytes of shared memory that a block may use on Hopper."""

LINE_BYTES = 128
"""The bytes of a line of C in shared memory."""

ROWS = 64
"""The number of rows of A that one instruction multiplies."""

Mode = Literal["sparse_weight", "sparse_activation", "weight_gradient"]
"""The role of the 2:4 operand A in a GEMM of an FFN, which says which size counts
tokens.

"sparse_weight": A is a weight, and B has a row per token in memory: n counts tokens.
"sparse_activation": A has a row per token, B is a weight: m counts tokens.
"weight_gradient": the sum over tokens, in float32, of A's columns and B's rows: k
counts tokens.
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The static facts of one GEMM."""

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    """The dtype of A and B: "bfloat16" or "float16"."""
    b_k_major: bool = True
    """Whether B is stored (n, k), or else (k, n)."""
    transpose_out: bool = True
    """Whether C is stored (n, m), or else (m, n)."""
    float32_out: bool = False
    """Whether C is float32, or else of 16 bits."""
    experts: int = 1
    """The number of experts of a grouped GEMM, see `grouped_matmul`: a token meets the
    weight of one of them. 1 where nothing is grouped."""
    group_tile: int = 0
    """The number of consecutive tokens that have one expert; 0 where nothing is
    grouped."""
    packed_out: bool = False
    """Whether the result is written 2:4, see `matmul_to_packed`, or else as C
    itself."""
    mode: Mode = "sparse_weight"
    """The role of A. It is the last field: the shipped tables are sorted by the fields
    in their order, and of equally good estimates the first entry's is taken."""

    @property
    def products(self) -> int:
        """The number of matrices C: one for each expert in weight gradients, else 1."""
        return self.experts if self.mode == "weight_gradient" else 1

    @property
    def out_bytes(self) -> int:
        """The bytes of one number of C."""
        return 4 if self.float32_out else 2


@dataclass(frozen=True, kw_only=True)
class Config:
    """The way that the work is cut up, which the tuner searches."""

    warpgroups: int = 2
    """The number of warpgroups that multiply; one more loads."""
    row_blocks: int = 2
    """The number of blocks of 64 rows of A that each of them multiplies."""
    tile_n: int = 192
    """The number of columns of B in a tile."""
    stages: int = 4
    """The number of steps along k that have their part of B in shared memory at a
    time."""
    pairs: int = 2
    """The number of pairs of steps that have their part of A in shared memory at a
    time."""
    cluster: int = 2
    """The number of blocks along m that load B together."""
    grid_minor_dim: Literal["m", "n"] = "m"
    """The axis along which successive tiles lie."""
    grid_tile_width: int = 8
    """The number of tiles along that axis that are visited before the next ones along
    the other, so that both operands stay in the L2 cache."""
    out_columns: int = 64
    """The number of columns of C in an epilogue tile, which is written at a time."""
    out_slots: int = 2
    """The number of writes of C that each warpgroup has under way at a time."""

    @property
    def tile_m(self) -> int:
        """The number of rows of A in the tile of one block."""
        return ROWS * self.row_blocks * self.warpgroups

    @property
    def bytes_per_step(self) -> int:
        """The bytes that a step along k writes to shared memory, and that the tensor
        cores read from it, together."""
        words = 512 * self.tile_m // ROWS
        written = self.tile_m * TILE_K + words + 2 * self.tile_n * TILE_K
        # Every 64 rows of A are multiplied by all of B.
        read = self.tile_m * TILE_K + 2 * self.tile_n * TILE_K * (self.tile_m // ROWS)
        return written + read

    def shared_memory_bytes(self, out_bytes: int) -> int:
        """Returns the bytes of shared memory that a block needs: operands of all
        stages, epilogue tiles with numbers of `out_bytes`, barriers."""
        words = 128 * self.row_blocks * self.warpgroups
        pair = 2 * (self.tile_m * TILE_K + 4 * words) + 16
        stage = 2 * self.tile_n * TILE_K + 16
        epi_tile = out_bytes * self.out_columns * ROWS
        epi_tiles = self.warpgroups * self.out_slots * epi_tile
        return self.pairs * pair + self.stages * stage + epi_tiles


def why_unsupported(shape: Shape) -> str | None:
    """Returns why no config runs a GEMM, or None where one does. Every caller asks this
    first."""
    if shape.dtype not in ("bfloat16", "float16"):
        return f"multiplies bfloat16 and float16, not {shape.dtype}"
    if shape.k % TILE_K or not shape.k:
        return f"k={shape.k} is not a multiple of {TILE_K}"
    if not shape.b_k_major and shape.n % 64:
        return f"n={shape.n} is not a multiple of 64, required of B stored (k, n)"
    name, size = ("m", shape.m) if shape.transpose_out else ("n", shape.n)
    if size % 64 or not size:
        return f"{name}={size}, the rows of C in memory, is not a multiple of 64"
    return _why_not_in_mode(shape)


def _why_not_in_mode(shape: Shape) -> str | None:
    """Returns why a GEMM's operands and result do not lie as its mode needs them, or
    None where they do. Without experts the kernel takes any order, and the mode only
    says how the GEMM is looked up."""
    if shape.mode == "weight_gradient":
        if shape.b_k_major or not shape.float32_out:
            return "a weight gradient is float32 and reads B stored (k, n)"
    elif shape.group_tile and shape.transpose_out != (shape.mode == "sparse_weight"):
        return "rows of experts are written a row per token: C^T of a sparse weight"
    return None


def why_invalid(config: Config, shape: Shape) -> str | None:
    """Returns why `config` cannot run `shape`, or None where it can. The gate, the
    heuristic and the tuner all ask this."""
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
    counts = config.stages, config.pairs, config.out_slots, config.grid_tile_width
    if min(counts) < 1:
        return "stages, pairs, out_slots and grid_tile_width must be positive"
    if reason := _why_not_grouped(config, shape) or _why_no_packed_out(config, shape):
        return reason
    needed = config.shared_memory_bytes(shape.out_bytes)
    if needed > SHARED_MEMORY_BYTES:
        return f"needs {needed} bytes of shared memory of {SHARED_MEMORY_BYTES}"
    return None


def _why_not_grouped(config: Config, shape: Shape) -> str | None:
    """Returns why a block, or the part of B that its cluster shares, would have two
    experts; None where it has one."""
    if not shape.group_tile:
        return None
    if shape.mode == "weight_gradient":
        if shape.group_tile % (2 * TILE_K):
            return f"group_tile={shape.group_tile} is not a multiple of {2 * TILE_K}"
        return None
    name, size = "tile_n", config.tile_n
    if shape.mode == "sparse_activation":
        name, size = "cluster x tile_m", config.cluster * config.tile_m
    if shape.group_tile % size:
        return f"{name}={size} does not divide group_tile={shape.group_tile}"
    return None


def _why_no_packed_out(config: Config, shape: Shape) -> str | None:
    """Returns why a result cannot be packed in the epilogue, or None where it can. An
    epilogue tile must be 64 tokens by 64 features, and while it is packed the next one
    needs another slot."""
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
    """Returns the heuristic's config for a shape that was not tuned: the one that moves
    the fewest bytes through shared memory, over all rounds that the multiprocessors
    need."""

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
    """Returns the configs that `default_config` chooses from; of equally good ones it
    takes the first."""
    fine = shape.b_k_major and shape.transpose_out
    fine = fine and not (shape.float32_out or shape.packed_out)
    step = 16 if fine else 64
    line = LINE_BYTES // shape.out_bytes
    sizes = [(2, n) for n in range(192, 63, -step)]
    sizes += [(1, n) for n in range(256, 63, -step)]
    return [
        Config(
            row_blocks=row_blocks,
            tile_n=tile_n,
            cluster=cluster,
            out_columns=line if tile_n % line == 0 else tile_n // 2,
        )
        for row_blocks, tile_n in sizes
        for cluster in (2, 1)
    ]
