"""A Hopper GPU for the choice of kernels; what those compute, in plain JAX."""

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.device import Device
from pallas_kernels.sm90 import dense_rows, expert_energies, sparse_matmul_configs
from pallas_kernels.tuned_gemm import TunedGemm
from sparsejax.ops.kernels import registry
from sparsejax.ops.kernels.base import (
    ExpertRows,
    KeptActivations,
    KeptGatedActivations,
    OverTokens,
)
from sparsejax.ops.kernels.hopper import HopperKernels
from sparsejax.sparsity.compressed import compress, decompress
from sparsejax.sparsity.masks import magnitude_mask, nm_mask, soft_threshold
from sparsejax.sparsity.packed import Packed, pack, unpack
from sparsejax.sparsity.patterns import TWO_FOUR

H200 = Device.named("NVIDIA H200")
H100 = Device.named("NVIDIA H100 80GB HBM3")
A100 = Device.named("NVIDIA A100-SXM4-80GB")


def timed(
    gemm: TunedGemm,
    sparse_us: float = 1.0,
    dense_us: float = 2.0,
    pack_us: float = 10.0,
    **config,
) -> tuning.Entry:
    """Returns what a search would have kept of `gemm`: the default config but for the
    fields in `config`."""
    default = sparse_matmul_configs.default_config(
        gemm.shape(), H200.count_multiprocessors()
    )
    return tuning.Entry(
        gemm=gemm,
        config=replace(default, **config),
        sparse_us=sparse_us,
        dense_us=dense_us,
        pack_us=pack_us,
        jax="0",
        date="2000-01-01",
        commit="0",
    )


def pretend(patch: pytest.MonkeyPatch, device: Device = H200) -> list[str]:
    """Every module sees `device`, whose kernels are plain JAX; returns the list of
    those that are called from now."""
    calls: list[str] = []
    jax.clear_caches()  # of traces made with the real kernels
    plain = replace(registry.HOPPER, load=partial(PlainKernels, calls=calls))
    patch.setattr(registry, "REGISTERED", (plain,))
    see_device(patch, device)
    return calls


@dataclass(frozen=True)
class PlainKernels(HopperKernels):
    """Hopper's kernels in plain JAX."""

    calls: list[str] = field(default_factory=list, compare=False)
    """The kernels that were called."""

    # Packing.

    def pack_weight(self, w, scales, *, axis, dtype):
        self.calls.append("compress")
        assert w.shape[1] % 64 == 0 and w.shape[2] % 64 == 0
        pruned = scales[:, None, None] * soft_threshold(w, axis=axis)
        mask = magnitude_mask(w, axis=axis)
        kept = compress(pruned.astype(dtype), mask=mask, axis=axis)
        return pack(kept, self.layout)

    def keep_features(self, y_up, rows, *, by_token):
        self.calls.append("keep_features")
        y_up = _gathered(y_up, rows) if by_token else y_up
        assert y_up.shape[1] % 64 == 0
        hidden = jax.nn.relu(y_up)
        a = compress(hidden * hidden, mask=nm_mask(hidden, TWO_FOUR))
        return KeptActivations(pack(a, self.layout), _counts(decompress(a) != 0))

    def activation_gradient(self, da, a, rows, *, by_token):
        self.calls.append("backward")
        self._check(a)
        da = _gathered(da, rows) if by_token else da
        root = jnp.sqrt(decompress(unpack(a)))
        return _at(a, (da * 2 * root).astype(da.dtype))

    def keep_gated_features(self, gate, up):
        self.calls.append("keep_gated_features")
        assert gate.shape == up.shape and up.shape[1] % 64 == 0
        hidden = jax.nn.relu(gate)
        a = hidden * hidden * up
        mask = magnitude_mask(a)
        each = [compress(of, mask=mask) for of in (a, hidden, up)]
        packed = [pack(of, self.layout) for of in each]
        return KeptGatedActivations(*packed, _counts(jnp.where(mask, a, 0) != 0))

    def gated_gradients(self, da, hidden, up):
        self.calls.append("gated_backward")
        self._check(hidden, up)
        kept = _at(hidden, da).values, hidden.values, up.values
        da, h, u = (x.astype(jnp.float32) for x in kept)
        pair = 2 * da * h * u, da * h * h
        dgate, dup = (replace(hidden, values=x.astype(hidden.dtype)) for x in pair)
        return dgate, dup

    def keep_tokens(self, x, residual, *, by_segments):
        self.calls.append("keep_tokens")
        self._check(x)
        dense = decompress(unpack(x))
        dense = jnp.pad(dense, ((0, -len(dense) % 64), (0, 0)))
        if by_segments:
            segments = dense.reshape(64, -1, dense.shape[1]).swapaxes(0, 1)
            dense = segments.reshape(dense.shape)
        mask = magnitude_mask(dense, axis=0)
        dense, mask = dense.T, mask.T
        if residual is not None:
            assert residual.rows % 64 == 0
            rows = jnp.argsort(residual.slots)[-residual.rows :]
            dense = jnp.concatenate([dense, dense[rows]])
            mask = jnp.concatenate([mask, ~mask[rows]])
        return pack(compress(dense, mask=mask), self.layout)

    def activation_gradient_over_tokens(
        self, da, a, rows, residual, *, by_token, by_segments
    ):
        dy_up = self.activation_gradient(da, a, rows, by_token=by_token)
        return dy_up, self._both_over_tokens(a, dy_up, rows, residual, by_segments)

    def over_tokens(self, a, dy_up, rows, residual, *, by_segments):
        self.calls.append("keep_tokens_of_both")
        return self._both_over_tokens(a, dy_up, rows, residual, by_segments)

    def _both_over_tokens(self, a, dy_up, rows, residual, by_segments):
        keep = partial(self.keep_tokens, by_segments=by_segments)
        if residual is None or rows is None:
            return OverTokens(keep(a, residual), (keep(dy_up, residual),))
        slots = residual.slots.reshape(rows.experts, -1)
        expert = rows.tile_expert
        expert = jnp.repeat(expert, a.metadata.shape[0] // expert.size)
        index = jnp.arange(expert.size)

        def of_own_expert(kept):
            of_each = [keep(kept, residual._replace(slots=s)) for s in slots]
            found = jnp.stack([packed.values for packed in of_each])
            words = jnp.stack([packed.metadata for packed in of_each])
            blocks = found.reshape(*found.shape[:2], expert.size, -1)
            found = blocks[expert, :, index].swapaxes(0, 1)
            words = words[expert, :, index].swapaxes(0, 1)
            return Packed(found.reshape(found.shape[0], -1), words, self.layout)

        return OverTokens(of_own_expert(a), (of_own_expert(dy_up),))

    def gated_gradients_over_tokens(self, da, hidden, up, residual, *, by_segments):
        gradients = self.gated_gradients(da, hidden, up)
        a = replace(hidden, values=hidden.values * hidden.values * up.values)
        a, *over_tokens = (
            self.keep_tokens(kept, residual, by_segments=by_segments)
            for kept in (a, *gradients)
        )
        return gradients, OverTokens(a, tuple(over_tokens))

    # Multiplying.

    def _multiply(self, mode, a, b, b_k_major, transpose_out, out_dtype, residual_rows):
        self.calls.append("sparse_matmul")
        self._check(a)
        if b.ndim == 3:
            assert not b_k_major and len(b) == 64
            b = b.swapaxes(0, 1).reshape(-1, b.shape[2])
        n, k = b.shape if b_k_major else b.shape[::-1]
        shape = sparse_matmul_configs.Shape(
            m=a.shape[0],
            n=n,
            k=k,
            mode=mode,
            dtype=str(b.dtype),
            b_k_major=b_k_major,
            transpose_out=transpose_out,
            float32_out=out_dtype == jnp.float32,
        )
        config = self.config_for(shape)
        assert sparse_matmul_configs.why_invalid(config, shape) is None
        # In float32: XLA on CPUs lacks the product of bfloat16 in some orders.
        dense = decompress(unpack(a)).astype(b.dtype).astype(jnp.float32)
        product = jnp.matmul(dense, (b.T if b_k_major else b).astype(jnp.float32))
        first, second = (
            (part.T if transpose_out else part).astype(out_dtype)
            for part in jnp.split(product, [len(product) - residual_rows])
        )
        return (first, second) if residual_rows else first

    def _product(self, x, weight, rows):
        if rows is not None:
            assert weight.dtype == x.dtype
            return self.rows_by_expert_weight(x, weight, rows)
        shape = sparse_matmul_configs.Shape(
            m=weight.shape[0],
            n=len(x),
            k=x.shape[1],
            dtype=str(x.dtype),
            packed_out=True,
        )
        config = self.config_for(shape)
        assert sparse_matmul_configs.why_invalid(config, shape) is None
        return self.matmul(weight, x, b_k_major=True, transpose_out=True)

    def matmul_keep_features(self, x, weight, rows):
        self.calls.append("keep_features of a product")
        product = self._product(x, weight, rows)
        return self.keep_features(product, None, by_token=False)

    def matmul_activation_gradient(self, dy, weight, a, rows):
        self.calls.append("backward of a product")
        da = self._product(dy, weight, rows)
        return self.activation_gradient(da, a, None, by_token=False)

    def expert_rows_matmul(self, a, b, rows, *, b_k_major):
        self.calls.append("sparse_rows")
        self._check(a)
        dense = decompress(unpack(a)).astype(jnp.float32)
        b = b.astype(jnp.float32)
        b = b.transpose(1, 2, 0) if b_k_major else b
        tiles = dense.reshape(rows.tile_expert.size, -1, dense.shape[1])
        product = jnp.einsum("tvk,tkn->tvn", tiles, b[rows.tile_expert])
        return _unwritten(product, rows).astype(a.dtype)

    def rows_by_expert_weight(self, x, weight, rows):
        self.calls.append("sparse_weights")
        self._check(weight)
        w = decompress(unpack(weight)).astype(jnp.float32)
        w = w.reshape(rows.experts, -1, w.shape[1])
        tiles = x.astype(jnp.float32).reshape(rows.tile_expert.size, -1, x.shape[1])
        product = jnp.einsum("tvk,tmk->tvm", tiles, w[rows.tile_expert])
        return _unwritten(product, rows).astype(weight.dtype)

    def dense_rows_matmul(self, x, w, rows, *, expert_axis, k_major, out_dtype=None):
        self.calls.append("dense_rows")
        product = self._dense_rows(x, w, rows, expert_axis, k_major)
        return product.astype(x.dtype if out_dtype is None else out_dtype)

    def expert_energies(self, x, w_transposed, *, experts):
        self.calls.append("expert_energies")
        assert {x.dtype, w_transposed.dtype} == {jnp.dtype(jnp.float8_e4m3fn)}
        y_up = x.astype(jnp.float32) @ w_transposed.astype(jnp.float32).T
        fourth = jnp.maximum(y_up * expert_energies.FACTOR, 0) ** 4
        return fourth.reshape(len(x), experts, -1).sum(axis=2)

    def dense_rows_squared_relu(self, x, w, rows, *, expert_axis, k_major):
        self.calls.append("squared relu of dense_rows")
        product = self._dense_rows(x, w, rows, expert_axis, k_major)
        return jnp.square(jnp.maximum(product, 0)).astype(x.dtype)

    def dense_rows_activation_gradient(self, dy, w, a, rows, *, expert_axis, k_major):
        self.calls.append("gradient of dense_rows")
        product = self._dense_rows(dy, w, rows, expert_axis, k_major)
        assert (a.shape, a.dtype) == (product.shape, dy.dtype)
        return (product * 2 * jnp.sqrt(a.astype(jnp.float32))).astype(dy.dtype)

    def _dense_rows(self, x, w, rows, expert_axis, k_major):
        w = jnp.moveaxis(w, expert_axis, 0).astype(jnp.float32)
        w = w.swapaxes(1, 2) if k_major else w
        count, group_tile = len(rows.tile_expert), len(x) // len(rows.tile_expert)
        assert dense_rows.why_unsupported(w.shape[1:], group_tile, str(x.dtype)) is None
        tiles = x.astype(jnp.float32).reshape(count, group_tile, -1)
        own = w[rows.tile_expert]
        if own.ndim == 4:
            self.calls.append("of several experts")
            _, g, k, n = own.shape
            assert dense_rows.why_not_joined(n if k == x.shape[1] else k) is None
            if tiles.shape[2] == g * k:
                own = own.reshape(count, g * k, n)
            else:
                own = own.swapaxes(1, 2).reshape(count, k, g * n)
        product = jnp.einsum("tvk,tkn->tvn", tiles, own)
        return _unwritten(product, rows)

    def expert_weight_gradient(self, a, b, rows, *, transpose_out, residual_rows):
        self.calls.append("sparse_over_rows")
        self._check(a)
        group_tile = rows.row_token.size // rows.tile_expert.size
        dense = decompress(unpack(a)).astype(jnp.float32)
        product = _of_experts(dense, b, rows.ends, group_tile)
        parts = jnp.split(product, [product.shape[1] - residual_rows], axis=1)
        if transpose_out:
            parts = [part.transpose(2, 0, 1) for part in parts]
        return parts[0], parts[1] if residual_rows else None

    def dense_expert_weight_gradient(self, lhs, rhs, ends, *, group_tile, expert_axis):
        self.calls.append("dense_over_rows")
        assert group_tile % 64 == lhs.shape[1] % 64 == rhs.shape[1] % 64 == 0
        product = _of_experts(lhs.T.astype(jnp.float32), rhs, ends, group_tile)
        return jnp.moveaxis(product, 0, expert_axis)

    def joined_weight_gradient(self, lhs, rhs, rows, *, joined, expert_axis):
        self.calls.append("dense_over_rows")
        g, count = rows.tile_expert.shape[1], len(rows.places)
        group_tile = len(lhs) // len(rows.tile_expert)
        lhs, rhs = (
            of.astype(jnp.float32).reshape(count // g, group_tile, -1)
            for of in (lhs, rhs)
        )
        entry = jnp.arange(count)
        used = (entry < rows.ends[-1])[:, None, None]
        tile, part = jnp.where(used[:, 0, 0], rows.places, 0) // g, rows.places % g
        split = {"lhs": lhs, "rhs": rhs}
        wide = split[joined].reshape(count // g, group_tile, g, -1)
        split = {name: of[tile] for name, of in split.items()}
        split[joined] = wide[tile, :, part]
        products = jnp.einsum("tvm,tvn->tmn", split["lhs"], split["rhs"])
        expert = jnp.searchsorted(rows.ends, entry, side="right")
        product = jax.ops.segment_sum(
            jnp.where(used, products, 0), expert, rows.experts
        )
        return jnp.moveaxis(product, 0, expert_axis)

    # Rows.

    def sum_rows(self, x, index):
        self.calls.append("sum_rows")
        assert x.shape[1] % 8 == 0 and x.dtype.itemsize == 2
        chosen = (index >= 0) & (index < len(x))
        rows = x[jnp.where(chosen, index, 0)].astype(jnp.float32)
        return jnp.where(chosen[..., None], rows, 0).sum(axis=1).astype(x.dtype)


def _gathered(x: jax.Array, rows: ExpertRows) -> jax.Array:
    """Returns what a kernel finds for its rows in a matrix with a row per token."""
    expert = jnp.repeat(rows.tile_expert, rows.row_token.size // rows.tile_expert.size)
    parts = x.reshape(len(x), rows.experts, -1)
    found = parts[rows.row_token, expert]
    return jnp.where((rows.row_token < 0)[:, None], 0, found)


def _counts(nonzero: jax.Array) -> jax.Array:
    """Returns how many of each 16 consecutive rows are not zero."""
    nonzero = jnp.pad(nonzero, ((0, -len(nonzero) % 16), (0, 0)))
    of_tiles = nonzero.reshape(-1, 16, nonzero.shape[1])
    return of_tiles.sum(axis=1, dtype=jnp.uint8)


def _unwritten(product: jax.Array, rows: ExpertRows) -> jax.Array:
    """Rows, those of tiles that are not used like memory that nobody wrote."""
    tile = jnp.arange(len(product))[:, None, None]
    used = tile < rows.used_tiles
    return jnp.where(used, product, jnp.nan).reshape(-1, product.shape[2])


def _of_experts(
    a: jax.Array, b: jax.Array, ends: jax.Array, group_tile: int
) -> jax.Array:
    """A (m, rows) B (rows, n) over each expert's own rows."""
    tile = jnp.repeat(jnp.arange(len(b) // group_tile), group_tile)
    starts = jnp.pad(ends[:-1], (1, 0))
    own = (tile[None] >= starts[:, None]) & (tile[None] < ends[:, None])
    dense = jnp.where(own[..., None], b.astype(jnp.float32)[None], 0)
    a = jnp.where(own[:, None], a[None], 0)
    return jnp.einsum("emk,ekn->emn", a, dense)


def see_device(patch: pytest.MonkeyPatch, device: Device = H200) -> None:
    """Every module sees `device`; the kernels are those of a GPU."""
    patch.setattr(Device, "of", lambda _: device)


def _at(positions: Packed, dense: jax.Array) -> Packed:
    """The entries of `dense` at the positions that are kept."""
    kept = unpack(positions).metadata
    groups = dense.reshape(dense.shape[0], -1, 4)
    index = kept.reshape(dense.shape[0], -1, 2).astype(jnp.int32)
    values = jnp.take_along_axis(groups, index, axis=-1)
    return replace(positions, values=values.reshape(dense.shape[0], -1))
