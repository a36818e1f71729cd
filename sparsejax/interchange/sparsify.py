"""The feed-forward modules of any Flax NNX model as `SparseFFN`s.

`sparsify(model, rules)` finds the modules by their paths, finds out what each computes
by calling it, and makes it a `SparseFFN` with the same function on the same parameters.
From then on `switch`, `loss_and_gradient` and everything else that knows a `SparseFFN`
knows these; `densify` goes back, and `explain` says of every module what it is and why.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from sparsejax.annotations import check_value
from sparsejax.dtypes import check_compute_dtype
from sparsejax.feed_forward.layout import FFNLayout
from sparsejax.feed_forward.sparsity import DENSE, FFNSparsity
from sparsejax.interchange.ffn_form import Call, form_of, parameters_of
from sparsejax.models.adopted_ffn import AdoptedFFN, Form, adopt, release
from sparsejax.models.sparse_ffn import SparseFFN
from sparsejax.ops.backend import Backend
from sparsejax.switches.switching import switch


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
    dtype: DTypeLike | None = None,
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
      dtype: the compute dtype of modules that compute in the dtype of x; they then take
        no other. None: that of their parameters.
    Returns:
      an explanation of each module that was chosen.
    Raises:
      ValueError: a rule chooses no module, or a module that is no such FFN, or one that
        shares a parameter with another module; says why. Nothing has been changed then.
    """
    check_value("backend", backend, Backend | None)
    if dtype is not None:
        check_compute_dtype("dtype", str(jnp.dtype(dtype)))
    modules = {"/".join(map(str, path)): part for path, part in nnx.iter_modules(model)}
    chosen: dict[str, nnx.Module] = {}
    for rule in (rules,) if isinstance(rules, str) else rules:
        try:
            pattern = re.compile(rule)
        except re.error as error:
            raise ValueError(
                f"rule {rule!r} is no regular expression ({error}); escape what stands "
                f"for itself with a backslash"
            ) from None
        found = {path: of for path, of in modules.items() if pattern.fullmatch(path)}
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
        values = parameters_of(module).values()
        if not all(isinstance(of, jax.Array) for of in values):
            raise ValueError(
                f"{path} has shapes and no weights yet; initialise the model or load "
                f"its checkpoint first"
            )
        if any(isinstance(of, jax.core.Tracer) for of in values):
            raise ValueError(
                f"{path} is traced, by jit or another transformation of JAX: whether "
                f"it is an FFN is found out by its numbers; call sparsify outside of "
                f"it, on the model that it returns"
            )
        form = _why_shared(path, modules) or form_of(module, call, dtype=dtype)
        if isinstance(form, str):
            raise ValueError(
                f"{path}, a {type(module).__name__}, cannot become a SparseFFN: {form}"
            )
        forms[path] = form
    for path, form in forms.items():
        adopt(chosen[path], form, backend=backend, layout=layout)
    return [_explained(path, module) for path, module in chosen.items()]


def _why_shared(path: str, modules: Mapping[str, nnx.Module]) -> str | None:
    """Returns which other module holds a parameter of the module at `path`, or None. To
    fold or renumber it for one of them would change what the other computes."""
    module = modules[path]
    own = set(_variables(module))
    within = f"{path}/" if path else ""
    for other in sorted(modules, key=len, reverse=True):
        is_inside = other.startswith(within)
        if not is_inside and own.intersection(
            _variables(modules[other], beside=module)
        ):
            return (
                f"it shares a parameter with {other or 'the model'}, and a sparse FFN "
                f"renumbers and folds its own; give each a parameter of its own"
            )
    return None


def _variables(node: object, *, beside: nnx.Module | None = None) -> Iterator[int]:
    """Yields the id of every variable in a module, or in a container of modules, that
    can be reached without `beside`."""
    seen: set[int] = set()
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if node is beside or id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, nnx.Variable):
            yield id(node)
        elif isinstance(node, nnx.Module):
            nodes += vars(node).values()
        elif isinstance(node, Mapping):
            nodes += node.values()
        elif isinstance(node, list | tuple):
            nodes += node


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
        kernels = [of for of in parameters_of(module).values() if jnp.ndim(of) > 1]
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


def _some(paths: Sequence[str]) -> str:
    """Returns the first paths of a model, for an error."""
    shown = ", ".join(path for path in paths[:8] if path)
    return f"{shown}, ..." if len(paths) > 8 else shown
