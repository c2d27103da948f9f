"""How many tasks start before one where tenants take turns."""

from __future__ import annotations

from mtask.doctor.position import _Turns


def test_each_start_of_a_tenant_comes_with_one_of_each_other_tenant() -> None:
    assert _Turns(3, 1).before(0) == 1
    assert _Turns(3, 1).before(2) == 2 * 4 + 1
    assert _Turns(3, None).before(0) == 3, "its turn is not known: it is the last one at worst"
    assert _Turns(0, 0).before(5) == 5
