"""What an interrupted block leaves of the driver's bounds."""

from __future__ import annotations

from contextvars import copy_context

from pymongo import _csot

from mtask.kernel.driver.stores import unbound


def test_a_bound_that_is_set_by_half_is_bound_no_more() -> None:
    def interrupted() -> None:
        _csot.TIMEOUT.set(8.0)  # and its deadline is not
        assert _csot.remaining() == float("inf")  # no number of milliseconds
        unbound()
        assert _csot.remaining() is None

    copy_context().run(interrupted)
