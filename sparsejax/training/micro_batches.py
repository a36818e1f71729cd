"""The gradient over several micro-batches, whose weights are made ready once for all.

A `SparseFFN` compresses its 2:4 weights at every call, and layers in bfloat16 or 8-bit
floats round theirs. Over the micro-batches of one optimiser step the weights are the
same, so once is enough. The weights as they are read are made here, read by the calls
inside, and dropped: no caller ever holds any, and so none can meet weights that they
were not made from. These calls, and no others, also move what training steps observe of
experts (`feed_forward.experts.observed`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from sparsejax.models.attention import Attention
from sparsejax.models.ffn_state import WeightsAsRead
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.models.transformer import Transformer


def loss_and_gradient(
    loss_of: Callable[..., Float[Array, ""]],
    model: nnx.Module,
    *batches: PyTree,
    place: Callable[[nnx.State], nnx.State] = lambda gradient: gradient,
) -> tuple[Float[Array, ""], nnx.State]:
    """Returns the mean loss over micro-batches, and its gradient by the model's
    `nnx.Param`s.

        (1 / n) sum_i loss_of(model, *(batch[i] for batch in batches))

    The micro-batches are run one after the other, in a loop that is compiled once;
    losses and gradients are added up in the dtype of the parameters. Other state of the
    model (counters of random streams, statistics) goes from one micro-batch to the next
    and into `model` at the end. The function works under a transformation such as
    `nnx.jit` and outside of any.

    Args:
      loss_of: called with the model and one micro-batch. It reads the weights and must
        not assign to them: a layer may read what was made of them before.
      model: any module, with `SparseFFN`s or without.
      batches: pytrees of arrays whose leading axis is n, the number of micro-batches,
        as keys made by `jax.random.split(key, n)`.
      place: applied to the gradient of each micro-batch before it is added, such as a
        constraint of how it lies on a mesh.
    Returns:
      the loss, and the gradient as `nnx.Optimizer.update` takes it.
    Raises:
      ValueError: no batch is given, or their leading axes differ or are empty.
    """
    count = _leading_size(batches)
    reading = nnx.clone(model)
    for _, layer in nnx.iter_modules(reading):
        if isinstance(layer, SparseFFN | Attention | Transformer):
            as_read = layer.weights_as_read()
            layer.as_read = None if as_read is None else WeightsAsRead(as_read)
        if isinstance(layer, SparseFFN):
            layer.share_of_step = 1 / count
    graph, params, as_read, rest = nnx.split(reading, nnx.Param, WeightsAsRead, ...)

    def loss_and_rest(params, rest, batch):
        model = nnx.merge(graph, params, as_read, rest, copy=True)
        loss = loss_of(model, *batch)
        return loss, nnx.state(model, nnx.Not(nnx.Any(nnx.Param, WeightsAsRead)))

    def accumulate(carry, batch):
        total, rest = carry
        (loss, rest), gradient = jax.value_and_grad(loss_and_rest, has_aux=True)(
            params, rest, batch
        )
        return (jax.tree.map(jnp.add, total, (loss, place(gradient))), rest), None

    zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    (total, rest), _ = jax.lax.scan(
        accumulate, (zeros, rest), batches, unroll=count == 1
    )
    nnx.update(model, rest)
    return jax.tree.map(lambda x: x / count, total)


def _leading_size(batches: PyTree) -> int:
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batches)}
    if len(sizes) != 1 or not all(size and size[0] for size in sizes):
        raise ValueError(
            f"micro-batches with leading axes {sorted(sizes)} are not a number of them "
            f"above zero, the same everywhere; stack them along a new leading axis, "
            f"which is (1, ...) for a single one"
        )
    return sizes.pop()[0]
