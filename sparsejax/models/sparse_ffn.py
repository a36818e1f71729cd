"""The FFN with sparse GEMMs, as a Flax NNX module.

Parameters are masters of `param_dtype`, float32 unless told otherwise; the layer
computes in its `dtype`. The layers of a model may be stacked: a `SparseFFN` whose
weights carry a leading layer axis packs, rescales and clusters all its layers at once,
and is called one layer at a time by the scan over them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from sparsejax.annotations import check_sizes, check_value
from sparsejax.distributed.mesh import constrain
from sparsejax.dtypes import Precision, check_compute_dtype
from sparsejax.explicit_axes import (
    automatically,
    inside_automatic_axes,
    spec_of,
)
from sparsejax.feed_forward.activation import ActivationName
from sparsejax.feed_forward.experts.observed import initial, moved
from sparsejax.feed_forward.experts.sample import Sample
from sparsejax.feed_forward.ffn import ffn, observed_ffn
from sparsejax.feed_forward.gated_ffn import check_gated, gated_ffn
from sparsejax.feed_forward.layout import FFNLayout, check_placed
from sparsejax.feed_forward.operands.weights import PackedFFN, pack_ffn
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity, check_divisible
from sparsejax.models.block_diagonal import check_groups, dense_weight, ffn_of_groups
from sparsejax.models.ffn_state import (
    ObservedState,
    RouterState,
    SoftThresholdScale,
    WeightsAsRead,
    arrays_of,
    set_arrays,
    soft_threshold_scales,
    variables,
)
from sparsejax.models.initializers import initial_weight
from sparsejax.models.neuron_axes import NEURON_AXES, NeuronAxis
from sparsejax.ops.backend import Backend
from sparsejax.routing.clusters import balanced_clusters, contiguous_order
from sparsejax.routing.routers import NO_STATE, State, check_token_ids


class SparseFFN(nnx.Module):
    """The feed-forward network, dense or sparse as `sparsity` says.

    relu2: relu(X W1)^2 W2, with W1 = `w_up` (d_model, d_hidden) and W2 = `w_down`.
    swiglu: (silu(X Wg) * X Wu) Wd; the activations may be sparse by experts, V:4:M.
    reglu2: (relu(X Wg)^2 * X Wu) Wd; weights and activations may be sparse.

    State that is not trained: `scales` holds beta of each sparse weight in the order
    (gate,) up, down; `router_state` holds the arrays that the router of a V:N:M pattern
    keeps, and is None where it keeps none; `observed` holds what training steps observe
    (`micro_batches` has the calls move it). Expert e owns the neurons [e d_hidden /
    experts, (e + 1) d_hidden / experts). Scales and router state belong to the weights:
    restore them together with the weights, or make them anew (`refresh_scales`,
    `cluster`). Every call compresses 2:4 weights anew; `micro_batches` compresses them
    once for several calls, as it does with weights in 8-bit floats.

    Sources: arXiv 2602.06183 (weights, router), 2503.16672 (activations), 2002.05202
    (SwiGLU).
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        *,
        activation: ActivationName = "relu2",
        sparsity: FFNSparsity = DENSE,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: jax.nn.initializers.Initializer | None = None,
        down_scale: float = 1.0,
        groups: int = 1,
        precision: Precision = "dtype",
        backend: Backend | None = None,
        layout: FFNLayout | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Makes the weights, truncated normal by their fan-in, and the state.

        Args:
          d_model, d_hidden: the widths of the FFN.
          activation: "relu2", or "swiglu" or "reglu2" with a gate.
          sparsity: which operand of which GEMM is sparse; dense by default.
          dtype: compute dtype.
          param_dtype: dtype of the masters, from which the weights that are read are
            rounded.
          kernel_init: makes a weight from a key, (d_in, d_out) and `param_dtype`; None
            for truncated normal by fan-in.
          down_scale: factor of the initial deviation of w_down.
          groups: with two or more the FFN is as many dense ones side by side, on
            weights that are block-diagonal (`block_diagonal`).
          precision: "fp8" and "fp8_all" round what the GEMMs of the dense FFN read, and
            GEMM 1 of a sparse one (see `ffn`), to 8-bit floats (`ops.fp8_matmul`).
          backend: what runs the sparse GEMMs; None for the fastest that can.
          layout: how the FFN lies on a mesh of several devices; None on one device.
          rngs: random streams; `params` is drawn from.
        Raises:
          ValueError: an argument is none of its choices, a width is no integer of at
            least 1, the groups do not divide the widths, or the sparsity does not fit:
            `check`.
        """
        check_value("activation", activation, ActivationName)
        check_value("backend", backend, Backend | None)
        check_sizes(d_model=d_model, d_hidden=d_hidden)
        check_value("rngs", rngs, nnx.Rngs)
        check_groups(groups, precision, d_model, {"d_hidden": d_hidden})
        self.d_model = d_model
        self.d_hidden = d_hidden
        self.activation = activation
        self.dtype = jnp.dtype(dtype)
        check_compute_dtype("dtype", str(self.dtype))
        self.groups = groups
        self.precision: Precision = precision
        self.backend = backend
        self.layout = layout

        def kernel(d_in: int, d_out: int, scale: float = 1.0) -> nnx.Param:
            how = {"kernel_init": kernel_init, "dtype": param_dtype, "groups": groups}
            return nnx.Param(initial_weight(rngs.params(), (d_in, d_out), scale, **how))

        self.w_up = kernel(d_model, d_hidden)
        self.w_down = kernel(d_hidden, d_model, down_scale)
        self.w_gate = nnx.data(
            kernel(d_model, d_hidden) if activation != "relu2" else None
        )
        self.scales = SoftThresholdScale(self._scales())
        self.router_state: nnx.Dict | None = nnx.data(None)
        # Only in the copies of a model that `micro_batches` makes and drops.
        self.as_read: WeightsAsRead | None = nnx.data(None)
        self.observed: nnx.Dict | None = nnx.data(None)
        # Only there as well: the share of an optimiser step that a call is.
        self.share_of_step: float | None = None
        self.sparsity = DENSE
        self.compute_as(sparsity)

    @inside_automatic_axes(lambda spec: spec)
    def __call__(
        self,
        x: Float[Array, "*batch d_model"],
        *,
        token_ids: Int[Array, "*batch"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "*batch d_model"]:
        """Returns the FFN of every token, in the compute dtype.

        Args:
          x: tokens; the last axis is d_model.
          token_ids: ids of the tokens, for a router that reads them, such as
            `TokenHash`.
          key: a random key for the random estimators of `sparsity.token_sparsity`.
        Raises:
          ValueError: the shapes do not fit, the weights stack several layers, or the
            sparsity needs an argument that is None.
        """
        if self.w_up[...].ndim != (2 if self.groups == 1 else 3):
            raise ValueError(
                f"w_up of shape {self.w_up[...].shape} stacks several layers; call one "
                f"layer at a time, as a scan over the leading axis does"
            )
        if x.shape[-1] != self.d_model:
            raise ValueError(
                f"x of shape {x.shape} does not end in d_model={self.d_model}; "
                f"transpose it or build SparseFFN({x.shape[-1]}, {self.d_hidden})"
            )
        if token_ids is not None:
            check_token_ids(token_ids, x.shape[:-1])
        tokens = x.reshape(-1, self.d_model).astype(self.dtype)
        packed = None if self.as_read is None else self.as_read.get_value()
        where: dict[str, Any] = {"layout": self.layout, "backend": self.backend}
        if self.groups > 1:
            weights = [weight[...] for weight in (*self.into_hidden, self.w_down)]
            out = ffn_of_groups(tokens, weights, packed, self.activation, **where)
            return out.reshape(x.shape)
        expert_index = self.route(tokens, token_ids)
        shared: dict[str, Any] = {
            "sparsity": self.sparsity,
            "precision": self.precision,
            "packed": packed,
            "scales": self.scales[...],
            "expert_index": expert_index,
            "distinct_experts": True,
            "key": key,
            **where,
        }
        w_up, w_down = self.w_up[...], self.w_down[...]
        if self.activation != "relu2":
            assert self.w_gate is not None
            shared["activation"] = self.activation
            out = gated_ffn(tokens, self.w_gate[...], w_up, w_down, **shared)
            return out.reshape(x.shape)
        shared["energy_threshold"] = self.energy_threshold
        if self.is_observing and tokens.size:
            observed = {} if self.observed is None else arrays_of(self.observed)
            shared["penalty_strength"] = observed.get("penalty_strength")
            shared["share_of_step"] = self.share_of_step
            out, sample = observed_ffn(tokens, w_up, w_down, **shared)
            self._observe(sample)
        else:
            out = ffn(tokens, w_up, w_down, **shared)
        return out.reshape(x.shape)

    @property
    def is_observing(self) -> bool:
        """Whether a call moves the state that is not trained."""
        return self.share_of_step is not None and self.sparsity.samples_tokens

    def _observe(self, sample: Sample) -> None:
        """Moves what training steps observe by some tokens of a call."""
        assert self.share_of_step is not None
        if self.observed is not None:
            kept = arrays_of(self.observed)
            after = moved(self.sparsity, kept, sample, self.share_of_step)
            set_arrays(self.observed, after)
        if self.sparsity.learns:
            assert self.router_state is not None
            state = arrays_of(self.router_state)
            seen = sample.x, sample.energies, self.share_of_step
            set_arrays(self.router_state, self.sparsity.router.learn(state, *seen))

    def dense_form(self, weight: nnx.Param) -> Float[Array, "d_in d_out"]:
        """Returns one of the weights into the hidden layer, whole where it is stored as
        the blocks of a diagonal."""
        if self.groups == 1:
            return weight[...]
        return dense_weight(weight[...], reads_residual=True)

    def route(
        self,
        x: Float[Array, "tokens d_model"],
        token_ids: Int[Array, "*batch"] | None = None,
    ) -> Int[Array, "tokens experts_per_token"] | None:
        """Returns the experts of each token; None where there are no experts, or where
        the FFN itself finds them, from pre-activations. No gradient passes.

        Raises:
          ValueError: the router reads token ids, and `token_ids` is None.
        """
        experts, router = self.sparsity.experts, self.sparsity.router
        if experts is None or router.inside:
            return None
        read = x
        if router.reads == "token_ids":
            if token_ids is None:
                raise ValueError(
                    f"router={router.name!r} reads token ids, but token_ids is None; "
                    f"pass token_ids of x's leading shape or choose a router that "
                    f"reads the token itself, such as 'nearest_centre'"
                )
            read = token_ids.reshape(-1)
        state = self.router_state
        return router.choose(
            read,
            experts=experts,
            experts_per_token=self.sparsity.expert_choices,
            state=NO_STATE if state is None else arrays_of(state),
            threshold=self.energy_threshold,
        )

    @property
    def energy_threshold(self) -> Float[Array, "*layers"] | None:
        """The share of a token's energy above which it uses an expert; None where every
        token uses as many."""
        if self.observed is None or self.sparsity.most_experts_per_token is None:
            return None
        return self.observed["energy_threshold"][...]

    def check(self, sparsity: FFNSparsity) -> None:
        """Raises ValueError where groups or experts do not divide the widths, where a
        gated FFN, or one of block-diagonal weights, cannot have the sparsity, or where
        the weights were put on other devices than those of the layout."""
        check_value("sparsity", sparsity, FFNSparsity)
        if self.groups > 1 and not sparsity.is_dense:
            raise ValueError(
                f"an FFN of {self.groups} groups, whose weights are block-diagonal, is "
                f"dense inside of them and cannot have {sparsity}; build it with "
                f"groups=1, or leave its sparsity out"
            )
        if self.activation != "relu2":
            check_gated(self.activation, sparsity)
        check_divisible(self.d_model, self.d_hidden, sparsity)
        weights = {"w_up": self.w_up[...], "w_down": self.w_down[...]}
        check_placed(self.layout, **weights)

    def compute_as(
        self, sparsity: FFNSparsity, *, keep_router_state: bool = False
    ) -> None:
        """Sets what the next call computes, and changes no weight and no beta.

        This is the part of `switching.switch` that is about one FFN's calls; a training
        loop calls that function, which also sees to betas and clusters.

        What the router keeps appears with its V:N:M pattern, as before any clustering.
        It stays while router and number of experts do, and is dropped with them, unless
        `keep_router_state`: then single steps of another sparsity, whose router keeps
        nothing, can lie in between. The same holds for what training steps observe.

        Raises:
          ValueError: see `check`; nothing has been changed then.
        """
        self.check(sparsity)
        before, self.sparsity = self.sparsity, sparsity
        experts, router = sparsity.experts, sparsity.router
        if experts is None or not router.has_state:
            self.router_state = self.router_state if keep_router_state else None
        elif (before.experts, before.router) != (experts, router):
            first = partial(router.initial_state, experts=experts)
            w = self.into_hidden[0][...]
            of_layers = first if w.ndim == 2 else jax.vmap(first)
            state = automatically(of_layers, w, out=PartitionSpec())
            self.router_state = variables(RouterState, state)
        if experts is None or not sparsity.observes:
            self.observed = self.observed if keep_router_state else None
        elif (before.experts, before.observes) != (experts, sparsity.observes):
            layers = self.w_up[...].shape[:-2]
            self.observed = variables(ObservedState, initial(sparsity, layers))

    def weights_as_read(self, *, whole: bool = False) -> PackedFFN | None:
        """Returns the weights as the calls read them, made from the present masters and
        betas; None where that is the masters. With `whole` they are gathered for calls
        with `layout.whole`. See `operands.weights.pack_ffn`."""
        return pack_ffn(
            self.w_up[...],
            self.w_down[...],
            w_gate=None if self.w_gate is None else self.w_gate[...],
            sparsity=self.sparsity,
            precision=self.precision,
            scales=self.scales[...],
            dtype=self.dtype,
            layout=self.layout,
            whole=whole,
            backend=self.backend,
        )

    def refresh_scales(self) -> None:
        """Sets every beta to <W, S(W)> / <S(W), S(W)> of the present weight.

        To be called when the sparse phase begins; beta is frozen from then on, because
        recomputing it makes the masks unstable (arXiv 2409.09099).
        """
        self.scales[...] = self._scales()

    def cluster(
        self, *, warm_start: bool = False
    ) -> Int[Array, " d_hidden"] | Int[Array, "layers d_hidden"]:
        """Groups like neurons into the experts, renumbers them, and tells the router.
        For a router that does not want them grouped (`Router.clusters`) all stay where
        they are.

        Neurons are like each other where their columns of W1 are, or of Wg in a gated
        FFN, whose gate says which of them are active. Neuron i becomes the former
        neuron order[i] in the columns of all weights into the hidden layer and in W2's
        rows, which leaves the dense function as it was. The optimiser's moments of them
        must be permuted alike, with the returned order.

        Args:
          warm_start: begin at the present grouping and not at a spread-out one.
        Returns:
          order, int32; (layers, d_hidden) if the layers are stacked.
        Raises:
          ValueError: the activation pattern is not V:N:M, or the router renames the
            arrays that it keeps. Nothing has been changed then.
        """
        experts, router = self.sparsity.experts, self.sparsity.router
        if experts is None:
            raise ValueError(
                f"activations={self.sparsity.activations} has no experts to cluster "
                f"for; switch to a sparsity with activations=VNM(v, 2, m) first"
            )
        if not router.clusters:
            stack = self.w_up[...].shape[:-2]
            same = jnp.arange(self.d_hidden, dtype=jnp.int32)
            return jnp.broadcast_to(same, (*stack, self.d_hidden))
        present = jnp.repeat(
            jnp.arange(experts, dtype=jnp.int32), self.d_hidden // experts
        )

        mesh = None if self.layout is None else self.layout.mesh

        def of_layer(
            weights: tuple[list[jax.Array], jax.Array],
        ) -> tuple[jax.Array, State, list[jax.Array], jax.Array]:
            # Every device clusters all neurons: the same clusters on every mesh.
            into, w_down = jax.tree.map(
                lambda w: constrain(w, mesh, None, None), weights
            )
            assignment, centres = balanced_clusters(
                into[0], experts, initial=present if warm_start else None
            )
            order = contiguous_order(assignment, experts)
            into = [w[:, order] for w in into]
            state = dict(router.clustered_state(into[0], centres))
            return order, state, into, w_down[order, :]

        weights = [w[...] for w in self.into_hidden], self.w_down[...]
        # One layer after the other: k-means holds several copies of W1.
        by_layer = partial(jax.lax.map, of_layer) if weights[1].ndim == 3 else of_layer
        lie = [spec_of(w) for w in weights[0]], spec_of(weights[1])
        whole = PartitionSpec()
        found = automatically(by_layer, weights, out=(whole, whole, *lie))
        order, state, into, w_down = found
        # First, for it may refuse them.
        if self.router_state is not None:
            set_arrays(self.router_state, state)
        self.w_down[...] = w_down
        for weight, renumbered in zip(self.into_hidden, into, strict=True):
            weight[...] = renumbered
        return order

    @property
    def neuron_axes(self) -> dict[tuple[str | int, ...], NeuronAxis]:
        """The parameters below the module that have its neurons, and where."""
        return {(name,): NeuronAxis(axis) for name, axis in NEURON_AXES.items()}

    @property
    def into_hidden(self) -> list[nnx.Param]:
        """The weights that GEMM 1 reads, in the order of `scales`: (gate,) up."""
        return [self.w_up] if self.w_gate is None else [self.w_gate, self.w_up]

    def _scales(self) -> jax.Array:
        into_hidden = self.into_hidden
        stack = self.w_up[...].shape[: -2 if self.groups == 1 else -3]
        if self.d_model % 4 or self.groups > 1:
            # Such a layer cannot have 2:4 weights: groups of four do not divide d, or
            # its weights are the blocks of a diagonal.
            return jnp.ones((*stack, len(into_hidden) + 1), jnp.float32)
        weights = [w[...] for w in into_hidden], self.w_down[...]
        return automatically(soft_threshold_scales, *weights, out=PartitionSpec())


def sparse_ffns(module: nnx.Module) -> list[SparseFFN]:
    """Returns every `SparseFFN` in the module, the module itself included."""
    return [part for _, part in nnx.iter_modules(module) if isinstance(part, SparseFFN)]
