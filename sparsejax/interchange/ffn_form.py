"""The form in which a module of any Flax NNX model is an FFN, found out by calling it.

The shapes of its kernels allow some forms; a copy of the module with random parameters
is called, and the form that gives the same output is its form.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from sparsejax.dtypes import COMPUTE_DTYPES
from sparsejax.feed_forward.activation import ActivationName
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.models.adopted_ffn import Form, Path, Stored

TOKENS = 8
"""The tokens that a module is called with, to find out what it computes."""

type Call = Callable[[nnx.Module, Float[Array, "1 tokens d_model"]], Any]
"""How a module is called: with itself and tokens (1, tokens, d_model)."""


def form_of(
    module: nnx.Module, call: Call, *, dtype: DTypeLike | None = None
) -> Form | str:
    """Returns the form in which a module is an FFN, or why it is none, in words.

    Args:
      module: any module with parameters.
      call: how it is called.
      dtype: the dtype of x, where the module computes in that. None: the dtype of its
        parameters.
    """
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.Dropout) and part.rate > 0:
            return f"it has dropout at rate {part.rate}, and a SparseFFN has none"
    kinds = {
        type(variable).__name__
        for _, variable in nnx.to_flat_state(nnx.state(module))
        if not isinstance(variable, nnx.Param | nnx.RngState)
    }
    if kinds:
        return f"it keeps state that is no parameter ({', '.join(sorted(kinds))})"
    shapes = {path: jnp.shape(value) for path, value in parameters_of(module).items()}
    reasons: list[str] = []
    for layers_axis in (None, 0, 1):
        found = _form_with(module, call, shapes, layers_axis, dtype)
        if isinstance(found, Form):
            return found
        reasons.append(found)
    # What is said of single layers, unless all is stacked.
    if all(len(shape) > 2 for shape in shapes.values()):
        for axis in (0, 1):
            if len({shape[axis] for shape in shapes.values()}) == 1:
                return reasons[1 + axis]
    return reasons[0]


def _form_with(
    module: nnx.Module,
    call: Call,
    shapes: dict[Path, tuple[int, ...]],
    layers_axis: int | None,
    dtype: DTypeLike | None,
) -> Form | str:
    """Returns the form where the parameters stack layers along an axis; None stands for
    a single layer."""
    of_layer = shapes
    if layers_axis is not None:
        if len({shape[layers_axis : layers_axis + 1] for shape in shapes.values()}) > 1:
            return "its parameters do not stack the same number of layers"
        without = lambda shape: shape[:layers_axis] + shape[layers_axis + 1 :]
        of_layer = {path: without(shape) for path, shape in shapes.items()}
    flat = [path for path, shape in of_layer.items() if len(shape) < 2]
    if flat:
        named = ", ".join(f"{_name(path)} {shapes[path]}" for path in flat)
        return (
            f"{named} is no kernel: a SparseFFN has neither biases nor norms nor "
            f"scales; build the module without (use_bias=False)"
        )
    if len(of_layer) not in (2, 3):
        return (
            f"it has {len(of_layer)} kernels, and an FFN has two, three, or two of "
            f"which one is a gate beside an up projection"
        )
    candidates = list(_candidates(of_layer))
    if not candidates:
        named = ", ".join(f"{_name(path)} {shape}" for path, shape in of_layer.items())
        return f"its kernels {named} lead to no hidden layer and back"
    if layers_axis is None:
        return _nearest(module, call, candidates, dtype)
    found = _nearest(_first_layer(module, layers_axis), call, candidates, dtype)
    return found if isinstance(found, str) else found.stacked(layers_axis)


ONLY_DTYPES = "a SparseFFN computes in float32 or bfloat16; use one of these"


class _Candidate(NamedTuple):
    """A form that the shapes of a module's kernels allow."""

    d_model: int
    d_hidden: int
    up: Stored
    down: Stored
    gate: Stored | None


def _candidates(shapes: dict[Path, tuple[int, ...]]) -> Iterator[_Candidate]:
    """Yields every form that the kernels of one layer may have by their shapes."""
    for *into, down in permutations(shapes):
        for down_stored, d_hidden, d_model in _orientations(down, shapes[down]):
            expected = (d_model, d_hidden)
            if len(into) == 2:
                fits = [
                    [
                        of
                        for of, *found in _orientations(path, shapes[path])
                        if tuple(found) == expected
                    ]
                    for path in into
                ]
                for gate in fits[0]:
                    for up in fits[1]:
                        yield _Candidate(d_model, d_hidden, up, down_stored, gate)
                continue
            (path,) = into
            for of, *found in _orientations(path, shapes[path]):
                if tuple(found) == expected:
                    yield _Candidate(d_model, d_hidden, of, down_stored, None)
            for first, second in _fused(path, shapes[path], d_model, d_hidden):
                yield _Candidate(d_model, d_hidden, second, down_stored, first)
                yield _Candidate(d_model, d_hidden, first, down_stored, second)


def _orientations(
    path: Path, shape: tuple[int, ...]
) -> Iterator[tuple[Stored, int, int]]:
    """Yields a kernel as (d_in, d_out) and transposed, with d_in and d_out."""
    if len(shape) == 2:
        yield Stored(path), shape[0], shape[1]
        yield Stored(path, transposed=True), shape[1], shape[0]


def _fused(
    path: Path, shape: tuple[int, ...], d_model: int, d_hidden: int
) -> Iterator[tuple[Stored, Stored]]:
    """Yields the ways in which a kernel of this shape may hold two (d_model, d_hidden)
    weights: the first and the second of them."""
    for transposed in (False, True):
        d_in, d_out = (d_model, d_hidden)[:: -1 if transposed else 1]
        whole = Stored(path, transposed=transposed)
        side_by_side = (d_in, 2 * d_out) if not transposed else (2 * d_in, d_out)
        if shape == side_by_side:
            yield replace(whole, half=0), replace(whole, half=1)
        for axis in (-3, -2, -1):
            three = [d_in, d_out]
            three.insert(3 + axis, 2)
            if shape == tuple(three):
                of = replace(whole, halves_axis=axis)
                yield replace(of, half=0), replace(of, half=1)


def _nearest(
    module: nnx.Module,
    call: Call,
    candidates: Sequence[_Candidate],
    dtype: DTypeLike | None,
) -> Form | str:
    """Returns the candidate that computes what the module does, or why there is
    none."""
    probe = _with_random_parameters(module)
    parameters = parameters_of(probe)
    stored = {str(parameter.dtype) for parameter in parameters.values()}
    if refused := sorted(stored - set(COMPUTE_DTYPES)):
        return f"its parameters are {refused[0]}: {ONLY_DTYPES}"
    if dtype is None:
        dtype = jnp.result_type(*parameters.values())
    # A clamp, a norm or a cap is not seen in tokens of one size.
    sizes = jnp.logspace(-2, 3, TOKENS)[None, :, None]
    errors: dict[str, str] = {}
    nearest: tuple[float, Form] | None = None
    for d_model in dict.fromkeys(of.d_model for of in candidates):
        x = sizes * jax.random.normal(jax.random.key(0), (1, TOKENS, d_model))
        try:
            with jax.default_matmul_precision("highest"):
                y = call(probe, x)
                follows_x = _follows(y, probe, call, x)
                if follows_x:
                    x = x.astype(dtype)
                    y = call(probe, x)
        except Exception as error:  # whatever the module of another raises
            errors[str(d_model)] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if not isinstance(y, jax.Array) or y.shape != x.shape:
            shown = y.shape if isinstance(y, jax.Array) else type(y).__name__
            errors[str(d_model)] = f"it returns {shown} for x {x.shape}"
            continue
        if (own := str(y.dtype)) not in COMPUTE_DTYPES:
            return f"it computes in {own}: {ONLY_DTYPES}"
        for candidate in candidates:
            if candidate.d_model != d_model:
                continue
            for activation in _activations(candidate):
                form = _form(candidate, activation, y.dtype, follows_x)
                error = _distance(form, parameters, x, y)
                if nearest is None or error < nearest[0]:
                    nearest = error, form
    if nearest is None:
        tried = "; ".join(f"d_model {d}: {why}" for d, why in errors.items())
        return (
            f"it cannot be called with x (1, {TOKENS}, d_model) alone ({tried}); pass "
            f"call=, which says how"
        )
    error, form = nearest
    # Two ways to round the same sums; another activation is off by tenths.
    if error > (1e-3 if jnp.dtype(form.dtype).itemsize == 4 else 3e-2):
        return (
            f"its output is not that of {' or '.join(_all_activations(form))} on its "
            f"kernels (the nearest, {form.activation}, is off by {error:.2g} of the "
            f"norm): another activation, a norm or a scale inside cannot be kept"
        )
    return form


def _activations(candidate: _Candidate) -> tuple[ActivationName, ...]:
    return ("relu2",) if candidate.gate is None else ("swiglu", "reglu2")


def _all_activations(form: Form) -> tuple[ActivationName, ...]:
    return ("relu2",) if form.gate is None else ("swiglu", "reglu2")


def _follows(y: Any, probe: nnx.Module, call: Call, x: jax.Array) -> bool:
    """Returns whether a module that gives y for x of float32 gives another dtype for
    one of bfloat16. A module that refuses bfloat16 does not."""
    try:
        low = call(probe, x.astype(jnp.bfloat16))
    except Exception:  # whatever the module of another raises
        return False
    both = isinstance(y, jax.Array) and isinstance(low, jax.Array)
    return both and y.dtype != low.dtype


def _form(
    candidate: _Candidate, activation: ActivationName, dtype: Any, follows_x: bool
) -> Form:
    return Form(
        activation=activation,
        d_model=candidate.d_model,
        d_hidden=candidate.d_hidden,
        up=candidate.up,
        down=candidate.down,
        gate=candidate.gate,
        dtype=str(dtype),
        follows_x=follows_x,
    )


def _distance(
    form: Form, parameters: dict[Path, jax.Array], x: jax.Array, y: jax.Array
) -> float:
    """Returns how far a dense `SparseFFN` of this form is from the output y of the
    module, as a share of the norm of y: of that token where it is farthest."""
    tokens = x.reshape(-1, form.d_model).astype(form.dtype)
    up, down = (of.read(parameters[of.path]) for of in (form.up, form.down))
    with jax.default_matmul_precision("highest"):
        if form.gate is None or form.activation == "relu2":
            own = ffn(tokens, up, down)
        else:
            gate = form.gate.read(parameters[form.gate.path])
            own = gated_ffn(tokens, gate, up, down, activation=form.activation)
    difference = own.reshape(y.shape).astype(jnp.float32) - y.astype(jnp.float32)
    norms = jnp.linalg.norm(y.astype(jnp.float32), axis=-1)
    shares = jnp.linalg.norm(difference, axis=-1) / jnp.maximum(norms, 1e-30)
    return float(jnp.nan_to_num(shares, nan=jnp.inf).max())


def parameters_of(module: nnx.Module) -> dict[Path, jax.Array]:
    """Returns the parameters of a module by their path below it."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    names = lambda path: tuple(of if isinstance(of, int) else str(of) for of in path)
    return {names(path): variable.get_value() for path, variable in flat}


def _with_random_parameters(module: nnx.Module) -> nnx.Module:
    """Returns a copy of the module with other parameters, random ones. Those of the
    module may be zeros until a checkpoint is loaded, and any function of them zero."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        (jax.random.normal(key, leaf.shape) * min(leaf.shape) ** -0.5).astype(
            leaf.dtype
        )
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(structure, drawn), rest, copy=True)


def _first_layer(module: nnx.Module, axis: int) -> nnx.Module:
    """Returns the first of the layers that a module's parameters stack along an
    axis."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    first = partial(jnp.take, indices=0, axis=axis)
    one = lambda x: first(x) if isinstance(x, jax.Array) else jax.eval_shape(first, x)
    return nnx.merge(graph, jax.tree.map(one, params), rest, copy=True)


def _name(path: Path) -> str:
    return ".".join(map(str, path))
