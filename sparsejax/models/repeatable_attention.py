"""A gradient of cuDNN's flash attention that repeats its bits, in any number of layers.

With one of `FLAGS` XLA asks cuDNN for such a gradient. It writes the wish into the
settings of the call, but of several equal calls, as of layers that are in no loop, into
those of the first alone (XLA's cudnn_custom_call_compiler.cc, as in jax 0.11.2). Each
call then looks for its compiled program by its settings, and all but the first end the
process with `std::out_of_range`. Calls that state the wish from the beginning are
equal, and find one program.
"""

import os
import re
from functools import cache, wraps
from typing import Any

FLAGS = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
"""The flags in XLA_FLAGS with which GPU kernels repeat their bits."""


def bits_repeat() -> bool:
    """Returns whether XLA_FLAGS asks for kernels that repeat their bits."""
    given = os.environ.get("XLA_FLAGS", "")
    # Of a flag that is given twice XLA reads the last value.
    values = dict(re.findall(rf"--({'|'.join(FLAGS)})(?:=(\S*))?(?=\s|$)", given))
    return any(value.lower() in ("", "true", "1") for value in values.values())


@cache
def ask_for_repeatable_gradients() -> None:
    """Lets every call of cuDNN's flash attention that JAX lowers from now on ask for a
    gradient that repeats its bits.

    JAX has no argument for it, so a function of JAX that has no public name is
    replaced: `create_dot_product_attention_backend_config_base`, which makes the
    settings of a call.
    """
    from jax._src.cudnn import fused_attention_stablehlo as lowering

    name = "create_dot_product_attention_backend_config_base"
    settings_of = getattr(lowering, name)

    @wraps(settings_of)
    def with_repeatable_gradient(*args: Any, **kwargs: Any) -> dict[str, Any]:
        settings = settings_of(*args, **kwargs)
        settings["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return settings

    setattr(lowering, name, with_repeatable_gradient)
