"""What `sparsejax sample` refuses before it loads a model."""

import pytest

from sparsejax.command import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tokens", "0"], "tokens=0 must be at least 1"),
        (["--seed", "-1"], "seed=-1 must be at least 0"),
        (["--seed", "99999999999999999999"], "seed=99999999999999999999 must be"),
        (["--prompt", ""], "--prompt '' is empty; give one character or more"),
    ],
)
def test_options_that_are_out_of_range_are_named(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main.run(["sample", "no-such-model", *options])
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
