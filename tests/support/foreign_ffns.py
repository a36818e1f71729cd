"""Feed-forward modules of models that know nothing of `SparseFFN`."""

import jax
import jax.numpy as jnp
from flax import nnx

D, F = 16, 64


def relu2(h):
    return jnp.square(nnx.relu(h))


class Plain(nnx.Module):
    """Two linear layers; a call of two more arguments."""

    def __init__(self, rngs, activation=relu2, **settings):
        linear = lambda i, o: nnx.Linear(i, o, rngs=rngs, use_bias=False, **settings)
        self.wi, self.wo = linear(D, F), linear(F, D)
        self.activation = activation

    def __call__(self, x, deterministic=True, *, axes=None):
        return self.wo(self.activation(self.wi(x)))


class Transposed(nnx.Module):
    """Kernels as (d_out, d_in), under the names of a `SparseFFN`'s, one of which is of
    the wrong matrix."""

    def __init__(self, rngs):
        self.w_down = nnx.Param(jax.random.normal(rngs.params(), (F, D)) / 4)
        self.w_up = nnx.Param(jax.random.normal(rngs.params(), (D, F)) / 8)

    def __call__(self, x):
        return relu2(x @ self.w_down[...].T) @ self.w_up[...].T


class Gated(nnx.Module):
    """Three kernels, in a dictionary."""

    def __init__(self, rngs, act=nnx.silu, rate=0.0, **settings):
        linear = lambda i, o: nnx.Linear(i, o, rngs=rngs, use_bias=False, **settings)
        self.parts = nnx.Dict(a=linear(D, F), b=linear(D, F), c=linear(F, D))
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.act = act

    def __call__(self, x):
        parts = self.parts
        return parts["c"](self.dropout(self.act(parts["a"](x)) * parts["b"](x)))


class Fused(nnx.Module):
    """A gate and an up projection in one kernel, which `split` takes apart."""

    def __init__(self, rngs, shape, split):
        self.gate_up = nnx.Param(jax.random.normal(rngs.params(), shape) / 4)
        self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs)
        self.split = split

    def __call__(self, x):
        gate, up = self.split(self.gate_up[...])
        return self.down(nnx.silu(x @ gate) * (x @ up))


def halves(kernel):
    return kernel[:, :F], kernel[:, F:]


MODULES = {
    "two": lambda rngs: Plain(rngs),
    "two in bfloat16": lambda rngs: Plain(rngs, dtype=jnp.bfloat16),
    "two from zeros": lambda rngs: Plain(rngs, kernel_init=nnx.initializers.zeros),
    "transposed": Transposed,
    "swiglu": lambda rngs: Gated(rngs),
    "reglu2": lambda rngs: Gated(rngs, act=relu2),
    "fused": lambda rngs: Fused(rngs, (D, 2 * F), halves),
    "up first": lambda rngs: Fused(rngs, (D, 2 * F), lambda k: halves(k)[::-1]),
    "rows": lambda rngs: Fused(rngs, (2 * F, D), lambda k: (k[:F].T, k[F:].T)),
    "einsum": lambda rngs: Fused(rngs, (2, D, F), lambda k: (k[0], k[1])),
    "in the middle": lambda rngs: Fused(rngs, (D, 2, F), lambda k: (k[:, 0], k[:, 1])),
}


class Model(nnx.Module):
    """Two layers of a kind of FFN, and a kernel that is none of theirs."""

    def __init__(self, make):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([make(rngs) for _ in range(2)])
        self.head = nnx.Linear(D, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)
