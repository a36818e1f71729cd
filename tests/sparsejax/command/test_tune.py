"""`sparsejax tune`: what is timed, and where nothing is."""

from sparsejax.command import main
from sparsejax.config.presets import PRESETS
from sparsejax.ops.gemm_spec import GemmSpec
from sparsejax.ops.kernels import registry
from sparsejax.tuning import tune
from tests.support.devices import hopper

PRESET = "--preset wide-200m --mesh.data 1".split()


def test_elsewhere_than_on_hopper_it_is_refused(capsys):
    assert main.run(["tune", *PRESET]) == 1
    assert "needs a Hopper GPU, not cpu; run this on the" in capsys.readouterr().err


def test_the_gemms_of_the_run_are_timed(capsys, monkeypatch):
    hopper.see_device(monkeypatch, hopper.H100)
    monkeypatch.setattr("sparsejax.command.tune.current_device", lambda: hopper.H100)
    given: list[GemmSpec] = []
    monkeypatch.setattr(tune, "tune_missing", lambda gemms, report: given.extend(gemms))
    paper = ["--recipe", "paper"]
    assert main.run(["tune", *PRESET, *paper]) == 0
    assert given == tune.gemms_of_run(PRESETS["wide-200m"]().with_recipe("paper"))
    assert any(gemm.experts == 4 for gemm in given)
    assert "is timed on this GPU already" in capsys.readouterr().out
    given.clear()
    # Experts dense inside have no 2:4 operand.
    for recipe in ("dense", "experts"):
        assert main.run(["tune", *PRESET, "--recipe", recipe]) == 0
        assert not given
        assert "no GEMM that the 2:4 kernels" in capsys.readouterr().out


def test_kernels_without_configs_have_nothing_to_tune(monkeypatch, capsys):
    plain = registry.Registered(
        name="mosaic_sm90", why_unavailable=lambda device: None, load=lambda _: object()
    )
    monkeypatch.setattr(registry, "REGISTERED", (plain,))
    assert main.run(["tune", *PRESET]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "nothing to tune on cpu: its kernels have no configs" in told
