"""The example with a model of MaxText, where that is installed."""

import jax
import pytest

pytest.importorskip("maxtext", reason="needs maxtext: uv run --group maxtext pytest")

from experiments.integrations.maxtext_llama import Config, main


@pytest.mark.parametrize("is_stacked_and_fused", [False, True])
def test_a_llama_of_maxtext_is_sparsified_trained_and_given_back(
    is_stacked_and_fused, capsys
):
    how = dict.fromkeys(("scan_layers", "fused_mlp"), is_stacked_and_fused)
    # MaxText's own modules promote ranks.
    with jax.numpy_rank_promotion("allow"):
        before, dense, sparse, after, own = main(Config(steps=60, **how))
    assert before > 4 > dense > sparse > after
    # The same sums in another order.
    assert own == pytest.approx(after, rel=1e-4)
    shown = capsys.readouterr().out
    layer = "layers" if is_stacked_and_fused else "layers_1"
    into = "wi.kernel" if is_stacked_and_fused else "wi_0.kernel, wi_1.kernel"
    assert f"decoder/{layer}/mlp: swiglu of {into}, wo.kernel" in shown
    (off,) = (line for line in shown.splitlines() if line.startswith("dense: logits"))
    assert float(off.split()[-1]) < 1e-4
