"""The gradient over several micro-batches, whose weights are made ready once for all.

A `SparseFFN` compresses its 2:4 weights at every call, and layers in bfloat16 or 8-bit
floats round theirs. Over the micro-batches of one optimiser step the weights are the
same, so once is enough. The weights as they are read are made here, read by the calls
inside, and dropped: no caller ever holds any, and so none can meet weights that they
were not made from. These calls, and no others, also move what training steps observe of
experts (`feed_forward.experts.observed`).

Where a `Transformer` goes through its layers without a loop, the weights as each layer
reads them are arrays of their own. Were they parts of one array for all layers, each
GEMM would read a copy of its part, made in every micro-batch. One array it is where
devices gather the weights in every micro-batch: XLA would else gather attention's
before the first one and hold them.

Gradients are added up for each layer by itself, where a `Transformer` goes through its
layers without a loop, though its parameters are stacked: a GEMM then adds its gradient
to the sum of the layer as it writes, and XLA can move the sum over devices, one for
each layer, out of the loop over micro-batches. It does neither for an array of all
layers, into which each layer's gradient would be copied. For the same reason an
embedding that is the head, too, has a sum for each of its two uses.
"""

from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from sparsejax.models.attention import Attention
from sparsejax.models.ffn_state import EmbeddingAsHead, WeightsAsRead
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.models.transformer import Transformer

type Place = Callable[[tuple, jax.Array], jax.Array]
"""A function of a parameter's path, as in `jax.tree_util`, and an array."""


def loss_and_gradient(
    loss_of: Callable[..., Any],
    model: nnx.Module,
    *batches: PyTree,
    has_aux: bool = False,
    place: Place = lambda path, gradient: gradient,
    place_sum: Place | None = None,
    whole: bool = False,
) -> tuple[Any, nnx.State]:
    """Returns the mean loss over micro-batches, and its gradient by the model's
    `nnx.Param`s.

        (1 / n) sum_i loss_of(model, *(batch[i] for batch in batches))

    The micro-batches are run one after the other, in a loop that is compiled once;
    losses and gradients are added up in the dtype of the parameters. Other state of the
    model (counters of random streams, statistics) goes from one micro-batch to the next
    and into `model` at the end. The function works under a transformation such as
    `nnx.jit` and outside of any.

    Args:
      loss_of: called with the model and one micro-batch, returns its loss, a scalar. It
        reads the weights and must not assign to them: a layer may read what was made of
        them before.
      model: any module, with `SparseFFN`s or without.
      batches: pytrees of arrays whose leading axis is n, the number of micro-batches,
        as keys made by `jax.random.split(key, n)`.
      has_aux: whether `loss_of` returns a pair, the loss and a pytree of other arrays.
      place: says how gradients lie on a mesh while they are added up. It is called with
        the path of a parameter and with an array of its gradient, and returns that
        array, under a constraint such as `jax.lax.with_sharding_constraint`. Without a
        loop over layers it gets each layer by itself, as an array of one layer. The
        gradient of an embedding as the head comes by itself, too, with a path that ends
        in `embedding_as_head`.
      place_sum: says in the same way how the gradient lies that is returned; None for
        `place`.
      whole: whether the weights of `SparseFFN`s with a layout, of `Attention`s and of
        heads with a mesh are gathered once, before the first micro-batch, over fsdp or
        `FFNLayout.stored`, and held by each device. Else they are gathered in each
        micro-batch where they are read, as all others are.
    Returns:
      the loss, and the gradient as `nnx.Optimizer.update` takes it. With `has_aux` the
      pair of the loss and the other arrays takes the place of the loss; they are those
      of all micro-batches, stacked along a leading axis.
    Raises:
      ValueError: no batch is given, or their leading axes differ or are empty.
      TypeError: `loss_of` returns what is no scalar, or a pair without `has_aux`, or no
        pair with it.
    """
    count = _leading_size(batches)
    reading = nnx.clone(model)
    layers = _UnrolledLayers(reading)
    for path, layer in nnx.iter_modules(reading):
        if isinstance(layer, SparseFFN | Attention | Transformer):
            as_read = layers.weights_as_read(path, layer, whole=whole)
            layer.as_read = None if as_read is None else WeightsAsRead(as_read)
        if isinstance(layer, SparseFFN):
            layer.share_of_step = 1 / count
            if whole and layer.layout is not None:
                layer.layout = layer.layout.whole
        if isinstance(layer, Transformer) and layer.head is None and count > 1:
            layer.embedding_as_head = EmbeddingAsHead(layer.embedding[...])
    graph, params, heads, as_read, rest = nnx.split(
        reading, nnx.Param, EmbeddingAsHead, WeightsAsRead, ...
    )
    parts = layers.apart(params), heads
    kept = nnx.Not(nnx.Any(nnx.Param, EmbeddingAsHead, WeightsAsRead))

    def loss_and_rest(parts, rest, batch):
        of_layers, heads = parts
        read = layers.read_whole(params, of_layers)
        ready = layers.together(as_read)
        model = nnx.merge(graph, read, heads, ready, rest, copy=True)
        loss, aux = _loss_and_aux(loss_of(model, *batch), has_aux)
        return loss, (aux, nnx.state(model, kept))

    placed = partial(_placed, place)

    def accumulate(carry, batch):
        total, rest = carry
        (loss, (aux, rest)), (gradient, heads) = jax.value_and_grad(
            loss_and_rest, has_aux=True
        )(parts, rest, batch)
        total, sums = total
        sums = jax.tree.map(jnp.add, sums, placed((gradient, heads)))
        return ((total + loss, placed(sums)), rest), aux

    zeros = (jnp.zeros(()), placed(jax.tree.map(jnp.zeros_like, parts)))
    (total, rest), aux = jax.lax.scan(
        accumulate, (zeros, rest), batches, unroll=count == 1
    )
    nnx.update(model, rest)
    # Here once more, or the loop would have its sums lie as `place_sum` says.
    total = total[0], _placed(place_sum or place, placed(total[1]))
    loss, (gradient, heads) = jax.tree.map(lambda x: x / count, total)
    found = (loss, aux) if has_aux else loss
    return found, _with_heads(layers.together(gradient), heads)


def _loss_and_aux(found: Any, has_aux: bool) -> tuple[Any, Any]:
    """Returns the loss and what came with it, of what a function of the loss returned;
    None where nothing may come with it."""
    if isinstance(found, tuple) != has_aux or (has_aux and len(found) != 2):
        raise TypeError(
            f"loss_of returned {type(found).__name__} with has_aux={has_aux}; return "
            f"the loss alone, or the pair (loss, other arrays) with has_aux=True"
        )
    return found if has_aux else (found, None)


def _placed(place: Place, states: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
    """Returns the states with `place` applied to their arrays, to each one of `_Layers`
    as to an array that stacks a single layer."""

    def of(path, part):
        if not _is_layers(part):
            return place(path, part)
        return _Layers(jnp.squeeze(place(path, array[None]), 0) for array in part)

    each = partial(jax.tree_util.tree_map_with_path, of, is_leaf=_is_layers)
    return tuple(map(each, states))


def _with_heads(state: nnx.State, heads: nnx.State) -> nnx.State:
    """Returns the state with each head in `heads` added to the embedding that it is."""
    of_embedding = {
        (*_names(path)[:-1], "embedding"): head
        for path, head in jax.tree_util.tree_leaves_with_path(heads)
    }

    def of(path, leaf):
        head = of_embedding.get(_names(path))
        return leaf if head is None else leaf + head

    return jax.tree_util.tree_map_with_path(of, state)


def _names(path: tuple) -> tuple:
    """Returns the names on the path of an array in a state."""
    return tuple(entry.key for entry in path if hasattr(entry, "key"))


class _UnrolledLayers:
    """The layers of the transformers in a model that go through them without a loop,
    each of whose arrays can be taken apart into those of its layers."""

    def __init__(self, model: nnx.Module) -> None:
        self._of_blocks = {
            (*path, "blocks"): module
            for path, module in nnx.iter_modules(model)
            if isinstance(module, Transformer) and not module.config.scan_layers
        }

    def weights_as_read(
        self,
        path: tuple,
        module: SparseFFN | Attention | Transformer,
        *,
        whole: bool,
    ) -> PyTree:
        """Returns `module.weights_as_read`, with a `_Layers` in the place of every
        array of blocks whose weights are not gathered where they are read."""
        transformer = self._transformer_of(path)
        if transformer is None or (_is_stored_split(transformer) and not whole):
            return module.weights_as_read(whole=whole)
        graph, stacked = nnx.split(module)
        states = (
            jax.tree.map(itemgetter(i), stacked)
            for i in range(transformer.config.layers)
        )
        made = (nnx.merge(graph, of).weights_as_read(whole=whole) for of in states)
        return jax.tree.map(lambda *arrays: _Layers(arrays), *made)

    def apart(self, state: nnx.State) -> PyTree:
        """Returns a state with a `_Layers` in the place of every array of blocks."""

        def of(path, array):
            return _layers_of(array) if self._is_of_blocks(path) else array

        return jax.tree_util.tree_map_with_path(of, state)

    def together(self, parts: PyTree) -> nnx.State:
        """Returns the state with an array in the place of every `_Layers`."""
        whole = lambda part: jnp.stack(part) if _is_layers(part) else part
        return jax.tree.map(whole, parts, is_leaf=_is_layers)

    def read_whole(self, state: nnx.State, parts: PyTree) -> nnx.State:
        """Returns the state, with the gradient of its parts. The arrays of all layers
        are read as they are: if they were put together from their parts, XLA would
        gather each of these before the micro-batches under fsdp, and hold them."""
        read = lambda part, whole: (
            _read_whole(whole, part) if _is_layers(part) else part
        )
        return jax.tree.map(read, parts, state, is_leaf=_is_layers)

    def _is_of_blocks(self, path: tuple) -> bool:
        """Returns whether the array with this path is one of all layers."""
        return self._transformer_of(_names(path)) is not None

    def _transformer_of(self, names: tuple) -> Transformer | None:
        """Returns the transformer to whose blocks belongs what has these names."""
        for of, transformer in self._of_blocks.items():
            if names[: len(of)] == of:
                return transformer
        return None


def _is_stored_split(transformer: Transformer) -> bool:
    mesh = transformer.mesh
    return mesh is not None and mesh.shape.get("fsdp", 1) > 1


@jax.tree_util.register_pytree_node_class
class _Layers(tuple):
    """The arrays of the layers, one by one, of which a model has one array."""

    __slots__ = ()

    def tree_flatten(self) -> tuple[tuple, None]:
        """Returns the arrays."""
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _: None, arrays: Iterable) -> "_Layers":
        """Returns these arrays as layers."""
        return cls(arrays)


def _layers_of(array: jax.Array) -> _Layers:
    return _Layers(array[i] for i in range(len(array)))


def _is_layers(part: Any) -> bool:
    return isinstance(part, _Layers)


@jax.custom_vjp
def _read_whole(whole: jax.Array, layers: _Layers) -> jax.Array:
    del layers
    return whole


def _read_forward(whole, layers):
    return _read_whole(whole, layers), None


def _read_backward(_, gradient):
    return None, _layers_of(gradient)


_read_whole.defvjp(_read_forward, _read_backward)


def _leading_size(batches: PyTree) -> int:
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batches)}
    if len(sizes) != 1 or not all(size and size[0] for size in sizes):
        raise ValueError(
            f"micro-batches with leading axes {sorted(sizes)} are not a number of them "
            f"above zero, the same everywhere; stack them along a new leading axis, "
            f"which is (1, ...) for a single one"
        )
    return sizes.pop()[0]
