"""A trace of some training steps, as XProf and Perfetto read it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jax


@dataclass(frozen=True)
class ProfiledSteps:
    """The optimiser steps `first` to `last` of a run, both included, counted from 1."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ValueError(
                f"profile {self.first}:{self.last} must be FIRST:LAST with 1 <= FIRST "
                f"<= LAST, such as 20:22 for the steps 20, 21 and 22"
            )

    @classmethod
    def named(cls, text: str) -> Self:
        """Reads "FIRST:LAST". Raises ValueError where it is none."""
        first, colon, last = text.partition(":")
        if not (colon and first.isdecimal() and last.isdecimal()):
            raise ValueError(
                f"profile {text!r} must be FIRST:LAST, such as 20:22 for the steps 20, "
                f"21 and 22"
            )
        return cls(int(first), int(last))

    def check_within(self, steps: int) -> None:
        """Raises ValueError where a run of `steps` steps does not have all of them."""
        if self.last > steps:
            raise ValueError(
                f"profile {self.first}:{self.last} goes beyond the last step of a run "
                f"of steps={steps}; choose earlier steps"
            )

    def check_ahead(self, step: int) -> None:
        """Raises ValueError where a run that goes on behind `step` has done all of
        them."""
        if self.last <= step:
            raise ValueError(
                f"profile {self.first}:{self.last} lies behind step {step}, with which "
                f"this run goes on; choose later steps"
            )


class Profiler:
    """Writes a trace of the chosen steps into the folder `profile` of a run folder.

    A run that is resumed among these steps traces those that are left.
    """

    def __init__(self, folder: Path, steps: ProfiledSteps | None) -> None:
        """Prepares a trace of `steps`; None: there is none."""
        self._folder = folder / "profile"
        self._steps = steps
        self._is_tracing = False

    @contextmanager
    def around(self, step: int, before: Any) -> Iterator[None]:
        """Traces the block, which does a step, if the step is chosen.

        Args:
          step: its number, from 1.
          before: arrays that earlier steps compute; the trace begins when they are
            there, so that it has nothing of those steps.
        """
        if self._steps is None or not self._steps.first <= step <= self._steps.last:
            yield
            return
        if not self._is_tracing:
            jax.block_until_ready(before)
            jax.profiler.start_trace(self._folder)
            self._is_tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def end(self, step: int, after: Any) -> Path | None:
        """Writes the trace after its last step, once the arrays `after` that the step
        computes are there, and returns its folder; None after any other step."""
        if not self._is_tracing or self._steps is None or step < self._steps.last:
            return None
        jax.block_until_ready(after)
        self.close()
        return self._folder

    def close(self) -> None:
        """Writes the steps traced so far, where the run ends among them."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()
