"""Makes and updates the roles in the database. `mtask.kernel.driver.roles` defines these roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mtask.errors import OperationFailed
from mtask.kernel.driver.operation import Operation, admin_command
from mtask.kernel.driver.roles import ROLES, Role, privileges, role_name

_ALREADY_THERE = 51002


def make(database: str) -> Operation[dict[str, str]]:
    """Make or update the roles in `admin`; return "made", "changed" or "in place" for each role.

    The user needs MongoDB's role userAdminAnyDatabase, because none of mtask's own roles may make roles.
    """
    done = {}
    for role in ROLES:
        done[role_name(database, role)] = yield from _make(database, role)
    return done


def _make(database: str, role: Role) -> Operation[str]:
    name, wanted = role_name(database, role), privileges(database, role)
    answer = yield admin_command("rolesInfo", {"role": name, "db": "admin"}, showPrivileges=True)
    if not answer["roles"]:
        try:
            yield admin_command("createRole", name, privileges=wanted, roles=[])
        except OperationFailed as error:
            if error.code != _ALREADY_THERE:
                raise
        else:
            return "made"
    elif not answer["roles"][0]["roles"] and _normal(answer["roles"][0]["privileges"]) == _normal(wanted):
        return "in place"
    yield admin_command("updateRole", name, privileges=wanted, roles=[])
    return "changed"


def _normal(listed: Sequence[Mapping[str, Any]]) -> set[tuple[str, str]]:
    return {(str(sorted(each["resource"].items())), action) for each in listed for action in each["actions"]}
