"""What a run says of its records, as they come."""

from sparsejax.config import TrainConfig
from sparsejax.terminal import console


def test_what_should_worry_is_yellow(monkeypatch):
    said = []
    monkeypatch.setattr(console, "say", lambda text, style: said.append(style))
    where = {"step": 3, "checkpoint": "c", "reason": "r"}
    losses = dict.fromkeys(
        ("before", "before_unmasked", "after", "after_unmasked", "jump"), 1.0
    )
    with console.progress(TrainConfig()) as observe:
        observe({"event": "damaged"} | where)
        observe({"event": "switch", "to": "dense", "large": True} | where | losses)
        observe({"event": "resume"} | where)
        observe({"event": "switch", "to": "dense", "large": False} | where | losses)
    assert said == ["yellow", "yellow", None, None]


def test_a_branch_says_which_phases_are_dense_as_in_its_trunk(capsys):
    trunk = {"run": "../trunk", "step": 3, "seconds": 1.0, "learning_rate": 1e-3}
    start = {"event": "start", "step": 3, "corpus": "text", "unigram_loss": 3.0}
    start |= {"branch": trunk, "learning_rate": 1e-3, "run_dense": [1, 2]}
    with console.progress(TrainConfig()) as observe:
        observe(start)
    assert "phase 1, 2 is trained dense, as there" in capsys.readouterr().out


def test_a_spike_of_the_gradient_is_said(capsys):
    usual = [140.0, 23.0, 11.0, 9.0, 8.0, 9.0]
    step = {"event": "step", "kind": "sparse", "loss": 4.0}
    with console.progress(TrainConfig(steps=20)) as observe:
        for number, norm in enumerate([*usual, 900.0, 4.75e6, 20.0]):
            observe(step | {"step": number, "gradient_norm": norm})
    (line,) = [of for of in capsys.readouterr().out.splitlines() if "median" in of]
    assert "step 7: gradient norm 4.75e+06, and the median before it 11" in line


def test_the_first_gradients_have_no_median(capsys):
    step = {"event": "step", "kind": "sparse", "loss": 4.0}
    with console.progress(TrainConfig(steps=20)) as observe:
        for number, norm in enumerate([1.0, 1.0, 1.0, 1.0, 1e6]):
            observe(step | {"step": number, "gradient_norm": norm})
    assert "median" not in capsys.readouterr().out
