"""A decoder-only transformer: pre-norm blocks, stacked and run by one scan."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Primitive
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int, Key

from sparsejax.config import ModelConfig
from sparsejax.distributed.mesh import (
    BATCH,
    constrain,
    ffn_layout,
    split_over,
    stored_axes,
)
from sparsejax.explicit_axes import (
    inside_automatic_axes,
    with_automatic_axes,
)
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.kept_names import HIDDEN, MIXED, ROTATED, ROUTES
from sparsejax.models.attention import Attention, KVCache
from sparsejax.models.ffn_state import (
    EmbeddingAsHead,
    ObservedState,
    RouterState,
    WeightsAsRead,
)
from sparsejax.models.initializers import fan_in_normal
from sparsejax.models.loss import token_losses
from sparsejax.models.norm import RMSNorm
from sparsejax.models.sparse_ffn import SparseFFN, sparse_ffns
from sparsejax.ops.backend import Backend
from sparsejax.ops.linear import as_read, linear, rounded_copy

MOVED = nnx.Any(ObservedState, RouterState)
"""The state that calls of training steps move."""


class Block(nnx.Module):
    """One layer of a transformer: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        sparsity: FFNSparsity = DENSE,
        backend: Backend | None = None,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        # Two branches per layer add to the residual stream; scaled like this, their sum
        # starts with the same variance at any depth (Radford et al. 2019, GPT-2).
        branch_scale = (2 * config.layers) ** -0.5
        norm = partial(RMSNorm, config.d_model, config.norm_epsilon, config.dtype)
        self.attention_norm = norm()
        self.attention = Attention(
            config.d_model,
            config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
            norm_epsilon=config.norm_epsilon,
            qkv_bias=config.qkv_bias,
            rope_base=config.rope_base,
            dtype=config.dtype,
            out_scale=branch_scale,
            groups=config.groups,
            precision=config.precision,
            mesh=mesh,
            rngs=rngs,
        )
        self.ffn_norm = norm()
        self.ffn = SparseFFN(
            config.d_model,
            config.d_hidden,
            activation=config.activation,
            sparsity=sparsity,
            dtype=config.dtype,
            down_scale=branch_scale,
            groups=config.groups,
            precision=config.precision,
            backend=backend,
            layout=ffn_layout(mesh),
            rngs=rngs,
        )

    def __call__(
        self,
        x: Float[Array, "batch sequence d_model"],
        *,
        token_ids: Int[Array, "batch sequence"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[
        Float[Array, "batch sequence d_model"], Float[Array, "batch sequence d_model"]
    ]:
        """Returns the block's output, and the input that its FFN saw."""
        x = x + self.attention(self.attention_norm(x))
        ffn_input = self.ffn_norm(x)
        return x + self.ffn(ffn_input, token_ids=token_ids, key=key), ffn_input

    def with_cache(
        self,
        x: Float[Array, "batch new d_model"],
        cache: KVCache,
        positions: Int[Array, "batch new"],
        token_ids: Int[Array, "batch new"],
    ) -> tuple[Float[Array, "batch new d_model"], KVCache]:
        """Returns the block's output for new tokens, and its cache with them:
        `Attention.with_cache`."""
        mixed, cache = self.attention.with_cache(
            self.attention_norm(x), cache, positions
        )
        x = x + mixed
        # Only a backward draws from the key.
        key = jax.random.key(0)
        return x + self.ffn(self.ffn_norm(x), token_ids=token_ids, key=key), cache


class Transformer(nnx.Module):
    """A decoder-only transformer: embedding, `config.layers` blocks, final norm, head.

    The blocks' parameters are stacked, (layers, ...), under `blocks`: one block is
    traced, whatever the depth, and with `scan_layers` compiled once. The residual
    stream is in `config.dtype`; norms, softmax and logits are float32.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        sparsity: FFNSparsity = DENSE,
        backend: Backend | None = None,
        mesh: Mesh | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the parameters.

        Args:
          config: the sizes of the model, and what it computes.
          sparsity: the sparsity of its FFNs; dense by default.
          backend: what runs the sparse GEMMs; None for the fastest that can.
          mesh: a mesh with some of the axes of `distributed.mesh`, as `make_mesh`
            there makes it; None for one device.
          rngs: random streams; `params` is drawn from.
        """
        self.config = config
        self.mesh = None if mesh is None else with_automatic_axes(mesh)
        width, vocabulary = config.d_model, config.vocab_size
        # The embedding is read by rows of d_model: fan-in as the head of a tied model.
        self.embedding = nnx.Param(fan_in_normal(rngs.params(), (width, vocabulary)).T)
        self.head = nnx.data(
            None
            if config.tie_embeddings
            else nnx.Param(fan_in_normal(rngs.params(), (width, vocabulary)))
        )
        self.final_norm = RMSNorm(width, config.norm_epsilon, config.dtype)
        # Only in the copies of a model that `micro_batches` makes and drops.
        self.as_read: WeightsAsRead | None = nnx.data(None)
        self.embedding_as_head: EmbeddingAsHead | None = nnx.data(None)

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked_blocks(rngs: nnx.Rngs) -> Block:
            return Block(
                config, sparsity=sparsity, backend=backend, mesh=mesh, rngs=rngs
            )

        self.blocks = stacked_blocks(rngs)

    @property
    def sparsity(self) -> FFNSparsity:
        """The sparsity of the FFNs, which `switching.switch` changes; dense where a
        module of another kind is in their place."""
        ffn = self.blocks.ffn
        return ffn.sparsity if isinstance(ffn, SparseFFN) else DENSE

    def __call__(
        self,
        tokens: Int[Array, "batch sequence"],
        *,
        key: Key[Array, ""] | None = None,
        capture_ffn_inputs: bool = False,
    ) -> Any:
        """Returns the logits of the token after each token, float32 (batch, sequence,
        vocab).

        Args:
          tokens: ids in [0, vocab_size), int32.
          key: a random key for `sparsity.needs_key`; every layer gets its own.
          capture_ffn_inputs: also return the input of each FFN, (layers, batch,
            sequence, d_model) in `config.dtype`, as a second result.
        """
        x, ffn_inputs = self.features(
            tokens, key=key, capture_ffn_inputs=capture_ffn_inputs
        )
        logits = self.logits(x)
        return (logits, ffn_inputs) if capture_ffn_inputs else logits

    @inside_automatic_axes(
        lambda of_tokens: (of_tokens, PartitionSpec(None, *of_tokens))
    )
    def features(
        self,
        tokens: Int[Array, "batch sequence"],
        *,
        key: Key[Array, ""] | None = None,
        capture_ffn_inputs: bool = False,
    ) -> tuple[
        Float[Array, "batch sequence d_model"],
        Float[Array, "layers batch sequence d_model"] | None,
    ]:
        """Returns the features that the head reads, in `config.dtype`, and the inputs
        of the FFNs if asked for, else None."""
        graph, stacked = nnx.split(self.blocks)
        keys = None
        if key is not None:
            keys = jax.random.split(key, self.config.layers)

        ffn = self.blocks.ffn
        observes = isinstance(ffn, SparseFFN) and ffn.is_observing

        def apply(x, layer):
            state, key = layer
            block = nnx.merge(graph, state)
            x, ffn_input = block(x, token_ids=tokens, key=key)
            moved = nnx.state(block, MOVED) if observes else None
            return x, (ffn_input if capture_ffn_inputs else None, moved)

        config = self.config
        x, (ffn_inputs, moved) = jax.lax.scan(
            rematerialise(
                apply, config.remat, in_loop=config.scan_layers, groups=config.groups
            ),
            self._embed(tokens),
            (stacked, keys),
            unroll=not config.scan_layers,
        )
        if moved is not None:
            nnx.update(self.blocks, moved)
        return self.final_norm(x), ffn_inputs

    def features_with_cache(
        self,
        tokens: Int[Array, "batch new"],
        cache: KVCache,
        positions: Int[Array, "batch new"],
    ) -> tuple[Float[Array, "batch new d_model"], KVCache]:
        """Returns what the head reads of new tokens, and the cache of all layers with
        them: `Attention.with_cache`."""
        graph, stacked = nnx.split(self.blocks)

        def apply(x, layer):
            state, own = layer
            block = nnx.merge(graph, state)
            return block.with_cache(x, own, positions, tokens)

        x, cache = jax.lax.scan(apply, self._embed(tokens), (stacked, cache))
        return self.final_norm(x), cache

    def _embed(self, tokens: jax.Array) -> jax.Array:
        # Under fsdp each device looks up its columns for the tokens of all, and they
        # exchange activations: the table itself, which is larger, stays where it is.
        ids = constrain(tokens, self.mesh, "data", None)
        x = constrain(self.embedding[...][ids], self.mesh, "data", None, "fsdp")
        x = x.astype(self.config.dtype)
        return constrain(x, self.mesh, BATCH, None, None)

    @inside_automatic_axes(lambda spec: spec)
    def logits(
        self,
        features: Float[Array, "*batch d_model"],
        *,
        of_loss: bool = False,
    ) -> Float[Array, "*batch vocab"]:
        """Returns features @ head, operands in `config.dtype`, accumulated and returned
        in float32. With `of_loss` they are returned in the dtype that
        `config.logits_of_loss` names.

        In the backward the gradient of the logits is rounded to `config.dtype`, and
        that of the head is not.
        """
        in_dtype = of_loss and self.config.logits_of_loss == "dtype"
        copy = None if self.as_read is None else self.as_read.get_value()
        read = as_read(self._head_weight, copy, self.config.dtype)
        read = constrain(read, self.mesh, *self._axes_of_head)
        logits = linear(
            features,
            self._head_weight,
            read,
            transposed=self.head is None,
            out_dtype=self.config.dtype if in_dtype else jnp.float32,
        )
        if features.ndim < 3:
            return logits
        return constrain(logits, self.mesh, BATCH, None, "tensor")

    @property
    def _head_weight(self) -> Float[Array, "rows columns"]:
        """The head (d_model, vocab), or the embedding (vocab, d_model)."""
        if self.head is not None:
            return self.head[...]
        of_head = self.embedding_as_head
        return self.embedding[...] if of_head is None else of_head[...]

    def weights_as_read(
        self, *, whole: bool = False
    ) -> Float[Array, "rows columns"] | None:
        """Returns the head, or the embedding in its place, in the compute dtype; None
        where it has that already. With `whole` it is returned in any case, gathered
        over fsdp."""
        if not whole:
            copy = rounded_copy(self._head_weight, self.config.dtype)
            if copy is None:
                return None
            # Else XLA may gather the parameter, and round what it has gathered.
            stored = stored_axes("embedding" if self.head is None else "head")
            return split_over(copy, *stored, mesh=self.mesh)
        copy = as_read(self._head_weight, None, self.config.dtype)
        return split_over(copy, *self._axes_of_head, mesh=self.mesh)

    @property
    def _axes_of_head(self) -> tuple[str | None, ...]:
        """The mesh axes that split the axes of `_head_weight` while it is read."""
        return ("tensor", None) if self.head is None else (None, "tensor")


def rematerialise(
    block: Callable, remat: str, *, in_loop: bool = True, groups: int = 1
) -> Callable:
    """Returns `block` with a backward that recomputes what `ModelConfig.remat` says.

    Args:
      in_loop: whether it is the body of a loop.
      groups: blocks on the diagonal of each weight of its linear layers; with two or
        more these are GEMMs with one batch axis.
    """
    if remat == "none":
        return block
    policies = jax.checkpoint_policies
    # A GEMM with more batch axes than a linear layer's is attention's, whose outputs
    # are the large ones.
    plain = policies.dots_with_no_batch_dims_saveable
    # And which rows of experts the tokens got: to choose anew would read all Y1 again.
    routes = policies.save_only_these_names(ROUTES)
    dots = plain if groups == 1 else _has_one_batch_axis
    policy = routes
    if remat == "dots":
        named = policies.save_only_these_names(ROUTES, HIDDEN, ROTATED, MIXED)
        policy = policies.save_from_both_policies(dots, named)
        policy = policies.save_from_both_policies(policy, _is_flash_attention)
    # The body of a loop cannot be merged with its recomputation, so that barriers
    # against that would only cost.
    return jax.checkpoint(block, policy=policy, prevent_cse=not in_loop)


def _is_flash_attention(primitive: Primitive, *_: Any, **_parameters: Any) -> bool:
    """Returns whether an operation is the forward of cuDNN's flash attention, in the
    form of a policy of `jax.checkpoint`. Its backward reads its result and, of each
    row, the logarithm of the sum of its exponentials, which have no names in JAX."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


def _has_one_batch_axis(primitive: Primitive, *_: Any, **parameters: Any) -> bool:
    """Returns whether an operation is a GEMM of at most one batch axis, in the form of
    a policy of `jax.checkpoint`."""
    if primitive is not jax.lax.dot_general_p:
        return False
    _, (batch_axes, _) = parameters["dimension_numbers"]
    return len(batch_axes) <= 1


def cross_entropy(
    model: Transformer,
    tokens: Int[Array, "batch sequence_plus_one"],
    key: Key[Array, ""] | None = None,
) -> Float[Array, ""]:
    """Returns the mean loss in nats per token of predicting tokens[:, 1:], float32, by
    logits in `config.logits_of_loss`."""
    features, _ = model.features(tokens[:, :-1], key=key)
    logits = model.logits(features, of_loss=True)
    return token_losses(logits, tokens[:, 1:]).mean()


def graph_on(
    build: Callable[[], Transformer], sparsity: FFNSparsity
) -> nnx.GraphDef[Transformer]:
    """Returns the graph of a model that computes with `sparsity` on the state of the
    model that `build` makes, which is only traced."""

    def built() -> Transformer:
        model = build()
        for ffn in sparse_ffns(model):
            ffn.compute_as(sparsity, keep_router_state=True)
        return model

    return nnx.split(nnx.eval_shape(built))[0]
