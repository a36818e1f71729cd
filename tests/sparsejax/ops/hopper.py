"""A Hopper GPU for the choice of kernels; what those compute, in plain JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import (
    activations_sm90,
    compress_sm90,
    dense_over_rows_sm90,
    grouped_matmul_sm90,
    matmul_to_packed_sm90,
    over_tokens_sm90,
    row_sums_sm90,
    sparse_matmul_configs,
    sparse_matmul_sm90,
    tuning,
)
from pallas_kernels.device import Device
from sparsejax.formats import Compressed, compress, decompress
from sparsejax.packing import Packed, pack, unpack
from sparsejax.patterns import TWO_FOUR
from sparsejax.pruning import magnitude_mask, nm_mask, soft_threshold

H200 = Device.named("NVIDIA H200")
H100 = Device.named("NVIDIA H100 80GB HBM3")
A100 = Device.named("NVIDIA A100-SXM4-80GB")


def timed(
    shape: sparse_matmul_configs.Shape,
    sparse_us: float,
    dense_us: float,
    pack_us: float = 10.0,
) -> tuning.Entry:
    """What a search would have kept of `shape`."""
    return tuning.Entry(
        shape=shape,
        config=sparse_matmul_configs.default_config(
            shape, H200.count_multiprocessors()
        ),
        sparse_us=sparse_us,
        dense_us=dense_us,
        pack_us=pack_us,
        jax="0",
        date="2000-01-01",
        commit="0",
    )


def pretend(patch: pytest.MonkeyPatch, device: Device = H200) -> list[str]:
    """Every module sees `device`; returns the list of kernels called from now."""
    calls: list[str] = []

    def compress_on_gpu(w, scales, *, k_major, dtype):
        calls.append("compress")
        assert w.shape[1] % 64 == 0 and w.shape[2] % 64 == 0
        axis = -1 if k_major else -2
        pruned = scales[:, None, None] * soft_threshold(w, axis=axis)
        mask = magnitude_mask(w, axis=axis)
        packed = pack(compress(pruned.astype(dtype), mask=mask, axis=axis))
        return packed.values, packed.metadata

    def multiply_on_gpu(
        values,
        metadata,
        b,
        *,
        b_k_major=True,
        transpose_out=True,
        out_dtype=None,
        rows_apart=0,
        config,
        multiprocessors,
    ):
        assert multiprocessors == H200.multiprocessors
        calls.append("sparse_matmul")
        out_dtype = jnp.dtype(b.dtype if out_dtype is None else out_dtype)
        if b.ndim == 3:
            assert not b_k_major and len(b) == 64
            b = b.swapaxes(0, 1).reshape(-1, b.shape[2])
        n, k = b.shape if b_k_major else b.shape[::-1]
        shape = sparse_matmul_configs.Shape(
            m=values.shape[0],
            n=n,
            k=k,
            dtype=str(b.dtype),
            b_k_major=b_k_major,
            transpose_out=transpose_out,
            float32_out=out_dtype == jnp.float32,
        )
        assert sparse_matmul_configs.why_invalid(config, shape) is None
        # In float32: XLA on CPUs lacks the product of bfloat16 in some orders.
        a = decompress(unpack(Packed(values, metadata))).astype(jnp.float32)
        b = (b.T if b_k_major else b).astype(jnp.float32)
        product = jnp.matmul(a, b)
        parts = jnp.split(product, [len(product) - rows_apart] if rows_apart else 1)
        parts = tuple(
            (part.T if transpose_out else part).astype(out_dtype) for part in parts
        )
        return parts if rows_apart else parts[0]

    def gathered(x, by_expert):
        """What a kernel finds for its rows."""
        if by_expert is None or by_expert.row_token is None:
            return x
        tiles = by_expert.tile_expert.size
        expert = jnp.repeat(by_expert.tile_expert, by_expert.row_token.size // tiles)
        parts = x.reshape(len(x), by_expert.experts, -1)
        rows = parts[by_expert.row_token, expert]
        return jnp.where((by_expert.row_token < 0)[:, None], 0, rows)

    def keep_features_on_gpu(y_up, by_expert=None):
        calls.append("keep_features")
        y_up = gathered(y_up, by_expert)
        assert y_up.shape[1] % 64 == 0
        hidden = jax.nn.relu(y_up)
        a = compress(hidden * hidden, mask=nm_mask(hidden, TWO_FOUR))
        packed, tail = pack(a), -y_up.shape[0] % 16
        nonzero = jnp.pad(decompress(a) != 0, ((0, tail), (0, 0)))
        counts = nonzero.reshape(-1, 16, y_up.shape[1]).sum(axis=1, dtype=jnp.uint8)
        return packed.values, packed.metadata, counts

    def backward_on_gpu(da, values, metadata, by_expert=None):
        calls.append("backward")
        da = gathered(da, by_expert)
        root = jnp.sqrt(decompress(unpack(Packed(values, metadata))))
        positions = unpack(Packed(values, metadata))
        return _at(positions, (da * 2 * root).astype(da.dtype))

    def keep_gated_on_gpu(gate, up):
        calls.append("keep_gated_features")
        assert gate.shape == up.shape and up.shape[1] % 64 == 0
        hidden = jax.nn.relu(gate)
        a = hidden * hidden * up
        mask = magnitude_mask(a)
        packed = [pack(compress(of, mask=mask)) for of in (a, hidden, up)]
        nonzero = jnp.pad(jnp.where(mask, a, 0) != 0, ((0, -len(a) % 16), (0, 0)))
        counts = nonzero.reshape(-1, 16, a.shape[1]).sum(axis=1, dtype=jnp.uint8)
        first, *others = packed
        return first.values, first.metadata, counts, *(p.values for p in others)

    def gated_backward_on_gpu(da, hidden, up, metadata):
        calls.append("gated_backward")
        positions = unpack(Packed(hidden, metadata))
        da, hidden, up = (x.astype(jnp.float32) for x in (da, hidden, up))
        da = _at(positions, da)
        pair = 2 * da * hidden * up, da * hidden * hidden
        return tuple(x.astype(positions.values.dtype) for x in pair)

    def keep_tokens_on_gpu(values, metadata, whole=None, *, by_segments):
        calls.append("keep_tokens")
        x = decompress(unpack(Packed(values, metadata)))
        x = jnp.pad(x, ((0, -len(x) % 64), (0, 0)))
        if by_segments:
            x = x.reshape(64, -1, x.shape[1]).swapaxes(0, 1).reshape(x.shape)
        mask = magnitude_mask(x, axis=0)
        x, mask = x.T, mask.T
        if whole is not None:
            assert whole.rows % 64 == 0
            rows = jnp.argsort(whole.slots)[-whole.rows :]
            x = jnp.concatenate([x, x[rows]])
            mask = jnp.concatenate([mask, ~mask[rows]])
        packed = pack(compress(x, mask=mask))
        return packed.values, packed.metadata

    def backward_over_tokens_on_gpu(
        da, values, metadata, whole=None, *, by_segments, by_expert=None
    ):
        dy = backward_on_gpu(da, values, metadata, by_expert)
        return dy, *both_over_tokens(
            values, dy, metadata, whole, by_segments, by_expert
        )

    def keep_both_on_gpu(
        values, dy, metadata, whole=None, *, by_segments, by_expert=None
    ):
        calls.append("keep_tokens_of_both")
        return both_over_tokens(values, dy, metadata, whole, by_segments, by_expert)

    def both_over_tokens(values, dy, metadata, whole, by_segments, by_expert):
        keep = partial(keep_tokens_on_gpu, by_segments=by_segments)
        if whole is None or by_expert is None:
            return [keep(kept, metadata, whole) for kept in (values, dy)]
        slots = whole.slots.reshape(by_expert.experts, -1)
        expert = by_expert.tile_expert
        expert = jnp.repeat(expert, metadata.shape[0] // expert.size)
        over_tokens = []
        for kept in (values, dy):
            of_each = [keep(kept, metadata, whole._replace(slots=s)) for s in slots]
            found, words = (jnp.stack(arrays) for arrays in zip(*of_each, strict=True))
            blocks = found.reshape(*found.shape[:2], expert.size, -1)
            index = jnp.arange(expert.size)
            found = blocks[expert, :, index].swapaxes(0, 1)
            words = words[expert, :, index].swapaxes(0, 1)
            over_tokens.append((found.reshape(found.shape[0], -1), words))
        return over_tokens

    def gated_over_tokens_on_gpu(da, hidden, up, metadata, *whole, by_segments):
        gradients = gated_backward_on_gpu(da, hidden, up, metadata)
        over_tokens = (
            keep_tokens_on_gpu(kept, metadata, *whole, by_segments=by_segments)
            for kept in (hidden * hidden * up, *gradients)
        )
        return *gradients, *over_tokens

    def rows_on_gpu(
        values,
        words,
        b,
        tile_expert,
        used,
        *,
        b_k_major,
        config_for=None,
        multiprocessors,
    ):
        calls.append("sparse_rows")
        a = decompress(unpack(Packed(values, words))).astype(jnp.float32)
        b = b.astype(jnp.float32)
        b = b.transpose(1, 2, 0) if b_k_major else b
        tiles = a.reshape(tile_expert.size, -1, a.shape[1])
        product = jnp.einsum("tvk,tkn->tvn", tiles, b[tile_expert])
        return unwritten(product, used).astype(values.dtype)

    def weights_on_gpu(
        values,
        words,
        b,
        tile_expert,
        used,
        *,
        experts,
        config_for=None,
        multiprocessors,
    ):
        calls.append("sparse_weights")
        a = decompress(unpack(Packed(values, words))).astype(jnp.float32)
        a = a.reshape(experts, -1, a.shape[1])
        tiles = b.astype(jnp.float32).reshape(tile_expert.size, -1, b.shape[1])
        product = jnp.einsum("tvk,tmk->tvm", tiles, a[tile_expert])
        return unwritten(product, used).astype(values.dtype)

    def product_on_gpu(values, words, x, experts, config_for):
        assert values.dtype == x.dtype
        if experts is not None:
            tile_expert, used, count = experts
            return weights_on_gpu(
                values,
                words,
                x,
                tile_expert,
                used,
                experts=count,
                multiprocessors=H200.multiprocessors,
            )
        shape = sparse_matmul_configs.Shape(
            m=len(values),
            n=len(x),
            k=x.shape[1],
            dtype=str(x.dtype),
            packed_out=True,
        )
        config = config_for(shape)
        assert sparse_matmul_configs.why_invalid(config, shape) is None
        return multiply_on_gpu(
            values,
            words,
            x,
            config=config,
            multiprocessors=H200.multiprocessors,
        )

    def keep_product_on_gpu(
        values, words, x, experts=None, *, config_for, multiprocessors
    ):
        calls.append("keep_features of a product")
        product = product_on_gpu(values, words, x, experts, config_for)
        return keep_features_on_gpu(product)

    def product_backward_on_gpu(
        values, words, dy, a, a_words, experts=None, *, config_for, multiprocessors
    ):
        calls.append("backward of a product")
        da = product_on_gpu(values, words, dy, experts, config_for)
        return backward_on_gpu(da, a, a_words)

    def unwritten(product, used):
        """Rows, those of tiles that are not used like memory that nobody wrote."""
        tile = jnp.arange(len(product))[:, None, None]
        return jnp.where(tile < used, product, jnp.nan).reshape(-1, product.shape[2])

    def over_rows_on_gpu(
        values,
        words,
        b,
        ends,
        *,
        group_tile,
        transpose_out,
        rows_apart=0,
        config_for=None,
        multiprocessors,
    ):
        calls.append("sparse_over_rows")
        a = decompress(unpack(Packed(values, words))).astype(jnp.float32)
        product = of_experts(a, b, ends, group_tile)
        parts = jnp.split(
            product, [product.shape[1] - rows_apart] if rows_apart else 1, axis=1
        )
        if transpose_out:
            parts = [part.transpose(2, 0, 1) for part in parts]
        return tuple(parts) if rows_apart else parts[0]

    def dense_over_rows_on_gpu(
        a, b, ends, *, group_tile, expert_axis=0, multiprocessors
    ):
        calls.append("dense_over_rows")
        assert group_tile % 64 == a.shape[1] % 64 == b.shape[1] % 64 == 0
        product = of_experts(a.T.astype(jnp.float32), b, ends, group_tile)
        return jnp.moveaxis(product, 0, expert_axis)

    def of_experts(a, b, ends, group_tile):
        """A (m, rows) B (rows, n) over each expert's own rows."""
        tile = jnp.repeat(jnp.arange(len(b) // group_tile), group_tile)
        starts = jnp.pad(ends[:-1], (1, 0))
        own = (tile[None] >= starts[:, None]) & (tile[None] < ends[:, None])
        dense = jnp.where(own[..., None], b.astype(jnp.float32)[None], 0)
        a = jnp.where(own[:, None], a[None], 0)
        return jnp.einsum("emk,ekn->emn", a, dense)

    def sum_rows_on_gpu(x, index):
        calls.append("sum_rows")
        assert x.shape[1] % 8 == 0 and x.dtype.itemsize == 2
        chosen = (index >= 0) & (index < len(x))
        rows = x[jnp.where(chosen, index, 0)].astype(jnp.float32)
        return jnp.where(chosen[..., None], rows, 0).sum(axis=1).astype(x.dtype)

    jax.clear_caches()  # of traces made with the real kernels
    patch.setattr(activations_sm90, "keep_features", keep_features_on_gpu)
    patch.setattr(activations_sm90, "backward", backward_on_gpu)
    patch.setattr(activations_sm90, "keep_gated_features", keep_gated_on_gpu)
    patch.setattr(activations_sm90, "gated_backward", gated_backward_on_gpu)
    patch.setattr(over_tokens_sm90, "keep_tokens", keep_tokens_on_gpu)
    patch.setattr(over_tokens_sm90, "keep_tokens_of_both", keep_both_on_gpu)
    patch.setattr(matmul_to_packed_sm90, "keep_features", keep_product_on_gpu)
    patch.setattr(matmul_to_packed_sm90, "backward", product_backward_on_gpu)
    patch.setattr(over_tokens_sm90, "backward", backward_over_tokens_on_gpu)
    patch.setattr(over_tokens_sm90, "gated_backward", gated_over_tokens_on_gpu)
    patch.setattr(grouped_matmul_sm90, "sparse_rows", rows_on_gpu)
    patch.setattr(grouped_matmul_sm90, "sparse_weights", weights_on_gpu)
    patch.setattr(grouped_matmul_sm90, "sparse_over_rows", over_rows_on_gpu)
    patch.setattr(dense_over_rows_sm90, "dense_over_rows", dense_over_rows_on_gpu)
    patch.setattr(row_sums_sm90, "sum_rows", sum_rows_on_gpu)
    patch.setattr(compress_sm90, "compress", compress_on_gpu)
    patch.setattr(sparse_matmul_sm90, "sparse_matmul", multiply_on_gpu)
    see_device(patch, device)
    return calls


def see_device(patch: pytest.MonkeyPatch, device: Device = H200) -> None:
    """Every module sees `device`; the kernels are those of a GPU."""
    patch.setattr(Device, "of", lambda _: device)


def _at(positions: Compressed, dense: jax.Array) -> jax.Array:
    """The entries of `dense` that are kept."""
    groups = dense.reshape(dense.shape[0], -1, 4)
    index = positions.metadata.reshape(dense.shape[0], -1, 2).astype(jnp.int32)
    kept = jnp.take_along_axis(groups, index, axis=-1)
    return kept.reshape(dense.shape[0], -1)
