"""The program of a kernel, as text, from what a jitted function is lowered to."""

import re
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.mosaic.gpu import dialect
from jax.interpreters import mlir
from jaxlib.mlir import ir


def modules(function: Callable[..., Any], *operands: Any) -> list[str]:
    """Returns the module of every Mosaic kernel that `function` calls, in the order of
    the calls."""
    lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    found: list[str] = []

    def look(op: ir.Operation) -> ir.WalkResult:
        if op.name == "stablehlo.custom_call" and "mosaic_gpu" in str(
            op.attributes["call_target_name"]
        ):
            config = ir.DictAttr(op.attributes["mhlo.backend_config"])
            found.append(_text(ir.StringAttr(config["module"]).value_bytes))
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(look)
    return found


def grid(module: str) -> tuple[int, ...]:
    """Blocks along x, y and z of the launch in a kernel's text."""
    launch = re.search(r"gpu\.launch\"\(%\w+, (%\w+), (%\w+), (%\w+),", module)
    assert launch is not None
    constant = r'{} = "[\w.]*arith\.constant"\(\) {{value = (\d+) : index}}'
    values = [re.search(constant.format(name), module) for name in launch.groups()]
    return tuple(int(value[1]) for value in values if value is not None)


def _text(bytecode: bytes) -> str:
    with mlir.make_ir_context() as context:
        dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(bytecode))
