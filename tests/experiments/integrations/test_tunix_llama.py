"""The example with a model of Tunix, where that is installed."""

import jax
import pytest

pytest.importorskip("tunix", reason="needs google-tunix: uv run --group tunix pytest")

from experiments.integrations.tunix_llama import Config, main


def test_a_llama_of_tunix_is_sparsified_trained_and_given_back(capsys):
    # Tunix's own modules promote ranks.
    with jax.numpy_rank_promotion("allow"):
        before, dense, sparse, after, own = main(Config(steps=40))
    assert before > 4 > dense > sparse > after
    # The same sums in another order.
    assert own == pytest.approx(after, rel=1e-4)
    shown = capsys.readouterr().out
    assert "layers/1/mlp: swiglu of gate_proj.kernel, up_proj.kernel" in shown
    assert "layers/0/attn stays: it has 4 kernels" in shown
    (off,) = (line for line in shown.splitlines() if line.startswith("dense: logits"))
    assert float(off.split()[-1]) < 1e-4
