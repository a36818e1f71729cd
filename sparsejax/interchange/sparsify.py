"""The feed-forward modules of any Flax NNX model as `SparseFFN`s.

`sparsify(model, rules)` finds the modules by their paths, finds out what each computes
by calling it, and makes it a `SparseFFN` with the same function on the same parameters.
From then on `switch`, `loss_and_gradient` and everything else that knows a `SparseFFN`
knows these; `densify` goes back, and `explain` says of every module what it is and why.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from sparsejax.annotations import check_value
from sparsejax.feed_forward.activation import ActivationName
from sparsejax.feed_forward.ffn import ffn
from sparsejax.feed_forward.gated_ffn import gated_ffn
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.models.adopted_ffn import AdoptedFFN, Form, Path, Stored, adopt, release
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.ops.backend import Backend
from sparsejax.switches.switching import switch

TOKENS = 8
"""The tokens that a module is called with, to find out what it computes."""

type Call = Callable[[nnx.Module, Float[Array, "1 tokens d_model"]], Any]
"""How a module is called: with itself and tokens (1, tokens, d_model)."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What one module of a model is, and why."""

    path: str
    """The path of the module, joined by "/"."""
    is_sparse_ffn: bool
    sparsity: FFNSparsity | None
    """The sparsity of a `SparseFFN`; None of any other module."""
    reason: str
    """The form of an FFN that was adopted, or why the module is none."""


def sparsify(
    model: nnx.Module,
    rules: Sequence[str],
    *,
    call: Call = lambda module, x: module(x),  # pyrefly: ignore[not-callable]
    backend: Backend | None = None,
    layout: FFNLayout | None = None,
) -> list[Explanation]:
    """Makes the modules that the rules name `SparseFFN`s, in place, each with the
    function that it had.

    A module is an FFN where it has two kernels or three, or two of which one is a gate
    and an up projection side by side, and no other parameter, and where its output is
    that of `SparseFFN` with one of its activations. That is found out by calling a copy
    with random parameters, so names do not matter, nor whether a kernel is (d_in,
    d_out) or transposed.
    The parameters keep their paths, shapes and places: checkpoints, shardings and an
    optimiser's state stay valid. The FFNs are dense at first; `switch(model, optimizer,
    sparsity)` makes them sparse. Layers may be stacked along the first or the second
    axis of all their parameters.

    Args:
      model: any module.
      rules: regular expressions; a module is chosen where one of them is its whole
        path, the names joined by "/", as r"layers/\\d+/mlp".
      call: how a chosen module is called. Whatever else its own call takes has no
        effect from then on.
      backend: what runs the sparse GEMMs; None for the fastest that can.
      layout: how the FFNs lie on a mesh of several devices; None on one device.
    Returns:
      an explanation of each module that was chosen.
    Raises:
      ValueError: a rule chooses no module, or a module that is no such FFN; says why.
        Nothing has been changed then.
    """
    check_value("backend", backend, Backend | None)
    modules = {"/".join(map(str, path)): part for path, part in nnx.iter_modules(model)}
    chosen: dict[str, nnx.Module] = {}
    for rule in rules:
        found = {path: of for path, of in modules.items() if re.fullmatch(rule, path)}
        if not found:
            raise ValueError(
                f"rule {rule!r} is the path of no module of the "
                f"{type(model).__name__}; paths are {_some(list(modules))}"
            )
        chosen |= found
    forms: dict[str, Form] = {}
    for path, module in chosen.items():
        if isinstance(module, SparseFFN):
            raise ValueError(
                f"{path} is a SparseFFN already; leave it out of the rules"
            )
        if not all(isinstance(of, jax.Array) for of in _parameters(module).values()):
            raise ValueError(
                f"{path} has shapes and no weights yet; initialise the model or load "
                f"its checkpoint first"
            )
        form = form_of(module, call)
        if isinstance(form, str):
            raise ValueError(
                f"{path}, a {type(module).__name__}, cannot become a SparseFFN: {form}"
            )
        forms[path] = form
    for path, form in forms.items():
        adopt(chosen[path], form, backend=backend, layout=layout)
    return [_explained(path, module) for path, module in chosen.items()]


def densify[O](model: nnx.Module, optimizer: O = None) -> O:
    """Gives every module that `sparsify` has changed its own class back, in place.

    The modules become dense first, by `switch`: where they have 2:4 weights, those that
    GEMM 1 has read take the place of the masters.

    Args:
      model: a model that `sparsify` has changed.
      optimizer: as in `switch`, which returns it.
    Raises:
      ValueError: no module of the model is one that `sparsify` has changed.
    """
    adopted = [
        part for _, part in nnx.iter_modules(model) if isinstance(part, AdoptedFFN)
    ]
    if not adopted:
        raise ValueError(
            f"no module of the {type(model).__name__} was changed by sparsify; a model "
            f"that was built with SparseFFN becomes dense by switch"
        )
    for module in adopted:
        # Leaving experts renumbers nothing: no moment of any optimiser has to follow.
        switch(module, None, DENSE)
    for module in adopted:
        release(module)
    return optimizer


def explain(
    model: nnx.Module,
    *,
    call: Call = lambda module, x: module(x),  # pyrefly: ignore[not-callable]
) -> list[Explanation]:
    """Returns an explanation of every `SparseFFN` of the model, and of every other
    module that holds two kernels or more and has no such module inside of it.

    Args:
      model: any module, before or after `sparsify`.
      call: as in `sparsify`.
    """
    explanations: list[Explanation] = []
    # Modules come with what is inside of them first.
    inner: set[str] = set()
    for names, module in nnx.iter_modules(model):
        path = "/".join(map(str, names))
        parts = [f"{path}/{name}".strip("/") for name in _children(module)]
        kernels = [of for of in _parameters(module).values() if jnp.ndim(of) > 1]
        # Containers of modules, which nothing can call, are no FFNs.
        is_listed = callable(module) and len(kernels) > 1
        if is_listed and not inner.intersection(parts):
            explanations.append(_explained(path, module, call))
        if is_listed:
            inner.add(path)
    return explanations


def _children(module: nnx.Module) -> Iterator[str]:
    """Yields the path of every module below a module, relative to it."""
    for names, part in nnx.iter_modules(module):
        if part is not module:
            yield "/".join(map(str, names))


def _explained(path: str, module: nnx.Module, call: Call | None = None) -> Explanation:
    if isinstance(module, SparseFFN):
        adopted = isinstance(module, AdoptedFFN)
        reason = str(module.form) if adopted else "built as a SparseFFN"
        return Explanation(
            path=path, is_sparse_ffn=True, sparsity=module.sparsity, reason=reason
        )
    form = form_of(module, call) if call is not None else ""
    reason = form
    if isinstance(form, Form):
        reason = f"no rule has chosen it, though it could become one: {form}"
    return Explanation(
        path=path, is_sparse_ffn=False, sparsity=None, reason=str(reason)
    )


def form_of(module: nnx.Module, call: Call) -> Form | str:
    """Returns the form in which a module is an FFN, or why it is none, in words."""
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
    shapes = {path: jnp.shape(value) for path, value in _parameters(module).items()}
    reasons: list[str] = []
    for layers_axis in (None, 0, 1):
        found = _form_with(module, call, shapes, layers_axis)
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
        return _nearest(module, call, candidates)
    found = _nearest(_first_layer(module, layers_axis), call, candidates)
    return found if isinstance(found, str) else found.stacked(layers_axis)


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
    module: nnx.Module, call: Call, candidates: Sequence[_Candidate]
) -> Form | str:
    """Returns the candidate that computes what the module does, or why there is
    none."""
    probe = _with_random_parameters(module)
    parameters = _parameters(probe)
    errors: dict[str, str] = {}
    nearest: tuple[float, Form] | None = None
    for d_model in dict.fromkeys(of.d_model for of in candidates):
        x = jax.random.normal(jax.random.key(0), (1, TOKENS, d_model))
        try:
            with jax.default_matmul_precision("highest"):
                y = call(probe, x)
        except (TypeError, ValueError, AttributeError) as error:
            errors[str(d_model)] = f"{type(error).__name__}: {error}".splitlines()[0]
            continue
        if not isinstance(y, jax.Array) or y.shape != x.shape:
            shown = y.shape if isinstance(y, jax.Array) else type(y).__name__
            errors[str(d_model)] = f"it returns {shown} for x {x.shape}"
            continue
        for candidate in candidates:
            if candidate.d_model != d_model:
                continue
            for activation in _activations(candidate):
                form = _form(candidate, activation, y.dtype)
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


def _form(candidate: _Candidate, activation: ActivationName, dtype: Any) -> Form:
    return Form(
        activation=activation,
        d_model=candidate.d_model,
        d_hidden=candidate.d_hidden,
        up=candidate.up,
        down=candidate.down,
        gate=candidate.gate,
        dtype=str(dtype),
    )


def _distance(
    form: Form, parameters: dict[Path, jax.Array], x: jax.Array, y: jax.Array
) -> float:
    """Returns how far a dense `SparseFFN` of this form is from the output y of the
    module, as a share of the norm of y."""
    tokens = x.reshape(-1, form.d_model).astype(form.dtype)
    up, down = (of.read(parameters[of.path]) for of in (form.up, form.down))
    with jax.default_matmul_precision("highest"):
        if form.gate is None or form.activation == "relu2":
            own = ffn(tokens, up, down)
        else:
            gate = form.gate.read(parameters[form.gate.path])
            own = gated_ffn(tokens, gate, up, down, activation=form.activation)
    difference = own.reshape(y.shape).astype(jnp.float32) - y.astype(jnp.float32)
    norm = jnp.linalg.norm(y.astype(jnp.float32))
    return float(jnp.linalg.norm(difference) / jnp.maximum(norm, 1e-30))


def _parameters(module: nnx.Module) -> dict[Path, jax.Array]:
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


def _some(paths: Sequence[str]) -> str:
    """Returns the first paths of a model, for an error."""
    shown = ", ".join(path for path in paths[:8] if path)
    return f"{shown}, ..." if len(paths) > 8 else shown
